"""Directories between this machine and a sandbox: small files many at a time, large ones by themselves, in
flat memory.

What a sandbox says is in it is not trusted: names are checked, must come in ascending order, and are bounded
in number and bytes; `local` sees to it that nothing is written outside.
"""

from __future__ import annotations

import os
import threading
from contextlib import AsyncExitStack, closing
from pathlib import Path

import anyio
import msgspec
from anyio.to_thread import run_sync

from cloudyard.errors import CloudyardError, InvalidRequest, LimitExceeded, NotFound
from cloudyard.model import (
    MIB,
    TREE_PART_ENTRIES_MAX,
    Done,
    FileInfo,
    ListTree,
    MakeDir,
    Stat,
    TreeEntry,
    TreePart,
    WriteTree,
    check_below,
)
from cloudyard.sdk import files, local as here
from cloudyard.sdk.tasks import plain_task_group
from cloudyard.sdk.transport import Caller

FILES_IN_FLIGHT = 8  # large ones of one directory
FETCH_TRIES = 4  # of a file of a directory that changes while it is read
DOWNLOAD_ENTRIES_MAX = 1_000_000
SHARED_NAMES_BYTES_MAX = 64 * MIB  # names of files with several, which are kept until the end
SKIPPED_NAMED_MAX = 100


# What reading a file that was listed says where another process has removed or replaced it since.
_GONE = {
    "file_not_found",
    "is_a_directory",
    "kernel_file",
    "not_a_directory",
    "not_a_regular_file",
    "too_many_links",
}


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """What an upload or a download has copied."""

    files: int = 0
    directories: int = 0
    links: int = 0
    """Symbolic links, and further names of files that have several."""
    bytes: int = 0
    """Content of the files."""
    skipped: int = 0
    """Devices, FIFOs and sockets, which have no content, and mounts of the kernel's such as /proc."""
    skipped_paths: list[str] = []
    """The first of them, below the directory."""


class _Count:
    """What was copied so far, within bounds. Listings are counted in threads, files fetched in the loop."""

    def __init__(self, *, max_bytes: int | None = None, what: str = "") -> None:
        self.files = self.directories = self.links = self.bytes = 0
        self.skipped: list[bytes] = []
        self._skipped = 0
        self._max_bytes = max_bytes
        self._what = what
        self._lock = threading.Lock()

    def add(self, entry: TreeEntry, size: int = 0) -> None:
        """Count an entry. Raises LimitExceeded."""
        with self._lock:
            self._check(self.bytes + size)
            match entry.kind:
                case "file" if entry.same_as:
                    self.links += 1
                case "file":
                    self.files += 1
                case "directory":
                    self.directories += 1
                case "symlink":
                    self.links += 1
                case "other":
                    self._skip(entry.name)
            self.bytes += size

    def resize(self, old: int, new: int) -> None:
        """A file that was counted is larger or smaller by now. Raises LimitExceeded."""
        with self._lock:
            if self._max_bytes is not None:
                files.check_size(self.bytes + new - old, self._max_bytes, self._what)
            self.bytes += new - old

    def vanished(self, size: int) -> None:
        """Take back a file that was counted and was gone when it was fetched."""
        with self._lock:
            self.files -= 1
            self.bytes -= size

    def moved(self, entry: TreeEntry) -> None:
        """What was counted as another name of a file is one by itself. Raises LimitExceeded."""
        self.add(entry, entry.size)
        with self._lock:
            self.links -= 1

    def skip(self, name: bytes) -> None:
        """Count what is not copied."""
        with self._lock:
            self._skip(name)

    def _skip(self, name: bytes) -> None:
        self._skipped += 1
        if len(self.skipped) < SKIPPED_NAMED_MAX:
            self.skipped.append(name)

    def _check(self, size: int) -> None:
        if self._max_bytes is None:
            return
        files.check_size(size, self._max_bytes, self._what)
        if self.files + self.directories + self.links + self._skipped >= DOWNLOAD_ENTRIES_MAX:
            raise LimitExceeded(
                f"{self._what} has more than {DOWNLOAD_ENTRIES_MAX} entries.",
                code="too_many_entries",
                hint="Pack them into an archive, by a command in the sandbox.",
            )

    def result(self) -> Transfer:
        return Transfer(
            files=self.files,
            directories=self.directories,
            links=self.links,
            bytes=self.bytes,
            skipped=self._skipped,
            skipped_paths=[name.decode("utf-8", "backslashreplace") for name in self.skipped],
        )


