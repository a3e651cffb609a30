"""Sandboxes that have ended and are remembered for a while: what a user may still ask about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cloudyard.core.reconcile import ENDED_KEPT_MAX, expired
from cloudyard.edge.clock import Clock
from cloudyard.errors import CloudyardError
from cloudyard.model import SandboxInfo

SLACK = 256  # so many more than ENDED_KEPT_MAX before the oldest are looked for


class Ended(NamedTuple):
    """A sandbox of which nothing is left but its record."""

    info: SandboxInfo
    path: Path
    at: float
    """Seconds since 1970."""
    error: CloudyardError | None = None
    """Why it could not be created, while that is remembered."""


class Remembered:
    """Ended sandboxes by id. A record goes when its sandbox is forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: dict[str, Ended] = {}

    def add(self, ended: Ended) -> None:
        """Remember one, and forget the oldest of too many."""
        self._ended[ended.info.id] = ended
        if len(self._ended) > ENDED_KEPT_MAX + SLACK:
            self.forget_expired()

    def get(self, sandbox: str) -> Ended | None:
        """One by its id."""
        return self._ended.get(sandbox)

    def __contains__(self, sandbox: str) -> bool:
        return sandbox in self._ended

    def __iter__(self) -> Iterator[Ended]:
        return iter(self._ended.values())

    def forget_expired(self) -> None:
        """Forget those past the bounds of time and number, with their records."""
        ages = {name: ended.at for name, ended in self._ended.items()}
        for name in expired(ages, self._clock.wall()):
            self._ended.pop(name).path.unlink(missing_ok=True)
