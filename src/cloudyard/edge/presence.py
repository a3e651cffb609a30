"""One edge for a state directory, and a sign of life by which the next one knows how long none was here."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from cloudyard.errors import Conflict

STAMP = struct.Struct("<d")


class Presence:
    """Holds the directory's lock, and notes on disk now and then that the edge lives."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = -1
        self._stamp = -1

    def enter(self) -> None:
        """Take the directory.

        Raises:
            Conflict: another edge has it.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / "lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise Conflict(
                f"Another edge, process {holder}, runs on the state directory {self._directory.parent}.",
                code="edge_running",
                hint="Stop it with `cloudyard down`, or give this yard a state directory of its own.",
            ) from exc
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock
        self._stamp = os.open(self._directory / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def last_seen(self) -> float | None:
        """The monotonic clock when an edge was last here; None when none ever was."""
        data = os.pread(self._stamp, STAMP.size, 0)
        return float(STAMP.unpack(data)[0]) if len(data) == STAMP.size else None

    def note(self, now: float) -> None:
        """The edge lives at this moment of the monotonic clock."""
        os.pwrite(self._stamp, STAMP.pack(now), 0)

    def leave(self) -> None:
        """Give the directory free."""
        for fd in (self._stamp, self._lock):
            if fd >= 0:
                os.close(fd)
        self._stamp = self._lock = -1
