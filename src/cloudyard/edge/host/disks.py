"""Disks of sandboxes: a directory each, whose contents can be bounded where the machine can do that.

`DiskPool` keeps them as subvolumes of one btrfs with a limit each; `PlainDisks` as directories of whatever
file system is there, without one. What is made here bears the name it was given and is found again by it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Protocol

from cloudyard.edge.backends.base import DiskUse
from cloudyard.edge.host.trash import discard

REMOVE_WAIT_S = 5.0  # a removal waits so long; the rest of a large disk goes later


class Disks(Protocol):
    """The disks of one yard on this machine. Methods block as their system calls do, and raise OSError."""

    @property
    def limited(self) -> bool:
        """Whether disks have limits."""

    @property
    def mount(self) -> int | None:
        """A mount that holds them all and is attached nowhere yet; None where they lie in a directory."""

    def names(self) -> list[str]:
        """Disks that are there."""

    def make(self, name: str, most_bytes: int) -> Path:
        """An empty directory of mode 0700, which may hold so much. ENOSPC when there is no room for one."""

    def limit(self, name: str, most_bytes: int) -> None:
        """Let it hold so much from now on."""

    def use(self, name: str) -> DiskUse:
        """How full it is."""

    def remove(self, name: str) -> Path | None:
        """Remove it, if it is there. Gives what is still to be discarded, where that takes long."""

    def left(self) -> list[Path]:
        """What an earlier edge had removed in part."""

    async def run(self) -> None:
        """Look after them until cancelled."""

    def close(self) -> None:
        """Let go of them. They stay as long as a sandbox lives."""


class PlainDisks:
    """Disks that are directories.

    Args:
        directory: where they are.
        trash: where they are moved to be removed; on the same file system.
    """

    limited = False
    mount = None

    def __init__(self, directory: Path, trash: Path) -> None:
        self._directory = directory
        self._trash = trash

    def names(self) -> list[str]:
        return os.listdir(self._directory)

    def make(self, name: str, most_bytes: int) -> Path:
        path = self._directory / name
        path.mkdir(mode=0o700)
        return path

    def limit(self, name: str, most_bytes: int) -> None:
        """Nothing can be bounded here."""

    def use(self, name: str) -> DiskUse:
        facts = os.statvfs(self._directory)
        return DiskUse(used_bytes=0, limit_bytes=0, free_bytes=facts.f_bavail * facts.f_frsize)

    def remove(self, name: str) -> Path | None:
        thrown = self._trash / f"{name}-{secrets.token_hex(4)}"
        try:
            (self._directory / name).rename(thrown)  # at once: the name is free before the disk is empty
        except FileNotFoundError:
            return None
        return None if discard(thrown, REMOVE_WAIT_S) else thrown

    def left(self) -> list[Path]:
        return list(self._trash.iterdir())

    async def run(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing is held."""
