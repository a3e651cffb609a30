"""What host and cell both stand on: frames, and the kernel's calls that Python lacks.

Frames, both ways: a size (u32), then fields, each a name's and a value's size (u32), the name and the value.
"""

from __future__ import annotations

import ctypes
import os
import struct

SIZE = struct.Struct("<I")
FIELD = struct.Struct("<II")
READ_BYTES = 64 * 1024
WORK = "/tmp"

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
SYS_MOUNT_SETATTR, SYS_CLOSE_RANGE = 442, 436  # the same on every architecture
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1
CAP_VERSION_3 = 0x20080522
CAP_KILL = 5
CAPS_MAX = 64

libc = ctypes.CDLL(None, use_errno=True)
Fields = dict[bytes, list[bytes]]


class Failed(Exception):
    """A step of ours did not work; its one argument says which, and why."""


def read_body(fd: int) -> bytes:
    """The body of the next frame from a pipe. Ends the process where there is none."""
    (size,) = SIZE.unpack(_read(fd, SIZE.size))
    return bytes(_read(fd, size))


def parse(body: bytes) -> Fields:
    """The fields of a frame's body."""
    fields: Fields = {}
    at = 0
    while at < len(body):
        name_size, value_size = FIELD.unpack_from(body, at)
        at += FIELD.size
        name = body[at : at + name_size]
        at += name_size
        fields.setdefault(name, []).append(body[at : at + value_size])
        at += value_size
    return fields


def write_frame(**fields: bytes | int | str) -> None:
    """Write one frame to the worker's stdout."""
    parts = []
    for name, value in fields.items():
        raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
        parts.append(FIELD.pack(len(name), len(raw)) + name.encode() + raw)
    body = b"".join(parts)
    write_all(1, SIZE.pack(len(body)) + body)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read(fd: int, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = os.readv(fd, [view[at:]])
        if not got:
            os._exit(0)  # whoever was to say something is gone
        at += got
    return data


def check(result: int, what: str) -> None:
    """Raise Failed where a call of libc has failed."""
    if result < 0:
        raise Failed(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """mount(2)."""
    result = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    check(result, f"mount {kind or 'again'} at {target}")


def set_read_only(path: str, *, deep: bool, on: bool) -> None:
    """Forbid writes to a mount, and to those below it if `deep`; or allow them again."""
    attributes = struct.pack("<QQQQ", MOUNT_ATTR_RDONLY if on else 0, 0 if on else MOUNT_ATTR_RDONLY, 0, 0)
    result = libc.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR),
        ctypes.c_int(AT_FDCWD),
        path.encode(),
        ctypes.c_uint(AT_RECURSIVE if deep else 0),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    check(result, f"change the mount at {path}")


def keep_capabilities(mask: int) -> None:
    """Give up every capability but those of the mask."""
    header = struct.pack("<Ii", CAP_VERSION_3, 0)
    sets = struct.pack("<IIIIII", mask, mask, 0, 0, 0, 0)
    check(libc.capset(header, sets), "give up capabilities")
