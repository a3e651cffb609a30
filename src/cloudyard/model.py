"""The nouns of Cloudyard: what a user asks for, what a step is, what comes back.

Frozen msgspec structs and the limits that hold for them. Structs that users send forbid unknown fields and
name them; what our own parts send each other skips them, so that a newer part can talk to an older one.
Schemas only grow: a new field has a default, a type never changes, a field is never reordered
(`tests/golden/messages` fails on change).

This file does no I/O, reads no clock and knows no server.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NewType

from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import replace

from cloudyard.errors import InvalidRequest, LimitExceeded

SandboxId = NewType("SandboxId", str)
EdgeId = NewType("EdgeId", str)
ProjectId = NewType("ProjectId", str)
CommandId = NewType("CommandId", int)

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Limits, each with its unit. A request past one of them is refused with a sentence that names it.
CPU_MIN, CPU_MAX = 0.05, 512.0  # cores
MEMORY_MIN_BYTES, MEMORY_MAX_BYTES = 16 * MIB, 4096 * GIB
PIDS_MIN, PIDS_MAX = 8, 65_536  # processes and threads
TTL_MIN_S, TTL_MAX_S = 1.0, 30 * 24 * 3600.0
TIMEOUT_MAX_S = 7 * 24 * 3600.0
COMMAND_BYTES_MAX = 768 * KIB  # argv or shell string, environment and inline stdin together
OUTPUT_LIMIT_DEFAULT_BYTES = 16 * MIB  # kept per stream of a command
OUTPUT_LIMIT_MAX_BYTES = 1 * GIB
OUTPUT_INLINE_BYTES = 192 * KIB  # of each stream, carried in the result itself; the rest is fetched
CHUNK_BYTES_MAX = 256 * KIB  # one piece of a stream or a file over the wire
STREAM_WINDOW = 4  # pieces in flight: 1 MiB outstanding
PATH_BYTES_MAX = 4096
LABELS_MAX = 32
LABEL_BYTES_MAX = 256
KEY_BYTES_MAX = 200
CREATE_MANY_MAX = 4096
LIST_DIR_MAX = 20_000  # entries of one directory

BackendName = Literal["function", "container", "microvm", "vm"]
SandboxState = Literal["creating", "running", "stopping", "stopped", "failed"]
StreamName = Literal["stdout", "stderr"]
FileKind = Literal["file", "directory", "symlink", "other"]

SANDBOX_ID = re.compile(r"sb-(?P<edge>[a-z0-9]{1,16})-(?P<unique>[a-z0-9]{12})\Z")
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?i?B?)\s*\Z", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}
_UNITS |= {
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": 1024 * GIB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
}
_UNITS |= {"ki": KIB, "mi": MIB, "gi": GIB, "ti": 1024 * GIB}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")


def parse_size(value: int | str, *, what: str) -> int:
    """Bytes from a number or from text such as `"512MiB"`, `"2GB"` or `"1.5g"`.

    Raises:
        InvalidRequest: the text is no size.
    """
    if isinstance(value, int):
        return value
    match = _SIZE.match(value)
    unit = match["unit"].lower() if match else None
    if match is None or unit not in _UNITS:
        raise InvalidRequest(
            f"{what} is {value!r}, which is not a size.",
            code="bad_size",
            hint='Write it like "512MiB" or "2GiB".',
        )
    return int(float(match["number"]) * _UNITS[unit])


def edge_of(sandbox: str) -> EdgeId:
    """The edge that a sandbox id names.

    Raises:
        InvalidRequest: the text is no sandbox id.
    """
    match = SANDBOX_ID.match(sandbox)
    if match is None:
        raise InvalidRequest(
            f"{sandbox!r} is not a sandbox id.",
            code="bad_sandbox_id",
            hint="Ids look like sb-e1-0a1b2c3d4e5f.",
        )
    return EdgeId(match["edge"])


# -------------------------------------------------------------------------------------------------------
# What a user asks for


class SandboxSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A sandbox that a user wants. Sizes are bytes or text such as "512MiB"; times are seconds."""

    image: str
    backend: BackendName = "container"
    cpu: float = 1.0
    """Cores the sandbox may use at most."""
    memory: int | str = "512MiB"
    """Memory it may use at most, page cache and tmpfs included."""
    pids: int = 256
    """Processes and threads it may have at once."""
    env: dict[str, str] = {}
    """Environment of every command, under what the command itself sets."""
    cwd: str = ""
    """Where commands start; the image's own directory if empty."""
    user: str = ""
    """Who commands run as: a name, a uid or uid:gid; the image's own (usually root) if empty."""
    hostname: str = "sandbox"
    idle_ttl_s: float | None = None
    """Stop it after so long without a request; None: never for that reason."""
    max_ttl_s: float | None = None
    """Stop it so long after its creation; None: never for that reason."""
    labels: dict[str, str] = {}


class CreateRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A spec and the key that makes creating idempotent: the same key gives the same sandbox."""

    spec: SandboxSpec
    key: str = ""


class Pty(Struct, frozen=True, forbid_unknown_fields=True):
    """Size of a terminal, in characters."""

    rows: Annotated[int, Meta(ge=1, le=4096)] = 24
    cols: Annotated[int, Meta(ge=1, le=4096)] = 80


class CommandSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A command to start: `argv` as it is, or one string through `/bin/sh -c`."""

    argv: list[str] = []
    shell: str = ""
    env: dict[str, str] = {}
    cwd: str = ""
    user: str = ""
    stdin: bytes = b""
    """Bytes to feed at once."""
    keep_stdin: bool = False
    """Leave stdin open for `SendStdin`; else it ends after `stdin`."""
    pty: Pty | None = None
    timeout_s: float | None = None
    output_limit_bytes: int = OUTPUT_LIMIT_DEFAULT_BYTES
    """Bytes kept of each stream. What comes past it is counted and dropped, and the command never waits for
    it."""


# -------------------------------------------------------------------------------------------------------
# Operations on a sandbox. Each one that reaches an edge is a step there.


class Op(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, tag_field="op"):
    """One operation. The tag is the name of the operation in snake case."""


class Exec(Op, tag="exec", frozen=True):
    """Run a command and wait for it. Gives ExecResult."""

    command: CommandSpec


class Start(Op, tag="start", frozen=True):
    """Start a command and return at once. Gives CommandInfo."""

    command: CommandSpec


class Wait(Op, tag="wait", frozen=True):
    """Wait for a command's end, at most `wait_s`. Gives ExecResult, or CommandInfo when it still runs."""

    command_id: int
    wait_s: float = 3600.0


class ReadOutput(Op, tag="read_output", frozen=True):
    """The next bytes of a stream from `offset` on. Waits up to `wait_s` for the first. Gives OutputChunk.

    This is a stream whose receiver holds the credit: it asks for numbered pieces and may have STREAM_WINDOW
    requests under way. A piece that is lost is asked for again; none can go missing unseen.
    """

    command_id: int
    stream: StreamName = "stdout"
    offset: int = 0
    max_bytes: int = CHUNK_BYTES_MAX
    wait_s: float = 0.0


class SendStdin(Op, tag="send_stdin", frozen=True):
    """Bytes for a command's stdin, at `offset` of all bytes sent so far; `eof` closes it after them. Gives
    Done.

    Bytes below the offset that was already taken are dropped, so a repeat does no harm. Returns when the
    command's pipe has taken them, or after `wait_s` with `taken` saying how far it came; sooner with less
    when nobody will read the rest. One without data and `eof` tells at which offset the next bytes go.
    """

    command_id: int
    data: bytes = b""
    offset: int = 0
    eof: bool = False
    wait_s: float = 30.0


class Signal(Op, tag="signal", frozen=True):
    """Send a signal to the command's whole process tree. Gives Done."""

    command_id: int
    signal: Annotated[int, Meta(ge=1, le=64)] = 9


