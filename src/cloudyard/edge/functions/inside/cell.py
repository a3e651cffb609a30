"""A cell: PID 1 of its namespaces, as root of the sandbox, and its child, which becomes the call."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudyard.edge.functions.inside.base import (
        CAP_KILL,
        CLONE_NEWIPC,
        CLONE_NEWNS,
        MS_NODEV,
        MS_NOEXEC,
        MS_NOSUID,
        MS_RDONLY,
        MS_REMOUNT,
        PR_SET_DUMPABLE,
        PR_SET_PDEATHSIG,
        READ_BYTES,
        SIZE,
        SYS_CLOSE_RANGE,
        WORK,
        Failed,
        Fields,
        check,
        keep_capabilities,
        libc,
        mount,
        parse,
        read_body,
        write_all,
        write_frame,
    )
    from cloudyard.edge.functions.inside.program import Program
    from cloudyard.edge.functions.inside.walls import Walls

SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")
END_WAIT_S = 2.0  # from SIGKILL to the end of the last process of a call
TICK_S = 0.1  # how often orphans are reaped while a call runs
PROCESSES_MAX = 128  # and threads of one call
FILES_MAX = 1024  # open files of one process
FD_WHY, FD_ORDERS = 3, 4  # in the call's process, until it begins
CPUCLOCK_SCHED = 2  # in the number of a process's own clock
KEEP_MAX_BYTES = 16 * 1024 * 1024  # of a compiled program


def be_cell(waiting: int, uid: int, walls: Walls) -> Program:
    """Set up the cell and the process that becomes the call, wait for the turn, run it. Returns in the call
    itself only."""
    problem = ""
    call: Call | Program | None = None
    try:
        score = isolate(walls)
        call = fork_call(uid, score, walls)
    except (Failed, OSError) as exc:
        problem = str(exc)
    if isinstance(call, Program):
        return call
    if not os.read(waiting, 1):
        os._exit(0)
    os.close(waiting)
    try:
        orders, fields = read_body(0), parse(read_body(0))
        if call is None:
            raise Failed(problem)
        call.run(orders, fields)
    except BaseException as exc:  # noqa: BLE001 (the edge is told, and this process ends)
        write_frame(kind="done", failed=f"{type(exc).__name__}: {exc}")
        os._exit(1)
    os._exit(0)


def isolate(walls: Walls) -> int:
    """Take on the cell's namespaces and mounts. Gives a descriptor of this process's oom_score_adj."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    check(libc.unshare(CLONE_NEWNS | CLONE_NEWIPC), "make a mount namespace")
    score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    for path in SCRATCH:
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    # A call sees no process but its own, and cannot save itself from the out-of-memory killer.
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY
    walls.hide(lambda: mount("proc", "/proc", "proc", flags, "hidepid=2"))
    return score


def fork_call(uid: int, score: int, walls: Walls) -> Call | Program:
    """Fork the process that becomes the call. In it, this returns the program once there is one."""
    pipes = [os.pipe() for _ in range(5)]  # stdin, stdout, stderr, why it did not start, orders
    theirs = (pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][1], pipes[4][0])
    for reading, _ in pipes[:3]:
        os.fchown(reading, uid, uid)  # else it may not open /dev/stdin and its like
    os.pwrite(score, b"1000", 0)
    pid = os.fork()
    if pid == 0:
        return await_call(uid, theirs, walls)
    os.pwrite(score, b"500", 0)
    os.close(score)
    for fd in theirs:
        os.close(fd)
    return Call(pid, pipes[0][1], pipes[1][0], pipes[2][0], why=pipes[3][0], orders=pipes[4][1])


