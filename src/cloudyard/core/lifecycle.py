"""The life of one sandbox as a table: what may happen in which state, where it leads and what has to be
done then.

All transitions live here, and this file knows no kernel object, no clock and no file. `decide` is asked
with an event, which carries its cause and its time, and answers with the new life and the commands that a
shell has to carry out. A pair that is not in the table is a fault of ours (`InvalidTransition`).
`diagram` draws the table, `story` tells how a sandbox came to where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Literal

from msgspec import Struct

from cloudyard.errors import CloudyardError
from cloudyard.model import SandboxState

StopReason = Literal["asked", "idle_ttl", "max_ttl"]
LifeState = SandboxState | Literal["absent"]


class InvalidTransition(CloudyardError):
    """An event arrived in a state that has no place for it. Never the fault of a user."""

    kind = "internal"


class Life(Struct, frozen=True):
    """Where a sandbox is in its life, and why it ended if it has."""

    state: LifeState = "absent"
    reason: str = ""

    @property
    def over(self) -> bool:
        """It has ended and will not live again."""
        return self.state in ("stopped", "failed")


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened. `cause` is the id of the request or event behind it, `at` seconds since
    1970.
    """

    cause: str = ""
    at: float = 0.0


class CreateAdmitted(Event, frozen=True):
    """A create was asked for, its promise made and its record on disk."""


class Ready(Event, frozen=True):
    """The probe ran to a good end inside."""


class CreateFailed(Event, frozen=True):
    """The launch or the probe failed, or was given up."""

    evidence: str = ""


class StopWanted(Event, frozen=True):
    """Somebody or a timer wants it to end."""

    reason: StopReason = "asked"


class GuestGone(Event, frozen=True):
    """PID 1 ended, or answers no more, and nobody asked for that."""

    evidence: str = ""


class TornDown(Event, frozen=True):
    """Its kernel objects are gone."""


class Adopted(Event, frozen=True):
    """After a restart of the edge: its instance was found alive."""


class Missing(Event, frozen=True):
    """After a restart of the edge: its instance was not found."""


class Command(Enum):
    """What the shell has to do. Carried out in the order given."""

    LAUNCH = "launch"
    GIVE_UP_LAUNCH = "give_up_launch"
    ARM_TIMERS = "arm_timers"
    END_COMMANDS = "end_commands"
    TEAR_DOWN = "tear_down"
    GIVE_BACK = "give_back"
    """Return the promise of cpu and memory, and remember the sandbox as ended for a while."""


_C = Command
TRANSITIONS: dict[tuple[LifeState, type[Event]], tuple[LifeState, tuple[Command, ...]]] = {
    ("absent", CreateAdmitted): ("creating", (_C.LAUNCH,)),
    ("creating", Ready): ("running", (_C.ARM_TIMERS,)),
    ("creating", CreateFailed): ("failed", (_C.TEAR_DOWN,)),
    ("creating", GuestGone): ("creating", ()),  # the launch finds out by itself, and says more about it
    ("creating", StopWanted): ("stopping", (_C.GIVE_UP_LAUNCH,)),
    ("running", StopWanted): ("stopping", (_C.END_COMMANDS, _C.TEAR_DOWN)),
    ("running", GuestGone): ("failed", (_C.END_COMMANDS, _C.TEAR_DOWN)),
    ("running", Adopted): ("running", (_C.ARM_TIMERS,)),
    ("running", Missing): ("failed", (_C.END_COMMANDS, _C.GIVE_BACK)),
    ("stopping", CreateFailed): ("stopping", (_C.TEAR_DOWN,)),
    ("stopping", Ready): ("stopping", (_C.END_COMMANDS, _C.TEAR_DOWN)),
    ("stopping", StopWanted): ("stopping", ()),
    ("stopping", GuestGone): ("stopping", ()),
    ("stopping", Adopted): ("stopping", (_C.END_COMMANDS, _C.TEAR_DOWN)),
    ("stopping", Missing): ("stopped", (_C.END_COMMANDS, _C.GIVE_BACK)),
    ("stopping", TornDown): ("stopped", (_C.GIVE_BACK,)),
    ("failed", TornDown): ("failed", (_C.GIVE_BACK,)),
    ("failed", Adopted): ("failed", (_C.END_COMMANDS, _C.TEAR_DOWN)),
    ("failed", Missing): ("failed", (_C.END_COMMANDS, _C.GIVE_BACK)),
    ("failed", StopWanted): ("failed", ()),
    ("failed", GuestGone): ("failed", ()),
    ("stopped", StopWanted): ("stopped", ()),
    ("stopped", GuestGone): ("stopped", ()),
}


class Decision(Struct, frozen=True):
    """The new life and what to do."""

    life: Life
    commands: tuple[Command, ...]


def decide(life: Life, event: Event) -> Decision:
    """What an event means for a life.

    Raises:
        InvalidTransition: the table has no entry for it.
    """
    entry = TRANSITIONS.get((life.state, type(event)))
    if entry is None:
        raise InvalidTransition(
            f"A sandbox that is {life.state} met the event {type(event).__name__}, which has no place there.",
            code="invalid_transition",
        )
    state, commands = entry
    return Decision(Life(state, life.reason or _reason(event)), commands)


def _reason(event: Event) -> str:
    match event:
        case StopWanted():
            return event.reason
        case CreateFailed():
            return "create_failed"
        case GuestGone():
            return "guest_gone"
        case Missing():
            return "lost"
        case _:
            return ""


class Transition(Struct, frozen=True, array_like=True):
    """One thing that happened in a life, as it is kept in the sandbox's record."""

    event: str
    state: LifeState
    reason: str = ""
    cause: str = ""
    at: float = 0.0
    evidence: str = ""


def transition(event: Event, life: Life) -> Transition:
    """What is kept of an event and the life that it led to."""
    evidence = getattr(event, "evidence", "")
    return Transition(type(event).__name__, life.state, life.reason, event.cause, event.at, evidence)


def story(transitions: Iterable[Transition]) -> list[str]:
    """One sentence for each thing that happened, in order, each with its cause."""
    return [
        f"{step.at:.3f} {step.event} -> {step.state}"
        + (f" ({step.reason})" if step.reason else "")
        + (f", caused by {step.cause}" if step.cause else "")
        + (f": {step.evidence}" if step.evidence else "")
        for step in transitions
    ]


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for (state, event), (after, _commands) in TRANSITIONS.items():
        if state != after:
            before = "[*]" if state == "absent" else state
            lines.append(f"    {before} --> {after}: {event.__name__}")
    return "\n".join(lines)
