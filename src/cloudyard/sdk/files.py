"""Files between this machine and a sandbox: any size with flat memory, checked, put in place in one move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import BinaryIO, Protocol
from uuid import uuid4

import anyio
from anyio.to_thread import run_sync
from msgspec.structs import replace

from cloudyard.errors import CloudyardError, Conflict, LimitExceeded
from cloudyard.model import (
    CHUNK_BYTES_MAX,
    STREAM_WINDOW,
    Done,
    FileChunk,
    FileInfo,
    ReadFile,
    UploadChunk,
    UploadCommit,
    WriteFile,
)
from cloudyard.sdk.tasks import plain_task_group, pull
from cloudyard.sdk.transport import Caller

UPLOAD_TRIES = 3


class Sink(Protocol):
    """What takes the bytes of a file, in order. It blocks."""

    def write(self, data: bytes) -> None:
        """Add bytes."""


async def read(caller: Caller, sandbox: str, path: str, *, max_bytes: int) -> bytes:
    """All bytes of a file."""
    whole = bytearray()

    async def take(piece: bytes) -> None:
        whole.extend(piece)

    what = f"{path} in {sandbox}"
    await _fetch(take, caller, sandbox, path, allow=lambda size: check_size(size, max_bytes, what))
    return bytes(whole)


async def fetch_into(
    sink: Sink,
    caller: Caller,
    sandbox: str,
    path: str,
    *,
    below: bytes = b"",
    allow: Callable[[int], None],
) -> int:
    """Write all bytes of a file into `sink`, in flat memory, and give its size. `allow` is told the size
    before anything is written, and raises what is to be raised."""

    async def take(piece: bytes) -> None:
        await run_sync(sink.write, piece)

    return await _fetch(take, caller, sandbox, path, below=below, allow=allow)


async def write(
    caller: Caller, sandbox: str, path: str, *, source: BinaryIO, size: int, mode: int | None
) -> FileInfo:
    """Put the bytes of `source` at a path, replacing what is there in one move."""
    if size <= CHUNK_BYTES_MAX:
        data = await run_sync(source.read, CHUNK_BYTES_MAX + 1)
        if len(data) <= CHUNK_BYTES_MAX:
            digest = sha256(data).digest()
            op = WriteFile(path=path, data=data, mode=mode, sha256=digest)
            return await caller.ask(sandbox, op, FileInfo)
    return await write_large(caller, sandbox, path, source=source, mode=mode)


async def write_large(
    caller: Caller, sandbox: str, path: str, *, below: bytes = b"", source: BinaryIO, mode: int | None
) -> FileInfo:
    """The same in pieces, for any size."""
    tries = UPLOAD_TRIES
    while True:
        tries -= 1
        source.seek(0)
        try:
            return await _Upload(caller, sandbox, path, below=below, source=source).run(mode=mode)
        except CloudyardError as exc:
            # The edge was restarted in the middle of the commit: it was done or not, and once more does no
            # harm.
            if exc.code != "step_lost" or not tries:
                raise


def check_size(size: int, max_bytes: int, what: str) -> None:
    """Raises LimitExceeded where it is more than the caller allows."""
    if size > max_bytes:
        raise LimitExceeded(
            f"{what} has at least {size} bytes; max_bytes is {max_bytes}.",
            code="too_large",
            hint="Pass a larger max_bytes if you expect so much. A file may claim any size and hold nothing.",
        )


def check_piece(data: bytes, digest: bytes, what: str) -> None:
    """Raises CloudyardError where bytes are not those that were read in the sandbox."""
    if digest and sha256(data).digest() != digest:
        raise CloudyardError(f"{what} came damaged: its SHA-256 is another.", code="stream_broken")


class _Upload:
    """One large file on its way into a sandbox: pieces by offset, then a commit with size and hash."""

    def __init__(self, caller: Caller, sandbox: str, path: str, *, below: bytes, source: BinaryIO) -> None:
        self._caller = caller
        self._sandbox = sandbox
        self._path = path
        self._below = below
        self._id = uuid4().hex
        self._source = source
        self._digest = sha256()
        self._size = 0
        self._reading = anyio.Lock()
        self._held: defaultdict[int, anyio.Event] = defaultdict(anyio.Event)

    async def run(self, *, mode: int | None) -> FileInfo:
        self._held[0].set()
        async with plain_task_group() as tasks:
            for _ in range(STREAM_WINDOW):
                tasks.start_soon(self._worker)
        commit = UploadCommit(
            upload_id=self._id,
            path=self._path,
            below=self._below,
            size=self._size,
            sha256=self._digest.hexdigest(),
            mode=mode,
        )
        return await self._caller.ask(self._sandbox, commit, FileInfo)

    async def _worker(self) -> None:
        while True:
            async with self._reading:
                offset = self._size
                data = await run_sync(self._next_piece)
            if not data:
                return
            op = UploadChunk(upload_id=self._id, path=self._path, offset=offset, data=data)
            in_turn = self._held[
                offset
            ].is_set()  # asked before sending: the answer may be older than what we hear
            try:
                await self._caller.ask(self._sandbox, op, Done)
            except Conflict:
                if in_turn:
                    raise
                # It overtook the piece in front of it: wait until that one is held, then send it again.
                await self._held[offset].wait()
                await self._caller.ask(self._sandbox, op, Done)
            self._held.pop(offset, None)
            self._held[offset + len(data)].set()

    def _next_piece(self) -> bytes:
        data = self._source.read(CHUNK_BYTES_MAX)
        self._digest.update(data)
        self._size += len(data)
        return data


async def _fetch(
    take: Callable[[bytes], Awaitable[None]],
    caller: Caller,
    sandbox: str,
    path: str,
    *,
    below: bytes = b"",
    allow: Callable[[int], None],
) -> int:
    """Hand over a file's bytes in order, and give how many. Each piece comes with its hash, and all of them
    must be of one and the same state of the file."""
    op = ReadFile(path=path, below=below)
    what = f"{path}{'/' if below else ''}{below.decode('utf-8', 'backslashreplace')} in {sandbox}"
    first = await caller.ask(sandbox, op, FileChunk)
    allow(first.size)

    def check(chunk: FileChunk, offset: int, size: int) -> bytes:
        if (chunk.size, chunk.mtime_ns) != (first.size, first.mtime_ns):
            raise Conflict(f"{what} changed while it was read.", code="file_changed", hint="Read it again.")
        if chunk.offset != offset or len(chunk.data) != size:
            raise CloudyardError(
                f"{what} came incomplete: {size} bytes were asked for at offset {offset}, "
                f"{len(chunk.data)} came at {chunk.offset}.",
                code="stream_broken",
            )
        check_piece(chunk.data, chunk.sha256, what)
        return chunk.data

    async def fetch(offset: int, size: int) -> bytes:
        chunk = await caller.ask(sandbox, replace(op, offset=offset, max_bytes=size), FileChunk)
        return check(chunk, offset, size)

    begun = min(first.size, CHUNK_BYTES_MAX)
    await take(check(first, 0, begun))
    await pull(fetch, take, start=begun, end=first.size)
    return first.size
