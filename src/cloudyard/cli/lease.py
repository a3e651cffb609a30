"""Sandboxes that live no longer than this program: what `run` and `shell` use and throw away.

The program stops its sandbox when it ends in any way that lets it act: done, failed, interrupted, told to end
by SIGTERM or SIGHUP. Against the rest (SIGKILL, a lost machine) the sandbox has a lease: a short time to live
that is renewed for as long as the program runs. Knows the SDK and signals.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Unpack

import anyio

from cloudyard.cli import EXIT_SIGNAL
from cloudyard.errors import CloudyardError, InvalidRequest, YardUnavailable
from cloudyard.model import TTL_MAX_S, TTL_MIN_S
from cloudyard.sdk.client import SandboxOptions, Yard
from cloudyard.sdk.sandbox import Sandbox
from cloudyard.sdk.tasks import plain_task_group

LEASE_S = 120.0
RENEWALS = 4  # in the time of one lease
STOP_WITHIN_S = 30.0


async def until_told_to_end(work: Callable[[], Awaitable[int]]) -> int:
    """Do the work; SIGTERM and SIGHUP cancel it, as ctrl-C does, and what it cleans up is waited for.

    Returns:
        The work's exit code, or 128 plus the signal's number.
    """
    told = 0
    heeded = [  # one that is ignored stays ignored: that is what nohup(1) is for
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN
    ]
    code = 0
    with anyio.open_signal_receiver(*heeded) as signals:
        async with plain_task_group() as tasks:
            scope = anyio.CancelScope()

            async def watch() -> None:
                nonlocal told
                async for number in signals:
                    told = number
                    scope.cancel()

            tasks.start_soon(watch)
            with scope:
                code = await work()
            tasks.cancel_scope.cancel()
    return EXIT_SIGNAL + told if scope.cancelled_caught else code


class Leased:
    """A sandbox under a lease."""

    def __init__(self, box: Sandbox, *, born: float, lease_s: float, max_ttl_s: float | None) -> None:
        self.box = box
        self.kept = False
        """It goes on without this program."""
        self._born = born
        self._lease_s = lease_s
        self._max_ttl_s = max_ttl_s
        self._renewing = anyio.CancelScope()

    async def keep(self) -> None:
        """Let it live on, as long as was asked for."""
        self._renewing.cancel()
        await self.box.keep_alive(max_ttl_s=self._max_ttl_s)
        self.kept = True

    async def renew(self) -> None:
        """Renew the lease until cancelled, or until the sandbox is gone, which its user hears of anyway."""
        with self._renewing:
            while True:
                await anyio.sleep(self._lease_s / RENEWALS)
                try:
                    await self.box.keep_alive(max_ttl_s=self._ends_in_s())
                except YardUnavailable:
                    continue
                except CloudyardError:
                    return

    def _ends_in_s(self) -> float:
        """Time to live, which counts from the creation."""
        return min(time.monotonic() - self._born + self._lease_s, self._max_ttl_s or TTL_MAX_S)


@asynccontextmanager
async def leased(
    yard: Yard, image: str, *, lease_s: float, **options: Unpack[SandboxOptions]
) -> AsyncIterator[Leased]:
    """A new sandbox, stopped on leaving the block unless it was kept.

    Args:
        lease_s: it stops by itself so long after this program was last heard of.
        **options: as for `Yard.create`. At the end of its `max_ttl_s` it stops in any case.

    Raises:
        InvalidRequest: one of the two times is out of range.
        CloudyardError: as from `Yard.create`.
    """
    born = time.monotonic()
    max_ttl_s = options.get("max_ttl_s")
    for name, seconds in (("--lease", lease_s), ("--max-ttl", max_ttl_s)):
        if seconds is not None and not TTL_MIN_S <= seconds <= TTL_MAX_S:
            raise InvalidRequest(
                f"{name} is {seconds:g} seconds, out of range.",
                code="out_of_range",
                hint=f"Between {TTL_MIN_S:g} second and {TTL_MAX_S / 86400:g} days.",
            )
    first_s = lease_s if max_ttl_s is None else min(lease_s, max_ttl_s)
    options["max_ttl_s"] = first_s
    box = await yard.create(image, **options)
    lease = Leased(box, born=born, lease_s=lease_s, max_ttl_s=max_ttl_s)
    try:
        async with plain_task_group() as tasks:
            tasks.start_soon(lease.renew)
            yield lease
            tasks.cancel_scope.cancel()
    except BaseException:
        if not lease.kept:
            with anyio.move_on_after(STOP_WITHIN_S, shield=True), suppress(CloudyardError):
                await box.stop()
        raise
    if not lease.kept:
        with anyio.fail_after(STOP_WITHIN_S, shield=True):
            await box.stop()
