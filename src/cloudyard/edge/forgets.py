"""FORGET frames that wait for another frame to go with: alone each would cost a call and wake the guest."""

from __future__ import annotations

from collections.abc import Callable

from cloudyard.edge.clock import Clock, Timer, Timers
from cloudyard.edge.config import FORGET_DELAY_S
from cloudyard.wire.guest import Kind, encode


class Forgets:
    """What one guest may forget and has not been told yet."""

    __slots__ = ("_clock", "_frames", "_send", "_timer", "_timers")

    def __init__(self, clock: Clock, timers: Timers, send: Callable[[bytes], None]) -> None:
        self._clock = clock
        self._timers = timers
        self._send = send
        self._frames = b""
        self._timer: Timer | None = None

    def add(self, command_id: int) -> None:
        """The guest may forget a command. It is told with the next frame, or after FORGET_DELAY_S."""
        self._frames += encode(Kind.FORGET, command_id)
        if self._timer is None:
            self._timer = self._timers.at(self._clock.monotonic() + FORGET_DELAY_S, self._due)

    def before(self, data: bytes) -> bytes:
        """What is to be sent, with the frames that waited in front of it."""
        if self._frames:
            data, self._frames = self._frames + data, b""
        return data

    def drop(self) -> None:
        """The link is gone; whoever makes the next one asks the guest what it holds."""
        self._frames = b""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        if self._frames:
            self._send(b"")
