"""One btrfs for the disks of all sandboxes of a yard, in a file: a subvolume each, with a limit each.

The file is on one loop device, which frees itself when the last sandbox and the edge have ended; the mount is
attached to no directory of the machine. An edge that finds the device in use takes the file system up as it
is: sandboxes live in it. One that does not makes it anew: nothing in it is of use to anybody, and a machine
that lost power leaves no damage behind.

What the file takes of the machine's disk is set aside for it, so that no write in a sandbox ever finds the
machine's disk full, which would end the file system for all of them. The file grows ahead of need, as long as
a reserve stays free on the machine; when it can grow no more, sandboxes hear ENOSPC.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio
from anyio import to_thread

from cloudyard.edge.backends.base import DiskUse
from cloudyard.edge.host import btrfs, inroot, loops, syscalls
from cloudyard.errors import LimitExceeded, Unsupported
from cloudyard.model import GIB, MIB

FILE_MIN_BYTES = 256 * MIB  # the smallest pool that is worth its name
STEP_BYTES = 4 * GIB  # it begins so large and grows by so much
AHEAD_BYTES = 2 * GIB  # free space that it has ready: what sandboxes write between two looks
STALE_BYTES = 4 * MIB  # so near to its limit, a disk is counted anew
LOOK_EACH_S = 0.25
LOW_BYTES = 64 * MIB  # with less free, no disk is made
RESERVE_BYTES, RESERVE_SHARE = 2 * GIB, 0.05  # of the machine's disk that the pool leaves alone
MKFS_WAIT_S = 60.0
FORGOTTEN_AT_ONCE = 8  # counters of removed disks, with each removal
PROGRAMS = "/usr/sbin:/sbin:/usr/bin:/bin"
_ATTRIBUTES = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOATIME
# Contents are of no use after a crash, so they need no sums; space that is free stays the file's.
_OPTIONS = ("nodatasum", "nodiscard")
_log = logging.getLogger(__name__)


class DiskPool:
    """Disks that are subvolumes. Made by `open_pool`.

    Args:
        file: the pool's file, open.
        path: its path.
        device: the loop device on it, open.
        mount: the file system, as a mount that is attached nowhere (O_PATH).
        most_bytes: what the file may take at most.
    """

    limited = True

    def __init__(self, file: int, path: Path, *, device: int, mount: int, most_bytes: int) -> None:
        self._file = file
        self._path = path
        self._device = device
        self._mount = mount
        self._root = root = os.open(f"/proc/self/fd/{mount}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._most = most_bytes
        btrfs.enable_quotas(root)
        self._counters = btrfs.counters_of(root)
        self._ids: dict[str, int] = {}
        self._removed: deque[int] = deque()

    @property
    def mount(self) -> int:
        return self._mount

    def names(self) -> list[str]:
        return os.listdir(f"/proc/self/fd/{self._root}")

    def make(self, name: str, most_bytes: int) -> Path:
        if self._free() < LOW_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        btrfs.make_subvolume(self._root, name)
        path = Path(f"/proc/self/fd/{self._root}/{name}")
        os.chmod(path, 0o700)
        self.limit(name, most_bytes)
        return path

    def limit(self, name: str, most_bytes: int) -> None:
        btrfs.limit(self._root, self._id(name), most_bytes)

    def use(self, name: str) -> DiskUse:
        held = btrfs.held(self._counters, self._id(name))
        if held.limit - held.used < STALE_BYTES:
            btrfs.hurry(self._root)  # what was removed lately still counts: the next look shall know better
        return DiskUse(used_bytes=held.used, limit_bytes=held.limit, free_bytes=self._free())

    def remove(self, name: str) -> Path | None:
        with suppress(FileNotFoundError):
            self._removed.append(self._id(name))
            self._ids.pop(name, None)
            btrfs.remove_subvolume(self._root, name)
            if self._free() < AHEAD_BYTES:
                btrfs.hurry(self._root)
        for _ in range(min(FORGOTTEN_AT_ONCE, len(self._removed))):
            subvolume = self._removed.popleft()
            if not btrfs.forget(self._root, subvolume):
                self._removed.append(subvolume)
        return None

    def left(self) -> list[Path]:
        return []

    async def run(self) -> None:
        while True:
            await anyio.sleep(LOOK_EACH_S)
            if self._free() < AHEAD_BYTES:
                try:
                    await to_thread.run_sync(self._grow)
                except OSError as exc:
                    _log.warning("The disk pool %s could not grow: %s", self._path, exc.strerror)

    def close(self) -> None:
        for descriptor in (self._root, self._mount, self._device, self._file):
            os.close(descriptor)

    def _grow(self) -> None:
        size = os.fstat(self._file).st_size
        more = min(STEP_BYTES, self._most - size, spare_bytes(self._path))
        if more < FILE_MIN_BYTES:
            return
        set_aside(self._file, size, more)
        loops.take_up_size(self._device)
        btrfs.take_up_size(self._root)
        _log.info("the disk pool %s has grown to %d MiB", self._path, (size + more) // MIB)

    def _free(self) -> int:
        facts = os.fstatvfs(self._root)
        return facts.f_bavail * facts.f_frsize

    def _id(self, name: str) -> int:
        if name not in self._ids:
            directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
            try:
                self._ids[name] = btrfs.subvolume_id(directory)
            finally:
                os.close(directory)
        return self._ids[name]


def open_pool(path: Path, *, most_bytes: int) -> DiskPool:
    """The pool in this file, made where no sandbox lives in it. Blocks while it is made: for a thread.

    One process at a time may have it.

    Args:
        path: the pool's file; its directory is there.
        most_bytes: what the file may take of the machine's disk at most.

    Raises:
        LimitExceeded: the machine's disk has no room for it.
        Unsupported: the machine cannot make one: no btrfs, no mkfs.btrfs, no loop device.
    """
    try:
        with ExitStack() as undo:
            file, (device, name) = _in_use(path) or _made(path, most_bytes)
            for descriptor in (file, device):
                undo.callback(os.close, descriptor)
            mount = syscalls.new_mount("btrfs", name, attributes=_ATTRIBUTES, options=_OPTIONS)
            undo.callback(os.close, mount)
            pool = DiskPool(file, path, device=device, mount=mount, most_bytes=most_bytes)
            undo.pop_all()
            return pool
    except OSError as exc:
        raise _refused(exc, path) from exc


def is_in_use(path: Path) -> bool:
    """Whether sandboxes live in the pool of this file."""
    found = _in_use(path)
    if found is None:
        return False
    file, (device, _) = found
    os.close(device)
    os.close(file)
    return True


def spare_bytes(path: Path) -> int:
    """What the machine's disk there can spare."""
    facts = os.statvfs(path.parent)
    reserve = max(RESERVE_BYTES, int(facts.f_blocks * facts.f_frsize * RESERVE_SHARE))
    return max(0, facts.f_bavail * facts.f_frsize - reserve)


