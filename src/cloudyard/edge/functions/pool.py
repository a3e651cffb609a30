"""The workers of this node: given out one call at a time, made when calls wait, ended when others need their
place.

Knows how many there may be and who waits, and nothing of what calls are. One that is spoiled is never given
out again; its place is free only when nothing of it is left.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from cloudyard.edge.functions.worker import Shape, Worker
from cloudyard.errors import CloudyardError, LimitExceeded
from cloudyard.model import CALL_QUEUE_MAX_S

log = logging.getLogger(__name__)

QUEUE_MAX = 4096  # calls that wait for a worker
SERVED_MAX = 5_000  # calls of one worker; each of its cells takes a new uid
SETTLE_S = 10.0  # from a call's answer to the next cell
IDLE_MAX_S = 600.0  # a worker that nobody has wanted for so long is ended
IDLE_LOOK_S = 30.0


class _Waiter:
    """A call that waits for a worker."""

    __slots__ = ("done", "error", "memory", "shape", "worker")

    def __init__(self, shape: Shape, memory: int) -> None:
        self.shape = shape
        self.memory = memory
        self.done = anyio.Event()
        self.worker: Worker | None = None
        self.error: CloudyardError | None = None


class Lease:
    """A call's right to a worker. If one is spoiled between two runs of the call, another takes its place."""

    def __init__(self, pool: Pool, shape: Shape, memory: int) -> None:
        self._pool = pool
        self._shape = shape
        self._memory = memory
        self._held: Worker | None = None

    async def worker(self) -> Worker:
        """A worker whose next cell waits. Raises as `Pool.lease`."""
        if self._held is not None and not await settled(self._held):
            self.end()
        if self._held is None:
            self._held = await self._pool.take(self._shape, self._memory)
        return self._held

    def end(self) -> None:
        """Give back what is held."""
        if self._held is not None:
            self._pool.give_back(self._held, self._memory)
            self._held = None


async def settled(worker: Worker) -> bool:
    """Wait for a worker's next cell; gives whether there will be one, with nothing left of the last."""
    try:
        with anyio.fail_after(SETTLE_S):
            await worker.until_ready()
    except (CloudyardError, TimeoutError) as exc:
        worker.spoil(f"no cell for the next call: {exc}")
    return not worker.spoiled


