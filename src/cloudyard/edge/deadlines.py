"""When a command is killed for taking too long, or for writing nothing. One timer for both: each byte of
output moves a moment, and no timer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cloudyard.edge.clock import Clock, Timers
from cloudyard.edge.command import Command


class Deadlines:
    """Deadlines of commands that the guest was asked to start."""

    __slots__ = ("_clock", "_kill", "_timers")

    def __init__(self, clock: Clock, timers: Timers, kill: Callable[[Command, str], None]) -> None:
        self._clock = clock
        self._timers = timers
        self._kill = kill

    def arm(self, command: Command) -> None:
        """Count from now on, or anew after a time in which nobody could hear it."""
        self.heard(command)
        self._set(command)

    def heard(self, command: Command) -> None:
        """It has written something."""
        if command.spec.no_output_timeout_s is not None:
            command.heard_at = self._clock.monotonic()

    def _set(self, command: Command) -> None:
        if command.timer is not None:
            command.timer.cancel()
            command.timer = None
        moments = [moment for moment in (_timeout(command), _silence(command)) if moment is not None]
        if moments and not command.dying:
            command.timer = self._timers.at(min(moments), partial(self._due, command))

    def _due(self, command: Command) -> None:
        now = self._clock.monotonic()
        timeout, silence = _timeout(command), _silence(command)
        if timeout is not None and timeout <= now:
            command.timed_out = command.spec.timeout_s
            self._kill(command, "timeout")
        elif silence is not None and silence <= now:
            command.silent = command.spec.no_output_timeout_s
            self._kill(command, "silence")
        else:
            self._set(command)


def _timeout(command: Command) -> float | None:
    if command.spec.timeout_s is None:
        return None
    return command.started_at + command.stalled_s + command.spec.timeout_s


def _silence(command: Command) -> float | None:
    if command.spec.no_output_timeout_s is None:
        return None
    return command.heard_at + command.spec.no_output_timeout_s
