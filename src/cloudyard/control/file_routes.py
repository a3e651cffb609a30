"""HTTP routes for files. A file of any size goes through in pieces, a few in flight, in flat memory."""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from litestar import Router
from litestar.params import FromQuery, JSONBody, QueryParameter
from litestar.response import Stream

from cloudyard.control.api import Call, SandboxPath, StepKey, TheYard, delete, get, post, put
from cloudyard.control.results import only
from cloudyard.control.yard import Yard
from cloudyard.core.iam import Grant
from cloudyard.errors import CloudyardError, Conflict
from cloudyard.model import (
    CHUNK_BYTES_MAX,
    DirListing,
    Done,
    FileChunk,
    FileInfo,
    ListDir,
    MakeDir,
    ReadFile,
    Remove,
    Stat,
    UploadChunk,
    UploadCommit,
    WriteFile,
)

FilePath = Annotated[str, QueryParameter(name="path", description="Absolute path inside the sandbox.")]


class MakeDirRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A directory to make."""

    path: str
    mode: int = 0o755
    parents: bool = True
    exist_ok: bool = True


@get("/files", media_type="application/octet-stream", summary="Download a file of any size")
async def download(yard: TheYard, request: Call, sandbox: SandboxPath, file_path: FilePath) -> Stream:
    grant = request.auth
    first = await _read(yard, grant, sandbox, file_path, 0)
    return Stream(
        _pull(yard, grant, sandbox, file_path, first),
        media_type="application/octet-stream",
        headers={"Content-Length": str(first.size)},
    )


@put("/files", status_code=200, request_max_body_size=None, summary="Write a file of any size in one move")
async def upload(
    yard: TheYard,
    request: Call,
    sandbox: SandboxPath,
    file_path: FilePath,
    mode: Annotated[
        str | None,
        QueryParameter(description="Permission bits in octal, such as 644.", pattern="^[0-7]{1,4}$"),
    ] = None,
    sha256: Annotated[
        str | None,
        QueryParameter(
            description="What it has to be, in hexadecimal; else nothing is written.",
            pattern="^[0-9a-fA-F]{64}$",
        ),
    ] = None,
    step_key: StepKey = "",
    *,
    parents: FromQuery[bool] = True,
) -> FileInfo:
    bits = None if mode is None else int(mode, 8)
    pieces = _pieces(request.stream())
    first = await anext(pieces, b"")
    second = await anext(pieces, b"")
    if not second:
        whole = hashlib.sha256(first).digest() if sha256 is None else bytes.fromhex(sha256)
        op = WriteFile(path=file_path, data=first, mode=bits, parents=parents, sha256=whole)
        return only(FileInfo, await yard.op(request.auth, sandbox, op, key=step_key))
    upload_id = secrets.token_hex(8)
    size, digest = await _push(
        yard, request.auth, sandbox, file_path, upload_id, deque((first, second)), pieces
    )
    commit = UploadCommit(
        upload_id=upload_id, path=file_path, size=size, sha256=sha256 or digest, mode=bits, parents=parents
    )
    return only(FileInfo, await yard.op(request.auth, sandbox, commit, key=step_key))


@get("/files/stat", summary="What is at a path")
async def stat(
    yard: TheYard, request: Call, sandbox: SandboxPath, file_path: FilePath, *, follow: FromQuery[bool] = True
) -> FileInfo:
    return only(FileInfo, await yard.op(request.auth, sandbox, Stat(path=file_path, follow=follow)))


@get("/files/list", summary="Entries of a directory, by name")
async def list_dir(yard: TheYard, request: Call, sandbox: SandboxPath, file_path: FilePath) -> DirListing:
    return only(DirListing, await yard.op(request.auth, sandbox, ListDir(path=file_path)))


@post("/files/mkdir", status_code=200, summary="Make a directory")
async def make_dir(
    yard: TheYard, request: Call, sandbox: SandboxPath, data: JSONBody[MakeDirRequest], step_key: StepKey = ""
) -> FileInfo:
    op = MakeDir(path=data.path, mode=data.mode, parents=data.parents, exist_ok=data.exist_ok)
    return only(FileInfo, await yard.op(request.auth, sandbox, op, key=step_key))


@delete("/files", status_code=200, summary="Remove a file, a link or a directory")
async def remove(
    yard: TheYard,
    request: Call,
    sandbox: SandboxPath,
    file_path: FilePath,
    step_key: StepKey = "",
    *,
    recursive: FromQuery[bool] = False,
    missing_ok: FromQuery[bool] = False,
) -> Done:
    op = Remove(path=file_path, recursive=recursive, missing_ok=missing_ok)
    return only(Done, await yard.op(request.auth, sandbox, op, key=step_key))


def router() -> Router:
    """All routes of this file."""
    return Router(
        "/sandboxes/{sandbox:str}",
        route_handlers=[download, upload, stat, list_dir, make_dir, remove],
    )


async def _read(yard: Yard, grant: Grant, sandbox: str, path: str, offset: int) -> FileChunk:
    return only(FileChunk, await yard.op(grant, sandbox, ReadFile(path=path, offset=offset)))


async def _pull(yard: Yard, grant: Grant, sandbox: str, path: str, first: FileChunk) -> AsyncIterator[bytes]:
    """The file's bytes in order. A file that changes on the way breaks the transfer: no reader may take it
    for whole.
    """
    at, chunk = 0, first
    while True:
        if (chunk.size, chunk.mtime_ns) != (first.size, first.mtime_ns) or chunk.offset != at:
            raise Conflict(f"{path} changed while it was read.", code="file_changed", hint="Read it again.")
        if chunk.sha256 and hashlib.sha256(chunk.data).digest() != chunk.sha256:
            raise CloudyardError(f"{path} came damaged: its SHA-256 is another.", code="stream_broken")
        if chunk.data:
            yield chunk.data
        at += len(chunk.data)
        if at >= first.size:
            return
        if not chunk.data:
            raise Conflict(f"{path} ended before its size.", code="file_changed", hint="Read it again.")
        chunk = await _read(yard, grant, sandbox, path, at)


async def _pieces(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The body cut anew, into pieces of CHUNK_BYTES_MAX; only the last may be shorter."""
    held = bytearray()
    async for data in body:
        held += data
        while len(held) >= CHUNK_BYTES_MAX:
            yield bytes(held[:CHUNK_BYTES_MAX])
            del held[:CHUNK_BYTES_MAX]
    if held:
        yield bytes(held)


async def _push(
    yard: Yard,
    grant: Grant,
    sandbox: str,
    path: str,
    upload_id: str,
    begun: deque[bytes],
    rest: AsyncIterator[bytes],
) -> tuple[int, str]:
    """Send pieces in order, and give size and hash of them all."""
    digest, size = hashlib.sha256(), 0
    while piece := begun.popleft() if begun else await anext(rest, b""):
        digest.update(piece)
        op = UploadChunk(upload_id=upload_id, path=path, offset=size, data=piece)
        await yard.op(grant, sandbox, op)
        size += len(piece)
    return size, digest.hexdigest()