class Resize(Op, tag="resize", frozen=True):
    """Change the size of a command's terminal. Gives Done."""

    command_id: int
    pty: Pty


class ListCommands(Op, tag="list_commands", frozen=True):
    """Commands that run or whose results are kept. Gives CommandList."""


class ReadFile(Op, tag="read_file", frozen=True):
    """Bytes of a file from `offset` on, at most CHUNK_BYTES_MAX of them. Gives FileChunk."""

    path: str
    offset: int = 0
    max_bytes: int = CHUNK_BYTES_MAX


class WriteFile(Op, tag="write_file", frozen=True):
    """Write a whole small file (at most CHUNK_BYTES_MAX), replacing what is there in one move. Gives
    FileInfo."""

    path: str
    data: bytes = b""
    mode: int | None = None
    """Permission bits; None keeps those of the file it replaces, or 0644."""
    parents: bool = True
    """Make missing parent directories."""


class UploadChunk(Op, tag="upload_chunk", frozen=True):
    """A piece of a large file at `offset` of upload `upload_id`. Not a step. Gives Done."""

    upload_id: str
    path: str
    offset: int
    data: bytes


class UploadCommit(Op, tag="upload_commit", frozen=True):
    """Put a finished upload in its place in one move, if its size and SHA-256 agree. Gives FileInfo."""

    upload_id: str
    path: str
    size: int
    sha256: str
    mode: int | None = None
    parents: bool = True


class ListDir(Op, tag="list_dir", frozen=True):
    """Entries of a directory, sorted by name. Gives DirListing."""

    path: str


class Stat(Op, tag="stat", frozen=True):
    """What is at a path; a link itself is described, not followed, if `follow` is false. Gives FileInfo."""

    path: str
    follow: bool = True


class Remove(Op, tag="remove", frozen=True):
    """Remove a file, a link or a directory. Gives Done."""

    path: str
    recursive: bool = False
    missing_ok: bool = False


class MakeDir(Op, tag="make_dir", frozen=True):
    """Make a directory. Gives FileInfo."""

    path: str
    mode: int = 0o755
    parents: bool = True
    exist_ok: bool = True


class GetSandbox(Op, tag="get_sandbox", frozen=True):
    """Its state. Not a step, and no use that keeps an idle sandbox alive. Gives SandboxInfo."""


class KeepAlive(Op, tag="keep_alive", frozen=True):
    """Count as use, and change its times to live where given. Gives SandboxInfo."""

    idle_ttl_s: float | UnsetType | None = UNSET
    max_ttl_s: float | UnsetType | None = UNSET


class StopSandbox(Op, tag="stop_sandbox", frozen=True):
    """Stop it and give everything back. Stopping a stopped one is no error. Gives SandboxInfo."""


AnyOp = (
    Exec
    | Start
    | Wait
    | ReadOutput
    | SendStdin
    | Signal
    | Resize
    | ListCommands
    | ReadFile
    | WriteFile
    | UploadChunk
    | UploadCommit
    | ListDir
    | Stat
    | Remove
    | MakeDir
    | GetSandbox
    | KeepAlive
    | StopSandbox
)

# -------------------------------------------------------------------------------------------------------
# What comes back

FaultLabel = Literal["policy", "infra"]


