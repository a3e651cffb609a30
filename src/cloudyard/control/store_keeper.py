"""Brings the yard's store back after a full disk.

JetStream takes no more writes after one that failed, until its server is started again. Whoever runs the
server says here how much its disk has free and how to start it again; with a server of somebody else's this
only notices when it works again.
"""

from __future__ import annotations

import logging
from typing import Protocol

import anyio

from cloudyard.errors import YardUnavailable
from cloudyard.fabric import Fabric

log = logging.getLogger(__name__)

TRY_S = 0.5  # between tries of a store that takes no writes
RESTART_S, RESTART_MAX_S = 4.0, 60.0  # pause after a restart that has not helped; it doubles


class OwnStore(Protocol):
    """The NATS server of this yard, where the yard runs it."""

    def free_bytes(self) -> int:
        """What is free on the disk of its store."""

    async def restart(self) -> None:
        """End it, so that it is started again; returns when it has ended."""


async def keep_store(fabric: Fabric, own: OwnStore | None) -> None:
    """Watch the fabric's store until cancelled."""
    fabric.store.free_bytes = None if own is None else own.free_bytes
    while True:
        await fabric.store.trouble()
        log.warning("the store takes no writes: %s", ", ".join(fabric.store.suspects))
        await _recover(fabric, own)
        log.warning("the store takes writes again")


async def _recover(fabric: Fabric, own: OwnStore | None) -> None:
    pause_s, restart_at = RESTART_S, 0.0
    while fabric.store.suspects:
        await fabric.wait_connected()
        try:
            await fabric.store.try_again()
        except YardUnavailable as exc:
            log.info("the store still takes no writes: %s", exc)
        else:
            return
        if own is not None and not fabric.store.full and anyio.current_time() >= restart_at:
            log.warning("starting the NATS server again: its store takes no writes, and its disk has room")
            await own.restart()
            restart_at = anyio.current_time() + pause_s
            pause_s = min(2 * pause_s, RESTART_MAX_S)
        await anyio.sleep(TRY_S)
