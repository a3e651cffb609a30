"""What comes back from an operation."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from cloudyard.model.basics import BackendName, FileKind, LimitName, SandboxState, StartError
from cloudyard.model.trees import TreeEntry

FaultLabel = Literal["policy", "infra"]


class Fault(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose doing a result is that is not a plain success, and how we know.

    `policy`: the agent's own doing (an exit code, a limit it hit, a timeout). `infra`: ours; only this may be
    retried.
    """

    label: FaultLabel
    reason: str
    """Stable name: exit, signal, timeout, no_output, oom, pids, disk, output, killed, expired (the sandbox's
    time to live), lost, not_started."""
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
    limits_hit: list[LimitName] = []
    """Limits of the sandbox or of the command that were seen to be hit while it ran; it may have ended well
    all the same."""
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
    error_code: StartError | None = None
    """The same as a stable name."""


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
    sha256: bytes = b""
    """Of `data`, made where it was read."""


class TreePart(Result, tag="tree_part", frozen=True):
    """Entries of a tree in ascending order. While there is `more`, ask again after the last one's name."""

    entries: list[TreeEntry] = []
    more: bool = False


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
    disk_used_bytes: int | None = None
    """What its disk holds beyond its image; None in lists, and where the node does not count it."""
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
    | TreePart
    | DirListing
    | SandboxInfo
)
