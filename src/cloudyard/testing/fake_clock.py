"""A clock that a test moves by hand: nothing waits for real, and every deadline fires in its order."""

from __future__ import annotations

import anyio


class FakeClock:
    """Both clocks of an edge, standing still until `advance`."""

    def __init__(self, monotonic: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._moved = anyio.Event()

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    async def wait_until(self, moment: float | None, woken: anyio.Event) -> None:
        async with anyio.create_task_group() as tasks:

            async def wait_woken() -> None:
                await woken.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(wait_woken)
            while moment is None or self._monotonic < moment:
                await self._moved.wait()
            tasks.cancel_scope.cancel()

    async def advance(self, seconds: float) -> None:
        """Move both clocks on, and let whoever waited for that act."""
        self._monotonic += seconds
        self._wall += seconds
        moved, self._moved = self._moved, anyio.Event()
        moved.set()
        await anyio.wait_all_tasks_blocked()
