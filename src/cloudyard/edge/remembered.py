"""Sandboxes that have ended and are remembered for a while: what a user may still ask about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

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
    """Ended sandboxes by id, each as a few hundred bytes: there may be thousands. A record goes when its
    sandbox is forgotten.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: dict[str, tuple[bytes, float, CloudyardError | None]] = {}

    def add(self, ended: Ended) -> None:
        """Remember one, and forget the oldest of too many."""
        packed = _encode((ended.info, str(ended.path)))
        self._ended[ended.info.id] = packed, ended.at, ended.error
        if len(self._ended) > ENDED_KEPT_MAX + SLACK:
            self.forget_expired()

    def get(self, sandbox: str) -> Ended | None:
        """One by its id."""
        kept = self._ended.get(sandbox)
        return None if kept is None else self._unpacked(kept)

    def __contains__(self, sandbox: str) -> bool:
        return sandbox in self._ended

    def __iter__(self) -> Iterator[Ended]:
        return map(self._unpacked, self._ended.values())

    def forget_expired(self) -> None:
        """Forget those past the bounds of time and number, with their records."""
        ages = {name: at for name, (_, at, _) in self._ended.items()}
        for name in expired(ages, self._clock.wall()):
            self._unpacked(self._ended.pop(name)).path.unlink(missing_ok=True)

    def _unpacked(self, kept: tuple[bytes, float, CloudyardError | None]) -> Ended:
        packed, at, error = kept
        info, path = _decoder.decode(packed)
        return Ended(info, Path(path), at, error)


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(tuple[SandboxInfo, str])
