"""Operations on a sandbox. Each one that reaches an edge is a step there."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from cloudyard.model.basics import CHUNK_BYTES_MAX, StreamName
from cloudyard.model.specs import CommandSpec, Pty
from cloudyard.model.trees import TreeEntry


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
    below: bytes = b""
    """A name in a tree whose top is `path`, as ListTree gives it; it need not be UTF-8."""


class WriteFile(Op, tag="write_file", frozen=True):
    """Write a whole small file (at most CHUNK_BYTES_MAX), replacing what is there in one move. Gives
    FileInfo."""

    path: str
    data: bytes = b""
    mode: int | None = None
    """Permission bits; None keeps those of the file it replaces, or 0644."""
    parents: bool = True
    """Make missing parent directories."""
    sha256: bytes = b""
    """Of `data`, made where it was read; checked before the file gets its name. Empty: unchecked."""


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
    below: bytes = b""
    """A name in a tree whose top is `path`, as in ReadFile."""


class ListTree(Op, tag="list_tree", frozen=True):
    """A part of all that is below a directory, small files with their content. Gives TreePart.

    Names come in ascending order, each directory before what is in it, so a name says where to go on: nothing
    is kept between two parts, and a tree that changes meanwhile is seen as each part finds it.
    """

    path: str
    after: bytes = b""
    """The last name that is held already."""


class WriteTree(Op, tag="write_tree", frozen=True):
    """Write many entries below a directory, in their order, each in one move. Gives Done.

    Missing directories are made. At the first entry that cannot be written it ends, with an error that names
    it.
    """

    path: str
    entries: list[TreeEntry]


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


class KillAll(Op, tag="kill_all", frozen=True):
    """End every process of the sandbox but its PID 1, however it tries to stay. Commands under way end with
    signal 9, files stay. Gives Done once none is left.
    """


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
    | ListTree
    | WriteTree
    | ListDir
    | Stat
    | Remove
    | MakeDir
    | KillAll
    | GetSandbox
    | KeepAlive
    | StopSandbox
)
