"""What is known of JetStream's store behind a fabric, and the error while it takes no writes.

After one write that failed, as on a full disk, a stream of JetStream answers no further write until its
server is started again, while reads go on. So a write that got no answer makes its bucket suspect: writes to
it fail at once from then on, and whoever waits on `trouble` tries it, and has the server started again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio

from cloudyard.errors import YardUnavailable
from cloudyard.model import MIB

SPARE_BYTES = 8 * MIB  # with less than this free on the store's disk, starting the server again helps nothing


class _Suspect(NamedTuple):
    """A bucket that took no write: why, and how to try one that clears it."""

    reason: str
    probe: Callable[[], Awaitable[None]]


class StoreHealth:
    """Which buckets take no writes.

    Attributes:
        free_bytes: asks how much is free on the store's disk; None where the server is not of this machine.
    """

    def __init__(self) -> None:
        self.free_bytes: Callable[[], int] | None = None
        self._suspects: dict[str, _Suspect] = {}
        self._trouble = anyio.Event()

    @property
    def suspects(self) -> list[str]:
        """Buckets that took no write, sorted."""
        return sorted(self._suspects)

    @property
    def full(self) -> bool:
        """Whether the store's disk is known to be full."""
        try:
            return self.free_bytes is not None and self.free_bytes() < SPARE_BYTES
        except OSError:  # no disk that can be asked
            return False

    async def trouble(self) -> None:
        """Return once a bucket is suspect."""
        await self._trouble.wait()

    async def try_again(self) -> None:
        """Write to each bucket that is suspect; those that answer no longer are.

        Raises:
            YardUnavailable: one still takes no writes.
        """
        for suspect in list(self._suspects.values()):
            await suspect.probe()

    def suspect(self, bucket: str, reason: str, probe: Callable[[], Awaitable[None]]) -> None:
        """A write was not answered; `probe` is to write again, and to `clear` the bucket when that works."""
        self._suspects[bucket] = _Suspect(reason, probe)
        self._trouble.set()

    def clear(self, bucket: str) -> None:
        """A write was answered."""
        if self._suspects.pop(bucket, None) is not None and not self._suspects:
            self._trouble = anyio.Event()

    def check(self, bucket: str, what: str) -> None:
        """Do nothing if a write to the bucket has a chance.

        Raises:
            YardUnavailable: it is suspect.
        """
        if (suspect := self._suspects.get(bucket)) is not None:
            raise self.error(what, suspect.reason)

    def error(self, what: str, reason: str) -> YardUnavailable:
        """The error of a write that the store did not take."""
        if self.full:
            return YardUnavailable(
                f"Writing {what} failed: the disk of the yard's state folder is full.",
                code="store_unavailable",
                hint="Free disk space there; the yard then recovers by itself within seconds.",
                retry_safe=False,
            )
        return YardUnavailable(
            f"Writing {what} failed: the yard's store (JetStream) does not take it: {reason}.",
            code="store_unavailable",
            hint="The disk of the yard's state folder may be full, or was: see that it has free space. "
            "A yard with its own NATS then starts the store again by itself; try again in some seconds.",
        )
