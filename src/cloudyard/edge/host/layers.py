"""Mounting an EROFS layer, by either of two ways: straight from the file (Linux 6.12 and later), or through a
loop device that frees itself with the last mount. Knows files and devices; where the mount is put is the
caller's business.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Literal

from cloudyard.edge.host import loops, syscalls
from cloudyard.errors import CloudyardError, LimitExceeded, NotFound, Unsupported

LayerMount = Literal["auto", "direct", "loop"]

_ATTRIBUTES = syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOATIME


def mount_layer(path: Path, way: LayerMount) -> int:
    """A detached, read-only mount of the layer, as a descriptor.

    Raises:
        NotFound: there is no such file.
        Unsupported: it is no EROFS image, or the kernel cannot mount it in the way asked for.
        LimitExceeded: no loop device is free.
    """
    if not path.is_file():
        raise NotFound(
            f"The layer {path} is missing.",
            code="layer_missing",
            hint="Build or pull the image again on this node.",
        )
    try:
        if way != "loop":
            try:
                return syscalls.new_mount("erofs", str(path), attributes=_ATTRIBUTES)
            except OSError as exc:
                if way == "direct" or exc.errno != errno.ENOTBLK:
                    raise
        return _through_loop(path)
    except OSError as exc:
        raise _translated(exc, path, way) from exc


def _through_loop(path: Path) -> int:
    backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        device, name = loops.attach(backing, path, read_only=True)
    finally:
        os.close(backing)
    try:
        return syscalls.new_mount("erofs", name, attributes=_ATTRIBUTES)
    finally:
        os.close(device)  # the mount keeps the device from here on; without one it frees itself now


def _translated(exc: OSError, path: Path, way: LayerMount) -> CloudyardError:
    message = f"Mounting the layer {path} as EROFS failed: {exc.strerror}."
    match exc.errno:
        case errno.EINVAL | errno.EUCLEAN:
            return Unsupported(
                message, code="layer_damaged", hint="The file is no EROFS image; build it again."
            )
        case errno.ENOTBLK:
            return Unsupported(
                message,
                code="layer_mount_unsupported",
                hint=f"The way {way!r} needs Linux 6.12; use the way 'loop'.",
            )
        case errno.ENODEV:
            return Unsupported(
                message, code="erofs_missing", fault="infra", hint="Load the kernel module: modprobe erofs."
            )
        case errno.ENOENT | errno.ENXIO if exc.filename and str(exc.filename).startswith("/dev/loop"):
            return Unsupported(
                message, code="loop_missing", fault="infra", hint="Load the kernel module: modprobe loop."
            )
        case errno.EBUSY | errno.ENOSPC:
            return LimitExceeded(
                message,
                code="no_loop_device",
                fault="infra",
                hint="Raise the number of loop devices (max_loop).",
            )
        case _:
            return Unsupported(message, code="layer_mount_failed", fault="infra")
