"""The host: the program of ours in a worker's sandbox, which makes a cell for each call.

The edge never imports it. It reads the text and hands it to the image's own Python (3.9 or later), on stdin,
so that nothing of it is on any disk; it may import nothing but the standard library, and as little as it can.

The host forks *cells* and never sees a call. A cell is a process, PID 1 of new pid, mount and ipc namespaces.
It waits for its turn, reads one call from the worker's stdin, runs it in a child of its own as a uid that no
other call of this worker has, and writes the answer to the worker's stdout. The host then reaps it, with
which every process of the call is gone, gives the turn to the next cell, made by then, and makes another.

Frames, both ways: a size (u32), then fields, each a name's and a value's size (u32), the name and the value.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import os
import resource
import select
import signal
import struct
import sys
import time

TYPE_CHECKING = False  # typing is not imported: calls find in sys.modules what the host needs, and no more
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

SIZE = struct.Struct("<I")
FIELD = struct.Struct("<II")
READ_BYTES = 64 * 1024
WORK = "/tmp"
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")
FIRST_UID, LAST_UID = 10_000, 60_000
TRY_PAUSE_S = 0.05  # between two tries to make a cell
TRIES = 100
END_WAIT_S = 2.0  # from SIGKILL to the end of the last process of a call
TICK_S = 0.1  # how often orphans are reaped while a call runs
PROCESSES_MAX = 128  # and threads of one call
FILES_MAX = 1024  # open files of one process
KEEP_MAX_BYTES = 16 * 1024 * 1024  # of a compiled program

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
SYS_MOUNT_SETATTR, SYS_CLOSE_RANGE = 442, 436  # the same on every architecture
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
KEYCTL_JOIN_SESSION_KEYRING = 1
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1
CAP_VERSION_3 = 0x20080522
CAP_KILL = 5
CAPS_MAX = 64

libc = ctypes.CDLL(None, use_errno=True)
Fields = dict[bytes, list[bytes]]


class Failed(Exception):
    """A step of ours did not work; its one argument says which, and why."""


# --- frames ---------------------------------------------------------------------------------------------


def read_frame() -> Fields:
    """The next frame on the worker's stdin. Ends the process where there is none."""
    (size,) = SIZE.unpack(_read(SIZE.size))
    body = _read(size)
    fields: Fields = {}
    at = 0
    while at < size:
        name_size, value_size = FIELD.unpack_from(body, at)
        at += FIELD.size
        name = bytes(body[at : at + name_size])
        at += name_size
        fields.setdefault(name, []).append(bytes(body[at : at + value_size]))
        at += value_size
    return fields


def write_frame(**fields: bytes | int | str) -> None:
    """Write one frame to the worker's stdout."""
    parts = []
    for name, value in fields.items():
        raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
        parts.append(FIELD.pack(len(name), len(raw)) + name.encode() + raw)
    body = b"".join(parts)
    data = memoryview(SIZE.pack(len(body)) + body)
    while data:
        data = data[os.write(1, data) :]


