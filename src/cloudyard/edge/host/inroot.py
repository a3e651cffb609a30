"""Paths inside another root, resolved by the kernel: openat2 with RESOLVE_IN_ROOT, and what builds on it.

An absolute path, a link and `..` mean here what they mean to a process whose root is the given directory; no
race with a process inside leads out of it. Everything else works on descriptors so opened, never on a path
again.

This file knows system calls and errno, no sandbox. It blocks as its calls do: on local disks for
microseconds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cloudyard.errors import (
    CloudyardError,
    Conflict,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    YardUnavailable,
)

LINKS_MAX = 40  # as the kernel has it
RACES_MAX = 200  # tries of one open that renames elsewhere on the machine disturb,
RACES_MAX_S = 0.05  # and how long they may take: a sandbox can make a path slow and rename all the while
BLOCK_BYTES = 1 << 20

_NR_OPENAT2 = 437
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH, _IN_ROOT = 0x01, 0x02, 0x04, 0x08, 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_O_PATH_DIR = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC

# Where files of a sandbox may lie. Anything else (proc, sysfs, cgroup, devpts, ...) is the kernel's own.
_FILE_SYSTEMS = {
    0x794C7630: "overlay",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xE0F5E1E2: "erofs",
    0x6969: "nfs",
}

_BY_ERRNO: dict[int, tuple[type[CloudyardError], str, str]] = {
    errno.ENOENT: (NotFound, "file_not_found", ""),
    errno.ENOTDIR: (Conflict, "not_a_directory", ""),
    errno.EISDIR: (Conflict, "is_a_directory", "Name a file in it."),
    errno.EEXIST: (Conflict, "exists", ""),
    errno.ENOTEMPTY: (Conflict, "directory_not_empty", "Pass recursive=True to remove what is in it too."),
    errno.ELOOP: (Conflict, "too_many_links", "The path goes through a loop of symbolic links."),
    errno.EBUSY: (Conflict, "is_a_mount_point", "A mount point cannot be replaced or removed."),
    errno.EXDEV: (Conflict, "is_a_mount_point", "A mount point cannot be replaced or removed."),
    errno.ETXTBSY: (Conflict, "program_running", "Stop the program, or write to another path and rename."),
    errno.EAGAIN: (Conflict, "keeps_changing", "Something renames directories on this path all the time."),
    errno.EACCES: (Forbidden, "permission_denied", ""),
    errno.EPERM: (Forbidden, "permission_denied", "It may be immutable or the kernel's own."),
    errno.EROFS: (Forbidden, "read_only", "Write to a directory that is not mounted read-only."),
    errno.ENOSPC: (LimitExceeded, "disk_full", "Remove files in the sandbox."),
    errno.EDQUOT: (LimitExceeded, "disk_full", "Remove files in the sandbox."),
    errno.EFBIG: (LimitExceeded, "file_too_large", ""),
    errno.EMLINK: (LimitExceeded, "too_many_entries", ""),
    errno.ENAMETOOLONG: (InvalidRequest, "name_too_long", "A name has at most 255 bytes, a path 4,095."),
    errno.EINVAL: (InvalidRequest, "bad_path", ""),
    errno.EMFILE: (YardUnavailable, "descriptors_used_up", "The edge has too many files open; try again."),
    errno.ENFILE: (YardUnavailable, "descriptors_used_up", "The machine has too many files open; try again."),
}


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_HOW_SIZE = ctypes.c_size_t(ctypes.sizeof(_OpenHow))


class _Statfs(ctypes.Structure):
    _fields_ = (("f_type", ctypes.c_long), ("rest", ctypes.c_byte * 240))


@contextmanager
def explained(doing: str, path: str) -> Iterator[None]:
    """Turn an OSError about a path of the sandbox into our error, with the kernel's reason.

    Args:
        doing: what was attempted, such as "write".
        path: on what, as the user named it.
    """
    try:
        yield
    except OSError as exc:
        number = exc.errno or 0
        cls, code, hint = _BY_ERRNO.get(number, (CloudyardError, "file_failed", ""))
        reason = exc.strerror or os.strerror(number)
        raise cls(f"Cannot {doing} {shown(path)}: {reason}.", code=code, hint=hint) from exc


def shown(path: str) -> str:
    """The path in UTF-8, for messages and listings: bytes that are none become backslash escapes."""
    return path if path.isascii() else os.fsencode(path).decode("utf-8", "backslashreplace")


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """The descriptor, closed on leaving."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_in_root(root: int, path: str, flags: int) -> int:
    """Open a path as a process with that root would. Raises OSError."""
    return _openat2(root, path, flags, _IN_ROOT | _NO_MAGICLINKS)


def open_child(directory: int, name: str, flags: int) -> int:
    """Open an entry of a directory, neither through a link nor across a mount (EXDEV). Raises OSError."""
    return _openat2(directory, name, flags | os.O_NOFOLLOW, _BENEATH | _NO_XDEV | _NO_MAGICLINKS)


