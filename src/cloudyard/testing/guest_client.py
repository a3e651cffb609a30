"""The real guest, as a plain process or as PID 1 under bubblewrap, and a blocking client for its frames.

For contract tests of the guest and for trying things by hand. The client keeps what every command has told,
acknowledges output at once unless told not to, and fails when a bound of seconds is passed. It knows the wire
and nothing of edges or backends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cloudyard.wire.guest import (
    PROTOCOL_VERSION,
    STDERR,
    STDIN_WINDOW,
    STDOUT,
    Decoder,
    Frame,
    Kind,
    Options,
    Tag,
    encode,
)

BOUND_S = 20.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GUEST_UID = 65533
CAPABILITIES = ("chown", "dac_override", "fowner", "setuid", "setgid", "kill", "sys_chroot")


@dataclass
class Told:
    """What the guest has told of one command on this connection."""

    frames: list[Frame] = field(default_factory=list)
    output: dict[int, bytearray] = field(default_factory=lambda: {STDOUT: bytearray(), STDERR: bytearray()})
    offset: dict[int, int] = field(default_factory=lambda: {STDOUT: 0, STDERR: 0})
    taken: int = 0
    """Bytes of stdin the command has taken."""
    stdin_lost: bool = False

    @property
    def stdout(self) -> bytes:
        """All bytes of stdout so far."""
        return bytes(self.output[STDOUT])

    @property
    def stderr(self) -> bytes:
        """All bytes of stderr so far."""
        return bytes(self.output[STDERR])

    def last(self, kind: Kind) -> Frame | None:
        """The newest frame of a kind, or None."""
        return next((frame for frame in reversed(self.frames) if frame.kind == kind), None)

    @property
    def started(self) -> Frame | None:
        """STARTED, once it came."""
        return self.last(Kind.STARTED)

    @property
    def result(self) -> Frame | None:
        """EXITED or NOT_STARTED, once it came."""
        return self.last(Kind.EXITED) or self.last(Kind.NOT_STARTED)

    @property
    def exit_code(self) -> int | None:
        """Exit code, None where it has none."""
        return self.result.maybe_number(Tag.EXIT_CODE) if self.result else None

    @property
    def signal(self) -> int | None:
        """The signal that ended it, None where none did."""
        return self.result.maybe_number(Tag.SIGNAL) if self.result else None


class GuestClient:
    """One connection to a guest, past its HELLO unless told otherwise."""

    def __init__(self, path: Path, *, hello: bool = True, acknowledge: bool = True) -> None:
        self.acknowledge = acknowledge
        self.told: dict[int, Told] = defaultdict(Told)
        self.frames: list[Frame] = []
        """Frames about the connection itself."""
        self.closed = False
        self._decoder = Decoder()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(BOUND_S)
        self._socket.connect(str(path))
        if hello:
            self.send(Kind.HELLO, 0, (Tag.VERSION_MIN, PROTOCOL_VERSION), (Tag.VERSION_MAX, PROTOCOL_VERSION))
            self.until(lambda: any(frame.kind == Kind.WELCOME for frame in self.frames))

    def __enter__(self) -> GuestClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the guest and its commands live on."""
        self._socket.close()

    def send(self, kind: Kind, command: int = 0, *fields: tuple[Tag, bytes | int]) -> None:
        """Send one frame."""
        self.send_bytes(encode(kind, command, *fields))

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are, right or wrong."""
        self._socket.sendall(data)

    def pump(self, timeout_s: float) -> bool:
        """Take what comes within a time. False when nothing came."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(1 << 20)
        except TimeoutError:
            return False
        except ConnectionError:
            data = b""
        finally:
            self._socket.settimeout(BOUND_S)
        if not data:
            self.closed = True
            return False
        for frame in self._decoder.feed(data):
            self._take(frame)
        return True

    def until(self, condition: Callable[[], bool], *, bound_s: float = BOUND_S) -> None:
        """Take frames until a condition holds.

        Raises:
            TimeoutError: it does not hold within the bound.
            ConnectionError: the guest closed the connection first.
        """
        end = time.monotonic() + bound_s
        while not condition():
            if self.closed:
                raise ConnectionError(f"the guest closed the connection: {self.errors()}")
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the guest did not do it within {bound_s} s: {dict(self.told)}")
            self.pump(min(left, 1.0))

    def errors(self) -> list[str]:
        """Texts of all ERROR frames about the connection."""
        return [frame.text(Tag.TEXT) for frame in self.frames if frame.kind == Kind.ERROR]

    def _take(self, frame: Frame) -> None:
        if frame.command == 0:
            self.frames.append(frame)
            return
        told = self.told[frame.command]
        if frame.kind in (Kind.OUTPUT, Kind.STDIN_ACK, Kind.EXITED) and told.started is None:
            raise AssertionError(f"{frame} came before STARTED")
        if frame.kind == Kind.OUTPUT:
            stream, data = frame.number(Tag.STREAM), frame.data(Tag.DATA)
            if frame.number(Tag.OFFSET) != told.offset[stream]:
                raise AssertionError(
                    f"a gap: offset {frame.number(Tag.OFFSET)}, expected {told.offset[stream]}"
                )
            told.output[stream] += data
            told.offset[stream] += len(data)
            if self.acknowledge:
                self.send(
                    Kind.OUTPUT_ACK, frame.command, (Tag.STREAM, stream), (Tag.OFFSET, told.offset[stream])
                )
            return
        if frame.kind == Kind.STDIN_ACK:
            told.taken = frame.number(Tag.OFFSET)
            told.stdin_lost = bool(frame.number(Tag.EOF, 0))
        told.frames.append(frame)

    def start(
        self,
        command: int,
        program: list[str] | str | bytes,
        *,
        env: dict[str, str] | None = None,
        cwd: str = "/",
        user: str = "",
        options: Options | None = None,
        size: tuple[int, int] = (24, 80),
        open_files: int = 0,
    ) -> Told:
        """Send EXEC; the command's facts fill up as frames are taken."""
        fields: list[tuple[Tag, bytes | int]] = []
        match program:
            case list():
                fields += [(Tag.ARG, os.fsencode(word)) for word in program]
            case str():
                fields.append((Tag.SHELL, program.encode()))
            case bytes():
                fields.append((Tag.SHELL, program))
        fields += [
            (Tag.ENV, f"{name}={value}".encode()) for name, value in {"PATH": PATH, **(env or {})}.items()
        ]
        fields += [(Tag.CWD, cwd.encode()), (Tag.OPTIONS, int(options or 0))]
        if open_files:
            fields.append((Tag.OPEN_FILES, open_files))
        if user:
            fields.append((Tag.USER, user.encode()))
        if options and options & Options.PTY:
            fields += [(Tag.ROWS, size[0]), (Tag.COLS, size[1])]
        self.send(Kind.EXEC, command, *fields)
        return self.told[command]

    def run(
        self, command: int, program: list[str] | str | bytes, *, bound_s: float = BOUND_S, **options: object
    ) -> Told:
        """Start a command, wait for its result and have it forgotten."""
        told = self.start(command, program, **options)  # type: ignore[arg-type]
        self.until(lambda: told.result is not None, bound_s=bound_s)
        self.send(Kind.FORGET, command)
        return told

    def feed(self, command: int, data: bytes, *, eof: bool = True) -> None:
        """Send all of stdin, never more than the window ahead of what was taken."""
        told, at = self.told[command], 0
        while at < len(data) and not told.stdin_lost:
            room = told.taken + STDIN_WINDOW - at
            if room <= 0:
                before = told.taken
                self.until(lambda before=before: told.taken > before or told.stdin_lost)  # type: ignore[misc]
                continue
            piece = data[at : at + room]
            self.send(Kind.STDIN, command, (Tag.OFFSET, at), (Tag.DATA, piece))
            at += len(piece)
        if eof:
            self.send(Kind.STDIN, command, (Tag.OFFSET, at), (Tag.EOF, 1))

    def signal(self, command: int, number: int) -> None:
        """Signal the whole tree of a command."""
        self.send(Kind.SIGNAL, command, (Tag.SIGNAL, number))

    def list(self) -> dict[int, Frame]:
        """STATE of every command that the guest holds."""
        before = sum(frame.kind == Kind.LISTED for frame in self.frames)
        for told in self.told.values():
            told.frames = [frame for frame in told.frames if frame.kind != Kind.STATE]
        self.send(Kind.LIST)
        self.until(lambda: sum(frame.kind == Kind.LISTED for frame in self.frames) > before)
        states = {command: told.last(Kind.STATE) for command, told in self.told.items()}
        return {command: state for command, state in states.items() if state is not None}

    def resume(self, command: int, *, stdout: int = 0, stderr: int = 0) -> Told:
        """Resume both streams of a command of an earlier connection."""
        told = self.told[command]
        for stream, offset in ((STDOUT, stdout), (STDERR, stderr)):
            told.offset[stream] = offset
            self.send(Kind.RESUME, command, (Tag.STREAM, stream), (Tag.OFFSET, offset))
        return told