async def upload(caller: Caller, sandbox: str, local: Path, *, path: str) -> Transfer:
    """Copy a local file, or a directory with all below it, into a sandbox. Links below are kept as links."""
    if not local.exists():
        raise NotFound(f"{local} cannot be uploaded: it does not exist.", code="file_not_found")
    count = _Count()
    if not local.is_dir():
        with here.explained("Reading", local), here.open_regular(local.resolve()) as opened:
            facts = os.fstat(opened.fileno())
            mode = facts.st_mode & here.PERMISSIONS
            done = await files.write(caller, sandbox, path, source=opened, size=facts.st_size, mode=mode)
        return Transfer(files=1, bytes=done.size)
    with here.explained("Reading", local):
        mode = local.stat().st_mode & here.PERMISSIONS
    await caller.ask(sandbox, MakeDir(path=path, mode=mode), FileInfo)
    source = here.Source(local)
    slots = anyio.Semaphore(FILES_IN_FLIGHT)

    gone: set[bytes] = set()

    async def one(name: bytes) -> None:
        try:
            size = await _upload_large(caller, sandbox, path, source=source, name=name)
        finally:
            slots.release()
        if size is None:
            gone.add(name)
        else:
            count.add(TreeEntry(name=name, kind="file"), size)

    async with plain_task_group() as tasks:
        batches = source.batches()
        while (batch := await run_sync(next, batches, None)) is not None:
            if batch:
                await caller.ask(sandbox, WriteTree(path=path, entries=batch), Done)
            for entry in batch:
                count.add(entry, len(entry.data or b""))
            for name in source.large:
                await slots.acquire()  # a directory of a million files is no million tasks
                tasks.start_soon(one, name)
    for at in range(0, len(source.other_names), TREE_PART_ENTRIES_MAX):
        names = source.other_names[at : at + TREE_PART_ENTRIES_MAX]
        for entry in names:
            if entry.same_as in gone:  # it may live on by this name
                await slots.acquire()
                await one(entry.name)
        names = [entry for entry in names if entry.same_as not in gone]
        await caller.ask(sandbox, WriteTree(path=path, entries=names), Done)
        for entry in names:
            count.add(entry)
    for name in source.skipped:
        count.skip(name)
    return count.result()


async def download(caller: Caller, sandbox: str, path: str, *, local: Path, max_bytes: int) -> Transfer:
    """Copy a file, or a directory with all below it, out of a sandbox. Links below are kept as links."""
    if max_bytes < 0:
        raise InvalidRequest(f"max_bytes is {max_bytes}, below zero.", code="out_of_range")
    info = await caller.ask(sandbox, Stat(path=path), FileInfo)
    if info.kind != "directory":
        what = f"{path} in {sandbox}"
        with here.explained("Writing", local), here.new_file(local) as made:
            size = await files.fetch_into(
                made, caller, sandbox, path, allow=lambda size: files.check_size(size, max_bytes, what)
            )
            made.keep(info.mode)
        return Transfer(files=1, bytes=size)
    async with AsyncExitStack() as stack:
        into = stack.enter_context(closing(await run_sync(here.Destination, local)))
        return await _Download(caller, sandbox, path, into=into, max_bytes=max_bytes).run()