def open_below(directory: int, path: str, flags: int) -> int:
    """Open a relative path below a directory, through no link at all; mounts are entered. Raises OSError."""
    return _openat2(directory, path, flags | os.O_NOFOLLOW, _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS)


def reopen(descriptor: int, flags: int) -> int:
    """Open what an O_PATH descriptor stands for, whatever its path is by now. Raises OSError."""
    return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)


def open_regular(root: int, path: str, flags: int, doing: str) -> int:
    """Open a regular file on a disk; never a FIFO, a device or a file of the kernel's.

    Raises:
        Conflict: it is no regular file.
        Forbidden: it is the kernel's.
        OSError: the kernel refused.
    """
    with closing(open_in_root(root, path, os.O_PATH)) as there:
        check_regular(os.fstat(there).st_mode, path, doing)
        check_file_system(there, path, doing)
        return reopen(there, flags)


def open_directory(root: int, path: str, doing: str, *, parents: bool = False, owner: int = 0) -> int:
    """Open a directory (O_PATH) on a disk; make it and its parents, owned by `owner`, if `parents` is true.

    Raises:
        Forbidden: it is the kernel's.
        OSError: the kernel refused.
    """
    try:
        found = open_in_root(root, path, _O_PATH_DIR)
    except FileNotFoundError:
        if not parents:
            raise
        found = _make_parents(root, path, doing, owner)
    try:
        check_file_system(found, path, doing)
    except BaseException:
        os.close(found)
        raise
    return found


def make_child(directory: int, name: str, *, mode: int, owner: int) -> int:
    """Make a directory in a directory and open it (O_RDONLY). Raises OSError, FileExistsError too."""
    os.mkdir(name, 0o700, dir_fd=directory)
    made = open_child(directory, name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if os.fstat(made).st_uid == os.geteuid():  # else someone inside has put another in its place
            os.fchown(made, owner, owner)
            os.fchmod(made, mode)
    except BaseException:
        os.close(made)
        raise
    return made


def split(path: str) -> tuple[str, str]:
    """Directory and last name of a path. The name is empty where the path can only be a directory."""
    directory, _, name = path.rstrip("/").rpartition("/")
    return (path, "") if name in ("", ".", "..") else (directory or "/", name)


def check_regular(mode: int, path: str, doing: str) -> None:
    """Refuse what is no regular file.

    Raises:
        Conflict: it is something else; the message says what.
    """
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise Conflict(f"Cannot {doing} {shown(path)}: it is a directory.", code="is_a_directory")
    what = next((word for test, word in _SPECIAL if test(mode)), "no regular file")
    raise Conflict(
        f"Cannot {doing} {shown(path)}: it is {what}.",
        code="not_a_regular_file",
        hint="Use a command in the sandbox for anything that is no regular file.",
    )


def file_system(descriptor: int) -> str:
    """The kind of file system it is on: by name where files of a sandbox may lie there, else by number.
    Raises OSError."""
    buffer = _Statfs()
    if _libc.fstatfs(descriptor, ctypes.byref(buffer)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    number = buffer.f_type & 0xFFFFFFFF
    return _FILE_SYSTEMS.get(number, f"{number:#x}")


def check_file_system(descriptor: int, path: str, doing: str) -> None:
    """Refuse what lies on a file system of the kernel's, such as /proc.

    Raises:
        Forbidden: it does.
    """
    kind = file_system(descriptor)
    if kind not in _FILE_SYSTEMS.values():
        raise Forbidden(
            f"Cannot {doing} {shown(path)}: it is the kernel's (file system {kind}).",
            code="kernel_file",
            hint="Use a command in the sandbox for /proc, /sys and the like.",
        )


_SPECIAL = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a symbolic link"),
)


def _make_parents(root: int, path: str, doing: str, owner: int) -> int:
    here = open_in_root(root, "/", _O_PATH_DIR)
    walked = ""
    for name in path.split("/"):
        if not name:
            continue
        walked += f"/{name}"
        try:
            try:
                below = open_in_root(root, walked, _O_PATH_DIR)
            except FileNotFoundError:
                check_file_system(here, walked, doing)
                try:
                    below = make_child(here, name, mode=0o755, owner=owner)
                except FileExistsError:  # made by another meanwhile, or a link to nowhere
                    below = open_in_root(root, walked, _O_PATH_DIR)
        finally:
            os.close(here)
        here = below
    return here


def _openat2(directory: int, path: str, flags: int, resolve: int) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    raw = os.fsencode(path)
    give_up_at, number = 0.0, errno.EAGAIN
    for _ in range(RACES_MAX):
        opened: int = _libc.syscall(
            _NR_OPENAT2, directory, ctypes.c_char_p(raw), ctypes.byref(how), _HOW_SIZE
        )
        if opened >= 0:
            return opened
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
        now = time.monotonic()
        give_up_at = give_up_at or now + RACES_MAX_S
        if now > give_up_at:
            break
    raise OSError(number, os.strerror(number), path)