class Fault(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose doing a result is that is not a plain success, and how we know.

    `policy`: the agent's own doing (an exit code, a limit it hit, a timeout). `infra`: ours; only this may be
    retried.
    """

    label: FaultLabel
    reason: str
    """Stable name: exit, signal, timeout, oom, pids, disk, output, killed, lost, not_started."""
    evidence: str = ""
    """What says so: a kernel counter, a guest frame, an errno."""


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="result"):
    """What an operation gave. `step` numbers the operation on its sandbox; 0 where it is none."""

    step: int = 0
    replayed: bool = False
    """True when a repeated step key brought back a recorded result and nothing ran."""
    fault: Fault | None = None


class ExecResult(Result, tag="exec", frozen=True):
    """How a command ended. Exactly one of exit_code and signal is set, unless it never started or its end is
    unknown."""

    command_id: int
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    """The first OUTPUT_INLINE_BYTES at most; `stdout_kept` says how much can be fetched."""
    stderr: bytes = b""
    stdout_kept: int = 0
    stderr_kept: int = 0
    stdout_total: int = 0
    """Bytes that the command really wrote."""
    stderr_total: int = 0
    truncated: bool = False
    """More was written than is kept."""
    timed_out: bool = False
    oom: bool = False
    """Something in the sandbox was killed for memory while it ran: of this command, or of another that ran at
    the same time. It may have ended well all the same."""
    duration_s: float = 0.0
    """From the command's start to the end of its first process."""
    stalled_s: float = 0.0
    """Time in which it could not run through no doing of its own (frozen, or our restart): not counted to
    timeout_s."""
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    """Largest resident size of any one waited-for process of the command, as the kernel's rusage tells."""
    error: str = ""
    """Why it never started: the call, its object and the kernel's reason."""


class CommandInfo(Result, tag="command", frozen=True):
    """A command that runs, or ran and whose result is kept."""

    command_id: int
    running: bool
    pid: int = 0
    """Inside the sandbox."""
    pid_start: int = 0
    """Start time of that process, in clock ticks since boot (/proc/PID/stat, field 22)."""
    argv: list[str] = []
    pty: bool = False
    exit_code: int | None = None
    signal: int | None = None
    stdout_total: int = 0
    stderr_total: int = 0


class CommandList(Result, tag="commands", frozen=True):
    commands: list[CommandInfo] = []


class OutputChunk(Result, tag="output", frozen=True):
    """A piece of a stream. `eof` says that the stream ends with it; then `total` and `sha256` (of all kept
    bytes) are set."""

    data: bytes = b""
    offset: int = 0
    eof: bool = False
    total: int = 0
    sha256: str = ""


class Done(Result, tag="done", frozen=True):
    """It is done. `taken`: bytes accepted so far, where the operation took bytes."""

    taken: int = 0


class FileInfo(Result, tag="file", frozen=True):
    path: str
    kind: FileKind
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: str = ""
    """Where a symlink points."""


class FileChunk(Result, tag="file_chunk", frozen=True):
    """A piece of a file. `size` and `mtime_ns` are the file's own at that moment: a reader checks that they
    did not move."""

    data: bytes
    offset: int
    size: int
    mtime_ns: int = 0


class DirListing(Result, tag="dir", frozen=True):
    path: str
    entries: list[FileInfo] = []


class SandboxInfo(Result, tag="sandbox", frozen=True):
    id: str
    project: str
    edge: str
    image: str
    backend: BackendName
    state: SandboxState
    created_at: float
    """Seconds since 1970."""
    cpu: float
    memory_bytes: int
    labels: dict[str, str] = {}
    idle_ttl_s: float | None = None
    max_ttl_s: float | None = None
    stopped_at: float | None = None
    reason: str = ""
    """Why it stopped or failed: asked, idle_ttl, max_ttl, guest_gone, lost, create_failed."""
    steps: int = 0
    commands: int = 0
    """Commands running now."""
    memory_used_bytes: int | None = None
    """What the kernel charges it now, with its page cache; None in lists and where it is not known."""
    cpu_used_s: float | None = None
    """Processor time of all that ever ran in it; None in lists and where it is not known."""


AnyResult = (
    ExecResult
    | CommandInfo
    | CommandList
    | OutputChunk
    | Done
    | FileInfo
    | FileChunk
    | DirListing
    | SandboxInfo
)

# -------------------------------------------------------------------------------------------------------
# Images


class ImageConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an image says of the commands that run in it."""

    env: dict[str, str] = field(
        default_factory=lambda: {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
        }
    )
    cwd: str = "/root"
    user: str = "root"
    probe: list[str] = field(default_factory=lambda: ["/bin/true"])
    """Run once when a sandbox is made; creating returns only after it ended well."""


class Image(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image: layers from the lowest up, by content, and a config. `layers` are names of EROFS files in the
    depot."""

    name: str
    layers: list[str]
    config: ImageConfig = field(default_factory=ImageConfig)
    created_at: float = 0.0
    size_bytes: int = 0


# -------------------------------------------------------------------------------------------------------
# Between our own parts


class ErrorBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the wire; the one JSON shape of the HTTP API is {"error": this}."""

    kind: str
    code: str
    message: str
    hint: str = ""
    retry_safe: bool = False
    fault: FaultLabel | None = None


class EdgeLoad(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an edge has and what is promised of it. The unit of placement."""

    cpu_total: float
    memory_total_bytes: int
    cpu_promised: float = 0.0
    memory_promised_bytes: int = 0
    sandboxes: int = 0
    sandboxes_max: int = 0
    memory_available_bytes: int = 0


class Heartbeat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An edge's word that it lives, sent every HEARTBEAT_S and at once after its start. `boot` changes with
    every start."""

    edge: str
    boot: str
    sequence: int
    backends: list[str]
    load: EdgeLoad
    images: list[str] = []
    draining: bool = False


HEARTBEAT_S = 1.0
EDGE_SILENT_S = 5.0  # after so long without a heartbeat nothing is placed on an edge


def normalised(spec: SandboxSpec) -> SandboxSpec:
    """The spec with sizes in bytes, after every bound has been checked.

    Raises:
        InvalidRequest: a value is out of its range; the sentence names the field, the value and the range.
    """
    memory = parse_size(spec.memory, what="memory")
    _in_range("cpu", spec.cpu, CPU_MIN, CPU_MAX, "cores")
    _in_range("memory", memory, MEMORY_MIN_BYTES, MEMORY_MAX_BYTES, "bytes")
    _in_range("pids", spec.pids, PIDS_MIN, PIDS_MAX, "processes")
    for name, ttl in (("idle_ttl_s", spec.idle_ttl_s), ("max_ttl_s", spec.max_ttl_s)):
        if ttl is not None:
            _in_range(name, ttl, TTL_MIN_S, TTL_MAX_S, "seconds")
    if not _NAME.match(spec.image):
        raise InvalidRequest(
            f"image is {spec.image!r}, which is no image name.",
            code="bad_image_name",
            hint="Names are lower-case letters, digits, dots, dashes and underscores, such as debian.",
        )
    if not re.match(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62})\Z", spec.hostname):
        raise InvalidRequest(f"hostname is {spec.hostname!r}, which is no host name.", code="bad_hostname")
    if len(spec.labels) > LABELS_MAX or any(
        len(k) + len(v) > LABEL_BYTES_MAX for k, v in spec.labels.items()
    ):
        raise InvalidRequest(
            f"labels hold {len(spec.labels)} entries.",
            code="bad_labels",
            hint=f"At most {LABELS_MAX} labels of {LABEL_BYTES_MAX} characters, name and value together.",
        )
    check_env(spec.env)
    _check_text("The spec", spec.cwd, spec.user, *spec.labels, *spec.labels.values())
    _check_cwd(spec.cwd)
    return replace(spec, memory=memory)


def check_command(command: CommandSpec) -> None:
    """Check a command's own bounds.

    Raises:
        InvalidRequest: neither or both of argv and shell, a NUL byte, a bad name in env, a cwd that is not
            absolute, what cannot be written as UTF-8, a number out of range. LimitExceeded: argv or shell,
            env and stdin together are over COMMAND_BYTES_MAX.
    """
    if bool(command.argv) == bool(command.shell):
        raise InvalidRequest(
            "A command needs either argv or shell, and not both."
            if command.argv
            else "The command is empty.",
            code="bad_command",
            hint='Pass one string to run through /bin/sh, or a list such as ["ls", "-l"].',
        )
    if any("\0" in part for part in (*command.argv, command.shell, command.cwd, command.user)):
        raise InvalidRequest("The command holds a NUL byte, which no argument can carry.", code="bad_command")
    _check_text("The command", *command.argv, command.shell, command.cwd, command.user)
    _check_cwd(command.cwd)
    if command.timeout_s is not None and not 0 < command.timeout_s <= TIMEOUT_MAX_S:
        raise InvalidRequest(
            f"timeout_s is {command.timeout_s}.",
            code="bad_timeout",
            hint=f"Above 0, and at most {_readable(TIMEOUT_MAX_S, 'seconds')}.",
        )
    _in_range("output_limit_bytes", command.output_limit_bytes, 0, OUTPUT_LIMIT_MAX_BYTES, "bytes")
    check_env(command.env)
    size = len(command.shell.encode()) + len(command.stdin) + sum(len(part.encode()) for part in command.argv)
    size += sum(len(name.encode()) + len(value.encode()) for name, value in command.env.items())
    if size > COMMAND_BYTES_MAX:
        raise LimitExceeded(
            f"The command with its environment and stdin is {size} bytes; at most {COMMAND_BYTES_MAX} fit.",
            code="command_too_large",
            hint="Write large input to a file first, or send it through stdin of a started command.",
        )


def check_env(env: dict[str, str]) -> None:
    """Check names and values of an environment.

    Raises:
        InvalidRequest: a name is empty or holds `=` or NUL, a value holds NUL, or one of them is no text.
    """
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidRequest(
                f"env has the entry {name!r}, which no environment can carry.",
                code="bad_env",
                hint="A name is not empty and holds no =, and nothing holds a NUL byte.",
            )
        _check_text("env", name, value)


def check_path(path: str) -> None:
    """Check a path inside a sandbox: absolute, within PATH_BYTES_MAX, no NUL.

    Raises:
        InvalidRequest: it is not.
    """
    _check_text("path", path)
    if not path.startswith("/") or "\0" in path or len(path.encode()) > PATH_BYTES_MAX:
        raise InvalidRequest(
            f"path is {path[:200]!r}.",
            code="bad_path",
            hint=f"Paths are absolute and at most {PATH_BYTES_MAX} bytes.",
        )


def check_key(key: str) -> None:
    """Check a step key or create key.

    Raises:
        InvalidRequest: it is too long or holds control characters.
    """
    _check_text("The key", key)
    if len(key.encode()) > KEY_BYTES_MAX or any(ord(char) < 32 for char in key):
        raise InvalidRequest(
            f"The key {key[:80]!r} cannot be used.",
            code="bad_key",
            hint=f"Printable, at most {KEY_BYTES_MAX} bytes.",
        )


def _readable(value: float, unit: str) -> str:
    """A quantity as a person would write it: in the largest unit of which it is a whole number."""
    steps = {
        "bytes": ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")),
        "seconds": ((24 * 3600, "days"), (3600, "hours"), (60, "minutes")),
    }
    for size, name in steps.get(unit, ()):
        if value >= size and value % size == 0:
            return f"{value / size:.15g} {name if value > size else name.removesuffix('s')}"
    return f"{value:.15g} {unit if value != 1 else unit.removesuffix('s')}"


def _check_text(what: str, *texts: str) -> None:
    for text in texts:
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise InvalidRequest(
                f"{what} holds half a character (a surrogate), which cannot be written as UTF-8.",
                code="bad_text",
                hint="Send bytes that are no text through stdin or a file.",
            )


def _check_cwd(cwd: str) -> None:
    if cwd and not cwd.startswith("/"):
        raise InvalidRequest(
            f"cwd is {cwd[:200]!r}, which is not absolute.",
            code="bad_cwd",
            hint="Write it from the root of the sandbox, such as /root/work.",
        )


def _in_range(name: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:  # NaN fails both comparisons and is refused too
        raise InvalidRequest(
            f"{name} is {_readable(value, unit)}, out of range.",
            code="out_of_range",
            hint=f"Between {_readable(low, unit)} and {_readable(high, unit)}.",
        )
