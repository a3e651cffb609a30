"""What an edge keeps of a sandbox on disk: the kinds of record, and a file that they are appended to.

A file is a row of entries, each a length (u32), a CRC-32 (u32) and that many bytes of msgpack. A kill may
cut the last entry anywhere; loading cuts the torn tail off. Records are arrays with a tag, so that new
fields go at the end with a default. The page cache outlives any process, so appending is enough against a
kill; only the first record, before which no kernel object exists, is forced to the disk.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from cloudyard.core.lifecycle import Transition
from cloudyard.edge.backends.base import InstanceFacts
from cloudyard.edge.refusals import Refused
from cloudyard.errors import LimitExceeded
from cloudyard.model import CommandInfo, CommandSpec, ErrorBody, ExecResult, ImageConfig, SandboxSpec

ENTRY = struct.Struct("<II")
ENTRY_BYTES_MAX = 4 * 1024 * 1024  # a length past this is a torn or foreign entry


class Record(Struct, frozen=True, array_like=True, tag=True):
    """One entry. The tag is the class's name and never changes."""


class Head(Record, frozen=True, tag="Head"):
    """The first record: everything that was asked for."""

    sandbox: str
    project: str
    spec: SandboxSpec
    image: ImageConfig
    created_at: float
    """Seconds since 1970."""
    created_mono: float
    """The monotonic clock then."""


class Placed(Record, frozen=True, tag="Placed"):
    """Its instance."""

    facts: InstanceFacts


class Moved(Record, frozen=True, tag="Moved"):
    """A transition of its life."""

    transition: Transition


class Gone(Record, frozen=True, tag="Gone"):
    """Nothing of it is left but this file."""

    at: float
    """Seconds since 1970."""
    steps: int = 0


class Lives(Record, frozen=True, tag="Lives"):
    """Its times to live were changed."""

    idle_ttl_s: float | None
    max_ttl_s: float | None


class Used(Record, frozen=True, tag="Used"):
    """It was in use at this moment of the monotonic clock."""

    at: float


class Reserved(Record, frozen=True, tag="Reserved"):
    """Step numbers up to this one may have been given out."""

    number: int


class Intent(Record, frozen=True, tag="Intent"):
    """A step is about to be done."""

    step: int
    key: str
    digest: bytes
    op: str
    at: float
    """The monotonic clock then."""
    command: CommandSpec | None = None
    oom_kills: int | None = None
    """The sandbox's counter of out-of-memory kills then, where a command is to be started."""
    forks_refused: int | None = None
    """That of refused forks, likewise."""

    @property
    def refused(self) -> Refused | None:
        """Both, where they are known."""
        return None if self.oom_kills is None else Refused(self.oom_kills, self.forks_refused or 0)


class Stalled(Record, frozen=True, tag="Stalled"):
    """All time so far in which a command could not run through no doing of its own."""

    command_id: int
    stalled_s: float
    oom_kills: int | None = None
    """The counter of out-of-memory kills when it started at last, where it was made to wait for that."""
    forks_refused: int | None = None
    """That of refused forks, likewise."""


class Answer(Record, frozen=True, tag="Answer"):
    """What a step gave: one of the two, or nothing where nobody can ask for it again."""

    step: int
    key: str
    digest: bytes
    result: bytes = b""
    """An encoded AnyResult."""
    error: ErrorBody | None = None


class Ended(Record, frozen=True, tag="Ended"):
    """A command has ended. `key` is that of the step, where the step waited for this."""

    command_id: int
    key: str
    digest: bytes
    info: CommandInfo
    result: ExecResult
    """With the output itself where it is small; else it is in the command's files."""
    stdout_in_file: bool = False
    stderr_in_file: bool = False


AnyRecord = Head | Placed | Moved | Gone | Lives | Used | Reserved | Intent | Stalled | Answer | Ended

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyRecord).decode


class Entry(NamedTuple):
    """A record and where it lies in its file."""

    record: AnyRecord
    offset: int
    size: int


def pack(record: AnyRecord) -> bytes:
    """A record as an entry."""
    body = _encode(record)
    return ENTRY.pack(len(body), zlib.crc32(body)) + body


def unpack(data: bytes) -> Iterator[Entry]:
    """The entries of a file's bytes, up to the first that is torn."""
    for offset, size in _whole(data):
        with suppress(msgspec.ValidationError):  # of a newer edge: it says nothing to this one
            yield Entry(_decode(data[offset + ENTRY.size : offset + size]), offset, size)


def _whole(data: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at + ENTRY.size <= len(data):
        size, checksum = ENTRY.unpack_from(data, at)
        body = data[at + ENTRY.size : at + ENTRY.size + size]
        if size > ENTRY_BYTES_MAX or len(body) < size or zlib.crc32(body) != checksum:
            return
        yield at, ENTRY.size + size
        at += ENTRY.size + size


class RecordFile:
    """One sandbox's file. Holds no descriptor: a node has thousands of these, and opening costs a few
    microseconds.
    """

    __slots__ = ("_path", "size")

    def __init__(self, path: Path, size: int = 0) -> None:
        self._path = path
        self.size = size

    @property
    def path(self) -> Path:
        return self._path

    def create(self, records: Iterable[AnyRecord]) -> None:
        """Write the first records and force them to the disk. Call it in a thread.

        Raises:
            LimitExceeded: the disk is full or cannot be written.
        """
        data = b"".join(pack(record) for record in records)
        try:
            _write(self._path, data, os.O_CREAT | os.O_TRUNC, sync=True)
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as exc:
            raise _disk_error(self._path, exc) from exc
        self.size = len(data)

    def append(self, record: AnyRecord) -> Entry:
        """Add a record.

        Raises:
            LimitExceeded: the disk is full or cannot be written. The file is as it was.
        """
        data = pack(record)
        entry = Entry(record, self.size, len(data))
        try:
            _write(self._path, data, os.O_APPEND)
        except OSError as exc:
            with suppress(OSError):
                os.truncate(self._path, self.size)
            raise _disk_error(self._path, exc) from exc
        self.size += len(data)
        return entry

    def load(self) -> list[Entry]:
        """All records; a torn tail is cut off the file."""
        data = self._path.read_bytes()
        entries = list(unpack(data))
        self.size = sum(size for _, size in _whole(data))
        if self.size < len(data):
            os.truncate(self._path, self.size)
        return entries

    def read(self, offset: int, size: int) -> AnyRecord:
        """The one record at a place that `append` or `load` gave."""
        return next(unpack(self.slice(offset, size))).record

    def slice(self, offset: int, size: int) -> bytes:
        """The bytes of entries as they lie in the file."""
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def replace(self, data: bytes) -> None:
        """Put other entries in the place of all, in one move.

        Raises:
            LimitExceeded: the disk is full or cannot be written. The file is as it was.
        """
        beside = self._path.with_suffix(".new")
        try:
            _write(beside, data, os.O_CREAT | os.O_TRUNC)
            beside.replace(self._path)
        except OSError as exc:
            raise _disk_error(self._path, exc) from exc
        self.size = len(data)


def _write(path: Path, data: bytes, flags: int, *, sync: bool = False) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
    try:
        written = os.write(fd, data)
        while written < len(data):  # a full disk takes a part first, then says so
            written += os.write(fd, data[written:])
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _disk_error(path: Path, exc: OSError) -> LimitExceeded:
    return LimitExceeded(
        f"Writing the record {path} failed: {exc.strerror}.",
        code="edge_disk_full",
        fault="infra",
        hint="Free space in the yard's state folder on that node.",
    )
