"""Output of commands: pulled piece by piece from an offset, checked against the edge's total and hash."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from hashlib import sha256

from cloudyard.errors import CloudyardError, LimitExceeded
from cloudyard.model import (
    CHUNK_BYTES_MAX,
    OUTPUT_LIMIT_MAX_BYTES,
    STREAM_WINDOW,
    OutputChunk,
    ReadOutput,
    StreamName,
)
from cloudyard.sdk.tasks import plain_task_group, pull
from cloudyard.sdk.transport import Caller

FOLLOW_WAIT_S = 30.0  # one long poll for output that is not there yet


class Output:
    """One stream of one command."""

    def __init__(self, caller: Caller, sandbox: str, *, command_id: int, stream: StreamName) -> None:
        self._caller = caller
        self._sandbox = sandbox
        self._command_id = command_id
        self._stream: StreamName = stream

    async def complete(self, head: bytes, kept: int) -> bytes:
        """All `kept` bytes of a command that has ended, of which `head` came with its result.

        Raises:
            CloudyardError: a piece is missing or the whole is not what the edge hashed.
        """
        if len(head) >= kept:
            return head
        whole = bytearray(head)
        last = OutputChunk()

        async def fetch(offset: int, size: int) -> bytes:
            nonlocal last
            chunk = await self._read(offset, max_bytes=size)
            if len(chunk.data) != size:
                raise self._broken(
                    f"{size} bytes were asked for at offset {offset} and {len(chunk.data)} came"
                )
            if chunk.eof:
                last = chunk
            return chunk.data

        async def take(piece: bytes) -> None:
            whole.extend(piece)

        await pull(fetch, take, start=len(head), end=kept)
        if not last.eof:
            last = await self._read(kept)
        self._check_end(last, at=kept, digest=sha256(whole).hexdigest())
        return bytes(whole)

    async def follow(self, offset: int) -> AsyncGenerator[bytes, None]:
        """Bytes from the offset on as they come, until the stream ends.

        Nothing is held between two pieces, so the consumer may stop at any of them.

        Raises:
            LimitExceeded: the stream ends here only because no more of it was kept.
        """
        digest = sha256() if offset == 0 else None
        while True:
            chunks = [await self._read(offset, wait_s=FOLLOW_WAIT_S)]
            while chunks:
                for chunk in chunks:
                    if chunk.offset != offset:
                        break  # the piece in front of it was short: it was read before more had come
                    offset += len(chunk.data)
                    if digest is not None:
                        digest.update(chunk.data)
                    if chunk.data:
                        yield chunk.data
                    if chunk.eof:
                        self._check_end(chunk, at=offset, digest=digest.hexdigest() if digest else "")
                        if chunk.total > offset:
                            raise self._truncated(kept=offset, total=chunk.total)
                        return
                full = (
                    len(chunks[-1].data) == CHUNK_BYTES_MAX and chunks[-1].offset + CHUNK_BYTES_MAX == offset
                )
                chunks = await self._read_ahead(offset) if full else []

    async def _read_ahead(self, offset: int) -> list[OutputChunk]:
        """What is there already of the next pieces, in order."""
        chunks: dict[int, OutputChunk] = {}

        async def read(at: int) -> None:
            chunks[at] = await self._read(at)

        async with plain_task_group() as tasks:
            for index in range(STREAM_WINDOW):
                tasks.start_soon(read, offset + index * CHUNK_BYTES_MAX)
        return [chunks[at] for at in sorted(chunks)]

    async def _read(
        self, offset: int, *, max_bytes: int = CHUNK_BYTES_MAX, wait_s: float = 0.0
    ) -> OutputChunk:
        op = ReadOutput(
            command_id=self._command_id,
            stream=self._stream,
            offset=offset,
            max_bytes=max_bytes,
            wait_s=wait_s,
        )
        chunk = await self._caller.ask(self._sandbox, op, OutputChunk)
        if chunk.offset != offset:
            raise self._broken(f"offset {offset} was asked for and {chunk.offset} came")
        return chunk

    def _check_end(self, chunk: OutputChunk, *, at: int, digest: str) -> None:
        if digest and chunk.sha256 and chunk.sha256 != digest:
            raise self._broken(f"{at} bytes were read and their SHA-256 is not that of what was kept")

    def _truncated(self, *, kept: int, total: int) -> LimitExceeded:
        return LimitExceeded(
            f"The {self._stream} of command {self._command_id} in {self._sandbox} was cut: it wrote {total} "
            f"bytes, of which {kept} were kept and have been read.",
            code="output_truncated",
            hint=f"Start it with a larger output_limit_bytes, at most {OUTPUT_LIMIT_MAX_BYTES}, or write to "
            f"a file.",
            fault="policy",
        )

    def _broken(self, reason: str) -> CloudyardError:
        return CloudyardError(
            f"The {self._stream} of command {self._command_id} in {self._sandbox} came incomplete: {reason}.",
            code="stream_broken",
            hint="This is a fault of ours; read it again from an offset that you trust.",
        )
