"""Directories between this machine and a sandbox: small files many at a time, large ones by themselves, in
flat memory.

What a sandbox says is in it is not trusted: names are checked, must come in ascending order, and are bounded
in number and bytes; `local` sees to it that nothing is written outside.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, closing
from pathlib import Path

import anyio
import msgspec
from anyio.to_thread import run_sync

from cloudyard.errors import CloudyardError, InvalidRequest, LimitExceeded, NotFound
from cloudyard.model import (
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
DOWNLOAD_ENTRIES_MAX = 1_000_000
SKIPPED_NAMED_MAX = 100


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
    """What was copied so far, within bounds."""

    def __init__(self, *, max_bytes: int | None = None, what: str = "") -> None:
        self.files = self.directories = self.links = self.bytes = 0
        self.skipped: list[bytes] = []
        self._skipped = 0
        self._max_bytes = max_bytes
        self._what = what

    def add(self, entry: TreeEntry, size: int = 0) -> None:
        """Count an entry. Raises LimitExceeded."""
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
                self.skip(entry.name)
        self.bytes += size
        if self._max_bytes is not None:
            files.check_size(self.bytes, self._max_bytes, self._what)
            if self.files + self.directories + self.links + self._skipped > DOWNLOAD_ENTRIES_MAX:
                raise LimitExceeded(
                    f"{self._what} has more than {DOWNLOAD_ENTRIES_MAX} entries.",
                    code="too_many_entries",
                    hint="Pack them into an archive, by a command in the sandbox.",
                )

    def vanished(self, entry: TreeEntry) -> None:
        """Take back a file that was counted and was gone when it was fetched."""
        self.files -= 1
        self.bytes -= entry.size

    def skip(self, name: bytes) -> None:
        """Count what is not copied."""
        self._skipped += 1
        if len(self.skipped) < SKIPPED_NAMED_MAX:
            self.skipped.append(name)

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

    async def one(name: bytes) -> None:
        try:
            size = await _upload_large(caller, sandbox, path, source=source, name=name)
        finally:
            slots.release()
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
    for first in range(0, len(source.other_names), TREE_PART_ENTRIES_MAX):
        names = source.other_names[first : first + TREE_PART_ENTRIES_MAX]
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
        with here.explained("Writing", local), here.new_file(local) as made:
            size = await files.fetch_into(made, caller, sandbox, path, max_bytes=max_bytes)
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
        self._max_bytes = max_bytes
        self._count = _Count(max_bytes=max_bytes, what=f"{path} in {sandbox}")
        self._slots = anyio.Semaphore(FILES_IN_FLIGHT)
        self._after = b""
        self._first_names: dict[str, bytes] = {}
        self._other_names: list[tuple[bytes, bytes]] = []

    async def run(self) -> Transfer:
        async with plain_task_group() as tasks:
            more = True
            while more:
                op = ListTree(path=self._path, after=self._after)
                part = await self._caller.ask(self._sandbox, op, TreePart)
                for entry in await run_sync(self._take, part):
                    await self._slots.acquire()
                    tasks.start_soon(self._fetch, entry)
                more = part.more
        await run_sync(self._link)
        return self._count.result()

    def _take(self, part: TreePart) -> list[TreeEntry]:
        """Write what a part holds, and give the files that have to be fetched."""
        large = []
        if part.more and not part.entries:
            raise self._bad_listing(b"")
        for entry in part.entries:
            self._check(entry)
            other = self._first_names.setdefault(entry.shared, entry.name) if entry.shared else entry.name
            if entry.kind == "file" and other != entry.name:
                self._count.add(msgspec.structs.replace(entry, same_as=other))
                self._other_names.append((other, entry.name))
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
            files.check_piece(entry.data, entry.sha256, f"{self._path} in {self._sandbox}")
            if len(entry.data) != entry.size:
                raise self._bad_listing(entry.name)

    async def _fetch(self, entry: TreeEntry) -> None:
        try:
            with self._into.new_file(entry.name) as made:
                await files.fetch_into(
                    made,
                    self._caller,
                    self._sandbox,
                    self._path,
                    below=entry.name,
                    max_bytes=self._max_bytes,
                )
                made.keep(entry.mode)
        except NotFound as error:
            if error.code != "file_not_found":
                raise
            self._count.vanished(entry)  # since it was listed
        finally:
            self._slots.release()

    def _link(self) -> None:
        for first, name in self._other_names:
            self._into.make_other_name(first, name)

    def _bad_listing(self, name: bytes) -> CloudyardError:
        return CloudyardError(
            f"{self._path} in {self._sandbox} lists an entry {name[:200]!r}, which cannot be.",
            code="bad_listing",
        )


async def _upload_large(caller: Caller, sandbox: str, path: str, *, source: here.Source, name: bytes) -> int:
    with source.open(name) as opened:
        mode = os.fstat(opened.fileno()).st_mode & here.PERMISSIONS
        done = await files.write_large(caller, sandbox, path, below=name, source=opened, mode=mode)
    return done.size
