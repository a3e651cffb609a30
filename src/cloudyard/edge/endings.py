"""How commands end: judged, put on record, then heard of by those who wait, then forgotten by the guest.

Holds the commands of one sandbox that are under way, and the places that they and what they left behind take
in the guest. `Commands` moves them; here is what follows from their ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cloudyard.edge.clock import Clock, Timers
from cloudyard.edge.command import Command
from cloudyard.edge.config import TREE_WAIT_S
from cloudyard.edge.forgets import Forgets
from cloudyard.edge.history import History
from cloudyard.edge.places import Places
from cloudyard.edge.refusals import Counters, disk_use, refused_since
from cloudyard.edge.steps import Step, StepBook
from cloudyard.edge.translate import signal_frame
from cloudyard.edge.verdict import SIGKILL, Bounds, error_of_start, judge, judge_not_started
from cloudyard.errors import CloudyardError, Conflict
from cloudyard.model import ExecResult
from cloudyard.wire.guest import Frame, Kind, Tag, encode


class Endings:
    """Commands of one sandbox on their way out."""

    def __init__(
        self,
        *,
        steps: StepBook,
        history: History,
        clock: Clock,
        timers: Timers,
        counters: Counters,
        bounds: Bounds,
        send: Callable[[bytes], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._steps = steps
        self._history = history
        self._clock = clock
        self._timers = timers
        self._counters = counters
        self._bounds = bounds
        self._send = send
        self._on_idle = on_idle
        self._launched = 0
        self.live: dict[int, Command] = {}
        """Commands under way."""
        self.lingering: set[int] = set()
        """Commands that have ended for us while something of them takes a place in the guest."""
        self.places = Places()
        self.forgets = Forgets(clock, timers, send)

    def note_sent(self, command: Command) -> None:
        """The guest is asked to start it."""
        command.sent = True
        self._launched += 1
        alone = len(self.live) == 1 and not self.lingering
        command.company = self._launched if alone else None

    def answer_start(self, command: Command) -> bool:
        """Answer its start, which nobody waits past; gives whether that is on record."""
        try:
            self._steps.answer(command.step, command.info)
        except CloudyardError:
            return False  # those who wait were told so
        return True

    # --- what the guest says ----------------------------------------------------------------------------

    def exited(self, command: Command, frame: Frame, *, resumed_at: float) -> None:
        """Its first process has ended, and its output is complete."""
        command.note_exit(frame, resumed_at=resumed_at)
        if command.dying and frame.number(Tag.TREE_ALIVE, 0):
            command.stop_timers()
            command.kill_timer = self._timers.at(
                self._clock.monotonic() + TREE_WAIT_S, partial(self.finish, command)
            )
            return
        self.finish(command)

    def not_started(self, command: Command, frame: Frame) -> None:
        """It never ran."""
        why = judge_not_started(
            frame.text(Tag.WHAT),
            frame.number(Tag.ERRNO, 0),
            frame.text(Tag.TEXT),
            forks_refused=refused_since(self._counters, command.refused_before).forks,
        )
        if command.waits:
            self._conclude(command, command.result_not_started(why), tree_lives=False)
            return
        self._leave(command)
        if self._fail(command.step, error_of_start(why)):
            self._forget(command, tree_lives=False)
        command.wake()

    def exited_late(self, number: int, *, tree_lives: bool) -> None:
        """A command that had ended for us has ended in the guest."""
        self._send(encode(Kind.FORGET, number))
        if not tree_lives:
            self.tree_gone(number)

    def tree_gone(self, number: int) -> None:
        """Nothing is left of a command that had ended for us."""
        self.lingering.discard(number)
        self.places.give_back()

    # --- the end ----------------------------------------------------------------------------------------

    def finish(self, command: Command, *, lost: str = "") -> None:
        """It has ended as far as can be known. `lost`: why its end is not known."""
        if command.id not in self.live:
            return
        if not command.waits and not command.step.done:  # it ended before its start was answered
            if lost:
                self._fail(command.step, CloudyardError(f"The command was lost: {lost}.", code="step_lost"))
            elif command.sent:
                if not self.answer_start(command) and command.tree_lives:
                    self._send(signal_frame(command.id, SIGKILL))
            else:
                message = f"The command was ended before it could start: {command.killed}."
                self._fail(command.step, Conflict(message, code="command_ended", fault="policy"))
        ending = command.ending(
            refused_since(self._counters, command.refused_before),
            disk=disk_use(self._counters) if command.ended_badly else None,
            shared=command.company != self._launched,
            lost=lost,
            limits=self._bounds,
        )
        self._conclude(command, command.result(judge(ending)), tree_lives=command.tree_lives)

    def give_up(self, command: Command, error: CloudyardError) -> None:
        """It could not even be handed to the guest."""
        if command.id in self.live:
            self._leave(command)
            self._fail(command.step, error)
            command.wake()

    def _conclude(self, command: Command, result: ExecResult, *, tree_lives: bool) -> None:
        ended = command.record(result)
        try:
            self._history.add(ended)
        except CloudyardError as exc:
            self._leave(command)
            if command.waits:
                self._steps.settle(command.step, exc)
            command.wake()
            return
        self._leave(command)
        if command.sent:
            self._forget(command, tree_lives=tree_lives)
        elif command.placed:
            self.places.give_back()
        if command.waits:
            self._steps.settle(command.step, self._history.result(ended))
        command.wake()

    def _leave(self, command: Command) -> None:
        command.stop_timers()
        del self.live[command.id]
        if not self.live:
            self._on_idle()

    def _forget(self, command: Command, *, tree_lives: bool) -> None:
        if command.exit is not None or not tree_lives:
            self.forgets.add(command.id)
        if tree_lives:
            self.lingering.add(command.id)
        else:
            self.places.give_back()

    def _fail(self, step: Step, error: CloudyardError) -> bool:
        """End a step; gives whether that is on record."""
        try:
            self._steps.fail(step, error)
        except CloudyardError:
            return False  # those who wait were told so
        return True
