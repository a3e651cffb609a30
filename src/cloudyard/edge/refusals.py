"""What the kernel refused a sandbox: memory, by killing, and processes."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from cloudyard.edge.backends.base import Usage
from cloudyard.edge.journal import Journal
from cloudyard.edge.records import Counted
from cloudyard.errors import LimitExceeded, SandboxUnavailable


class Counters(Protocol):
    """Where the kernel's counters are read. Both raise SandboxUnavailable when the sandbox is gone."""

    def usage(self) -> Usage:
        """All of them."""

    def oom_kills(self) -> int:
        """The one that every command needs."""


class Refusals:
    """The growth of a sandbox's counters.

    Out-of-memory kills are counted from each command's own start. Refused forks are counted since the last
    failure; what was seen of them is on record, so that no restart sees it again.
    """

    __slots__ = ("_counters", "_journal")

    def __init__(self, journal: Journal, counters: Counters) -> None:
        self._journal = journal
        self._counters = counters

    def oom_kills(self) -> int | None:
        """The counter of out-of-memory kills now; None when the sandbox is gone."""
        try:
            return self._counters.oom_kills()
        except SandboxUnavailable:
            return None

    def oom_kills_since(self, before: int | None) -> int:
        """By how much it grew; not at all where either end is not known."""
        now = self.oom_kills()
        return max(0, now - before) if now is not None and before is not None else 0

    def forks_refused(self) -> int:
        """How many forks were refused since the last look; none when the sandbox is gone."""
        try:
            usage = self._counters.usage()
        except SandboxUnavailable:
            return 0
        seen = self._journal.counted
        now = Counted(usage.oom_kills, usage.pids_refused)
        if now.forks_refused != seen.forks_refused:
            with suppress(LimitExceeded):  # then a restart may name an old refusal once more
                self._journal.append(now)
            self._journal.counted = now
        return max(0, now.forks_refused - seen.forks_refused)
