"""Small trials of what the kernel lets us do, each in a process and mount namespace of its own that vanish
with it.

Run as `python -m cloudyard.edge.host.trial DIRECTORY`; prints one JSON object of reasons, empty where a trial
went well. Knows system calls only. The container backend does the same for real, in C and with pools; this is
for `doctor`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_PRIVATE_RECURSIVE = 0x44000
MS_RDONLY = 1
MNT_DETACH = 2
AT_EMPTY_PATH, AT_FDCWD = 0x1000, -100
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_IDMAP = 0x00100000
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
BASE_UID = 1_999_962_112  # a range of 65,536 that nobody is given: above systemd's and below the sandboxes'
RANGE = 65_536

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def call(what: str, function: Callable[..., int], *args: Any) -> int:
    """A system call's result.

    Raises:
        OSError: it failed; the message says what was attempted.
    """
    result = function(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *args: Any) -> int:
    """The same for a call that libc does not wrap."""
    return call(what, _libc.syscall, ctypes.c_long(number), *args)


def mount(kind: str, source: str, target: str, *, flags: int = 0, options: str = "") -> None:
    """mount(2), whose error names the kind and the target."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    call(f"mounting {kind} on {target}", _libc.mount, *arguments)


def user_namespace() -> int:
    """A descriptor of a new user namespace with RANGE ids from BASE_UID, which no process stays in."""
    made_read, made_write = os.pipe()
    gone_read, gone_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gone_write)
        failed = _libc.unshare(CLONE_NEWUSER)
        os.write(made_write, bytes([ctypes.get_errno() if failed else 0]))
        os.read(gone_read, 1)
        os._exit(0)
    os.close(gone_read)
    try:
        if number := os.read(made_read, 1)[0]:
            raise OSError(number, f"making a user namespace: {os.strerror(number)}")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text(f"0 {BASE_UID} {RANGE}")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(gone_write)
        os.waitpid(child, 0)
        os.close(made_read)
        os.close(made_write)


def mount_erofs(image: str, target: str) -> tuple[str, str]:
    """Mount an image straight from its file, or through a loop device: which of them worked, and why not the
    first."""
    try:
        mount("erofs", image, target, flags=MS_RDONLY)
    except OSError as exc:
        direct = str(exc.strerror) if exc.errno != errno.ENOTBLK else "this kernel mounts no EROFS from a file"
    else:
        return "direct", ""
    done = subprocess.run(
        ["mount", "-t", "erofs", "-o", "ro,loop", image, target],
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    if done.returncode == 0:
        return "loop", direct
    return "none", f"{direct}; by loop device: {done.stderr.decode(errors='replace').strip()}"


def idmapped(source: str, target: str, userns: int) -> None:
    """Mount a copy of what is at `source` with ids shifted as the namespace says."""
    tree = syscall(
        f"cloning the mount {source}",
        SYS_OPEN_TREE,
        AT_FDCWD,
        source.encode(),
        ctypes.c_uint(OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC),
    )
    attr = _MountAttr(attr_set=MOUNT_ATTR_IDMAP, userns_fd=userns)
    size = ctypes.c_size_t(ctypes.sizeof(attr))
    syscall(
        f"shifting the ids of {source}", SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, ctypes.byref(attr), size
    )
    syscall(
        f"moving it to {target}",
        SYS_MOVE_MOUNT,
        tree,
        b"",
        AT_FDCWD,
        target.encode(),
        MOVE_MOUNT_F_EMPTY_PATH,
    )
    os.close(tree)


def run(directory: Path) -> dict[str, str]:
    """Every trial, in this process, which must be one that may be thrown away. `directory` is on the disk of
    the layers: whether EROFS can mount a file depends on the file system that holds it (tmpfs cannot)."""
    found = dict.fromkeys(("erofs", "erofs_reason", "userns_reason", "idmap_reason", "overlay_reason"), "")
    found["erofs"] = "untried"
    call("making a mount namespace", _libc.unshare, CLONE_NEWNS)
    call("making mounts private", _libc.mount, None, b"/", None, ctypes.c_ulong(MS_PRIVATE_RECURSIVE), None)
    image = str(directory / "image.erofs")
    scratch = directory / "scratch"
    scratch.mkdir()
    mount("tmpfs", "tmpfs", str(scratch), options="mode=700")
    for name in ("tree", "layer", "shifted", "root"):
        (scratch / name).mkdir()
    for name in (
        "upper",
        "work",
    ):  # on the disk, where writable layers are: overlay takes not every file system there
        (directory / name).mkdir()
    (scratch / "tree" / "file").write_text("x")
    try:
        made = subprocess.run(
            ["mkfs.erofs", "--quiet", image, str(scratch / "tree")],
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        if made.returncode:
            found["erofs_reason"] = f"mkfs.erofs: {made.stderr.decode(errors='replace').strip()[:200]}"
    except FileNotFoundError:
        found["erofs_reason"] = "mkfs.erofs is missing, which makes the image for the trial"
    userns = -1
    try:
        userns = user_namespace()
    except OSError as exc:
        found["userns_reason"] = str(exc.strerror)
    layer = str(scratch / "layer")
    if not found["erofs_reason"]:
        found["erofs"], found["erofs_reason"] = mount_erofs(image, layer)
    if found["erofs"] not in ("direct", "loop") or userns < 0:
        found["idmap_reason"] = found["overlay_reason"] = "not tried, for want of what is said above"
        return found
    try:
        idmapped(layer, str(scratch / "shifted"), userns)
    except OSError as exc:
        found["idmap_reason"] = str(exc.strerror)
    try:
        lower = "layer" if found["idmap_reason"] else "shifted"
        parts = f"lowerdir={scratch / lower},upperdir={directory / 'upper'},workdir={directory / 'work'}"
        mount("overlay", "overlay", str(scratch / "root"), options=parts)
        (scratch / "root" / "new").write_text("y")
    except OSError as exc:
        found["overlay_reason"] = str(exc.strerror)
    return found


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
