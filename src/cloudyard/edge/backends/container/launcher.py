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
from typing import NoReturn

from anyio import wait_readable

from cloudyard.edge.backends.container.defences import Defences
from cloudyard.edge.backends.container.site import Site
from cloudyard.edge.host.cgroups import Limits
from cloudyard.edge.host.processes import Process, Watcher, spawn
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
REPORT = struct.Struct("<i60s256s")
GO_BYTES_MAX = 65_536
INFO_BYTES_MAX = 4096
WORDS_BYTES_MAX = 2048  # of what bubblewrap said last
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL", "SYS_CHROOT")
NESTING_CAPABILITIES = (
    "SYS_ADMIN",  # namespaces and mounts
    "SYS_RESOURCE",  # to forbid user namespaces to what runs in them
    "SETPCAP",  # to give up the bounding set
)
GUEST_UID = 65_533  # of the sandbox's uids; its root can neither signal nor trace nor slow what has another


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

    async def go(
        self, hostname: str, layers: Sequence[str], argv: Sequence[str], *, user_namespaces: str
    ) -> int:
        """Have it become bubblewrap. Gives the pid of the sandbox's PID 1, which has then begun to be set up.

        `user_namespaces`: how many there may be inside; nothing: as many as on the host.

        Raises:
            CloudyardError: it failed; says at what.
        """
        directory = f"/boxes/{self.site.slot}"
        strings = (hostname, directory, user_namespaces, str(len(layers)), *layers, *argv)
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
        return int(json.loads(info)["child-pid"])

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
    site: Site, limits: Limits, *, program: str, template: int, guest: int, namespaces: int
) -> Launcher:
    """Make the site and start a launcher in it. Blocks for some milliseconds: for a thread.

    Args:
        site: the slot's place, of which nothing is there yet.
        limits: what its cgroup may use to begin with.
        program: the launcher's path.
        template: descriptor of the template mount namespace.
        guest: descriptor of the guest's program.
        namespaces: those to make, as flags of clone(2).

    Raises:
        OSError: what failed; the site may be there in part.
    """
    with ExitStack() as closing:
        listener = closing.enter_context(site.make(limits))
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


def bubblewrap(program: str, *, shm_bytes: int, nesting: bool, defences: Defences) -> list[str]:
    """The command line that makes a sandbox of what the launcher has prepared.

    Capabilities are the fewest with which package managers, su and sshd worked, and more where root inside is
    to make namespaces of its own. /dev/shm has a size of its own, for a tmpfs would else be half of the
    machine's memory.
    """
    names = (*CAPABILITIES, *NESTING_CAPABILITIES) if nesting else CAPABILITIES
    capabilities = ["--cap-drop", "ALL", *(part for name in names for part in ("--cap-add", f"CAP_{name}"))]
    userns = ("--userns", str(FD_USERNS), "--uid", "0", "--gid", "0")
    return [
        program,
        *(userns if defences.user_namespace else ()),
        *("--info-fd", str(FD_INFO)),
        *(("--unshare-pid", "--as-pid-1") if defences.pid_namespace else ()),
        *("--bind" if defences.nodev else "--dev-bind", "/root", "/"),
        *(("--proc", "/proc") if defences.pid_namespace else ("--bind", "/proc", "/proc")),
        *(("--dev", "/dev") if defences.own_devices else ("--dev-bind", "/dev", "/dev")),
        *("--perms", "1777", "--size", str(shm_bytes), "--tmpfs", "/dev/shm"),
        *("--chdir", "/"),
        *(capabilities if defences.capabilities else ("--cap-add", "ALL")),
        *(f"/proc/self/fd/{FD_GUEST}", "--listen", str(FD_LISTEN)),
        *("--uid", str(GUEST_UID if defences.guest_uid else 0)),
    ]


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _translated(error: int, what: str, path: str) -> CloudyardError:
    message = f"Starting the sandbox failed: could not {what} {path}: {os.strerror(error)}."
    match error:
        case errno.ENOSPC | errno.EDQUOT:
            return LimitExceeded(
                message,
                code="kernel_limit",
                hint="A bound of the kernel's: user.max_*_namespaces, fs.mount-max, disk.",
            )
        case errno.EAGAIN | errno.ENOMEM:
            return LimitExceeded(
                message, code="too_many_processes", hint="Raise kernel.pid_max, or stop sandboxes."
            )
        case errno.EINVAL if what.startswith("mount the overlay"):
            return Unsupported(
                message,
                code="overlay_refused",
                hint="Keep the yard's state on ext4, xfs, btrfs or tmpfs, and on no overlay.",
            )
        case errno.EINVAL if what.startswith("map the owners"):
            return Unsupported(
                message, code="idmap_refused", hint="Mapped EROFS mounts need Linux 5.19 or later."
            )
        case errno.EPERM | errno.EACCES | errno.ENOSYS:
            return Unsupported(
                message, code="kernel_refused", hint="Run cloudyard doctor: it tries each part by itself."
            )
        case _:
            return SandboxUnavailable(message, code="start_failed")
