"""What bears a slot's number on this machine: a cgroup, a directory, a socket. Made and removed here, and
nowhere else.

A site outlives the process that made it; the next edge finds it by the number alone.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread

from cloudyard.edge.backends.base import DiskUse
from cloudyard.edge.backends.container.options import ContainerOptions
from cloudyard.edge.host import cgroups
from cloudyard.edge.host.cgroups import Group, Limits
from cloudyard.edge.host.disks import Disks
from cloudyard.edge.host.processes import Watcher, kill_all
from cloudyard.edge.host.slots import uid_base
from cloudyard.errors import CloudyardError, LimitExceeded, SandboxUnavailable

EMPTY_WAIT_S = 15.0  # from SIGKILL to the end of the last process
LISTEN_BACKLOG = 16
RAISING_WEIGHT = 5000  # of the processor: somebody waits for it, and it takes a few ms
SOCKET_PATH_MAX = 107  # bytes, the kernel's


class Site:
    """A slot's place on the machine."""

    def __init__(self, slot: int, options: ContainerOptions, group: Group, disks: Disks) -> None:
        self.slot = slot
        self.base = uid_base(slot) if options.defences.own_ids else 0
        self.group = group
        self.socket_path = options.guests / f"{slot}.sock"
        self._disks = disks
        self._disk = str(slot)

    def make(self, limits: Limits, *, disk_bytes: int) -> socket.socket:
        """Make all of it. Gives the socket that the guest is to listen on.

        Raises:
            OSError: what failed; `remove` takes down what was made.
        """
        self.group.make()
        self.group.limit(limits)
        self.group.set_weight(RAISING_WEIGHT)
        directory = self._disks.make(self._disk, disk_bytes)
        for name in ("upper", "work"):
            path = directory / name
            path.mkdir()
            os.chmod(path, 0o755)  # whatever our umask: every user of the sandbox goes through `upper`, its /
            os.chown(path, self.base, self.base)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self.socket_path))
            listener.listen(LISTEN_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    def limit_disk(self, most_bytes: int) -> None:
        """Bound what its sandbox may write. Raises OSError."""
        self._disks.limit(self._disk, most_bytes)

    def disk(self) -> DiskUse:
        """How full its disk is. Raises OSError."""
        return self._disks.use(self._disk)

    def connect(self) -> socket.socket:
        """A new non-blocking connection to the guest.

        Raises:
            SandboxUnavailable: nobody listens.
        """
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.setblocking(False)
        try:
            link.connect(str(self.socket_path))
        except OSError as exc:
            link.close()
            raise SandboxUnavailable(
                f"Connecting to the guest at {self.socket_path} failed: {exc.strerror}.", code="guest_gone"
            ) from exc
        return link

    async def remove(self, watcher: Watcher, threads: CapacityLimiter) -> Path | None:
        """Kill what runs in it and take everything down. Finishes when cancelled, and is bounded.

        Returns:
            What is still to be discarded of the disk, where that takes long.

        Raises:
            CloudyardError: a process does not die, or the kernel keeps something; the site is still there.
        """
        with CancelScope(shield=True):
            await self.end_processes(watcher)
            try:
                left = await to_thread.run_sync(self._take_down, limiter=threads)
            except OSError as exc:
                raise CloudyardError(
                    f"Taking down slot {self.slot} failed at {exc.filename}: {exc.strerror}.",
                    code="not_removed",
                    retry_safe=True,
                ) from exc
        return left

    async def end_processes(self, watcher: Watcher, *, but: int = 0) -> None:
        """Kill what runs in it, frozen or not, and return when it has ended.

        Args:
            watcher: sees the ends of processes; it must run.
            but: the one process that is to live; 0 for none.

        Raises:
            CloudyardError: a process has not ended after EMPTY_WAIT_S.
        """
        with anyio.move_on_after(EMPTY_WAIT_S):
            while pids := [pid for pid in self.group.pids() if pid != but]:
                try:
                    if but:  # the kernel ends the others with PID 1 alone; else none may fork meanwhile
                        self.group.set_frozen(True)
                        pids = [pid for pid in self.group.pids() if pid != but]
                finally:
                    await kill_all(pids, watcher, then=lambda: self.group.set_frozen(False))
            return
        raise CloudyardError(
            f"Ending the processes {self.group.pids()} of slot {self.slot} failed: they are still there "
            f"{EMPTY_WAIT_S:g} s after SIGKILL.",
            code="not_killed",
            hint="They may wait for a disk or a network file system; try again later.",
            retry_safe=True,
        )

    def _take_down(self) -> Path | None:
        cgroups.remove(self.group)
        self.socket_path.unlink(missing_ok=True)
        return self._disks.remove(self._disk)


def refused(exc: OSError, slot: int) -> CloudyardError:
    """Our error for the kernel's refusal to make a site."""
    message = f"Preparing slot {slot} failed at {exc.filename or 'an unnamed object'}: {exc.strerror}."
    match exc.errno:
        case errno.ENOSPC | errno.EDQUOT if "cgroup" not in str(exc.filename):
            return LimitExceeded(
                message, code="disk_full", fault="infra", hint="Free space where the yard keeps its state."
            )
        case errno.EMFILE | errno.ENFILE:
            return LimitExceeded(
                message, code="too_many_descriptors", fault="infra", hint="Raise the edge's limit: ulimit -n."
            )
        case errno.EAGAIN | errno.ENOMEM:
            return LimitExceeded(
                message,
                code="too_many_processes",
                fault="infra",
                hint="Raise kernel.pid_max, or stop sandboxes.",
            )
        case _:
            return cgroups.refused(exc, f"Preparing slot {slot}")
