"""LXCFS: a daemon that shows files of /proc with the limits and counters of whoever reads them.

One for a yard, started when a sandbox first asks for it. It outlives the edge, for a sandbox whose daemon has
gone can read none of those files any more; the next edge finds it by its arguments. It mounts in a mount
namespace of its own, so the host's table does not grow, and the template shows that mount to sandboxes.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio
from anyio import CancelScope, Lock, to_thread

from cloudyard.edge.host import cgroups, syscalls
from cloudyard.edge.host.cgroups import Group
from cloudyard.edge.host.processes import Process, Watcher, ended_within, spawn
from cloudyard.edge.host.template import Template
from cloudyard.errors import SandboxUnavailable, Unsupported

FUSE = Path("/dev/fuse")
PLACE = "/lxcfs"  # in the template
FILES = ("cpuinfo", "loadavg", "meminfo", "stat", "swaps", "uptime")  # of /proc that are shown
READY_WAIT_S = 5.0  # from its start to its mount
END_WAIT_S = 5.0  # from SIGKILL to its end
POLL_S = 0.01
SAID_BYTES_MAX = 1000  # of its log, in an error


class Lxcfs:
    """The daemon of one yard.

    Args:
        program: its path; None where this machine has none.
        directory: where it mounts and keeps its log; its name is the yard's alone.
        group: for it alone: in the edge's own it would end where a service manager ends the edge's.
        watcher: sees its end; it must run.
    """

    def __init__(self, program: Path | None, directory: Path, group: Group, watcher: Watcher) -> None:
        self._program = program
        self._directory = directory
        self._group = group
        self._watcher = watcher
        self._process: Process | None = None
        self._turn = Lock()

    async def show(self, template: Template) -> int:
        """Have its files in the template, at PLACE. Starts it where it does not run. Gives its pid.

        Raises:
            Unsupported: this machine has none.
            SandboxUnavailable: it did not start.
        """
        async with self._turn:
            if self._process is not None and not self._process.has_ended():
                return self._process.pid
            process = self._found()
            if process is None:
                try:
                    process = self._start()
                except OSError as exc:
                    raise cgroups.refused(exc, "Starting lxcfs") from exc
            await self._mounted(process)
            mounted = await to_thread.run_sync(self._clone, process.pid)
            try:
                await template.show(mounted, PLACE)
            finally:
                os.close(mounted)
            self._process = process
            return process.pid

    async def end(self) -> bool:
        """End it, and everything that reads its files reads no more. Gives whether it ran."""
        async with self._turn:
            process = self._process or self._found()
            self._process = None
            if process is None:
                self._group.remove()  # it may have ended by itself
                return False
            await self._take_down(process)
            return True

    async def _take_down(self, process: Process) -> None:
        process.kill()
        await ended_within(process, END_WAIT_S)
        await to_thread.run_sync(cgroups.remove, self._group)

    @property
    def _mount(self) -> Path:
        return self._directory / "mount"

    @property
    def _arguments(self) -> list[str]:
        return [
            *("--foreground", "--pidfile", str(self._directory / "pid")),
            *("--enable-loadavg", "--enable-cfs", str(self._mount)),
        ]

    def _found(self) -> Process | None:
        """The one that an earlier edge started."""
        wanted = b"".join(os.fsencode(part) + b"\0" for part in self._arguments)
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and Path(f"/proc/{entry}/cmdline").read_bytes().endswith(wanted):
                    return self._watcher.watch(int(entry))
            except OSError:
                continue  # it ended while we looked
        return None

    def _start(self) -> Process:
        program = self._program
        if program is None:
            raise Unsupported(
                "A sandbox with lxcfs cannot be made here: the program lxcfs is missing.",
                code="no_lxcfs",
                hint="scripts/setup fetches Debian's; or install the package lxcfs.",
            )
        if not FUSE.exists():
            raise Unsupported(
                f"A sandbox with lxcfs cannot be made here: there is no {FUSE}.",
                code="no_lxcfs",
                hint="modprobe fuse",
            )
        self._group.remove()  # of one that has ended
        self._group.make()
        self._mount.mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = [
            # In a session of its own: a Ctrl-C for the edge is none for its sandboxes.
            *("/usr/bin/setsid", "/usr/bin/unshare", "--mount", "--propagation", "private"),
            *(
                "/usr/bin/env",
                "-i",
                f"LD_LIBRARY_PATH={program.parent}",
                str(program),
            ),  # its library is there
            *self._arguments,
        ]
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            pid = spawn(argv, {1: log, 2: log})
        finally:
            os.close(log)
        for entry in self._group.entries():
            os.write(entry, str(pid).encode())
            os.close(entry)
        return self._watcher.watch(pid)

    @property
    def _log(self) -> Path:
        return self._directory / "log"

    async def _mounted(self, process: Process) -> None:
        """Return when it has mounted its files."""
        with anyio.move_on_after(READY_WAIT_S):
            while not process.has_ended():
                if f" {self._mount} " in _text(Path(f"/proc/{process.pid}/mountinfo")):
                    return
                await anyio.sleep(POLL_S)
        with CancelScope(shield=True):
            await self._take_down(process)
        said = _text(self._log)[-SAID_BYTES_MAX:].strip() or "it said nothing"
        raise SandboxUnavailable(
            f"Starting lxcfs failed: {said}.", code="lxcfs_failed", hint="The edge's log may say more."
        )

    def _clone(self, pid: int) -> int:
        """A copy of its mount that is attached nowhere. Blocks: for a thread."""
        namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

        def clone() -> int:
            syscalls.enter_mount_namespace(namespace)
            return syscalls.clone_mount(str(self._mount))

        try:
            return syscalls.on_own_thread(clone)
        finally:
            os.close(namespace)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