def set_aside(file: int, at: int, size: int) -> None:
    """Make the file so much longer, with room for it on the disk where the file system there can do that."""
    if memory_backed(file):  # where setting aside is to use up
        os.ftruncate(file, at + size)
        return
    try:
        os.posix_fallocate(file, at, size)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(file, at + size)


def memory_backed(file: int) -> bool:
    """Whether the file lies on a tmpfs."""
    return inroot.file_system(file) == "tmpfs"


def _in_use(path: Path) -> tuple[int, tuple[int, str]] | None:
    """The pool's file and its device, where sandboxes live in it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    found = loops.find(file)
    if found is None:
        os.close(file)
        return None
    return file, found


def _made(path: Path, most_bytes: int) -> tuple[int, tuple[int, str]]:
    """A new pool's file, with a file system in it and a device on it."""
    path.unlink(missing_ok=True)  # of a pool in which nothing lives
    size = min(STEP_BYTES, most_bytes, spare_bytes(path))
    if size < FILE_MIN_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        set_aside(file, 0, size)
        _make_file_system(path)
        return file, loops.attach(file, path, read_only=False)
    except BaseException:
        os.close(file)
        path.unlink(missing_ok=True)
        raise


def _make_file_system(path: Path) -> None:
    program = shutil.which("mkfs.btrfs", path=PROGRAMS) or "mkfs.btrfs"
    command = [program, "--quiet", "--nodiscard", "-m", "single", "-d", "single", str(path)]
    try:
        made = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=MKFS_WAIT_S
        )
    except subprocess.TimeoutExpired as exc:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), command[0]) from exc
    if made.returncode:
        said = made.stderr.strip().splitlines()
        raise OSError(errno.EIO, said[-1] if said else "it failed and said nothing", command[0])


def _refused(exc: OSError, path: Path) -> LimitExceeded | Unsupported:
    message = f"Making the disk pool {path} failed at {exc.filename or path}: {exc.strerror}."
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        reserve = f"{RESERVE_BYTES // GIB} GiB, and {RESERVE_SHARE:.0%} of the disk"
        hint = f"It takes at least {FILE_MIN_BYTES // MIB} MiB and leaves {reserve}: free space there."
        return LimitExceeded(message, code="disk_full", hint=hint)
    return Unsupported(
        message,
        code="no_disk_pool",
        hint="Needs btrfs, loop devices and btrfs-progs; without a pool: cloudyard up --disk-pool 0.",
    )
