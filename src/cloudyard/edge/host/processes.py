"""Starting, watching and ending processes, each by a pidfd, so that a number given to another process is
never meant by mistake.

Knows processes only. Needs no child watcher of an event loop: one epoll descriptor holds every pidfd, and one
task waits on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence

import anyio
from anyio import Event, wait_readable

REAP_TRIES = 256  # ends of other processes that a zombie is kept through; then its parent is not ours to mend
FD_FLOOR = 256  # descriptors are lifted to here and up while a child's own are put in their places
_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


def spawn(argv: list[str], fds: Mapping[int, int]) -> int:
    """Start a program with an empty environment, default signals and no descriptors but the given ones. Gives
    its pid.

    Descriptors of this process are all close-on-exec, as Python makes them. Blocks for one vfork and exec.

    Args:
        argv: the program's path and its arguments.
        fds: for each descriptor number in the child, the one here. 0, 1 and 2 are /dev/null where left out.

    Raises:
        OSError: it cannot be started.
    """
    lifted: list[int] = []
    actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = []
    try:
        for target, source in fds.items():
            lifted.append(fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, FD_FLOOR))
            actions.append((os.POSIX_SPAWN_DUP2, lifted[-1], target))
        actions += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2) if fd not in fds]
        return os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsigmask=[], setsigdef=_SIGNALS)
    finally:
        for fd in lifted:
            os.close(fd)


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (/proc/PID/stat, field 22); None when there is none
    or it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class Process:
    """A process that is watched: ours, or one that was adopted."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.ended = Event()
        self._pidfd = pidfd

    def has_ended(self) -> bool:
        """Whether it has ended by now, also where its watcher has not yet come to see it."""
        if self._pidfd < 0 or self.ended.is_set():
            return True
        now = select.poll()
        now.register(self._pidfd, select.POLLIN)
        return bool(now.poll(0))

    def kill(self) -> None:
        """SIGKILL, if it is still there."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _reaped(self) -> bool:
        """Whether it is no zombie any more, after trying to see to that."""
        try:
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # it is not our child: its parent reaps it, or leaves it to us
            try:
                signal.pidfd_send_signal(self._pidfd, 0)
            except ProcessLookupError:
                return True
            return False
        return True

    def _let_go(self) -> None:
        os.close(self._pidfd)
        self._pidfd = -1


class Watcher:
    """Tells when processes end, and reaps those that are children of this one. Its `run` belongs in a task
    group."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._processes: dict[int, Process] = {}
        self._zombies: dict[Process, int] = {}

    def watch(self, pid: int) -> Process:
        """Watch a process.

        Raises:
            ProcessLookupError: there is none.
        """
        pidfd = os.pidfd_open(pid)
        process = Process(pid, pidfd)
        self._processes[pidfd] = process
        self._epoll.register(pidfd, select.EPOLLIN)
        return process

    def forget(self, process: Process) -> None:
        """Watch it no longer; it lives on."""
        if self._processes.pop(process._pidfd, None) is not None:
            process._let_go()  # which takes it out of the epoll set, too

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await wait_readable(self._epoll.fileno())
            self.collect()

    def collect(self) -> None:
        """See which have ended by now."""
        for pidfd, _ in self._epoll.poll(0):
            self._epoll.unregister(pidfd)
            process = self._processes.pop(pidfd)
            process.ended.set()
            self._zombies[process] = 0
        # A process may end just before its parent does, and becomes our child only then.
        for process, tries in list(self._zombies.items()):
            if process._reaped() or tries >= REAP_TRIES:
                del self._zombies[process]
                process._let_go()
            else:
                self._zombies[process] = tries + 1

    def close(self) -> None:
        """Let go of all; the processes live on."""
        for process in list(self._processes.values()):
            self.forget(process)
        for process in self._zombies:
            process._let_go()
        self._zombies.clear()
        self._epoll.close()


async def kill_all(pids: Sequence[int], watcher: Watcher, *, then: Callable[[], None]) -> None:
    """SIGKILL processes, call `then`, and return once they have ended."""
    found: list[Process] = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            process = watcher.watch(pid)
            process.kill()
            found.append(process)
    then()
    for process in found:
        await process.ended.wait()


async def ended_within(process: Process, seconds: float) -> bool:
    """Whether it ended, after waiting at most so long."""
    with anyio.move_on_after(seconds):
        await process.ended.wait()
    return process.ended.is_set()