class Call:
    """The call's process, before it has been told what it is to be."""

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int, *, why: int, orders: int) -> None:
        self.pid = pid
        self.streams = (stdin, stdout, stderr)
        self.why = why
        self.orders = orders

    def run(self, orders: bytes, fields: Fields) -> None:
        """Have it run, and write the answer.

        Args:
            orders: what it is to run, for itself to read.
            fields: its limits and its stdin.
        """
        for path in SCRATCH:
            if os.path.isdir(path):
                options = f"mode=1777,size={int(fields[b'scratch'][0])}"
                mount("tmpfs", path, "", MS_REMOUNT | MS_NOSUID | MS_NODEV, options)
        keep_capabilities(1 << CAP_KILL)
        begin, used_s = time.monotonic(), time.clock_gettime(~self.pid << 3 | CPUCLOCK_SCHED)
        write_all(self.orders, SIZE.pack(len(orders)) + orders)
        os.close(self.orders)
        why = b""
        while more := os.read(self.why, READ_BYTES):
            why += more
        watch = Watch(self.pid, *self.streams, limit=int(fields[b"limit"][0]))
        watch.run(fields.get(b"stdin", [b""])[0], begin=begin, timeout_s=int(fields[b"timeout_us"][0]) / 1e6)
        answer = watch.answer(but_s=used_s)
        if why:
            answer["refused"] = why
        if b"keep" in fields:
            answer["kept"] = kept_file(fields[b"keep"][0])
        write_frame(kind="done", **answer)


def kept_file(path: bytes) -> bytes:
    """A regular file that the call has left, empty where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with open(fd, "rb") as file:
        return file.read(KEEP_MAX_BYTES)


class Watch:
    """The call's process, seen from PID 1: feeds it, keeps what it says, ends it and all it has started."""

    def __init__(self, child: int, stdin: int, stdout: int, stderr: int, *, limit: int) -> None:
        self.child = child
        self.stdin = stdin
        self.kept = {stdout: bytearray(), stderr: bytearray()}
        self.total = {stdout: 0, stderr: 0}
        self.limit = limit
        self.status: int | None = None
        self.timed_out = False
        self.duration_s = 0.0
        for fd in (stdin, stdout, stderr):
            os.set_blocking(fd, False)

    def run(self, stdin: bytes, *, begin: float, timeout_s: float) -> None:
        """Return when the call's first process has ended, or was killed, and everything else with it."""
        poll = select.poll()
        poll.register(os.pidfd_open(self.child), select.POLLIN)
        for fd in self.kept:
            poll.register(fd, select.POLLIN)
        poll.register(self.stdin, select.POLLOUT)
        rest = memoryview(stdin)
        while self.status is None:
            left_s = begin + timeout_s - time.monotonic()
            if left_s <= 0:
                self.timed_out = True
                break
            for fd, _ in poll.poll(min(left_s, TICK_S) * 1000 + 1):
                if fd == self.stdin:
                    rest = self.feed(rest)
                    if not rest:
                        poll.unregister(fd)
                        os.close(fd)
                elif fd in self.kept and not self.drain(fd):
                    poll.unregister(fd)
            self.reap()
        self.duration_s = time.monotonic() - begin
        self.end()
        for fd in self.kept:
            while self.drain(fd, once=False):
                pass

    def feed(self, rest: memoryview) -> memoryview:
        """Give the call what it takes; gives what is left."""
        try:
            return rest[os.write(self.stdin, rest[:READ_BYTES]) :] if rest else rest
        except BlockingIOError:
            return rest
        except OSError:
            return rest[:0]  # it does not read

    def drain(self, fd: int, *, once: bool = True) -> bool:
        """Take some of what it says. False: there is no more, or if not `once`, none at the moment."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return once
        self.total[fd] += len(data)
        self.kept[fd] += data[: max(0, self.limit - len(self.kept[fd]))]
        return bool(data)

    def reap(self, flags: int = os.WNOHANG) -> bool:
        """Take in those who have ended. False: there is nobody left."""
        try:
            while True:
                pid, status = os.waitpid(-1, flags)
                if pid == 0:
                    return True
                if pid == self.child:
                    self.status = status
        except ChildProcessError:
            return False

    def end(self) -> None:
        """Kill all there is in this pid namespace but ourselves, and wait for it."""
        deadline = time.monotonic() + END_WAIT_S
        try:  # noqa: SIM105 (contextlib is not imported)
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        while self.reap() and time.monotonic() < deadline:
            time.sleep(0.001)

    def answer(self, *, but_s: float) -> dict[str, bytes | int | str]:
        """What the edge is told. `but_s`: processor time that is ours and not the call's."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = os.waitstatus_to_exitcode(self.status) if self.status is not None else -signal.SIGKILL
        (stdout, out), (stderr, err) = self.kept.items()
        return {
            "exit": code,  # below zero: the signal
            "stdout": bytes(out),
            "stderr": bytes(err),
            "stdout_total": self.total[stdout],
            "stderr_total": self.total[stderr],
            "timed_out": int(self.timed_out),
            "duration_us": int(self.duration_s * 1e6),
            "cpu_us": int(max(0.0, used.ru_utime + used.ru_stime - but_s) * 1e6),
            "peak": used.ru_maxrss * 1024,
        }


