"""System calls that Python has no function for: mounts and namespaces. Knows numbers and errno, and nothing
of sandboxes.

Each raises OSError with the kernel's reason and the path it was about. Namespaces belong to a thread in
Linux, so what enters one does so on a thread of its own (`on_own_thread`): no process is forked from a
threaded one for it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
CLONE_FS, CLONE_NEWNS = 0x200, 0x20000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOATIME = 0x1, 0x2, 0x4, 0x10
PR_SET_CHILD_SUBREAPER = 36

_AT_FDCWD = -100
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_OPEN_TREE_CLONE = 1
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
# From 424 on, numbers are the same on every architecture.
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 428, 429, 430, 431, 432

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, path: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)
    return result


def mount(source: str, target: str, kind: str = "", *, flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    done = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _check(done, target)


def unmount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(target.encode(), flags), target)


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    _check(_libc.pivot_root(new.encode(), old.encode()), new)


def unshare(flags: int) -> None:
    """unshare(2), for the calling thread."""
    _check(_libc.unshare(flags), "")


def enter_mount_namespace(fd: int) -> None:
    """setns(2) of the calling thread, which must share its file system information with no other thread after
    this."""
    unshare(CLONE_FS)
    _check(_libc.setns(fd, CLONE_NEWNS), "mount namespace")


def new_mount(kind: str, source: str, *, attributes: int, options: Sequence[str] = ("ro",)) -> int:
    """A mount that is attached nowhere yet, as a descriptor; `move_mount` puts it in its place.

    Args:
        kind: of the file system.
        source: the device or file.
        attributes: MOUNT_ATTR_*, of this mount.
        options: flags and NAME=VALUE, of the file system.

    Raises:
        OSError: the kernel's reason, with its own words where it gave some.
    """
    context = _check(_libc.syscall(_SYS_FSOPEN, kind.encode(), _FSOPEN_CLOEXEC), kind)
    try:
        try:
            for option in (f"source={source}", *options):
                name, equals, value = option.partition("=")
                how = _FSCONFIG_SET_STRING if equals else _FSCONFIG_SET_FLAG
                text = value.encode() if equals else None
                _check(_libc.syscall(_SYS_FSCONFIG, context, how, name.encode(), text, 0), source)
            _check(_libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0), source)
        except OSError as exc:
            said = _words(context)
            raise OSError(exc.errno, f"{exc.strerror} ({said})" if said else exc.strerror, source) from exc
        return _check(_libc.syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes), source)
    finally:
        os.close(context)


def _words(context: int) -> str:
    said: list[str] = []
    try:
        while len(said) < 8:
            said.append(os.read(context, 512).decode("utf-8", "replace").strip())
    except OSError:
        pass  # ENODATA: no more messages
    return "; ".join(said)


def clone_mount(path: str) -> int:
    """A copy of the mount at a path of this mount namespace, attached nowhere, as a descriptor."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    return _check(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags), path)


def move_mount(fd: int, target: str) -> None:
    """move_mount(2) of a mount that is attached nowhere."""
    _check(
        _libc.syscall(_SYS_MOVE_MOUNT, fd, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH), target
    )


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children, to be waited for here."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "")


def on_own_thread(work: Callable[[], T]) -> T:
    """The result of `work`, run on a thread that ends with it, so that a namespace it enters stays its
    own."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as exc:  # noqa: BLE001 - raised again by the caller's thread, right below
            failure.append(exc)

    thread = threading.Thread(target=run, name="namespace")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