class Pool:
    """Workers by shape. Used as an async context manager; leaving it ends them.

    Args:
        start: makes one; leaves nothing if it fails.
        size: how many there may be.
        memory_max_bytes: how much the calls under way may use together.
    """

    def __init__(
        self, start: Callable[[Shape], Awaitable[Worker]], *, size: int, memory_max_bytes: int
    ) -> None:
        self._start = start
        self._size = size
        self._memory_max = memory_max_bytes
        self._memory = 0
        self._held = 0  # places taken: workers that live, are being made or being ended
        self._idle: dict[Shape, deque[Worker]] = {}
        self._starting: Counter[Shape] = Counter()
        self._ending = 0
        self._waiting: deque[_Waiter] = deque()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._running = self._run()
        await self._running.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._running.__aexit__(None, None, None)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        """Hold the tasks in which workers are made and ended; at last, all workers are ended."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._end_unused)
                yield
                self._tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as ending:
                    for worker in [worker for idle in self._idle.values() for worker in idle]:
                        ending.start_soon(worker.stop)
                self._idle.clear()

    @asynccontextmanager
    async def lease(self, shape: Shape, memory: int) -> AsyncIterator[Lease]:
        """A worker of that shape for one call, which may use that much memory.

        Raises:
            LimitExceeded: too many calls wait, or it waited too long, or it wants more than there may be.
            CloudyardError: none could be made.
        """
        lease = Lease(self, shape, memory)
        try:
            yield lease
        finally:
            lease.end()

    async def take(self, shape: Shape, memory: int) -> Worker:
        """A worker, which is the caller's until `give_back`. Raises as `lease`."""
        if memory > self._memory_max:
            raise LimitExceeded(
                f"The call may use {memory >> 20} MiB; all calls of a node together may use "
                f"{self._memory_max >> 20} MiB here.",
                code="call_memory",
                hint="Ask for less, or run it in a sandbox.",
            )
        if len(self._waiting) >= QUEUE_MAX:
            raise self._busy(f"{QUEUE_MAX} calls wait for a worker already")
        waiter = _Waiter(shape, memory)
        self._waiting.append(waiter)
        self._dispatch()
        try:
            with anyio.move_on_after(CALL_QUEUE_MAX_S):
                await waiter.done.wait()
        except BaseException:
            if waiter.worker is not None:
                self.give_back(waiter.worker, memory)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
        if waiter.error is not None:
            raise waiter.error
        if waiter.worker is None:
            raise self._busy(f"no worker was free for {CALL_QUEUE_MAX_S:g} s")
        return waiter.worker

    def give_back(self, worker: Worker, memory: int) -> None:
        """A call is over, or given up."""
        self._memory -= memory
        if worker.spoiled or worker.worn or worker.calls >= SERVED_MAX:
            self._retire(worker)
        elif worker.ready:
            self._put(worker)
        else:
            self._spawn(self._settle, worker)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give out what is idle, and make or end workers where that is not enough."""
        wanted: Counter[Shape] = Counter()
        full = False
        for waiter in list(self._waiting):
            if full and not any(self._idle.values()):
                return
            if self._memory + waiter.memory > self._memory_max:
                continue
            worker = self._idle_one(waiter.shape)
            if worker is not None:
                self._waiting.remove(waiter)
                self._memory += waiter.memory
                waiter.worker = worker
                waiter.done.set()
                continue
            wanted[waiter.shape] += 1
            if not full and wanted[waiter.shape] > self._starting[waiter.shape]:
                full = not self._make_another(waiter.shape)

    def _idle_one(self, shape: Shape) -> Worker | None:
        idle = self._idle.get(shape)
        while idle:
            worker = idle.popleft()  # longest idle: its next cells have had most time to be made
            if worker.ready:
                return worker
            self._retire(worker)
        return None

    def _make_another(self, shape: Shape) -> bool:
        if self._held >= self._size:
            if not self._ending:
                self._end_oldest(but=shape)
            return False
        self._held += 1
        self._starting[shape] += 1
        self._spawn(self._make, shape)
        return True

    async def _make(self, shape: Shape) -> None:
        try:
            worker = await self._start(shape)
        except CloudyardError as exc:
            self._held -= 1
            self._refuse_one(shape, exc)
        else:
            self._put(worker)
        finally:
            self._starting -= Counter([shape])  # keeps no zeroes
            self._dispatch()

    def _refuse_one(self, shape: Shape, error: CloudyardError) -> None:
        waiter = next((each for each in self._waiting if each.shape == shape), None)
        if waiter is not None:
            self._waiting.remove(waiter)
            waiter.error = error
            waiter.done.set()

    async def _settle(self, worker: Worker) -> None:
        try:
            good = await settled(worker)
        except BaseException:
            await worker.stop()
            raise
        if good:
            self._put(worker)
        else:
            self._retire(worker)
        self._dispatch()

    def _put(self, worker: Worker) -> None:
        worker.idle_since = anyio.current_time()
        self._idle.setdefault(worker.shape, deque()).append(worker)

    def _retire(self, worker: Worker) -> None:
        why = worker.spoiled or worker.worn or "no longer needed"
        log.debug("A worker of %s is ended: %s.", worker.shape.image, why)
        self._ending += 1
        self._spawn(self._end, worker)

    async def _end(self, worker: Worker) -> None:
        await worker.stop()
        self._ending -= 1
        self._held -= 1
        self._dispatch()

    def _end_oldest(self, *, but: Shape) -> None:
        """End the worker that was wanted longest ago, if one of another shape is idle."""
        others = [(idle[0].idle_since, shape) for shape, idle in self._idle.items() if idle and shape != but]
        if others:
            _, shape = min(others, key=lambda each: each[0])
            self._retire(self._idle[shape].popleft())

    async def _end_unused(self) -> None:
        while True:
            await anyio.sleep(IDLE_LOOK_S)
            before = anyio.current_time() - IDLE_MAX_S
            for shape, idle in list(self._idle.items()):
                while idle and idle[0].idle_since < before:
                    self._retire(idle.popleft())
                if not idle:
                    del self._idle[shape]

    def _spawn(self, function: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        assert self._tasks is not None, "the pool is used while it runs"
        self._tasks.start_soon(function, *args)

    def _busy(self, why: str) -> LimitExceeded:
        return LimitExceeded(
            f"The call was not made: {why}.",
            code="calls_busy",
            fault="infra",
            hint="Try again later.",
            retry_safe=True,
        )
