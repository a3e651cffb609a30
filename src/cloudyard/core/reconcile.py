"""What an edge does with what it finds when it starts: pure answers from records and from what lives.

Three questions, each with one function: what becomes of each recorded sandbox (`triage`), what becomes of
each step that was under way (`settle`), and which ended sandboxes are remembered no longer (`expired`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from msgspec import Struct

from cloudyard.core.lifecycle import LifeState

ENDED_KEPT_S = 3600.0  # an ended sandbox is remembered so long
ENDED_KEPT_MAX = 10_000  # and at most so many of them


class Fate(Enum):
    """What becomes of a recorded sandbox."""

    FORGET = "forget"
    """Nobody was ever told that it exists: its creation was under way. Its record goes, the sweep takes
    what it left.
    """
    ADOPT = "adopt"
    """It should live, or was being torn down: look for its instance."""
    REMEMBER = "remember"
    """It has ended, and its end is on record."""


def triage(state: LifeState, *, placed: bool, ended: bool) -> Fate:
    """What becomes of a sandbox.

    Args:
        state: where its record says it is.
        placed: the record names its instance.
        ended: the record says that nothing of it is left.
    """
    if ended:
        return Fate.REMEMBER
    if state in ("absent", "creating") or not placed:
        return Fate.FORGET
    return Fate.ADOPT


class OpenStep(Struct, frozen=True):
    """A step whose intent is on record and whose result is not."""

    number: int
    command: bool
    """It started a command, whose id is the step's number."""
    repeatable: bool
    """Doing it twice is the same as doing it once."""
    begun: bool = False
    """Its command is known to have run, or may have been started again under another number."""


class Settlement(Enum):
    """What becomes of a step that was under way when the edge died."""

    GO_ON = "go_on"
    """The guest knows its command: it goes on as if nothing had been."""
    START = "start"
    """The guest never heard of its command, so that it never ran: it is started now."""
    RELEASE = "release"
    """Doing it again is harmless: the key is free, and whoever repeats it runs it."""
    LOST = "lost"
    """Whether it was done cannot be known, so it ends as lost, our fault, and is not run again."""


def settle(steps: Iterable[OpenStep], known: Mapping[int, object] | frozenset[int]) -> dict[int, Settlement]:
    """What becomes of each open step, given the commands that the guest holds.

    A guest that lives holds every command from EXEC until it is told that the result is on record. A command
    of an open step that it does not hold has therefore never reached it (docs/design/steps.md).
    """
    outcome: dict[int, Settlement] = {}
    for step in steps:
        if step.command and step.number in known:
            outcome[step.number] = Settlement.GO_ON
        elif step.command:
            outcome[step.number] = Settlement.LOST if step.begun else Settlement.START
        else:
            outcome[step.number] = Settlement.RELEASE if step.repeatable else Settlement.LOST
    return outcome


def expired(ended_at: Mapping[str, float], now: float) -> list[str]:
    """Ended sandboxes to forget, oldest first: those past ENDED_KEPT_S and those past ENDED_KEPT_MAX."""
    by_age = sorted(ended_at, key=lambda name: ended_at[name])
    surplus = max(0, len(by_age) - ENDED_KEPT_MAX)
    return [name for at, name in enumerate(by_age) if at < surplus or now - ended_at[name] > ENDED_KEPT_S]