@dataclass(frozen=True)
class RunningGuest:
    """A guest that listens at a path. `pid` is its own, as this process sees it."""

    path: Path
    pid: int

    def connect(self, *, hello: bool = True, acknowledge: bool = True) -> GuestClient:
        """A new connection."""
        return GuestClient(self.path, hello=hello, acknowledge=acknowledge)

    def rss_kib(self) -> int:
        """Resident memory of the guest itself."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


def bubblewrap_argv(guest_fd: int, listen_fd: int) -> list[str]:
    """bubblewrap with the host's tree as root, and the guest as PID 1 with the rights it has in a sandbox.

    bubblewrap that is started by root leaves capabilities alone: setpriv takes all but those of a sandbox.
    """
    words = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--bind", "/", "/"]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run", "--clearenv", "--"]
    words += ["setpriv", "--bounding-set", ",".join(["-all", *(f"+{name}" for name in CAPABILITIES)])]
    return [*words, f"/proc/self/fd/{guest_fd}", "--listen", str(listen_fd), "--uid", str(GUEST_UID)]


@contextmanager
def running_guest(
    binary: Path, *, as_pid_1: bool = False, env: dict[str, str] | None = None
) -> Iterator[RunningGuest]:
    """Start the guest and end it, with all it started, on leaving. `env` is for the guest itself."""
    with tempfile.TemporaryDirectory(prefix="cy-guest-") as folder:
        path = Path(folder) / "guest.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(64)
        guest_fd = os.open(binary, os.O_RDONLY | os.O_CLOEXEC)
        fds = (listener.fileno(), guest_fd)
        if as_pid_1:
            argv = bubblewrap_argv(guest_fd, listener.fileno())
        else:
            argv = [f"/proc/self/fd/{guest_fd}", "--listen", str(listener.fileno())]
        with subprocess.Popen(argv, pass_fds=fds, stdin=subprocess.DEVNULL, env=env) as process:
            listener.close()
            os.close(guest_fd)
            try:
                with GuestClient(path):
                    pid = process.pid if not as_pid_1 else _only_child(process.pid)
                yield RunningGuest(path, pid)
            finally:
                if as_pid_1:  # bubblewrap's monitor goes with its PID 1, and not the other way round
                    with suppress(ProcessLookupError):
                        os.kill(_only_child(process.pid), signal.SIGKILL)
                        process.wait(BOUND_S)
                process.kill()


def _only_child(parent: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                rest = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(rest[1]) == parent:
                return int(entry.name)
    raise ProcessLookupError(f"process {parent} has no child")
