"""The edge's side of guest/launch.c: park a launcher, tell it to go, hear how it went. That file says what
goes over the socket."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, NoReturn

from anyio import wait_readable

from cloudyard.edge.backends.container.site import Site
from cloudyard.edge.host.cgroups import Limits
from cloudyard.edge.host.processes import Process, Watcher, spawn
from cloudyard.edge.host.template import BOXES
from cloudyard.errors import CloudyardError, LimitExceeded, SandboxUnavailable, Unsupported

FD_WORDS, FD_CONTROL, FD_TEMPLATE, FD_GUEST, FD_LISTEN, FD_INFO, FD_USERNS, FD_CGROUPS = (
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
)
FD_FILTERS = FD_CGROUPS  # once the cgroups are joined
REPORT = struct.Struct("<i60s256s")
GO_BYTES_MAX = 65_536
INFO_BYTES_MAX = 4096
WORDS_BYTES_MAX = 2048  # of what bubblewrap said last


class Order(NamedTuple):
    """What a launcher that waits is told. Paths are the template's."""

    hostname: str
    user_namespaces: str
    """How many there may be inside; nothing: as many as on the host."""
    layers: Sequence[str]
    filters: Sequence[str]
    """Files with filters of system calls, open from FD_FILTERS on."""
    argv: Sequence[str]
    """Bubblewrap's command line."""


class Launcher:
    """One launcher's life: parked, then bubblewrap, then gone."""

    def __init__(self, site: Site, pid: int, *, control: socket.socket, info: int, words: int) -> None:
        self.site = site
        self._pid = pid
        self._process: Process | None = None
        self._control = control
        self._info = info
        self._words = words

    async def parked(self) -> None:
        """Return when it is ready to go.

        Raises:
            CloudyardError: it failed; says at what.
        """
        await wait_readable(self._control)
        said = self._control.recv(REPORT.size)
        if len(said) != REPORT.size or REPORT.unpack(said)[0] != 0:
            self._fail(said)

    async def go(self, order: Order) -> int:
        """Have it become bubblewrap. Gives the pid of the sandbox's PID 1, which has then begun to be set up.

        Raises:
            CloudyardError: it failed; says at what.
        """
        strings = (
            *(order.hostname, f"{BOXES}/{self.site.slot}", order.user_namespaces),
            *(str(len(order.layers)), *order.layers),
            *(str(len(order.filters)), *order.filters),
            *order.argv,
        )
        try:
            self._control.send(b"".join(part.encode() + b"\0" for part in strings))
        except OSError:
            self._fail(self._last_report())
        info = b""
        while not info.rstrip().endswith(b"}"):
            await wait_readable(self._info)
            more = os.read(self._info, INFO_BYTES_MAX)
            if not more or len(info) > INFO_BYTES_MAX:
                self._fail(self._last_report())
            info += more
        try:
            return int(json.loads(info)["child-pid"])
        except (ValueError, KeyError, TypeError):
            self._fail(self._last_report())

    def words(self) -> str:
        """What bubblewrap or the guest complained of last."""
        try:
            said = os.read(self._words, 65_536)
        except BlockingIOError:
            return ""
        return said[-WORDS_BYTES_MAX:].decode("utf-8", "replace").strip()

    def watched(self, watcher: Watcher) -> None:
        """Have its end seen."""
        self._process = watcher.watch(self._pid)

    def kill(self) -> None:
        """End it, whatever it has become."""
        if self._process is not None:
            self._process.kill()
        else:  # nobody else waits for it, so its number is still its own
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def died(self) -> SandboxUnavailable:
        """The error for a sandbox that ended while it started."""
        words = self.words() or "it said nothing"
        return SandboxUnavailable(
            f"Starting the sandbox failed: it ended before its guest answered ({words}).", code="start_failed"
        )

    def close(self) -> None:
        """Let go of it. One that is parked leaves by itself then."""
        self._control.close()
        for fd in (self._info, self._words):
            if fd >= 0:
                os.close(fd)
        self._info = self._words = -1

    def _last_report(self) -> bytes:
        try:
            return self._control.recv(REPORT.size)
        except OSError:
            return b""

    def _fail(self, said: bytes) -> NoReturn:
        """Raise for what it reported, or for what bubblewrap said."""
        if len(said) == REPORT.size:
            error, what, path = REPORT.unpack(said)
            raise _translated(error, _text(what), _text(path))
        words = self.words()
        raise SandboxUnavailable(
            f"Starting the sandbox failed: {words or 'bubblewrap ended and said nothing'}.",
            code="start_failed",
        )


def launch(
    site: Site,
    limits: Limits,
    *,
    disk_bytes: int,
    program: str,
    template: int,
    guest: int,
    namespaces: int,
) -> Launcher:
    """Make the site and start a launcher in it. Blocks for some milliseconds: for a thread.

    Args:
        site: the slot's place, of which nothing is there yet.
        limits: what its cgroup may use to begin with.
        disk_bytes: what its disk may hold to begin with.
        program: the launcher's path.
        template: descriptor of the template mount namespace.
        guest: descriptor of the guest's program.
        namespaces: those to make, as flags of clone(2).

    Raises:
        OSError: what failed; the site may be there in part.
    """
    with ExitStack() as closing:
        listener = closing.enter_context(site.make(limits, disk_bytes=disk_bytes))
        ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        closing.enter_context(control)
        info, info_end = os.pipe()
        closing.callback(os.close, info_end)
        words, words_end = os.pipe()
        closing.callback(os.close, words_end)
        with ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(os.close, info)
            undo.callback(os.close, words)
            entries = site.group.entries()
            for fd in entries:
                closing.callback(os.close, fd)
            fds = {
                FD_WORDS: words_end,
                FD_CONTROL: control.fileno(),
                FD_TEMPLATE: template,
                FD_GUEST: guest,
                FD_LISTEN: listener.fileno(),
                FD_INFO: info_end,
                **{FD_CGROUPS + i: fd for i, fd in enumerate(entries)},
            }
            for fd in (info, words):
                os.set_blocking(fd, False)
            ours.setblocking(False)
            pid = spawn([program, str(site.base), str(len(entries)), str(namespaces)], fds)
            undo.pop_all()
    return Launcher(site, pid, control=ours, info=info, words=words)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _translated(error: int, what: str, path: str) -> CloudyardError:
    message = f"Starting the sandbox failed: could not {what} {path}: {os.strerror(error)}."
    match error:
        case errno.ENOSPC | errno.EDQUOT:
            return LimitExceeded(
                message,
                code="kernel_limit",
                fault="infra",
                hint="A bound of the kernel's: user.max_*_namespaces, fs.mount-max, disk.",
            )
        case errno.EAGAIN | errno.ENOMEM:
            return LimitExceeded(
                message,
                code="too_many_processes",
                fault="infra",
                hint="Raise kernel.pid_max, or stop sandboxes.",
            )
        case errno.EINVAL if what.startswith("mount the overlay"):
            return Unsupported(
                message,
                code="overlay_refused",
                hint="Keep the yard's state on ext4, xfs, btrfs or tmpfs, and on no overlay.",
            )
        case errno.EINVAL if what.startswith("map the owners"):
            return Unsupported(
                message,
                code="idmap_refused",
                fault="infra",
                hint="Mapped EROFS mounts need Linux 5.19 or later.",
            )
        case errno.EPERM | errno.EACCES | errno.ENOSYS:
            return Unsupported(
                message,
                code="kernel_refused",
                fault="infra",
                hint="Run cloudyard doctor: it tries each part by itself.",
            )
        case _:
            return SandboxUnavailable(message, code="start_failed")
