"""A directory with all below it, inside another root: read in parts, and many entries written at once.

Nothing is kept between two parts. A part begins after a name, which need not exist any more, and goes on in
the order of names: directories before what is in them. No link is followed below the top when reading;
whatever is swapped meanwhile, all that is read lies below the top. Writing follows links as the sandbox would
itself.

Everything here blocks, within the bounds of one part; `files` runs it in threads.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress

from cloudyard.edge.host import inroot, replacing, uploads
from cloudyard.edge.host.inroot import closing, explained
from cloudyard.errors import Conflict, Forbidden, LimitExceeded
from cloudyard.model import (
    PATH_BYTES_MAX,
    TREE_DIR_MAX,
    TREE_INLINE_BYTES_MAX,
    TREE_PART_BYTES_MAX,
    TREE_PART_ENTRIES_MAX,
    FileKind,
    TreeEntry,
    TreePart,
)

PART_S = 5.0  # after which a part ends with what it has
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_MODE = 0o7777


def part(root: int, path: str, after: bytes) -> TreePart:
    """The entries that follow `after`, as many as one part may carry.

    Raises:
        Forbidden: the directory is the kernel's.
        LimitExceeded: a directory has more than TREE_DIR_MAX entries, or a path is too long.
        OSError: the kernel refused.
    """
    entries: list[TreeEntry] = []
    room = TREE_PART_BYTES_MAX
    give_up_at = time.monotonic() + PART_S
    with closing(inroot.open_directory(root, path, "list")) as top:
        walk = _Walk(top, path, after)
        try:
            for entry in walk.entries():
                room -= len(entry.data or b"") + len(entry.name) + len(entry.target)
                late = time.monotonic() > give_up_at
                if entries and (room < 0 or late or len(entries) == TREE_PART_ENTRIES_MAX):
                    return TreePart(entries=entries, more=True)
                entries.append(entry)
        finally:
            walk.close()
    return TreePart(entries=entries, more=False)


def write(root: int, path: str, entries: list[TreeEntry], *, base: int) -> None:
    """Write entries below a directory, one after the other.

    Raises:
        CloudyardError: an entry could not be written; those before it were.
    """
    for entry in entries:
        place = joined(path, entry.name)
        with explained("write", place):
            match entry.kind:
                case "directory":
                    _make_directory(root, place, entry.mode, base)
                case "symlink":
                    _make_link(root, place, entry.target, base)
                case _ if entry.same_as:
                    _make_other_name(root, joined(path, entry.same_as), place, base)
                case _:
                    _write_file(root, place, entry, base)


def joined(path: str, below: bytes) -> str:
    """A path of the sandbox and a name below it, which may hold any bytes. For system calls only."""
    return f"{path.rstrip('/')}/{os.fsdecode(below)}" if below else path


class _Level:
    """A directory on the way: the last name in it that was dealt with, and those still to come, the next one
    last; None where it is to be listed, for the first time or anew."""

    __slots__ = ("after", "name", "pending")

    def __init__(self, name: bytes, after: bytes) -> None:
        self.name = name
        self.after = after
        self.pending: list[bytes] | None = None


class _Walk:
    """All entries after a name. One directory is open at a time, found by its path from the top: one that was
    moved or swapped for a link meanwhile has nothing more in it."""

    def __init__(self, top: int, path: str, after: bytes) -> None:
        self._top = top
        self._path = path
        self._here: tuple[bytes, int] | None = None
        parts = after.split(b"/") if after else []
        self._levels = [_Level(b"/".join(parts[:depth]), part) for depth, part in enumerate([*parts, b""])]

    def close(self) -> None:
        """Close what is open."""
        if self._here is not None:
            os.close(self._here[1])
            self._here = None

    def entries(self) -> Iterator[TreeEntry]:
        """The entries. Raises LimitExceeded."""
        while self._levels:
            level = self._levels[-1]
            if level.pending is None:
                level.pending = self._names(level)
            if not level.pending:
                self._levels.pop()
                continue
            own = level.after = level.pending.pop()
            name = b"/".join((level.name, own)) if level.name else own
            if len(name) >= PATH_BYTES_MAX:
                raise LimitExceeded(
                    f"Cannot list {self._path}: a path below it has more than {PATH_BYTES_MAX - 1} bytes.",
                    code="name_too_long",
                    hint="Pack what is so deep into an archive, by a command in the sandbox.",
                )
            try:
                directory = self._enter(level.name)
                entry = self._entry(directory, own, name)
            except (OSError, Conflict):  # gone or swapped since it was listed
                continue
            yield entry
            if entry.kind == "directory":
                self._levels.append(_Level(name, b""))

    def _enter(self, name: bytes) -> int:
        if self._here is None or self._here[0] != name:
            opened = inroot.open_below(self._top, os.fsdecode(name) or ".", _DIRECTORY)
            self.close()
            self._here = (name, opened)
        return self._here[1]

    def _names(self, level: _Level) -> list[bytes]:
        found: list[bytes] = []
        try:
            directory = self._enter(level.name)
        except OSError:
            return found
        with os.scandir(directory) as entries:
            for count, entry in enumerate(entries):
                if count >= TREE_DIR_MAX:
                    raise LimitExceeded(
                        f"Cannot list {inroot.shown(joined(self._path, level.name))}: it has more than "
                        f"{TREE_DIR_MAX} entries.",
                        code="too_many_entries",
                        hint="Pack it into an archive, by a command in the sandbox.",
                    )
                if (name := os.fsencode(entry.name)) > level.after:
                    found.append(name)
        held = len(found)
        for other in reversed(self._levels):
            if other.pending is not None:
                held += len(other.pending)
                if held > TREE_DIR_MAX:  # a sandbox could make us hold as many for each level
                    other.pending = None
        return sorted(found, reverse=True)

    def _entry(self, directory: int, own: bytes, name: bytes) -> TreeEntry:
        facts = os.stat(own, dir_fd=directory, follow_symlinks=False)
        kind, size, target, data = _kind(facts.st_mode), 0, b"", None
        match kind:
            case "symlink":
                target = os.readlink(own, dir_fd=directory)
            case "directory" | "file":
                with closing(inroot.open_below(directory, os.fsdecode(own), os.O_PATH)) as there:
                    facts = os.fstat(there)
                    kind = _kind(facts.st_mode)
                    try:
                        inroot.check_file_system(there, self._path, "list")
                    except Forbidden:
                        kind = "other"  # a mount of the kernel's
                    if kind == "file":
                        size, data = facts.st_size, _small(there, facts.st_size)
            case "other":
                pass
        return TreeEntry(
            name=name,
            kind=kind,
            mode=stat.S_IMODE(facts.st_mode),
            size=size,
            mtime_ns=facts.st_mtime_ns,
            data=data,
            sha256=b"" if data is None else hashlib.sha256(data).digest(),
            target=target,
            shared=_identity(facts) if kind == "file" and facts.st_nlink > 1 else "",
        )


def _kind(mode: int) -> FileKind:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def _identity(facts: os.stat_result) -> str:
    """A word for a file and its content: the number alone may belong to another a moment later."""
    return f"{facts.st_dev}:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}"


def _small(there: int, size: int) -> bytes | None:
    """The content of a small file; None where it is large or just being written."""
    if size > TREE_INLINE_BYTES_MAX:
        return None
    with closing(inroot.reopen(there, os.O_RDONLY)) as source:
        data = os.pread(source, size + 1, 0)
    return data if len(data) == size else None


def _make_directory(root: int, place: str, mode: int, base: int) -> None:
    upper, name = inroot.split(place)
    with closing(inroot.open_directory(root, upper, "write", parents=True, owner=base)) as above:
        try:
            made = inroot.make_child(above, name, mode=mode & _MODE, owner=base)
        except FileExistsError:
            made = inroot.open_in_root(root, place, os.O_PATH | os.O_DIRECTORY)
        os.close(made)


def _write_file(root: int, place: str, entry: TreeEntry, base: int) -> None:
    data = entry.data or b""
    uploads.check_data(data, entry.sha256, place)
    with replacing.find_target(root, place, parents=True, base=base) as target:
        replacing.replace(
            target, place, lambda made: replacing.write_all(made, data), mode=entry.mode & _MODE, base=base
        )


def _make_link(root: int, place: str, to: bytes, base: int) -> None:
    upper, name = inroot.split(place)
    with closing(inroot.open_directory(root, upper, "write", parents=True, owner=base)) as directory:
        temporary = replacing.temporary_name()
        os.symlink(to, temporary, dir_fd=directory)
        try:
            os.chown(temporary, base, base, dir_fd=directory, follow_symlinks=False)
            _put(directory, temporary, name)
        finally:
            replacing.unlink_quietly(temporary, directory)


def _make_other_name(root: int, first: str, place: str, base: int) -> None:
    """A hard link. The first name is not followed if it is a link by now."""
    first_upper, first_name = inroot.split(first)
    upper, name = inroot.split(place)
    with (
        closing(inroot.open_directory(root, first_upper, "write")) as source,
        closing(inroot.open_directory(root, upper, "write", parents=True, owner=base)) as directory,
    ):
        temporary = replacing.temporary_name()
        inroot.check_regular(os.stat(first_name, dir_fd=source, follow_symlinks=False).st_mode, first, "link")
        os.link(first_name, temporary, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
        try:
            _put(directory, temporary, name)
        finally:
            replacing.unlink_quietly(temporary, directory)  # a rename onto the same file leaves it


def _put(directory: int, temporary: str, name: str) -> None:
    """Rename onto the name, unless something is mounted there: from outside that would detach it."""
    with suppress(FileNotFoundError):
        if replacing.is_mounted(directory, name):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
