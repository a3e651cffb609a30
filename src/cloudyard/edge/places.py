"""Places for commands in one guest, and a fair queue for when all are taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio

from cloudyard.edge.config import COMMANDS_LIVE_MAX, COMMANDS_QUEUED_MAX, QUEUE_WAIT_S
from cloudyard.errors import LimitExceeded


class Places:
    """How many commands the guest holds. A place that is given back goes to whoever waits longest."""

    __slots__ = ("_queue", "_taken")

    def __init__(self) -> None:
        self._taken = 0
        self._queue: deque[Callable[[], bool]] = deque()

    def take_nowait(self) -> bool:
        """Take a place if one is free."""
        if self._taken >= COMMANDS_LIVE_MAX:
            return False
        self._taken += 1
        return True

    async def take(self) -> None:
        """Take a place once there is one.

        Raises:
            LimitExceeded: there was none for QUEUE_WAIT_S, or too many wait already.
        """
        if len(self._queue) >= COMMANDS_QUEUED_MAX:
            raise LimitExceeded(
                f"{COMMANDS_QUEUED_MAX} commands wait in this sandbox already.",
                code="too_many_commands",
                hint="Wait for some of them first.",
                retry_safe=True,
            )
        place = anyio.Event()

        def take() -> bool:
            place.set()
            return True

        self._queue.append(take)
        try:
            with anyio.move_on_after(QUEUE_WAIT_S):
                await place.wait()
        finally:
            if not place.is_set():
                self._queue.remove(take)
        if not place.is_set():
            raise LimitExceeded(
                f"{COMMANDS_LIVE_MAX} commands run in this sandbox; none ended within {QUEUE_WAIT_S:g} s.",
                code="too_many_commands",
                hint="Wait for some of them, or kill some.",
                retry_safe=True,
            )

    def take_when_free(self, taken: Callable[[], bool]) -> None:
        """Take a place now or once there is one, however long that takes.

        Args:
            taken: called then; says whether the place is still wanted.
        """
        if not self.take_nowait():
            self._queue.append(taken)
        elif not taken():
            self.give_back()

    def give_back(self) -> None:
        """A command is held no longer."""
        while self._queue:
            if self._queue.popleft()():
                return
        self._taken = max(0, self._taken - 1)

    def recount(self, taken: int) -> None:
        """So many are taken, as the guest says."""
        self._taken = taken

    def open(self) -> None:
        """Let everyone go on who waits: there is nothing to wait for any more."""
        while self._queue:
            self._queue.popleft()()
