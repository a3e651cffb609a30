"""One live container."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable

import anyio
from anyio import CancelScope

from cloudyard.edge.backends.base import DiskUse, Files, InstanceFacts, Usage
from cloudyard.edge.backends.container.maker import limits_of
from cloudyard.edge.backends.container.site import Site, refused
from cloudyard.edge.host import cgroups
from cloudyard.edge.host.files import RootFiles
from cloudyard.edge.host.processes import Process, Watcher, ended_within
from cloudyard.errors import SandboxUnavailable
from cloudyard.model import SandboxSpec, parse_size

END_WAIT_S = 10.0  # from SIGKILL to the end of PID 1, which waits for all others


class ContainerInstance:
    """A container whose guest is listening, made here or adopted."""

    def __init__(
        self,
        facts: InstanceFacts,
        *,
        site: Site,
        process: Process,
        watcher: Watcher,
        remove: Callable[[Site], Awaitable[None]],
    ) -> None:
        self._facts = facts
        self._site = site
        self._process = process
        self._watcher = watcher
        self._remove = remove
        self._stopped = False
        self._turn = anyio.Lock()
        self._files = RootFiles(self._open_root, site.base)

    @property
    def facts(self) -> InstanceFacts:
        return self._facts

    @property
    def files(self) -> Files:
        return self._files

    def connect(self) -> socket.socket:
        if self._process.ended.is_set():
            raise self._gone("Connecting to the guest")
        return self._site.connect()

    async def wait_gone(self) -> None:
        await self._process.ended.wait()

    def usage(self) -> Usage:
        try:
            return self._site.group.usage()
        except OSError as exc:
            raise self._gone("Reading the counters") from exc

    def disk(self) -> DiskUse:
        try:
            return self._site.disk()
        except OSError as exc:
            raise self._gone("Reading the counters") from exc

    def oom_kills(self) -> int:
        try:
            return self._site.group.oom_kills()
        except OSError as exc:
            raise self._gone("Reading the counters") from exc

    def forks_refused(self) -> int:
        try:
            return self._site.group.forks_refused()
        except OSError as exc:
            raise self._gone("Reading the counters") from exc

    async def freeze(self) -> None:
        """No process of it runs until `thaw`."""
        try:
            await cgroups.freeze(self._site.group)
        except OSError as exc:
            raise self._gone("Freezing") from exc

    async def thaw(self) -> None:
        """It goes on."""
        try:
            self._site.group.set_frozen(False)
        except OSError as exc:
            raise self._gone("Thawing") from exc

    async def end_processes(self) -> None:
        async with self._turn:
            if self._stopped:
                raise self._gone("Ending the processes")
            with CancelScope(shield=True):
                await self._site.end_processes(self._watcher, but=self._process.pid)

    def resize(self, spec: SandboxSpec) -> None:
        """Give it the limits of a normalised spec. Raises CloudyardError."""
        try:
            self._site.group.limit(limits_of(spec))
            self._site.limit_disk(parse_size(spec.disk, what="disk"))
        except OSError as exc:
            raise refused(exc, self._site.slot) from exc

    async def stop(self) -> None:
        with CancelScope(shield=True):
            async with self._turn:
                if self._stopped:
                    return
                self._process.kill()
                with contextlib.suppress(OSError):  # no group: an earlier stop came so far
                    self._site.group.set_frozen(False)  # what is frozen takes the signal only then
                await ended_within(self._process, END_WAIT_S)
                await self._remove(self._site)
                self._stopped = True

    def _open_root(self) -> int:
        if self._process.ended.is_set():
            raise self._gone("Opening its files")
        root = os.open(f"/proc/{self._process.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._process.has_ended():  # its number may have been another's already, one of the host's
            os.close(root)
            raise self._gone("Opening its files")
        return root

    def _gone(self, what: str) -> SandboxUnavailable:
        return SandboxUnavailable(
            f"{what} of sandbox {self._facts.sandbox} failed: it has ended.", code="sandbox_gone"
        )
