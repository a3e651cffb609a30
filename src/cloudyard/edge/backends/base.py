"""What a backend is to the edge: the one seam between the edge's decisions and what makes a sandbox.

Every backend, and the fake in `cloudyard.testing`, passes the one contract suite in
`cloudyard.testing.backend_contract`. Abilities that not every backend has are separate protocols. A backend
knows nothing of projects, steps, keys or NATS.
"""

from __future__ import annotations

import socket
from typing import Protocol, runtime_checkable

from msgspec import Struct

from cloudyard.model import (
    DirListing,
    FileChunk,
    FileInfo,
    Image,
    SandboxId,
    SandboxSpec,
    TreeEntry,
    TreePart,
)


class InstanceFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a backend needs to find an instance again after the edge was killed; kept in the edge's local
    record.

    `pid` and `pid_start` (clock ticks since boot) name PID 1 as the host sees it: a pid alone may have been
    given to another process since. `slot` names everything else: cgroups, uid range and directory are derived
    from it.
    """

    sandbox: SandboxId
    slot: int
    pid: int
    pid_start: int


class Usage(Struct, frozen=True, kw_only=True):
    """Kernel counters of one instance, all since its creation."""

    memory_bytes: int
    memory_peak_bytes: int
    cpu_s: float
    oom_kills: int
    pids: int
    pids_refused: int


class DiskUse(Struct, frozen=True, kw_only=True):
    """How full an instance's disk is, in bytes."""

    used_bytes: int
    """What it holds beyond its image, where that is counted; else 0."""
    limit_bytes: int
    """What it may hold; 0 where nothing bounds it."""
    free_bytes: int
    """What is free for all instances together."""


class Files(Protocol):
    """Files of one instance. Paths are absolute inside the sandbox and are resolved there, links too, by the
    kernel.

    All raise NotFound, Conflict (is a directory, is none, not empty, exists), Forbidden (nothing in /proc or
    /sys), LimitExceeded (disk full, too many entries) and SandboxUnavailable, each with the path and the
    kernel's reason.
    """

    async def read(self, path: str, offset: int, max_bytes: int, *, below: bytes = b"") -> FileChunk:
        """Bytes of a regular file. Raises Conflict for anything that is no regular file; a FIFO never blocks
        it."""

    async def write(
        self, path: str, data: bytes, *, mode: int | None, parents: bool, sha256: bytes = b""
    ) -> FileInfo:
        """Replace a file in one move (temporary file beside it, then rename), keeping mode and owner of what
        was there. Raises Conflict, and does nothing, when there is a hash and it differs."""

    async def upload_chunk(self, upload: str, offset: int, data: bytes) -> int:
        """Add bytes to an upload kept on the sandbox's own disk. Gives the bytes held; a gap raises
        Conflict."""

    async def upload_commit(
        self,
        upload: str,
        path: str,
        *,
        size: int,
        sha256: str,
        mode: int | None,
        parents: bool,
        below: bytes = b"",
    ) -> FileInfo:
        """Put the upload in its place in one move. Raises Conflict when size or hash differ (the upload is
        dropped)."""

    async def list_dir(self, path: str) -> DirListing:
        """Entries sorted by name, links not followed."""

    async def list_tree(self, path: str, after: bytes) -> TreePart:
        """Entries of all that is below a directory, from behind the name `after` on, ascending; of links and
        mounts of the kernel's nothing is entered."""

    async def write_tree(self, path: str, entries: list[TreeEntry]) -> None:
        """Write checked entries below a directory in their order, each in one move."""

    async def stat(self, path: str, *, follow: bool) -> FileInfo:
        """What is at the path."""

    async def remove(self, path: str, *, recursive: bool, missing_ok: bool) -> None:
        """Remove a file, link or directory; never follows a link, never leaves the sandbox."""

    async def make_dir(self, path: str, *, mode: int, parents: bool, exist_ok: bool) -> FileInfo:
        """Make a directory owned by the sandbox's root."""


class Instance(Protocol):
    """One live sandbox of a backend. Until `stop` it holds kernel objects; after it nothing is left."""

    @property
    def facts(self) -> InstanceFacts:
        """Enough to adopt it again."""

    @property
    def files(self) -> Files:
        """Its files."""

    def connect(self) -> socket.socket:
        """A new non-blocking connection to its guest. Raises SandboxUnavailable when the guest is gone."""

    async def wait_gone(self) -> None:
        """Return once its PID 1 has ended, for whatever reason."""

    def usage(self) -> Usage:
        """Its counters now. Raises SandboxUnavailable when it is gone."""

    def disk(self) -> DiskUse:
        """How full its disk is. Raises as `usage` does."""

    def oom_kills(self) -> int:
        """That one counter, read before and after every command: it has to be cheap. Raises as `usage`
        does."""

    def forks_refused(self) -> int:
        """Likewise, of forks that its limit of processes refused."""

    async def end_processes(self) -> None:
        """End every process in it but PID 1, also one that forks as fast as it can; return once they have
        ended. Raises SandboxUnavailable when the instance is gone, or some are still there after a bound."""

    async def stop(self) -> None:
        """Kill everything in it, frozen or not, and give back processes, cgroups, disk and slot. Idempotent,
        bounded."""


class Backend(Protocol):
    """Makes and finds instances. Used as an async context manager, which keeps its pools filled and, on
    leaving, empties them; it leaves live instances alone."""

    @property
    def name(self) -> str:
        """The word that users write."""

    async def create(self, sandbox: SandboxId, spec: SandboxSpec, image: Image) -> Instance:
        """Make an instance in which the image's probe has run (edge/probe.py). `spec` is normalised. Raises
        Unsupported, LimitExceeded (no slot, disk full), NotFound (a layer is missing), SandboxUnavailable (it
        died while starting: its last words in the message; or `image_unusable`: the probe failed). Whatever
        it raises, also when cancelled, nothing is left behind."""

    async def adopt(self, facts: InstanceFacts) -> Instance | None:
        """The instance that an earlier edge made, or None when its PID 1 is gone."""

    async def sweep(self, keep: set[int]) -> list[str]:
        """Remove every kernel object and directory of this yard on this node that belongs to no slot in
        `keep`: processes, cgroups, directories, loop devices. Called once at start, before `create`. Gives a
        sentence for each thing removed."""

    def capacity(self) -> int:
        """How many instances the node can hold at most (uid ranges, pids, ...)."""


@runtime_checkable
class Freezable(Protocol):
    """An instance that can be stopped in time and go on."""

    async def freeze(self) -> None:
        """No process of it runs until `thaw`."""

    async def thaw(self) -> None:
        """It goes on."""


@runtime_checkable
class Resizable(Protocol):
    """An instance whose limits can be changed while it lives."""

    def resize(self, spec: SandboxSpec) -> None:
        """Give it the cpu, memory and pids of a normalised spec. Raises CloudyardError: the kernel refused,
        as it does where more memory is in use than would be allowed."""


@runtime_checkable
class Nesting(Protocol):
    """A backend that can also make instances in which root may make namespaces and mounts of its own.

    For programs of ours that keep what they run apart from themselves; never for a user's own sandbox, since
    it lets root inside reach more of the kernel.
    """

    async def create_nesting(self, sandbox: SandboxId, spec: SandboxSpec, image: Image) -> Instance:
        """Make one. All else is as in `Backend.create`."""
