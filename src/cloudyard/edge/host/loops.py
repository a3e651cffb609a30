"""Loop devices that free themselves with their last user. Knows files and devices, not what is on them."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

TRIES = 64  # another process may take the free device that we were told of
_CTL_GET_FREE, _CONFIGURE, _GET_STATUS64, _SET_CAPACITY = 0x4C82, 0x4C0A, 0x4C05, 0x4C07
_READ_ONLY, _AUTOCLEAR = 1, 4
# struct loop_info64: device and inode of the file, rdev, offset, size limit; number, crypt kind, crypt key
# size, flags; name, crypt name, key, 2 u64
_INFO = struct.Struct("<5Q 4I 64s 64s 32s 2Q")
# struct loop_config: fd, block size, struct loop_info64, 8 u64 reserved
_CONFIG = struct.Struct("<II 5Q 4I 64s 64s 32s 2Q 64x")


def attach(backing: int, path: Path, *, read_only: bool) -> tuple[int, str]:
    """A device on an open file: its descriptor, which keeps it until something else does, and its name.

    Raises:
        OSError: the kernel refused, or other processes took every device that was free.
    """
    flags = _AUTOCLEAR | (_READ_ONLY if read_only else 0)
    mode = os.O_RDONLY if read_only else os.O_RDWR
    config = _CONFIG.pack(backing, 0, 0, 0, 0, 0, 0, 0, 0, 0, flags, os.fsencode(path)[:63], b"", b"", 0, 0)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(TRIES):
            name = f"/dev/loop{fcntl.ioctl(control, _CTL_GET_FREE)}"
            device = os.open(name, mode | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _CONFIGURE, config)
            except OSError as exc:
                os.close(device)
                if exc.errno != errno.EBUSY:
                    raise
            else:
                return device, name
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "every free loop device was taken by another process", "/dev/loop-control")


def find(backing: int) -> tuple[int, str] | None:
    """The device that is on this file already, as from `attach`; None when there is none."""
    wanted = os.fstat(backing)
    for entry in Path("/sys/block").glob("loop*/loop"):
        name = f"/dev/{entry.parent.name}"
        try:
            device = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # it went
        try:
            told = _INFO.unpack(fcntl.ioctl(device, _GET_STATUS64, bytes(_INFO.size)))
        except OSError:  # it is on no file any more
            os.close(device)
            continue
        if (_device_of(told[0]), told[1]) == (wanted.st_dev, wanted.st_ino):
            return device, name
        os.close(device)
    return None


def take_up_size(device: int) -> None:
    """Have the device be as large as its file is now. Raises OSError."""
    fcntl.ioctl(device, _SET_CAPACITY, 0)


def _device_of(encoded: int) -> int:
    """A device's number as stat(2) gives it, from the kernel's own encoding."""
    return os.makedev((encoded & 0xFFF00) >> 8, (encoded & 0xFF) | (encoded >> 12 & 0xFFF00))