class _Download:
    """One directory on its way out of a sandbox."""

    def __init__(
        self, caller: Caller, sandbox: str, path: str, *, into: here.Destination, max_bytes: int
    ) -> None:
        self._caller = caller
        self._sandbox = sandbox
        self._path = path
        self._into = into
        self._what = f"{path} in {sandbox}"
        self._count = _Count(max_bytes=max_bytes, what=self._what)
        self._slots = anyio.Semaphore(FILES_IN_FLIGHT)
        self._after = b""
        self._first_names: dict[str, bytes] = {}
        self._other_names: list[tuple[bytes, TreeEntry]] = []
        self._shared_names_bytes = 0
        self._gone: set[bytes] = set()

    async def run(self) -> Transfer:
        async with plain_task_group() as tasks:
            more = True
            while more:
                op = ListTree(path=self._path, after=self._after)
                part = await self._caller.ask(self._sandbox, op, TreePart)
                for entry in await run_sync(self._take, part):
                    await self._slots.acquire()  # a directory of a million files is no million tasks
                    tasks.start_soon(self._fetch_large, entry)
                more = part.more
        await self._fetch_instead()
        await run_sync(self._link)
        return self._count.result()

    def _take(self, part: TreePart) -> list[TreeEntry]:
        """Write what a part holds, and give the files that have to be fetched."""
        large = []
        if part.more and not part.entries:
            raise self._bad_listing(b"")
        for entry in part.entries:
            self._check(entry)
            first = self._first_name(entry)
            if first != entry.name:
                self._count.add(msgspec.structs.replace(entry, same_as=first))
                self._other_names.append((first, msgspec.structs.replace(entry, data=None)))
                continue
            self._count.add(entry, entry.size if entry.kind == "file" else 0)
            match entry.kind:
                case "directory":
                    self._into.make_directory(entry.name, entry.mode)
                case "symlink":
                    self._into.make_link(entry.name, entry.target)
                case "file" if entry.data is None:
                    large.append(entry)
                case "file":
                    with self._into.new_file(entry.name) as made:
                        made.write(entry.data or b"")
                        made.keep(entry.mode)
                case "other":
                    pass
        return large

    def _first_name(self, entry: TreeEntry) -> bytes:
        """The name under which a file came before; its own where it did not. Raises LimitExceeded."""
        if entry.kind != "file" or not entry.shared:
            return entry.name
        self._shared_names_bytes += len(entry.name)
        if self._shared_names_bytes > SHARED_NAMES_BYTES_MAX:
            raise LimitExceeded(
                f"{self._what} has too many files with several names: the names have over "
                f"{SHARED_NAMES_BYTES_MAX} bytes.",
                code="too_many_entries",
                hint="Pack them into an archive, by a command in the sandbox.",
            )
        return self._first_names.setdefault(entry.shared, entry.name)

    def _check(self, entry: TreeEntry) -> None:
        """Refuse a name that leads elsewhere or comes again, and bytes that are not those that were read."""
        try:
            check_below(entry.name)
        except InvalidRequest as exc:
            raise self._bad_listing(entry.name) from exc
        if self._after and entry.name.split(b"/") <= self._after.split(b"/"):
            raise self._bad_listing(entry.name)
        self._after = entry.name
        if entry.data is not None:
            files.check_piece(entry.data, entry.sha256, self._what)
            if len(entry.data) != entry.size:
                raise self._bad_listing(entry.name)

    async def _fetch_large(self, entry: TreeEntry) -> None:
        try:
            if not await self._fetch(entry):
                self._gone.add(entry.name)
        finally:
            self._slots.release()

    async def _fetch(self, entry: TreeEntry) -> bool:
        """Fetch a file that is counted already; false where it has vanished since it was listed."""
        counted = entry.size

        def allow(size: int) -> None:
            nonlocal counted
            self._count.resize(counted, size)
            counted = size

        for tries in reversed(range(FETCH_TRIES)):
            try:
                with self._into.new_file(entry.name) as made:
                    await files.fetch_into(
                        made, self._caller, self._sandbox, self._path, below=entry.name, allow=allow
                    )
                    made.keep(entry.mode)
                return True
            except CloudyardError as error:
                if error.code in _GONE:
                    self._count.vanished(counted)
                    return False
                if error.code != "file_changed" or not tries:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _fetch_instead(self) -> None:
        """Files whose first name vanished before it was fetched may live on by another."""
        instead: dict[bytes, bytes] = {}
        left = []
        for first, entry in self._other_names:
            if first not in self._gone:
                left.append((first, entry))
            elif first in instead:
                left.append((instead[first], entry))
            else:
                self._count.moved(entry)
                if await self._fetch(entry):
                    instead[first] = entry.name
        self._other_names = left

    def _link(self) -> None:
        for first, entry in self._other_names:
            self._into.make_other_name(first, entry.name)

    def _bad_listing(self, name: bytes) -> CloudyardError:
        return CloudyardError(
            f"{self._what} lists an entry {name[:200]!r}, which cannot be.", code="bad_listing"
        )


async def _upload_large(
    caller: Caller, sandbox: str, path: str, *, source: here.Source, name: bytes
) -> int | None:
    """Bytes that were sent; None where the file has vanished since it was listed."""
    try:
        found = source.open(name)
    except NotFound:
        return None
    with found as opened:
        mode = os.fstat(opened.fileno()).st_mode & here.PERMISSIONS
        done = await files.write_large(caller, sandbox, path, below=name, source=opened, mode=mode)
    return done.size
