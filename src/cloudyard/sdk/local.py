"""Files of this machine that go to a sandbox or come from one, and errors that name them.

What comes from a sandbox is not trusted. Below the directory that a download was given, each directory on the
way is opened by its own name and no link is followed, so nothing that a sandbox names or links, before or
meanwhile, leads out of it. Everything here blocks; who uses it runs it in threads.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from cloudyard.errors import InvalidRequest, LimitExceeded, NotFound
from cloudyard.model import (
    TREE_INLINE_BYTES_MAX,
    TREE_PART_BYTES_MAX,
    TREE_PART_ENTRIES_MAX,
    TreeEntry,
)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BELOW = _DIRECTORY | os.O_NOFOLLOW
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SOURCE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
PERMISSIONS = 0o777  # no set-uid or set-gid bit is carried over: owners are not either
_OWNER_ALL = 0o700  # so that what is in a directory can be written, and removed again


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Errors of this machine's files, as errors that name the file.

    Raises:
        NotFound: something on the way there does not exist.
        LimitExceeded: the disk is full.
        InvalidRequest: any other reason of the kernel's.
    """
    try:
        yield
    except OSError as exc:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        reason = f"{what} {shown} on this machine failed: {(exc.strerror or str(exc)).lower()}."
        match exc.errno:
            case errno.ENOENT:
                missing = "" if path.parent.exists() else f"There is no directory {path.parent}; make it."
                raise NotFound(reason, code="local_file_not_found", hint=missing) from exc
            case errno.ENOSPC | errno.EDQUOT:
                raise LimitExceeded(reason, code="local_disk_full") from exc
            case _:
                raise InvalidRequest(reason, code="local_file") from exc


class NewFile:
    """A file that takes its place when `keep` is called, and vanishes if it is not. Holes stay holes."""

    def __init__(self, directory: int, name: bytes) -> None:
        self._directory = os.dup(directory)
        self._name = name
        self._temporary = b".%s.part" % uuid4().hex.encode()
        self._size = 0
        try:
            self._file = os.open(self._temporary, _NEW, 0o600, dir_fd=self._directory)
        except BaseException:
            os.close(self._directory)
            raise

    def write(self, data: bytes) -> None:
        """Add bytes."""
        if data != bytes(len(data)):
            view, at = memoryview(data), self._size
            while view:
                done = os.pwrite(self._file, view, at)
                view, at = view[done:], at + done
        self._size += len(data)

    def keep(self, mode: int) -> None:
        """Put it in its place, over whatever file or link is there."""
        os.ftruncate(self._file, self._size)
        os.fchmod(self._file, mode & PERMISSIONS)
        os.rename(self._temporary, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._temporary = b""

    def close(self) -> None:
        """Remove it, unless it was kept."""
        if self._temporary:
            with suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._directory)
        os.close(self._file)
        os.close(self._directory)


@contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """A new file at a path of the user's, whose links are followed but for the last name. Raises OSError."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    directory = os.open(path.parent, _DIRECTORY)
    try:
        made = NewFile(directory, os.fsencode(path.name))
    finally:
        os.close(directory)
    try:
        yield made
    finally:
        made.close()


class Destination:
    """A directory of this machine, made if need be, that a tree is written into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained("Making the directory", path):
            path.mkdir(parents=True, exist_ok=True)
            self._top = os.open(path, _DIRECTORY)

    def close(self) -> None:
        """Close what is open."""
        os.close(self._top)

    def place(self, name: bytes) -> Path:
        """Where an entry is, for messages."""
        return self.path / os.fsdecode(name)

    def make_directory(self, name: bytes, mode: int) -> None:
        """Make a directory. A link that an earlier download left there is replaced, never followed."""
        with explained("Making the directory", self.place(name)), self._above(name) as (above, own):
            try:
                os.mkdir(own, _OWNER_ALL, dir_fd=above)
            except FileExistsError:
                there = os.stat(own, dir_fd=above, follow_symlinks=False).st_mode
                if stat.S_ISDIR(there):
                    return
                if not stat.S_ISLNK(there):
                    raise
                os.unlink(own, dir_fd=above)
                os.mkdir(own, _OWNER_ALL, dir_fd=above)
            made = os.open(own, _BELOW, dir_fd=above)
            try:
                os.fchmod(made, (mode & PERMISSIONS) | _OWNER_ALL)
            finally:
                os.close(made)

    def make_link(self, name: bytes, target: bytes) -> None:
        """Make a symlink, in the place of a file or link that is there."""
        with explained("Making the link", self.place(name)), self._above(name) as (above, own):
            temporary = b".%s.part" % uuid4().hex.encode()
            os.symlink(target, temporary, dir_fd=above)
            _put(above, temporary, own)

    def make_other_name(self, first: bytes, name: bytes) -> None:
        """Make a hard link to a file that was written."""
        with (
            explained("Making the link", self.place(name)),
            self._above(first) as (source, first_own),
            self._above(name) as (above, own),
        ):
            temporary = b".%s.part" % uuid4().hex.encode()
            os.link(first_own, temporary, src_dir_fd=source, dst_dir_fd=above, follow_symlinks=False)
            _put(above, temporary, own)

    @contextmanager
    def new_file(self, name: bytes) -> Iterator[NewFile]:
        """A new file below the directory."""
        with explained("Writing", self.place(name)):
            with self._above(name) as (above, own):
                made = NewFile(above, own)
            try:
                yield made
            finally:
                made.close()

    @contextmanager
    def _above(self, name: bytes) -> Iterator[tuple[int, bytes]]:
        """The directory that an entry is in, and its own name."""
        *way, own = name.split(b"/")
        here = os.dup(self._top)
        try:
            for step in way:
                below = os.open(step, _BELOW, dir_fd=here)
                os.close(here)
                here = below
            yield here, own
        finally:
            os.close(here)


