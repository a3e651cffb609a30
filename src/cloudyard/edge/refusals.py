"""What the kernel refused a sandbox, counted from each command's own start: memory, by killing, and
processes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cloudyard.edge.backends.base import DiskUse
from cloudyard.errors import SandboxUnavailable


class Counters(Protocol):
    """Where the kernel's counters are read. All raise SandboxUnavailable when the sandbox is gone."""

    def oom_kills(self) -> int:
        """Processes of the sandbox that were killed for memory."""

    def forks_refused(self) -> int:
        """Forks in it that its limit of processes refused."""

    def disk(self) -> DiskUse:
        """How full its disk is."""


class Refused(NamedTuple):
    """The counters at one moment, or by how much they grew."""

    oom_kills: int = 0
    forks: int = 0


def refused_so_far(counters: Counters) -> Refused | None:
    """The counters now; None when the sandbox is gone."""
    try:
        return Refused(counters.oom_kills(), counters.forks_refused())
    except SandboxUnavailable:
        return None


def refused_since(counters: Counters, before: Refused | None) -> Refused:
    """By how much they grew; not at all where either end is not known."""
    now = refused_so_far(counters)
    if now is None or before is None:
        return Refused()
    return Refused(max(0, now.oom_kills - before.oom_kills), max(0, now.forks - before.forks))


def disk_use(counters: Counters) -> DiskUse | None:
    """How full the sandbox's disk is; None when the sandbox is gone."""
    try:
        return counters.disk()
    except SandboxUnavailable:
        return None
