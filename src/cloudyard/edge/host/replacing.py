"""Replacing a file inside another root in one move: a hidden temporary file beside it, then a rename.

The new file has owner and mode of the one it replaces, or belongs to the root of the sandbox. A link is
followed to where it leads. A file that is a mount point cannot be moved and is written in place.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cloudyard.edge.host import inroot
from cloudyard.edge.host.inroot import closing
from cloudyard.errors import Conflict

UID_RANGE = 65_536  # of one sandbox
_NEW_MODE = 0o644
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Target:
    """Where a write goes: an entry of an open directory, with what is there now."""

    directory: int
    name: str
    old: os.stat_result | None
    mounted: bool


@contextmanager
def find_target(root: int, path: str, *, parents: bool, base: int) -> Iterator[Target]:
    """The place that a write to `path` replaces, links followed.

    Raises:
        Conflict: something is there that is no regular file.
        OSError: the kernel refused.
    """
    place = path
    for _ in range(inroot.LINKS_MAX):
        upper, name = inroot.split(place)
        if not name or place.endswith("/"):
            raise Conflict(f"Cannot write {inroot.shown(path)}: it names a directory.", code="is_a_directory")
        with closing(inroot.open_directory(root, upper, "write", parents=parents, owner=base)) as directory:
            old: os.stat_result | None = None
            try:
                old = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISLNK(old.st_mode):
                    link = os.readlink(name, dir_fd=directory)
                    place = link if link.startswith("/") else f"{upper}/{link}"
                    continue
                inroot.check_regular(old.st_mode, path, "write")
                mounted = is_mounted(directory, name)
            except FileNotFoundError:
                old, mounted = None, False
            yield Target(directory, name, old, mounted=mounted)
            return
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def replace(
    target: Target, path: str, fill: Callable[[int], None], *, mode: int | None, base: int
) -> os.stat_result:
    """Make the target's new content by `fill(descriptor)` and put it in its place. Gives what stat says of
    it.

    Raises:
        Conflict: the target has become something else than a regular file.
        OSError: the kernel refused; the target is as it was, but for one that was written in place.
    """
    if target.mounted:
        return _in_place(target, path, fill, mode=mode)
    temporary = temporary_name()
    with closing(os.open(temporary, _NEW_FILE, 0o600, dir_fd=target.directory)) as made:
        try:
            os.fchown(made, base, base)  # at once: what a killed edge leaves can be removed inside
            fill(made)
            set_owner(made, target, mode=mode, base=base)
            os.rename(temporary, target.name, src_dir_fd=target.directory, dst_dir_fd=target.directory)
        except BaseException:
            unlink_quietly(temporary, target.directory)
            raise
        return os.fstat(made)


def temporary_name() -> str:
    """A new hidden name for what is to be renamed."""
    return f".cloudyard-{secrets.token_hex(8)}"


def set_owner(made: int, target: Target, *, mode: int | None, base: int) -> None:
    """Owner and mode of a new file: those of what it replaces, or the sandbox's root and 0644. Raises
    OSError."""
    uid, gid, bits = base, base, _NEW_MODE
    if target.old is not None:
        bits = stat.S_IMODE(target.old.st_mode)
        if 0 <= target.old.st_uid - base < UID_RANGE and 0 <= target.old.st_gid - base < UID_RANGE:
            uid, gid = target.old.st_uid, target.old.st_gid
    os.fchown(made, uid, gid)
    os.fchmod(made, bits if mode is None else mode & 0o7777)  # last: a change of owner clears set-uid


def is_mounted(directory: int, name: str) -> bool:
    """Whether an entry is a mount point. Ask before a rename or unlink from outside: the kernel would detach
    the mount, for it refuses only within the caller's own mount namespace. Raises OSError."""
    try:
        os.close(inroot.open_child(directory, name, os.O_PATH))
    except OSError as exc:
        if exc.errno == errno.EXDEV:
            return True
        raise
    return False


def write_all(target: int, data: bytes, offset: int = 0) -> None:
    """Write every byte at the offset. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(target, view, offset)
        view, offset = view[done:], offset + done


def copy_all(source: int, target: int, size: int) -> None:
    """Copy the first bytes of a file, however it grows meanwhile. Raises OSError."""
    for offset in range(0, size, inroot.BLOCK_BYTES):
        write_all(target, os.pread(source, min(inroot.BLOCK_BYTES, size - offset), offset), offset)


def unlink_quietly(name: str, directory: int) -> None:
    """Unlink what is ours to tidy up; that it is gone already is fine, and what hinders it was reported
    before."""
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:
        return


def _in_place(target: Target, path: str, fill: Callable[[int], None], *, mode: int | None) -> os.stat_result:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing(os.open(target.name, flags, dir_fd=target.directory)) as there:
        inroot.check_regular(os.fstat(there).st_mode, path, "write")
        inroot.check_file_system(there, path, "write")
        with closing(inroot.reopen(there, os.O_WRONLY | os.O_TRUNC)) as opened:
            fill(opened)
            if mode is not None:
                os.fchmod(opened, mode & 0o7777)
            return os.fstat(opened)