# --- the call, as a user of its own ---------------------------------------------------------------------


def await_call(uid: int, fds: tuple[int, ...], walls: Walls) -> Program:
    """Become the call, as soon as there are orders. Returns a program in Python; all else is run here."""
    try:
        become(uid, fds)
        walls.close()
        warm_up()
        return start_call(parse(read_body(FD_ORDERS)))
    except BaseException as exc:  # noqa: BLE001 (the cell is told, and this process ends)
        os.write(FD_WHY, f"{exc}".encode("utf-8", "replace")[:4096])
    os._exit(127)


def warm_up() -> None:
    """Write to the pages that every program writes to, while nobody waits: the first write copies a page."""
    exec(compile("class _:\n def _(self): return [*map(str, {})]\n", WORK, "exec"), {})
    gc.collect()


def start_call(fields: Fields) -> Program:
    """Lay out the call's files and begin with it."""
    for entry in fields.get(b"file", []):
        lay(entry)
    env = dict(entry.decode("utf-8", "surrogateescape").split("=", 1) for entry in fields.get(b"env", []))
    os.environ.clear()
    os.environ.update(env)
    args = [arg.decode("utf-8", "surrogateescape") for arg in fields.get(b"arg", [])]
    if fields[b"how"][0] == b"here":
        program = Program(args)
        os.close(FD_ORDERS)
        os.close(FD_WHY)
        return program
    for signals in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signals, signal.SIG_DFL)  # Python ignores them, and an exec keeps that
    os.execve(sys.executable if args[0] == "python3" else find(args[0]), args, os.environ)


def find(name: str) -> str:
    """Where a program is."""
    if "/" in name:
        return name
    for place in os.get_exec_path():
        if os.access(f"{place}/{name}", os.X_OK):
            return f"{place}/{name}"
    raise Failed(f"there is no {name}")


def become(uid: int, fds: tuple[int, ...]) -> None:
    """Take on the call's streams, session, limits and user, and keep nothing else."""
    os.setsid()
    for number, fd in enumerate([os.dup(fd) for fd in fds]):  # so that no number is taken before its turn
        os.dup2(fd, number, inheritable=number < FD_WHY)
    if libc.syscall(
        ctypes.c_long(SYS_CLOSE_RANGE), ctypes.c_uint(FD_ORDERS + 1), ctypes.c_uint(2**32 - 1), 0
    ):
        os.closerange(FD_ORDERS + 1, FILES_MAX * 4)
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, PROCESSES_MAX),
        (resource.RLIMIT_NOFILE, FILES_MAX),
    ):
        resource.setrlimit(limit, (value, value))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    keep_capabilities(0)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own /proc/self is not its own
    os.umask(0o022)
    os.chdir(WORK)


def lay(entry: bytes) -> None:
    """Write one of the call's files: mode, path and content."""
    mode, path, content = entry.split(b"\0", 2)
    if folder := os.path.dirname(path):
        os.makedirs(folder, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, int(mode, 8))
    with open(fd, "wb") as file:
        file.write(content)