class Source:
    """A directory of this machine, as entries in batches. Links are entries and never followed."""

    def __init__(self, path: Path) -> None:
        self.large: list[bytes] = []
        """Files found in the last batch that go by themselves: their directories are in it or were before."""
        self.other_names: list[TreeEntry] = []
        """Further names of files with several, to be written when all else is."""
        self.skipped: list[bytes] = []
        """Devices, FIFOs and sockets."""
        self.path = path
        self._seen: dict[tuple[int, int], bytes] = {}

    def batches(self) -> Iterator[list[TreeEntry]]:
        """All entries, directories before what is in them."""
        batch: list[TreeEntry] = []
        room = TREE_PART_BYTES_MAX
        for name in self._names():
            entry = self._entry(name)
            size = len(entry.data or b"") if entry is not None else 0
            if size > room or len(batch) + len(self.large) >= TREE_PART_ENTRIES_MAX:
                yield batch
                batch, room, self.large = [], TREE_PART_BYTES_MAX, []
            if entry is not None:
                batch.append(entry)
                room -= size
        if batch or self.large:
            yield batch

    def open(self, name: bytes) -> BinaryIO:
        """A file below, for reading."""
        path = self.path / os.fsdecode(name)
        with explained("Reading", path):
            return open_regular(path)

    def _names(self) -> Iterator[bytes]:
        top = os.fsencode(self.path)
        for root, directories, files in os.walk(top, onerror=partial(_unreadable, top)):
            above = root[len(top) :].lstrip(b"/")
            for own in sorted([*directories, *files]):
                yield above + b"/" + own if above else own

    def _entry(self, name: bytes) -> TreeEntry | None:
        """An entry; None for what is kept for later, has no content, or has vanished since it was listed."""
        try:
            return self._read(name)
        except NotFound:
            for shared in [shared for shared, first in self._seen.items() if first == name]:
                del self._seen[shared]
            return None

    def _read(self, name: bytes) -> TreeEntry | None:
        path = self.path / os.fsdecode(name)
        with explained("Reading", path):
            facts = path.lstat()
            mode = stat.S_IMODE(facts.st_mode)
            if stat.S_ISLNK(facts.st_mode):
                return TreeEntry(name=name, kind="symlink", target=os.fsencode(os.readlink(path)))
            if stat.S_ISDIR(facts.st_mode):
                return TreeEntry(name=name, kind="directory", mode=mode & (PERMISSIONS | stat.S_ISVTX))
            if not stat.S_ISREG(facts.st_mode):
                self.skipped.append(name)
                return None
            if facts.st_nlink > 1:
                first = self._seen.setdefault((facts.st_dev, facts.st_ino), name)
                if first != name:
                    self.other_names.append(TreeEntry(name=name, kind="file", same_as=first))
                    return None
            data = None
            if facts.st_size <= TREE_INLINE_BYTES_MAX:
                with open_regular(path) as source:
                    data = source.read(TREE_INLINE_BYTES_MAX + 1)
            if data is None or len(data) > TREE_INLINE_BYTES_MAX:
                self.large.append(name)
                return None
            digest = sha256(data).digest()
            return TreeEntry(name=name, kind="file", mode=mode & PERMISSIONS, data=data, sha256=digest)


def open_regular(path: Path) -> BinaryIO:
    """A regular file for reading; a FIFO never blocks it. Raises OSError, InvalidRequest."""
    descriptor = os.open(path, _SOURCE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidRequest(f"{path} cannot be uploaded: it is no regular file.", code="not_a_file")
    return open(descriptor, "rb")


def _put(directory: int, temporary: bytes, name: bytes) -> None:
    try:
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        with suppress(OSError):  # there still if it failed, or if both are names of one file
            os.unlink(temporary, dir_fd=directory)


def _unreadable(top: bytes, error: OSError) -> None:
    """For os.walk, which would leave out what it cannot read. Only what has vanished since it was listed may
    be left out."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and error.filename != top:
        return
    with explained("Reading", Path(os.fsdecode(error.filename))):
        raise error
