"""The clocks of an edge as ports, and one list of deadlines that serves everything in it.

Thousands of sandboxes have times to live and thousands of commands have timeouts; one task sleeps until
the earliest. Monotonic times are the kernel's CLOCK_MONOTONIC, which goes on over a restart of ours and
ends with the machine, as the sandboxes do.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from typing import Protocol

import anyio

log = logging.getLogger(__name__)

COMPACT_AT = 1024  # dead entries kept before the heap is rebuilt


class Clock(Protocol):
    """Where an edge reads the time. Tests bring one that they move by hand."""

    def monotonic(self) -> float:
        """Seconds since the machine started."""

    def wall(self) -> float:
        """Seconds since 1970."""

    async def wait_until(self, moment: float | None, woken: anyio.Event) -> None:
        """Return when `monotonic()` has reached the moment (None: never) or when woken."""


class SystemClock:
    """The real one."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def wait_until(self, moment: float | None, woken: anyio.Event) -> None:
        delay = float("inf") if moment is None else max(0.0, moment - time.monotonic())
        with anyio.move_on_after(delay):
            await woken.wait()


class Timer:
    """One deadline. `cancel` it when it is no longer wanted."""

    __slots__ = ("_timers", "act")

    def __init__(self, timers: Timers, act: Callable[[], None]) -> None:
        self._timers = timers
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        """Forget it. Harmless when it has fired."""
        if self.act is not None:
            self.act = None
            self._timers.note_dead()


class Timers:
    """Deadlines, each with a plain function that is called once when its time has come. The function may
    not wait.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._dead = 0
        self._woken = anyio.Event()

    def at(self, moment: float, act: Callable[[], None]) -> Timer:
        """Call `act` when the monotonic clock reaches the moment."""
        timer = Timer(self, act)
        self._count += 1
        earliest = not self._heap or moment < self._heap[0][0]
        heapq.heappush(self._heap, (moment, self._count, timer))
        if earliest:
            self._woken.set()
        return timer

    def note_dead(self) -> None:
        """An entry of the heap has been cancelled."""
        self._dead += 1
        if self._dead > COMPACT_AT and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].act is not None]
            heapq.heapify(self._heap)
            self._dead = 0

    async def run(self) -> None:
        """Fire each deadline in its time, until cancelled."""
        while True:
            now = self._clock.monotonic()
            while self._heap and self._heap[0][0] <= now:
                timer = heapq.heappop(self._heap)[2]
                if timer.act is None:
                    self._dead = max(0, self._dead - 1)
                    continue
                act, timer.act = timer.act, None
                try:
                    act()
                except Exception:
                    log.exception("A deadline's action failed.")
            self._woken = anyio.Event()
            await self._clock.wait_until(self._heap[0][0] if self._heap else None, self._woken)