def _read(size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = os.readv(0, [view[at:]])
        if not got:
            os._exit(0)  # the edge is gone
        at += got
    return data


# --- the kernel -----------------------------------------------------------------------------------------


def _check(result: int, what: str) -> None:
    if result < 0:
        raise Failed(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """mount(2)."""
    result = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {kind or 'again'} at {target}")


def set_read_only(path: str, *, deep: bool, on: bool) -> None:
    """Forbid writes to a mount, and to those below it if `deep`; or allow them again."""
    attributes = struct.pack("<QQQQ", MOUNT_ATTR_RDONLY if on else 0, 0 if on else MOUNT_ATTR_RDONLY, 0, 0)
    result = libc.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR),
        ctypes.c_int(AT_FDCWD),
        path.encode(),
        ctypes.c_uint(AT_RECURSIVE if deep else 0),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    _check(result, f"change the mount at {path}")


def keep_capabilities(mask: int) -> None:
    """Give up every capability but those of the mask."""
    header = struct.pack("<Ii", CAP_VERSION_3, 0)
    sets = struct.pack("<IIIIII", mask, mask, 0, 0, 0, 0)
    _check(libc.capset(header, sets), "give up capabilities")


# --- the host -------------------------------------------------------------------------------------------


class Cell:
    """One cell, as the host holds it."""

    def __init__(self, pid: int, go: int) -> None:
        self.pid = pid
        self.go = go

    def start(self) -> bool:
        """Give it the turn. False: it has died."""
        try:
            os.write(self.go, b"1")
        except BrokenPipeError:
            os.waitpid(self.pid, 0)
            return False
        finally:
            os.close(self.go)
        return True


def prepare(preload: list[bytes]) -> None:
    """Import what calls will find imported, and shut off what they must not reach."""
    sys.dont_write_bytecode = True
    if sys.path[:1] == [""]:
        del sys.path[0]
    for module in preload:
        try:
            __import__(module.decode())
        except BaseException as exc:  # noqa: BLE001 (a module may raise anything)
            write_frame(kind="refused", reason="preload", text=f"import {module.decode()}: {exc!r}")
            os._exit(1)
    sys.dont_write_bytecode = False
    try:
        _check(libc.unshare(CLONE_NEWNS), "make a mount namespace")
        mount("none", "/", "", MS_REC | MS_PRIVATE, "")
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")  # in a user namespace of its own a call could mount, and would be its own root
        set_read_only("/", deep=True, on=True)
        set_read_only("/proc", deep=False, on=False)  # a cell writes its oom_score_adj there
        for capability in range(CAPS_MAX):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    except (Failed, OSError) as exc:
        write_frame(kind="refused", reason="kernel", text=str(exc))
        os._exit(1)
    gc.collect()
    gc.freeze()  # else each cell copies the pages of all that was imported at its first collection


def serve() -> Program:
    """Make cells until the worker ends. Returns in a cell only, with the program that it is to run."""
    fields = read_frame()
    prepare(fields.get(b"preload", []))
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    uids = iter(range(FIRST_UID, LAST_UID))
    with open("/proc/self/statm") as file:
        rss = int(file.read().split()[1]) * resource.getpagesize()
    write_frame(kind="hello", version=sys.version.split()[0], rss=rss)
    made: Cell | Program | None = None
    status = 0
    while True:
        current = made or make_first_cell(own, uids)
        if isinstance(current, Program):
            return current
        write_frame(kind="ready", status=status, left=left_behind())
        if current.start():
            try:
                made = make_cell(own, next(uids))
            except (Failed, OSError):
                made = None  # a call may use up all there is: again when it is over
            if isinstance(made, Program):
                return made
        else:
            made = None
        _, status = os.waitpid(current.pid, 0)


def left_behind() -> str:
    """What is left of calls although all their processes are gone; empty where nothing is."""
    with open("/proc/net/sockstat") as file:
        for line in file:
            words = line.split()
            if words[0] == "TCP:":
                counts = dict(zip(words[1::2], words[2::2]))  # noqa: B905 (Python 3.9)
                if counts.get("inuse", "0") != "0" or counts.get("tw", "0") != "0":
                    return "connections"  # a later call would see them, and not get their ports
    return ""


def make_first_cell(own: int, uids: Iterator[int]) -> Cell | Program:
    """A cell, when no call runs. What a call used up may take a moment to come back."""
    problem = ""
    for _ in range(TRIES):
        try:
            return make_cell(own, next(uids))
        except (Failed, OSError) as exc:
            problem = str(exc)
            time.sleep(TRY_PAUSE_S)
    write_frame(kind="refused", reason="kernel", text=f"make a cell: {problem}")
    os._exit(1)


def make_cell(own: int, uid: int) -> Cell | Program:
    """Fork a cell. In the cell this returns the program that it is to run, if that is one in Python.

    Args:
        own: the host's own pid namespace.
        uid: whom the cell runs its call as.
    """
    waiting, go = os.pipe()
    pid = -1
    try:
        _check(libc.unshare(CLONE_NEWPID), "make a pid namespace")
        try:
            pid = os.fork()
        finally:
            if pid != 0:  # else the next unshare is refused
                _check(libc.setns(own, CLONE_NEWPID), "return to the pid namespace")
    finally:
        if pid != 0:
            os.close(waiting)
        if pid <= 0:
            os.close(go)
    return Cell(pid, go) if pid else be_cell(waiting, uid)


# --- a cell, as root of the sandbox and PID 1 of its namespace ------------------------------------------


def be_cell(waiting: int, uid: int) -> Program:
    """Set up the cell, wait for the turn, run the call. Returns in the call itself only."""
    problem = ""
    score = -1
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _check(libc.unshare(CLONE_NEWNS | CLONE_NEWIPC), "make a mount namespace")
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        for path in SCRATCH:
            if os.path.isdir(path):
                mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        # A call sees no process but its own, and cannot save itself from the out-of-memory killer.
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, "hidepid=2")
    except (Failed, OSError) as exc:
        problem = str(exc)
    if not os.read(waiting, 1):
        os._exit(0)
    os.close(waiting)
    try:
        fields = read_frame()
        if problem:
            raise Failed(problem)
        program = run_call(fields, uid, score)
    except BaseException as exc:  # noqa: BLE001 (the edge is told, and this process ends)
        write_frame(kind="done", failed=f"{type(exc).__name__}: {exc}")
        os._exit(1)
    if program is None:
        os._exit(0)
    return program


