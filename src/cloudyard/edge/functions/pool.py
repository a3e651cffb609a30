"""Workers by shape: few in all, the ones used last kept warm, a broken one never used again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from cloudyard.edge.functions.worker import Worker
from cloudyard.errors import CloudyardError, LimitExceeded
from cloudyard.model import CALL_QUEUE_MAX_S

CALLS_MAX = 5000  # of one worker; then a new one takes its place
QUEUE_MAX = 10_000  # calls that wait for a worker
_log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """What a worker cannot change: its image by content, and what it has imported."""

    image: str
    layers: tuple[str, ...]
    preload: tuple[str, ...]


class Pool:
    """Gives out workers, one call at a time each.

    Args:
        make: starts a worker of a shape; leaves nothing if it fails.
        size: how many there are at most, of all shapes together.
        behind: where workers are stopped, which no call waits for.
    """

    def __init__(self, make: Callable[[Shape], Awaitable[Worker]], *, size: int, behind: TaskGroup) -> None:
        self._make = make
        self._size = size
        self._behind = behind
        self._turns = anyio.Semaphore(size, fast_acquire=True)
        self._waiting = 0
        self._busy = 0
        self._idle: list[tuple[Shape, Worker]] = []  # the one used last at the end

    @asynccontextmanager
    async def worker(self, shape: Shape) -> AsyncIterator[Worker]:
        """A worker of that shape for one call. One that broke, or in which the call was cut off, is stopped.

        Raises:
            LimitExceeded: none came free within CALL_QUEUE_MAX_S, or too many wait.
            CloudyardError: none could be started.
        """
        await self._take_turn()
        try:
            worker = self._take_idle(shape) or await self._new(shape)
            self._busy += 1
            whole = False
            try:
                yield worker
                whole = not worker.broken and worker.calls < CALLS_MAX
            finally:
                self._busy -= 1
                if whole:
                    self._idle.append((shape, worker))
                else:
                    self._behind.start_soon(_stop, worker)
        finally:
            self._turns.release()

    async def drain(self) -> None:
        """Stop those that nobody uses."""
        idle, self._idle = self._idle, []
        for _, worker in idle:
            await _stop(worker)

    async def _take_turn(self) -> None:
        if self._waiting >= QUEUE_MAX:
            raise LimitExceeded(
                f"{QUEUE_MAX} calls wait for a worker already.",
                code="functions_busy",
                hint="Send fewer at once.",
                retry_safe=True,
            )
        self._waiting += 1
        try:
            with anyio.fail_after(CALL_QUEUE_MAX_S):
                await self._turns.acquire()
        except TimeoutError as exc:
            raise LimitExceeded(
                f"No worker came free for the call within {CALL_QUEUE_MAX_S:g} s.",
                code="functions_busy",
                hint="Send fewer at once, or calls that take less time.",
                retry_safe=True,
            ) from exc
        finally:
            self._waiting -= 1

    def _take_idle(self, shape: Shape) -> Worker | None:
        """The one used last whose next cell is ready; else the one used last."""
        fitting = [entry for entry in self._idle if entry[0] == shape and not entry[1].broken]
        chosen = next((entry for entry in reversed(fitting) if entry[1].note_ready()), None)
        if chosen is None and fitting:
            chosen = fitting[-1]
        if chosen is None:
            return None
        self._idle.remove(chosen)
        return chosen[1]

    async def _new(self, shape: Shape) -> Worker:
        while self._idle and len(self._idle) + self._busy >= self._size:
            _, unused = self._idle.pop(0)
            self._behind.start_soon(_stop, unused)
        return await self._make(shape)


async def _stop(worker: Worker) -> None:
    with CancelScope(shield=True):
        try:
            await worker.stop()
        except CloudyardError as exc:  # its slot stays taken until the next sweep
            _log.error("A worker could not be stopped: %s", exc)
