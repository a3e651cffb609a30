"""Sandboxes that live no longer than the runner: each has a short time to live, renewed while it is in use.

A runner that is killed leaves nothing behind for longer than LEASE_S, also when nobody resumes its run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio

from cloudyard.errors import CloudyardError
from cloudyard.sdk.sandbox import Sandbox

LEASE_S = 180.0
RENEWALS = 4  # in the time of one lease
RENEWALS_IN_FLIGHT = 32


class Leases:
    """The sandboxes that the runner holds now."""

    def __init__(self) -> None:
        self._since: dict[Sandbox, float] = {}
        self._room = anyio.Event()

    @property
    def held(self) -> int:
        """How many there are."""
        return len(self._since)

    @contextmanager
    def hold(self, sandbox: Sandbox) -> Iterator[None]:
        """Renew the lease of a sandbox, which has just been made, for the length of a block."""
        self._since[sandbox] = anyio.current_time()
        try:
            yield
        finally:
            del self._since[sandbox]

    def tell_room(self) -> None:
        """A sandbox was stopped: who waits for room may try again."""
        self._room.set()
        self._room = anyio.Event()

    async def wait_for_room(self, *, within_s: float) -> bool:
        """Return when a sandbox of the run was stopped, or after `within_s`; whether it was the former."""
        with anyio.move_on_after(within_s):
            await self._room.wait()
            return True
        return False

    async def renew(self) -> None:
        """Renew all leases until cancelled. A sandbox that is gone is its user's to notice."""
        slots = anyio.Semaphore(RENEWALS_IN_FLIGHT)

        async def one(sandbox: Sandbox, age_s: float) -> None:
            async with slots:
                with suppress(CloudyardError):
                    await sandbox.keep_alive(max_ttl_s=age_s + LEASE_S)

        while True:
            await anyio.sleep(LEASE_S / RENEWALS)
            now = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                for sandbox, since in self._since.items():
                    if now - since > LEASE_S / RENEWALS:
                        tasks.start_soon(one, sandbox, now - since)
