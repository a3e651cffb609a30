"""Frames between the edge and a host (`inside/base.py` has the other end). Pure: bytes in, bytes out."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cloudyard.errors import CloudyardError
from cloudyard.model import MIB

SIZE = struct.Struct("<I")
FIELD = struct.Struct("<II")
ANSWER_MAX_BYTES = 32 * MIB  # what comes from a worker is bounded: two streams, and a compiled program


class HostError(CloudyardError):
    """The host broke the protocol; its worker cannot go on."""

    kind = "host_protocol"


class Answer(NamedTuple):
    """One frame from a host."""

    fields: dict[str, bytes]

    def text(self, name: str) -> str:
        """A field as text; empty where it is absent."""
        return self.fields.get(name, b"").decode("utf-8", "replace")

    def data(self, name: str) -> bytes:
        """A field as it is; empty where it is absent."""
        return self.fields.get(name, b"")

    def number(self, name: str) -> int:
        """A field as a number; 0 where it is absent.

        Raises:
            HostError: it is none.
        """
        raw = self.fields.get(name, b"0")
        try:
            return int(raw)
        except ValueError as exc:
            raise HostError(f"field {name} is no number: {raw[:40]!r}") from exc


def pack(fields: Iterable[tuple[str, bytes]]) -> bytes:
    """A frame for a host. Names may be repeated."""
    parts: list[bytes] = []
    for name, value in fields:
        raw = name.encode()
        parts += (FIELD.pack(len(raw), len(value)), raw, value)
    body = b"".join(parts)
    return SIZE.pack(len(body)) + body


class Decoder:
    """Answers out of bytes, however they are cut."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Answer]:
        """Take bytes and give each answer that they complete.

        Raises:
            HostError: a size cannot be right. The decoder is of no use after it.
        """
        self._held += data
        while len(self._held) >= SIZE.size:
            (size,) = SIZE.unpack_from(self._held)
            if size > ANSWER_MAX_BYTES:
                raise HostError(f"a frame says it is {size} bytes, over the {ANSWER_MAX_BYTES} allowed")
            if len(self._held) < SIZE.size + size:
                return
            body = bytes(self._held[SIZE.size : SIZE.size + size])
            del self._held[: SIZE.size + size]
            yield Answer(dict(_fields(body)))


def _fields(body: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at < len(body):
        if len(body) - at < FIELD.size:
            raise HostError("a frame ends within a field's head")
        name_size, value_size = FIELD.unpack_from(body, at)
        at += FIELD.size
        if name_size + value_size > len(body) - at:
            raise HostError("a field goes past its frame")
        yield (
            body[at : at + name_size].decode("utf-8", "replace"),
            body[at + name_size : at + name_size + value_size],
        )
        at += name_size + value_size
