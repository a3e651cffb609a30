"""What the kernel refused a sandbox since the last look: memory, by killing, and processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from cloudyard.edge.backends.base import Usage
from cloudyard.edge.journal import Journal
from cloudyard.edge.records import Counted
from cloudyard.errors import LimitExceeded, SandboxUnavailable


class Refusals:
    """The growth of a sandbox's counters. What was seen is on record, so that no restart sees it again."""

    __slots__ = ("_journal", "_usage")

    def __init__(self, journal: Journal, usage: Callable[[], Usage]) -> None:
        self._journal = journal
        self._usage = usage

    def look(self) -> Counted:
        """By how much the counters grew since the last look; not at all when the sandbox is gone."""
        try:
            usage = self._usage()
        except SandboxUnavailable:
            return Counted()
        seen = self._journal.counted
        now = Counted(usage.oom_kills, usage.pids_refused)
        if now != seen:
            with suppress(LimitExceeded):  # then a restart may name an old refusal once more
                self._journal.append(now)
            self._journal.counted = now
        return Counted(max(0, now.oom_kills - seen.oom_kills), max(0, now.forks_refused - seen.forks_refused))
