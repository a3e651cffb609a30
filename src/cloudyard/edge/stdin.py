"""A command's stdin on its way to the guest: bytes at offsets, never more than the guest's window ahead.

Offsets count all bytes of the command's stdin, those that came with the command too. Knows frames, not
sockets.
"""

from __future__ import annotations

import anyio

from cloudyard.edge.config import STDIN_PENDING_MAX_BYTES
from cloudyard.errors import Conflict
from cloudyard.wire.guest import OUTPUT_DATA_MAX, STDIN_WINDOW, Kind, Tag, encode


class Stdin:
    """What the command's pipe has not taken yet, sent or not, so that a broken connection loses nothing
    of it.
    """

    __slots__ = ("_changed", "_command", "_eof", "_eof_sent", "_pending", "_sent", "closed", "taken")

    def __init__(self, command_id: int, first: bytes, *, eof: bool) -> None:
        self._command = command_id
        self._pending = bytearray(first)
        self._sent = 0
        self._eof = eof
        self._eof_sent = False
        self._changed: anyio.Event | None = None
        self.taken = 0
        """Bytes that the command's pipe took."""
        self.closed = False
        """The reader is gone: nothing more can be taken."""

    @property
    def end(self) -> int:
        """The offset that comes next."""
        return self.taken + len(self._pending)

    @property
    def full(self) -> bool:
        """Enough waits here."""
        return len(self._pending) >= STDIN_PENDING_MAX_BYTES

    def offer(self, offset: int, data: bytes, *, eof: bool) -> None:
        """Take bytes for sending; those that were taken before are dropped.

        Raises:
            Conflict: bytes before the offset are missing, or stdin was closed before them.
        """
        if offset > self.end:
            raise Conflict(
                f"stdin of command {self._command} has {self.end} bytes so far; these begin at {offset}.",
                code="stdin_gap",
                hint="Send the bytes between first.",
            )
        fresh = data[self.end - offset :]
        if fresh and self._eof:
            raise Conflict(
                f"stdin of command {self._command} was closed.",
                code="stdin_closed",
                hint="Nothing more can be written to it; start another command.",
            )
        self._pending += fresh
        self._eof = self._eof or eof

    def frames(self) -> bytes:
        """What may be sent now."""
        parts: list[bytes] = []
        while self._sent < self.end and not self.closed:
            size = min(self.end - self._sent, OUTPUT_DATA_MAX, self.taken + STDIN_WINDOW - self._sent)
            if size <= 0:
                break
            at = self._sent - self.taken
            data = bytes(self._pending[at : at + size])
            parts.append(encode(Kind.STDIN, self._command, (Tag.OFFSET, self._sent), (Tag.DATA, data)))
            self._sent += size
        if self._eof and not self._eof_sent and self._sent == self.end:
            self._eof_sent = True
            parts.append(encode(Kind.STDIN, self._command, (Tag.OFFSET, self._sent), (Tag.EOF, 1)))
        return b"".join(parts)

    def acknowledge(self, taken: int, *, closed: bool) -> None:
        """The guest says how far the pipe has come."""
        if taken > self.taken:
            del self._pending[: taken - self.taken]
            self.taken = taken
            self._sent = max(self._sent, taken)
        if closed:
            self.closed = True
            self._pending.clear()
        self.wake()

    def resume(self, taken: int) -> None:
        """After a new connection: go on where the pipe is. The guest drops what it has already."""
        self.acknowledge(taken, closed=False)
        self._sent = self.taken
        self._eof_sent = False

    def wake(self) -> None:
        """Let everyone look again who waits."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def wait_changed(self) -> None:
        """Return when the pipe took more or is gone."""
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()
