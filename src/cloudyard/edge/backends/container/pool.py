"""Launchers that wait. Making one takes milliseconds that a create then does not spend.

Each waits in the cgroups of the sandbox that it will make, because it takes long to move a process; so it is
of one class of processor time from the start. Those that wait mirror what was asked for last, as in `stock`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable

import anyio
from anyio import CapacityLimiter, Event, create_task_group

from cloudyard.edge.backends.container.launcher import Launcher
from cloudyard.errors import CloudyardError
from cloudyard.model import CpuClass

RETRY_S = 1.0  # after a launcher could not be prepared
_log = logging.getLogger(__name__)


class Pool:
    """Keeps launchers parked while `run` runs. A create that finds none of its class prepares its own, in
    turn with the others.

    Args:
        prepare: parks one; leaves nothing if it fails.
        drop: takes down one that is of no use any more.
        size: how many are kept, of both classes together.
        at_once: how many are prepared at the same time.
    """

    def __init__(
        self,
        prepare: Callable[[CpuClass], Awaitable[Launcher]],
        drop: Callable[[Launcher], Awaitable[None]],
        *,
        size: int,
        at_once: int,
    ) -> None:
        self._prepare_one = prepare
        self._drop = drop
        self._size = size
        self._at_once = at_once
        self._turns = CapacityLimiter(at_once)
        self._asked: deque[CpuClass] = deque(["latency"] * size, maxlen=size)
        self._parked: dict[CpuClass, deque[Launcher]] = {"latency": deque(), "best_effort": deque()}
        self._under_way: Counter[CpuClass] = Counter()
        self._leaving = 0
        self._changed = Event()

    async def run(self) -> None:
        """Keep it filled until cancelled."""
        async with create_task_group() as tasks:
            for _ in range(min(self._at_once, self._size)):
                tasks.start_soon(self._fill)

    async def take(self, cpu_class: CpuClass) -> Launcher:
        """A parked launcher of that class, which is the caller's from then on.

        Raises:
            CloudyardError: none was parked and none can be prepared.
        """
        self._asked.append(cpu_class)
        parked = self._parked[cpu_class]
        self._changed.set()
        return parked.popleft() if parked else await self._prepare(cpu_class)

    def drain(self) -> list[Launcher]:
        """All that are parked; they are the caller's from then on."""
        drained = [launcher for parked in self._parked.values() for launcher in parked]
        for parked in self._parked.values():
            parked.clear()
        return drained

    async def _fill(self) -> None:
        while True:
            wanted = Counter(self._asked)
            lacking = self._lacking(wanted)
            if lacking is not None and self._count() < self._size:
                await self._add(lacking)
            elif lacking is not None and (surplus := self._surplus(wanted)) is not None:
                await self._let_go(surplus)
            else:
                self._changed = Event() if self._changed.is_set() else self._changed
                await self._changed.wait()

    def _count(self) -> int:
        return sum(map(len, self._parked.values())) + self._under_way.total() + self._leaving

    def _lacking(self, wanted: Counter[CpuClass]) -> CpuClass | None:
        """The class of which some are missing."""
        for cpu_class, parked in self._parked.items():
            if len(parked) + self._under_way[cpu_class] < wanted[cpu_class]:
                return cpu_class
        return None

    def _surplus(self, wanted: Counter[CpuClass]) -> Launcher | None:
        """One more than is wanted of its class."""
        for cpu_class, parked in self._parked.items():
            if len(parked) > wanted[cpu_class]:
                return parked.popleft()
        return None

    async def _add(self, cpu_class: CpuClass) -> None:
        self._under_way[cpu_class] += 1
        try:
            self._parked[cpu_class].append(await self._prepare(cpu_class))
        except CloudyardError as exc:
            _log.warning("Filling the pool of launchers: %s", exc)
            await anyio.sleep(RETRY_S)
        finally:
            self._under_way[cpu_class] -= 1
            self._changed.set()

    async def _let_go(self, launcher: Launcher) -> None:
        self._leaving += 1
        try:
            await self._drop(launcher)
        except CloudyardError as exc:
            _log.warning("Taking down a launcher that is of no use any more: %s", exc)
        finally:
            self._leaving -= 1
            self._changed.set()

    async def _prepare(self, cpu_class: CpuClass) -> Launcher:
        async with self._turns:
            return await self._prepare_one(cpu_class)
