"""Launchers that wait. Making one takes milliseconds that a create then does not spend."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable

import anyio
from anyio import CapacityLimiter, Event, create_task_group

from cloudyard.edge.backends.container.launcher import Launcher
from cloudyard.errors import CloudyardError

RETRY_S = 1.0  # after a launcher could not be prepared
_log = logging.getLogger(__name__)


class Pool:
    """Keeps `size` launchers parked while `run` runs. A create that finds none prepares its own, in turn with
    the others."""

    def __init__(self, prepare: Callable[[], Awaitable[Launcher]], *, size: int, at_once: int) -> None:
        self._prepare_one = prepare
        self._size = size
        self._at_once = at_once
        self._turns = CapacityLimiter(at_once)
        self._parked: deque[Launcher] = deque()
        self._under_way = 0
        self._wanted = Event()

    async def run(self) -> None:
        """Keep it filled until cancelled."""
        async with create_task_group() as tasks:
            for _ in range(min(self._at_once, self._size)):
                tasks.start_soon(self._fill)

    async def take(self) -> Launcher:
        """A parked launcher, which is the caller's from then on.

        Raises:
            CloudyardError: none was parked and none can be prepared.
        """
        if self._parked:
            launcher = self._parked.popleft()
            self._wanted.set()
            return launcher
        return await self._prepare()

    def drain(self) -> list[Launcher]:
        """All that are parked; they are the caller's from then on."""
        drained = list(self._parked)
        self._parked.clear()
        return drained

    async def _fill(self) -> None:
        while True:
            while len(self._parked) + self._under_way >= self._size:
                self._wanted = Event() if self._wanted.is_set() else self._wanted
                await self._wanted.wait()
            self._under_way += 1
            try:
                launcher = await self._prepare()
                self._parked.append(launcher)
            except CloudyardError as exc:
                _log.warning("Filling the pool of launchers: %s", exc)
                await anyio.sleep(RETRY_S)
            finally:
                self._under_way -= 1

    async def _prepare(self) -> Launcher:
        async with self._turns:
            return await self._prepare_one()
