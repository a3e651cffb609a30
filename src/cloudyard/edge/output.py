"""What a command wrote: kept up to a limit, counted past it, in memory while small and in an append-only
file after that.

The guest keeps every byte until it is acknowledged, so a small stream is held here in memory,
unacknowledged, until the command's result is on record; after a restart of ours the guest sends it again
from the start. A stream that grows past SPILL_AT_BYTES moves to its file and is acknowledged as it is
written; after a restart it goes on at the file's length. Either way each byte is kept once. Knows files
and bytes, nothing of frames or commands.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import anyio

from cloudyard.edge.config import SPILL_AT_BYTES

HASH_INLINE_BYTES = 1024 * 1024  # a longer stream is hashed in a thread


class Stream:
    """One stream of a command that runs. The file's name is the place; nothing is there until the stream
    spills.
    """

    __slots__ = (
        "_changed",
        "_directory",
        "_memory",
        "_name",
        "acknowledged",
        "error",
        "kept",
        "limit",
        "spilled",
        "total",
    )

    def __init__(self, directory: Path, name: str, limit: int) -> None:
        self._directory = directory
        self._name = name
        self._memory = bytearray()
        self._changed: anyio.Event | None = None
        self.limit = limit
        self.kept = 0
        """Bytes that can be read here."""
        self.total = 0
        """Bytes that came."""
        self.acknowledged = 0
        """Bytes that the guest was told to forget."""
        self.spilled = False
        self.error = ""
        """Why the file could not be written, if it could not; the stream is cut there."""

    @property
    def over_limit(self) -> bool:
        """More came than is to be kept, and nothing is missing of that."""
        return self.total > self.limit and not self.error

    def resume(self, acknowledged: int) -> int:
        """Take up the stream that an earlier edge kept, and say from which offset the guest has to send.

        Args:
            acknowledged: how much the guest was told to forget.
        """
        with suppress(FileNotFoundError):
            self.kept = (self._directory / self._name).stat().st_size
            self.spilled = True
        self.total = max(self.kept, acknowledged)
        self.acknowledged = acknowledged
        if self.kept < min(acknowledged, self.limit):
            self.error = f"{acknowledged - self.kept} bytes that were acknowledged are not in the file"
            self.limit = self.kept
        return self.total

    def take(self, offset: int, data: bytes) -> None:
        """Take what the guest sent. Bytes that are here already are skipped; where bytes before it are
        missing the stream is cut.
        """
        if offset > self.total:
            self.error = f"bytes {self.total} to {offset} never came"
            self.limit, self.total = self.kept, offset
        data = data[self.total - offset :]
        if not data:
            return
        self.total += len(data)
        part = data[: max(0, self.limit - self.kept)]
        if part:
            if self.spilled:
                self._append(part)
            else:
                self._memory += part
                self.kept += len(part)
        if not self.spilled and self.total - self.acknowledged > SPILL_AT_BYTES:
            self._spill()
        self.wake()

    def to_acknowledge(self) -> int | None:
        """The offset below which the guest may forget all, if it has not been told yet."""
        if not self.spilled or self.total == self.acknowledged:
            return None
        self.acknowledged = self.total
        return self.total

    def read(self, offset: int, size: int) -> bytes:
        """Kept bytes from an offset on."""
        if self.spilled:
            return read_file(self._directory / self._name, offset, min(size, self.kept - offset))
        return bytes(self._memory[offset : offset + size])

    def inline(self) -> bytes | None:
        """All of it while it is in memory, None once it is in its file."""
        return None if self.spilled else bytes(self._memory)

    async def wait_changed(self) -> None:
        """Return when more has come or the stream has ended."""
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def wake(self) -> None:
        """Let everyone look again who waits for a change."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _spill(self) -> None:
        memory, self._memory = bytes(self._memory), bytearray()
        self.kept = 0
        self.spilled = True
        with suppress(FileExistsError):
            self._directory.mkdir(mode=0o700, parents=True)
        self._append(memory)

    def _append(self, data: bytes) -> None:
        try:
            path = self._directory / self._name
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                written = os.write(fd, data)
            finally:
                os.close(fd)
        except OSError as exc:
            self._cut(exc.strerror or str(exc))
            return
        self.kept += written
        if written < len(data):
            self._cut("the disk took only a part of it")

    def _cut(self, why: str) -> None:
        self.error = f"writing {self._name} failed at byte {self.kept}: {why}"
        self.limit = self.kept


def read_file(path: Path, offset: int, size: int) -> bytes:
    """Bytes of a file; fewer at its end, none when it is gone."""
    if size <= 0:
        return b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def bytes_sha256(data: bytes) -> str:
    """Hash of a small stream."""
    return hashlib.sha256(data).hexdigest()


async def file_sha256(path: Path, size: int) -> str:
    """Hash of the first bytes of a file, in a thread when it is long. Empty when the file is gone."""

    def compute() -> str:
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                left = size
                while left and (part := file.read(min(left, HASH_INLINE_BYTES))):
                    digest.update(part)
                    left -= len(part)
        except FileNotFoundError:
            return ""
        return digest.hexdigest()

    return compute() if size <= HASH_INLINE_BYTES else await anyio.to_thread.run_sync(compute)
