"""What we need of btrfs by ioctl: subvolumes, limits of what they may hold, a file system that grows.

Numbers and structures are those of linux/btrfs.h. Each function raises OSError with the kernel's reason.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from msgspec import Struct

FIRST_SUBVOLUME_INODE = 256  # of the root directory of each subvolume
_SUBVOL_CREATE, _SNAP_DESTROY, _RESIZE = 0x5000_940E, 0x5000_940F, 0x5000_9403
_QUOTA_CTL, _QGROUP_CREATE, _QGROUP_LIMIT = 0xC010_9428, 0x4010_942A, 0x8030_942B
_INO_LOOKUP, _FS_INFO, _START_SYNC = 0xD000_9412, 0x8400_941F, 0x8008_9418
_ENABLE, _ENABLE_SIMPLE = 1, 4
_LIMIT_REFERENCED = 1
_NAMED = struct.Struct("<q 4088s")
_LOOKUP = struct.Struct("<2Q 4080x")
_LIMIT = struct.Struct("<6Q")  # group, flags, most referenced, most exclusive, two reservations
_INFO_BYTES, _FSID_AT = 1024, 16


class Held(Struct, frozen=True):
    """What a subvolume holds, in bytes, written or about to be, and what it may hold."""

    used: int
    limit: int


def make_subvolume(directory: int, name: str) -> None:
    """Make an empty subvolume in a directory."""
    _name(directory, _SUBVOL_CREATE, name)


def remove_subvolume(directory: int, name: str) -> None:
    """Remove a subvolume with all in it; the kernel gives its space back behind it."""
    _name(directory, _SNAP_DESTROY, name)


def subvolume_id(directory: int) -> int:
    """The number of the subvolume that a directory is in."""
    asked = bytearray(_LOOKUP.pack(0, FIRST_SUBVOLUME_INODE))
    fcntl.ioctl(directory, _INO_LOOKUP, asked)
    found: int = _LOOKUP.unpack(asked)[0]
    return found


def enable_quotas(root: int) -> None:
    """Count what each subvolume holds; in the simple way, which is cheaper, where the kernel has it (6.7)."""
    try:
        fcntl.ioctl(root, _QUOTA_CTL, struct.pack("<2Q", _ENABLE_SIMPLE, 0))
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        fcntl.ioctl(root, _QUOTA_CTL, struct.pack("<2Q", _ENABLE, 0))


def limit(root: int, subvolume: int, most_bytes: int) -> None:
    """Bound what a subvolume may hold: past it, writing gives EDQUOT."""
    fcntl.ioctl(root, _QGROUP_LIMIT, _LIMIT.pack(subvolume, _LIMIT_REFERENCED, most_bytes, 0, 0, 0))


def forget(root: int, subvolume: int) -> bool:
    """Drop the counter of a subvolume that was removed, which some kernels leave to us. Gives whether it is
    gone."""
    try:
        fcntl.ioctl(root, _QGROUP_CREATE, struct.pack("<2Q", 0, subvolume))
    except OSError as exc:
        return exc.errno != errno.EBUSY  # the kernel is still at work on the subvolume
    return True


def held(counters: Path, subvolume: int) -> Held:
    """What a subvolume holds. `counters`: the file system's directory of them, from `counters_of`."""
    group = counters / f"0_{subvolume}"
    parts = ("referenced", "rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc")
    used = sum(int((group / part).read_bytes()) for part in parts)
    return Held(used, int((group / "max_referenced").read_bytes()))


def counters_of(root: int) -> Path:
    """Where the kernel shows the counters of this file system's subvolumes."""
    info = fcntl.ioctl(root, _FS_INFO, bytes(_INFO_BYTES))
    number = info[_FSID_AT : _FSID_AT + 16].hex()
    parts = (number[:8], number[8:12], number[12:16], number[16:20], number[20:])
    return Path("/sys/fs/btrfs") / "-".join(parts) / "qgroups"


def take_up_size(root: int) -> None:
    """Have the file system be as large as its device is now."""
    _name(root, _RESIZE, "1:max")


def hurry(root: int) -> None:
    """Begin now what the kernel does behind a removal."""
    fcntl.ioctl(root, _START_SYNC, bytes(8))


def _name(directory: int, request: int, name: str) -> None:
    # As a bytearray: Python takes 1,024 immutable bytes at most.
    fcntl.ioctl(directory, request, bytearray(_NAMED.pack(0, name.encode())))


def is_there() -> bool:
    """Whether this kernel has btrfs, loaded or to be loaded."""
    if "btrfs" in Path("/proc/filesystems").read_text().split():
        return True
    modules = Path("/lib/modules") / os.uname().release
    return any(modules.glob("kernel/fs/btrfs/btrfs.ko*"))
