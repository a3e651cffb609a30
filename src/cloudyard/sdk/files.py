"""Files and directories between this machine and a sandbox: any size with flat memory, checked, put in place
in one move.

Names that come from a sandbox are not trusted: a download never writes outside the directory it was given.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import anyio
from anyio.to_thread import run_sync

from cloudyard.errors import CloudyardError, Conflict, InvalidRequest, LimitExceeded, NotFound
from cloudyard.model import (
    CHUNK_BYTES_MAX,
    STREAM_WINDOW,
    CommandSpec,
    DirListing,
    Done,
    Exec,
    ExecResult,
    FileChunk,
    FileInfo,
    ListDir,
    MakeDir,
    ReadFile,
    Stat,
    UploadChunk,
    UploadCommit,
    WriteFile,
)
from cloudyard.sdk.tasks import plain_task_group, pull
from cloudyard.sdk.transport import Caller

FILES_IN_FLIGHT = 8  # of one directory
UPLOAD_TRIES = 3


@contextmanager
def _local(what: str, path: Path) -> Iterator[None]:
    """Errors of this machine's files, as errors that name the file.

    Raises:
        NotFound: something on the way there does not exist.
        LimitExceeded: the disk is full.
        InvalidRequest: any other reason of the kernel's.
    """
    try:
        yield
    except OSError as exc:
        reason = f"{what} {path} on this machine failed: {(exc.strerror or str(exc)).lower()}."
        match exc.errno:
            case errno.ENOENT:
                missing = "" if path.parent.exists() else f"There is no directory {path.parent}; make it."
                raise NotFound(reason, code="local_file_not_found", hint=missing) from exc
            case errno.ENOSPC | errno.EDQUOT:
                raise LimitExceeded(reason, code="local_disk_full") from exc
            case _:
                raise InvalidRequest(reason, code="local_file") from exc


async def read(caller: Caller, sandbox: str, path: str) -> bytes:
    """All bytes of a file."""
    first = await caller.ask(sandbox, ReadFile(path=path), FileChunk)
    whole = bytearray(first.data)

    async def take(piece: bytes) -> None:
        whole.extend(piece)

    fetch = _fetch(caller, sandbox, path, size=first.size, mtime_ns=first.mtime_ns)
    await pull(fetch, take, start=len(whole), end=first.size)
    return bytes(whole)


async def write(
    caller: Caller, sandbox: str, path: str, *, source: BinaryIO, size: int, mode: int | None
) -> FileInfo:
    """Put the bytes of `source` at a path, replacing what is there in one move."""
    if size <= CHUNK_BYTES_MAX:
        data = await run_sync(source.read, CHUNK_BYTES_MAX + 1)
        if len(data) <= CHUNK_BYTES_MAX:
            return await caller.ask(sandbox, WriteFile(path=path, data=data, mode=mode), FileInfo)
    tries = UPLOAD_TRIES
    while True:
        tries -= 1
        source.seek(0)
        try:
            return await _Upload(caller, sandbox, path, source=source).run(mode=mode)
        except CloudyardError as exc:
            # The edge was restarted in the middle of the commit: it was done or not, and once more does no
            # harm.
            if exc.code != "step_lost" or not tries:
                raise


async def upload(caller: Caller, sandbox: str, local: Path, *, path: str) -> None:
    """Copy a local file, or a directory with all below it, into a sandbox. Links below are kept as links."""
    if not local.exists():
        raise NotFound(f"{local} cannot be uploaded: it does not exist.", code="file_not_found")
    if not local.is_dir():
        await _upload_file(caller, sandbox, local, path=path)
        return
    slots = anyio.Semaphore(FILES_IN_FLIGHT)

    async def one(source: Path, target: str) -> None:
        async with slots:
            await _upload_file(caller, sandbox, source, path=target)

    async with plain_task_group() as tasks:
        for root, directories, names in os.walk(local, onerror=_unreadable):
            here = Path(root)
            inside = _join(path, here.relative_to(local).as_posix())
            with _local("Reading", here):
                mode = stat.S_IMODE(here.stat().st_mode)
            await caller.ask(sandbox, MakeDir(path=inside, mode=mode), FileInfo)
            for name in sorted([*directories, *names]):
                entry = here / name
                if entry.is_symlink():
                    with _local("Reading", entry):
                        target = os.readlink(entry)
                    await _make_link(caller, sandbox, target=target, path=_join(inside, name))
                elif entry.is_file():
                    async with slots:
                        pass  # a directory of a million files is no million tasks
                    tasks.start_soon(one, entry, _join(inside, name))


async def download(caller: Caller, sandbox: str, path: str, *, local: Path) -> None:
    """Copy a file, or a directory with all below it, out of a sandbox. Links below are kept as links."""
    info = await caller.ask(sandbox, Stat(path=path), FileInfo)
    if info.kind != "directory":
        await _download_file(caller, sandbox, path, info=info, local=local)
        return
    slots = anyio.Semaphore(FILES_IN_FLIGHT)

    async def one(entry: FileInfo, source: str, target: Path) -> None:
        async with slots:
            await _download_file(caller, sandbox, source, info=entry, local=target)

    async with plain_task_group() as tasks:
        waiting = [(path, local)]
        while waiting:
            directory, target = waiting.pop()
            with _local("Making the directory", target):
                _real_directory(target, top=target == local)
            listing = await caller.ask(sandbox, ListDir(path=directory), DirListing)
            for entry in listing.entries:
                name = _plain_name(entry)
                source = _join(directory, name)
                match entry.kind:
                    case "directory":
                        waiting.append((source, target / name))
                    case "symlink":
                        with _local("Making the link", target / name):
                            _replace_link(target / name, entry.target)
                    case "file":
                        tasks.start_soon(one, entry, source, target / name)
                    case "other":
                        pass  # sockets, FIFOs and devices have no bytes to copy


class _Upload:
    """One large file on its way into a sandbox: pieces by offset, then a commit with size and hash."""

    def __init__(self, caller: Caller, sandbox: str, path: str, *, source: BinaryIO) -> None:
        self._caller = caller
        self._sandbox = sandbox
        self._path = path
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
            upload_id=self._id, path=self._path, size=self._size, sha256=self._digest.hexdigest(), mode=mode
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


def _fetch(
    caller: Caller, sandbox: str, path: str, *, size: int, mtime_ns: int
) -> Callable[[int, int], Awaitable[bytes]]:
    """Pieces of a file that must not change while it is read."""

    async def fetch(offset: int, max_bytes: int) -> bytes:
        chunk = await caller.ask(sandbox, ReadFile(path=path, offset=offset, max_bytes=max_bytes), FileChunk)
        if (chunk.size, chunk.mtime_ns) != (size, mtime_ns):
            raise Conflict(
                f"{path} in {sandbox} changed while it was read.", code="file_changed", hint="Read it again."
            )
        if chunk.offset != offset or len(chunk.data) != max_bytes:
            raise CloudyardError(
                f"{path} in {sandbox} came incomplete: {max_bytes} bytes were asked for at offset {offset}, "
                f"{len(chunk.data)} came at {chunk.offset}.",
                code="stream_broken",
            )
        return chunk.data

    return fetch


def _unreadable(error: OSError) -> None:
    """For os.walk, which would leave out what it cannot read."""
    with _local("Reading", Path(error.filename)):
        raise error


async def _upload_file(caller: Caller, sandbox: str, local: Path, *, path: str) -> None:
    with _local("Reading", local), local.open("rb") as source:
        status = os.fstat(source.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(f"{local} cannot be uploaded: it is no regular file.", code="not_a_file")
        mode = stat.S_IMODE(status.st_mode)
        await write(caller, sandbox, path, source=source, size=status.st_size, mode=mode)


async def _download_file(caller: Caller, sandbox: str, path: str, *, info: FileInfo, local: Path) -> None:
    with _local("Writing", local):
        if local.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    async with _replacing(local, mode=info.mode & 0o777) as sink:

        async def take(piece: bytes) -> None:
            await run_sync(sink.write, piece)

        first = await caller.ask(sandbox, ReadFile(path=path), FileChunk)
        await take(first.data)
        fetch = _fetch(caller, sandbox, path, size=first.size, mtime_ns=first.mtime_ns)
        await pull(fetch, take, start=len(first.data), end=first.size)


@asynccontextmanager
async def _replacing(path: Path, *, mode: int) -> AsyncIterator[BinaryIO]:
    """A new file that takes the place of `path` if all goes well, and vanishes if not."""
    temporary = path.with_name(f".{path.name[:80]}.{uuid4().hex}.part")
    with _local("Writing", path):
        try:
            with temporary.open("xb") as sink:
                yield sink
                os.fchmod(sink.fileno(), mode)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


async def _make_link(caller: Caller, sandbox: str, *, target: str, path: str) -> None:
    command = CommandSpec(argv=["ln", "-sfn", "--", target, path], cwd="/", user="0", timeout_s=30)
    done = await caller.ask(sandbox, Exec(command=command), ExecResult)
    if done.exit_code != 0:
        reason = done.error or done.stderr.decode(errors="replace").strip()
        raise CloudyardError(f"The link {path} could not be made in {sandbox}: {reason}.", code="link_failed")


def _join(directory: str, name: str) -> str:
    return directory if name == "." else f"{directory.rstrip('/')}/{name}"


def _plain_name(entry: FileInfo) -> str:
    """The entry's own name, which must not lead anywhere else."""
    name = entry.path.rsplit("/", 1)[-1]
    if name in ("", ".", "..") or "\0" in name or os.sep in name:
        raise CloudyardError(f"The sandbox lists an entry with the path {entry.path!r}.", code="bad_listing")
    return name


def _real_directory(path: Path, *, top: bool) -> None:
    """Make a directory. Below the top, a link left by an earlier download is replaced, never followed."""
    if not top and path.is_symlink():
        path.unlink()
    path.mkdir(parents=top, exist_ok=True)


def _replace_link(path: Path, target: str) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    path.symlink_to(target)
