"""Files of a sandbox whose root this machine can open: the `Files` of every backend that is no virtual
machine.

Paths are resolved by the kernel inside the sandbox's root (`inroot`). Only regular files on disks are read
and written, and what is new belongs to the sandbox's root (`replacing`, `uploads`, `removal`). Owners are
shown as they are seen inside.

A question, or a small read of what is in memory, is done in place: it takes some microseconds, a thread takes
a hundred. The rest runs in threads, a few for each sandbox, so that one never waits for another's slow disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import anyio
from anyio import to_thread

from cloudyard.edge.host import inroot, replacing, trees, uploads
from cloudyard.edge.host.inroot import closing, explained, shown
from cloudyard.edge.host.removal import remove_tree
from cloudyard.edge.host.replacing import UID_RANGE
from cloudyard.errors import Conflict, InvalidRequest, LimitExceeded, NotFound, SandboxUnavailable
from cloudyard.model import (
    CHUNK_BYTES_MAX,
    KIB,
    LIST_DIR_BYTES_MAX,
    LIST_DIR_MAX,
    DirListing,
    FileChunk,
    FileInfo,
    FileKind,
    TreeEntry,
    TreePart,
    check_below,
    check_path,
)

GAP_WAIT_S = 5.0  # pieces of an upload that came out of order wait so long for those before them
INLINE_BYTES = 32 * KIB  # a read or write up to this size is not worth a thread
THREADS = 4  # for one sandbox at once
NOBODY = 65_534  # how an owner from outside the sandbox's range shows inside it
_T = TypeVar("_T")


class _NotInMemoryError(Exception):
    """A read would have to wait for a disk. No OSError: it is no refusal to be explained."""


class RootFiles:
    """Files under one root.

    Args:
        open_root: gives a new descriptor (O_PATH will do) of the root directory, which is closed after use.
            Raises
            SandboxUnavailable, or OSError, when the sandbox is gone.
        uid_base: the uid and gid on this machine that are 0 inside.
    """

    def __init__(self, open_root: Callable[[], int], uid_base: int) -> None:
        self._open_root = open_root
        self._base = uid_base
        self._threads: anyio.CapacityLimiter | None = None
        self._turns: dict[str, anyio.Condition] = {}

    async def read(self, path: str, offset: int, max_bytes: int, *, below: bytes = b"") -> FileChunk:
        """Bytes of a regular file from `offset` on, at most CHUNK_BYTES_MAX of them."""
        if offset < 0 or max_bytes < 0:
            raise InvalidRequest(
                f"Cannot read {max_bytes} bytes of {path} from {offset} on.", code="bad_offset"
            )
        size = min(max_bytes, CHUNK_BYTES_MAX)
        if size <= INLINE_BYTES:
            with suppress(_NotInMemoryError):
                return self._read(path, below, offset, size, flags=os.RWF_NOWAIT)
        return await self._in_thread(lambda: self._read(path, below, offset, size))

    async def write(
        self, path: str, data: bytes, *, mode: int | None, parents: bool, sha256: bytes = b""
    ) -> FileInfo:
        """Replace a file in one move, if the hash agrees where there is one."""

        def act() -> FileInfo:
            uploads.check_data(data, sha256, path)
            with (
                self._root("write", path) as root,
                replacing.find_target(root, path, parents=parents, base=self._base) as target,
            ):
                facts = replacing.replace(
                    target, path, lambda made: replacing.write_all(made, data), mode=mode, base=self._base
                )
            return self._describe(path, facts)

        return await self._in_thread(act)

    async def upload_chunk(self, upload: str, offset: int, data: bytes) -> int:
        """Add bytes at an offset of an upload and give the bytes held. What is held already may come
        again."""
        uploads.check_upload_id(upload)
        if offset < 0:
            raise InvalidRequest(f"Upload {upload} cannot take bytes at {offset}.", code="bad_offset")
        turn = self._turns.setdefault(upload, anyio.Condition())
        try:
            async with turn:
                held = await self._in_thread(lambda: self._held(upload))
                with anyio.move_on_after(GAP_WAIT_S):
                    while offset > held:
                        await turn.wait()
                        held = await self._in_thread(lambda: self._held(upload))
                if offset > held:
                    raise Conflict(
                        f"Upload {upload} holds {held} bytes; bytes at {offset} would leave a gap.",
                        code="upload_gap",
                        hint=f"Send what is missing from {held} on.",
                    )
                held = await self._in_thread(lambda: self._add(upload, offset, data))
                turn.notify_all()
                return held
        finally:
            if not turn.locked() and turn.statistics().tasks_waiting == 0:
                self._turns.pop(upload, None)

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
        """Put an upload in its place in one move, if size and hash agree. It is gone after it, either way."""
        uploads.check_upload_id(upload)

        def act() -> FileInfo:
            place = trees.joined(path, below)
            with self._root("write", path, below) as root:
                facts = uploads.commit(
                    root, upload, place, size=size, sha256=sha256, mode=mode, parents=parents, base=self._base
                )
            return self._describe(place, facts)

        return await self._in_thread(act)

    async def list_dir(self, path: str) -> DirListing:
        """Entries sorted by name. What is not UTF-8 in a name is shown with backslash escapes."""
        return await self._in_thread(lambda: self._list(path))

    async def list_tree(self, path: str, after: bytes) -> TreePart:
        """A part of all that is below a directory, from behind a name on."""

        def act() -> TreePart:
            with self._root("list", path) as root:
                return trees.part(root, path, after)

        return await self._in_thread(act)

    async def write_tree(self, path: str, entries: list[TreeEntry]) -> None:
        """Write many entries below a directory, in their order."""

        def act() -> None:
            with self._root("write", path) as root:
                trees.write(root, path, entries, base=self._base)

        await self._in_thread(act)

    async def stat(self, path: str, *, follow: bool) -> FileInfo:
        """What is at the path, be it the kernel's own."""
        flags = os.O_PATH if follow else os.O_PATH | os.O_NOFOLLOW
        with self._root("stat", path) as root, closing(inroot.open_in_root(root, path, flags)) as there:
            facts = os.fstat(there)
            link = os.readlink("", dir_fd=there) if stat.S_ISLNK(facts.st_mode) else ""
            return self._describe(path, facts, link)

    async def remove(self, path: str, *, recursive: bool, missing_ok: bool) -> None:
        """Remove a file, a link or a directory. A very large tree takes several calls
        (`remove_unfinished`)."""
        try:
            await self._in_thread(lambda: self._remove(path, recursive=recursive))
        except NotFound:
            if not missing_ok:
                raise

    async def make_dir(self, path: str, *, mode: int, parents: bool, exist_ok: bool) -> FileInfo:
        """Make a directory owned by the sandbox's root."""
        return await self._in_thread(
            lambda: self._make_dir(path, mode=mode, parents=parents, exist_ok=exist_ok)
        )

    async def _in_thread(self, act: Callable[[], _T]) -> _T:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(THREADS)
        return await to_thread.run_sync(act, limiter=self._threads)

    def _make_dir(self, path: str, *, mode: int, parents: bool, exist_ok: bool) -> FileInfo:
        with self._root("make the directory", path) as root:
            upper, name = inroot.split(path)
            above = inroot.open_directory(root, upper, "make", parents=parents, owner=self._base)
            with closing(above):
                try:
                    made = inroot.make_child(above, name or ".", mode=mode & 0o7777, owner=self._base)
                except FileExistsError:
                    if not exist_ok:
                        raise
                    made = inroot.open_in_root(root, path, os.O_PATH | os.O_DIRECTORY)
            with closing(made):
                return self._describe(path, os.fstat(made))

    def _read(self, path: str, below: bytes, offset: int, size: int, *, flags: int = 0) -> FileChunk:
        place = trees.joined(path, below)
        with (
            self._root("read", path, below) as root,
            closing(inroot.open_regular(root, place, os.O_RDONLY, "read")) as source,
        ):
            facts = os.fstat(source)
            wanted = max(0, min(size, facts.st_size - offset))
            data = _read_at(source, wanted, offset, flags)
            # Where it has just been cut off it ended here, and may have grown again since.
            whole = facts.st_size if len(data) == wanted else offset + len(data)
        digest = hashlib.sha256(data).digest()
        return FileChunk(data=data, offset=offset, size=whole, mtime_ns=facts.st_mtime_ns, sha256=digest)

    def _held(self, upload: str) -> int:
        with self._root("upload to", "/") as root:
            return uploads.held(root, upload)

    def _add(self, upload: str, offset: int, data: bytes) -> int:
        with self._root("upload to", "/") as root:
            return uploads.add(root, upload, offset, data, base=self._base)

    def _list(self, path: str) -> DirListing:
        with self._root("list", path) as root:
            with closing(inroot.open_directory(root, path, "list")) as there:
                directory = inroot.reopen(there, os.O_RDONLY | os.O_DIRECTORY)
            with closing(directory):
                entries = []
                room = LIST_DIR_BYTES_MAX
                for name in _names(directory, path):
                    try:
                        facts = os.stat(name, dir_fd=directory, follow_symlinks=False)
                        link = os.readlink(name, dir_fd=directory) if stat.S_ISLNK(facts.st_mode) else ""
                    except FileNotFoundError:
                        continue
                    entries.append(self._describe(f"{path.rstrip('/')}/{name}", facts, link))
                    room -= len(entries[-1].path) + len(entries[-1].target)
                    if room < 0:
                        raise _too_many(
                            f"{path}: the paths and links in it have over {LIST_DIR_BYTES_MAX} bytes"
                        )
                return DirListing(path=path, entries=entries)

    def _remove(self, path: str, *, recursive: bool) -> None:
        with self._root("remove", path) as root:
            upper, name = inroot.split(path)
            if not name:
                raise Conflict(f"Cannot remove {path}: name an entry of a directory.", code="bad_path")
            with closing(inroot.open_directory(root, upper, "remove")) as directory:
                is_directory = stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
                if replacing.is_mounted(directory, name):
                    raise Conflict(
                        f"Cannot remove {path}: it is a mount point of the sandbox.", code="is_a_mount_point"
                    )
                if is_directory and recursive:
                    remove_tree(directory, name, path)
                elif is_directory:
                    os.rmdir(name, dir_fd=directory)
                else:
                    os.unlink(name, dir_fd=directory)

    @contextmanager
    def _root(self, doing: str, path: str, below: bytes = b"") -> Iterator[int]:
        check_path(path)
        if below:
            check_below(below)
        try:
            root = self._open_root()
        except OSError as exc:
            raise SandboxUnavailable(
                f"Cannot {doing} {path}: the sandbox is gone ({exc.strerror}).", code="sandbox_gone"
            ) from exc
        with explained(doing, trees.joined(path, below)), closing(root):
            yield root

    def _describe(self, path: str, facts: os.stat_result, link: str = "") -> FileInfo:
        kind: FileKind = "other"
        for word, test in _KINDS:
            if test(facts.st_mode):
                kind = word
        return FileInfo(
            path=shown(path),
            kind=kind,
            size=facts.st_size,
            mode=stat.S_IMODE(facts.st_mode),
            uid=self._inside(facts.st_uid),
            gid=self._inside(facts.st_gid),
            mtime_ns=facts.st_mtime_ns,
            target=shown(link),
        )

    def _inside(self, number: int) -> int:
        return number - self._base if 0 <= number - self._base < UID_RANGE else NOBODY


_KINDS: tuple[tuple[FileKind, Callable[[int], bool]], ...] = (
    ("file", stat.S_ISREG),
    ("directory", stat.S_ISDIR),
    ("symlink", stat.S_ISLNK),
)


def _names(directory: int, path: str) -> list[str]:
    names: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > LIST_DIR_MAX:
                raise _too_many(f"{path}: it has more than {LIST_DIR_MAX} entries")
    return sorted(names)


def _too_many(what: str) -> LimitExceeded:
    return LimitExceeded(
        f"Cannot list {what}.",
        code="too_many_entries",
        hint="List it with a command in the sandbox, such as ls or find.",
    )


def _read_at(source: int, size: int, offset: int, flags: int) -> bytes:
    """Bytes at an offset, fewer only where the file ends. With RWF_NOWAIT it raises _NotInMemoryError where
    that takes more than memory, or nobody can tell, as on overlayfs."""
    data = bytearray(size)
    view, held = memoryview(data), 0
    try:
        while held < size and (more := os.preadv(source, [view[held:]], offset + held, flags)):
            held += more
    except OSError as exc:
        if flags and exc.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            raise _NotInMemoryError from exc
        raise
    return bytes(view[:held])