def run_call(fields: Fields, uid: int, score: int) -> Program | None:
    """Run the call and write the answer. Returns the program in the call itself."""
    for path in SCRATCH:
        if os.path.isdir(path):
            options = f"mode=1777,size={int(fields[b'scratch'][0])}"
            mount("tmpfs", path, "", MS_REMOUNT | MS_NOSUID | MS_NODEV, options)
    pipes = [os.pipe() for _ in range(4)]  # stdin, stdout, stderr, and why the call did not start
    os.pwrite(score, b"1000", 0)
    child = os.fork()
    if child == 0:
        theirs = (pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][1])
        return start_call(fields, uid, theirs)
    os.pwrite(score, b"500", 0)
    for fd in (pipes[0][0], pipes[1][1], pipes[2][1], pipes[3][1]):
        os.close(fd)
    keep_capabilities(1 << CAP_KILL)
    why = b""
    while more := os.read(pipes[3][0], READ_BYTES):
        why += more
    os.close(pipes[3][0])
    watch = Watch(child, pipes[0][1], pipes[1][0], pipes[2][0], limit=int(fields[b"limit"][0]))
    watch.run(fields.get(b"stdin", [b""])[0], timeout_s=int(fields[b"timeout_us"][0]) / 1e6)
    answer = watch.answer()
    if why:
        answer["refused"] = why
    if b"keep" in fields:
        answer["kept"] = kept_file(fields[b"keep"][0])
    write_frame(kind="done", **answer)
    return None


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

    def run(self, stdin: bytes, *, timeout_s: float) -> None:
        """Return when the call's first process has ended, or was killed, and everything else with it."""
        begin = time.monotonic()
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

    def answer(self) -> dict[str, bytes | int | str]:
        """What the edge is told."""
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
            "cpu_us": int((used.ru_utime + used.ru_stime) * 1e6),
            "peak": used.ru_maxrss * 1024,
        }


# --- the call, as a user of its own ---------------------------------------------------------------------


def start_call(fields: Fields, uid: int, fds: tuple[int, int, int, int]) -> Program:
    """Become the call. Returns a program in Python; anything else is run here."""
    try:
        become(uid, fds)
        for entry in fields.get(b"file", []):
            lay(entry)
        env = dict(entry.decode("utf-8", "surrogateescape").split("=", 1) for entry in fields.get(b"env", []))
        os.environ.clear()
        os.environ.update(env)
        args = [arg.decode("utf-8", "surrogateescape") for arg in fields.get(b"arg", [])]
        if fields[b"how"][0] == b"here":
            program = Program(args)
            os.close(3)
            return program
        for signals in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signals, signal.SIG_DFL)  # Python ignores them, and an exec keeps that
        program_path = sys.executable if args[0] == "python3" else find(args[0])
        os.execve(program_path, args, os.environ)
    except BaseException as exc:  # noqa: BLE001 (the cell is told, and this process ends)
        os.write(3, f"{exc}".encode("utf-8", "replace")[:4096])
    os._exit(127)


def find(name: str) -> str:
    """Where a program is."""
    if "/" in name:
        return name
    for place in os.get_exec_path():
        if os.access(f"{place}/{name}", os.X_OK):
            return f"{place}/{name}"
    raise Failed(f"there is no {name}")


def become(uid: int, fds: tuple[int, int, int, int]) -> None:
    """Take on the call's streams, session, limits and user, and keep nothing else."""
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number, inheritable=number < 3)
    if libc.syscall(ctypes.c_long(SYS_CLOSE_RANGE), ctypes.c_uint(4), ctypes.c_uint(2**32 - 1), 0):
        os.closerange(4, FILES_MAX * 4)
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, PROCESSES_MAX),
        (resource.RLIMIT_NOFILE, FILES_MAX),
    ):
        resource.setrlimit(limit, (value, value))
    join = SYS_KEYCTL.get(os.uname().machine)
    if join is not None:  # a key ring of its own: the one it was born with is everybody's
        libc.syscall(ctypes.c_long(join), ctypes.c_long(KEYCTL_JOIN_SESSION_KEYRING), None)
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


RESEED = ("numpy.random", "torch")  # each has a `seed()`; what they hold is else the same in every call


class Program:
    """A program in Python, to be run in this very interpreter as `python3 main.py` would."""

    def __init__(self, argv: list[str]) -> None:
        self.path = f"{WORK}/{argv[0]}"
        with open(self.path, "rb") as file:
            self.text = file.read()
        main = type(sys)("__main__")
        loader = sys.modules["_frozen_importlib_external"].SourceFileLoader
        self.names: dict[str, Any] = main.__dict__
        self.names.update(
            __file__=self.path,
            __builtins__=builtins,
            __cached__=None,
            __annotations__={},
            __loader__=loader("__main__", self.path),
        )
        sys.modules["__main__"] = main
        sys.argv = argv
        sys.orig_argv = ["python3", *argv]
        sys.path.insert(0, WORK)
        for name in RESEED:
            if name in sys.modules:
                sys.modules[name].seed()

    def ended_by(self, error: BaseException) -> NoReturn:
        """End as the interpreter does after an exception that nobody caught; none of our frames is shown."""
        if isinstance(error, SystemExit):
            raise error
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        try:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        except BaseException as second:  # noqa: BLE001 (a hook of the call may raise anything)
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(type(second), second, second.__traceback__)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None
            raise KeyboardInterrupt from None  # the interpreter then ends by SIGINT
        raise SystemExit(1)
