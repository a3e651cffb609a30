"""Small trials of what the kernel lets us do, in a process and mount namespace of their own that vanish with
them.

Run as `python -m cloudyard.edge.host.trial DIRECTORY`, where the directory is on the disk of layers and
writable layers: what works depends on the file system there. Prints one JSON object, with reasons that are
empty where a trial went well. The launcher does the same for real, in C; this is for `doctor`.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from cloudyard.core.doctor import UNTRIED
from cloudyard.edge.host import syscalls
from cloudyard.edge.host.layers import mount_layer
from cloudyard.edge.host.seccomp import NEWER, build_filters
from cloudyard.edge.host.slots import UIDS_PER_SLOT, uid_base
from cloudyard.errors import CloudyardError

AT_EMPTY_PATH = 0x1000
CLONE_NEWUSER = 0x10000000
MOUNT_ATTR_IDMAP = 0x00100000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
STEP_BYTES = 8  # of one instruction of a filter
SYS_MOUNT_SETATTR = 442  # the same on every architecture
TRIAL_SLOT = 0  # its ids serve; nothing is done to whoever else has them

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def _check(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def user_namespace() -> int:
    """A descriptor of a new user namespace with a sandbox's range of ids, which no process stays in."""
    made_read, made_write = os.pipe()
    gone_read, gone_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gone_write)
        failed = _libc.unshare(CLONE_NEWUSER)
        os.write(made_write, bytes([ctypes.get_errno() if failed else 0]))
        os.read(gone_read, 1)  # ends when the parent has closed the other end
        os._exit(0)
    os.close(gone_read)
    try:
        if number := os.read(made_read, 1)[0]:
            raise OSError(number, f"making a user namespace: {os.strerror(number)}")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text(f"0 {uid_base(TRIAL_SLOT)} {UIDS_PER_SLOT}")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(gone_write)
        os.waitpid(child, 0)
        os.close(made_read)
        os.close(made_write)


def make_image(image: Path, tree: Path) -> str:
    """Make an EROFS image of one file. Gives the reason if it cannot be made."""
    tree.mkdir()
    (tree / "file").write_text("x")
    command = ["mkfs.erofs", "--quiet", str(image), str(tree)]
    try:
        made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    except FileNotFoundError:
        return f"{UNTRIED}: mkfs.erofs is missing, which makes the image for the trial"
    return f"mkfs.erofs: {made.stderr.decode(errors='replace').strip()[:200]}" if made.returncode else ""


def mount_image(image: Path) -> tuple[int, str, str]:
    """Mount it straight from its file or through a loop device: the mount, the way, and why not the first
    one."""
    try:
        return mount_layer(image, "direct"), "direct", ""
    except CloudyardError as exc:
        direct = exc.message
    try:
        return mount_layer(image, "loop"), "loop", direct
    except CloudyardError as exc:
        return -1, "none", f"{direct} {exc.message}"


def shift_ids(mount: int, userns: int) -> None:
    """Have a detached mount show its files' ids as the user namespace maps them."""
    attr = _MountAttr(attr_set=MOUNT_ATTR_IDMAP, userns_fd=userns)
    size = ctypes.c_size_t(ctypes.sizeof(attr))
    arguments: tuple[Any, ...] = (mount, b"", AT_EMPTY_PATH, ctypes.byref(attr), size)
    _check("shifting the ids of a mount", _libc.syscall(ctypes.c_long(SYS_MOUNT_SETATTR), *arguments))


def run(directory: Path) -> dict[str, str]:
    """Every trial, in this process, which must be one that may be thrown away."""
    found = dict.fromkeys(("erofs_reason", "userns_reason", "idmap_reason", "overlay_reason"), "")
    found["erofs"] = "untried"
    userns = mount = -1
    syscalls.unshare(syscalls.CLONE_FS | syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    for name in ("layer", "root", "upper", "work"):
        (directory / name).mkdir()
    try:
        userns = user_namespace()
    except OSError as exc:
        found["userns_reason"] = str(exc.strerror)
    found["erofs_reason"] = make_image(directory / "image.erofs", directory / "tree")
    if not found["erofs_reason"]:
        mount, found["erofs"], found["erofs_reason"] = mount_image(directory / "image.erofs")
    if mount < 0 or userns < 0:
        found["idmap_reason"] = found["overlay_reason"] = f"{UNTRIED}, for want of what is said above"
        return found
    try:
        shift_ids(mount, userns)
    except OSError as exc:
        found["idmap_reason"] = str(exc.strerror)
    try:
        layer, upper, work = (directory / name for name in ("layer", "upper", "work"))
        syscalls.move_mount(mount, str(layer))
        options = f"lowerdir={layer},upperdir={upper},workdir={work}"
        syscalls.mount("overlay", str(directory / "root"), "overlay", options=options)
        (directory / "root" / "new").write_text("y")
    except OSError as exc:
        found["overlay_reason"] = f"mounting overlay in {directory.parent}: {exc.strerror}"
    return found


def keep_to_filters() -> str:
    """Take the filters of sandboxes on for this process. Gives the reason if they cannot be made, or do not
    hold."""
    try:
        for program in (build_filters()[name] for name in (NEWER, "sandbox")):
            steps = ctypes.create_string_buffer(program, len(program))
            whole = struct.pack("HP", len(program) // STEP_BYTES, ctypes.addressof(steps))
            _check("setting no_new_privs", _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
            _check("taking on a filter", _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, whole, 0, 0))
    except (CloudyardError, OSError) as exc:
        return exc.message if isinstance(exc, CloudyardError) else str(exc.strerror)
    return "" if _libc.unshare(CLONE_NEWUSER) else "a system call went past the filter"


if __name__ == "__main__":
    outcome = run(Path(sys.argv[1]))
    outcome["filter_reason"] = keep_to_filters()  # the last: this process can do little after it
    print(json.dumps(outcome))
