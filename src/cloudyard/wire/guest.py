"""Frames between an edge and the guest of one sandbox.

The text is `docs/guest-protocol.md`; `tests/golden/frames` holds the same truth as bytes, and both this file
and `guest/frames.c` are tested against it. A frame is a 16-byte header (body size u32, kind u16, flags u16,
command u64, little-endian) and a body of fields, each a tag (u16), a length (u32) and that many bytes.
Numbers are u64 in 8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import NamedTuple

from cloudyard.errors import CloudyardError

PROTOCOL_VERSION = 1
HEADER = struct.Struct("<IHHQ")
FIELD = struct.Struct("<HI")
NUMBER = struct.Struct("<Q")
FRAME_BODY_MAX = (2048 + 512) * 1024  # bytes; the largest command, its surroundings, and room to grow
OUTPUT_DATA_MAX = 32 * 1024  # bytes of output in one frame
OUTPUT_WINDOW = 128 * 1024  # bytes of a stream the guest holds until they are acknowledged
STDIN_WINDOW = 64 * 1024  # bytes of stdin that may be under way beyond what the guest has taken
GUEST_COMMANDS_MAX = 256  # commands that run or are held in one guest


class Kind(IntEnum):
    """What a frame is. Below 64 they go to the guest, from 64 on they come from it."""

    HELLO = 1
    EXEC = 2
    STDIN = 3
    SIGNAL = 4
    RESIZE = 5
    OUTPUT_ACK = 6
    FORGET = 7
    LIST = 8
    RESUME = 9
    PING = 10
    WELCOME = 64
    STARTED = 65
    OUTPUT = 66
    STDIN_ACK = 67
    EXITED = 68
    TREE_GONE = 69
    NOT_STARTED = 70
    STATE = 71
    LISTED = 72
    PONG = 73
    ERROR = 74


class Tag(IntEnum):
    """What a field is. One meaning per tag, whatever the frame."""

    VERSION_MIN = 1
    VERSION_MAX = 2
    VERSION = 3
    BUILD = 4
    ARG = 5
    SHELL = 6
    ENV = 7
    CWD = 8
    USER = 9
    OPTIONS = 10
    ROWS = 11
    COLS = 12
    DATA = 13
    OFFSET = 14
    EOF = 15
    SIGNAL = 16
    STREAM = 17
    PID = 18
    PID_START = 19
    EXIT_CODE = 20
    CPU_US = 21
    PEAK_BYTES = 22
    DURATION_US = 23
    STDOUT_TOTAL = 24
    STDERR_TOTAL = 25
    DETACHED = 26
    ERRNO = 27
    WHAT = 28
    TEXT = 29
    RUNNING = 30
    STDIN_TAKEN = 31
    STDOUT_ACKED = 32
    STDERR_ACKED = 33
    TREE_ALIVE = 34
    OPEN_FILES = 35


_TEXTS = {Tag.BUILD, Tag.ARG, Tag.SHELL, Tag.ENV, Tag.CWD, Tag.USER, Tag.DATA, Tag.WHAT, Tag.TEXT}
_NUMBERS = frozenset(int(tag) for tag in Tag if tag not in _TEXTS)


class Options(IntFlag):
    """Bits of the OPTIONS field of EXEC."""

    PTY = 1
    STDIN = 2


STDOUT, STDERR = 1, 2  # values of STREAM


class Frame(NamedTuple):
    """One frame. `fields` keeps order and repeats."""

    kind: int
    command: int
    fields: tuple[tuple[int, bytes], ...]

    def number(self, tag: Tag, default: int | None = None) -> int:
        """The number under a tag.

        Raises:
            FrameError: it is absent and no default is given, or it is not 8 bytes.
        """
        for found, raw in self.fields:
            if found == tag:
                if len(raw) != NUMBER.size:
                    raise FrameError(
                        f"field {tag.name} of a frame of kind {self.kind} is {len(raw)} bytes, not 8"
                    )
                return int(NUMBER.unpack(raw)[0])
        if default is None:
            raise FrameError(f"a frame of kind {self.kind} lacks the field {tag.name}")
        return default

    def maybe_number(self, tag: Tag) -> int | None:
        """The number under a tag, or None where it is absent."""
        return self.number(tag) if any(found == tag for found, _ in self.fields) else None

    def data(self, tag: Tag) -> bytes:
        """The bytes under a tag; empty where it is absent."""
        return next((raw for found, raw in self.fields if found == tag), b"")

    def text(self, tag: Tag) -> str:
        """The text under a tag, whatever bytes the guest sent; empty where it is absent."""
        return self.data(tag).decode("utf-8", "replace")


class FrameError(CloudyardError):
    """The other side broke the protocol; the connection cannot go on."""

    kind = "guest_protocol"


def encode(kind: Kind, command: int = 0, *fields: tuple[Tag, bytes | int]) -> bytes:
    """One frame as bytes.

    Raises:
        FrameError: the body is over FRAME_BODY_MAX.
    """
    parts = [b""]
    size = 0
    for tag, value in fields:
        raw = NUMBER.pack(value) if isinstance(value, int) else value
        parts.append(FIELD.pack(tag, len(raw)))
        parts.append(raw)
        size += FIELD.size + len(raw)
    if size > FRAME_BODY_MAX:
        raise FrameError(
            f"a frame of kind {kind.name} would be {size} bytes, over the {FRAME_BODY_MAX} allowed"
        )
    parts[0] = HEADER.pack(size, kind, 0, command)
    return b"".join(parts)


def greeting() -> bytes:
    """The frame that opens a connection to a guest: it says which versions we speak."""
    return encode(Kind.HELLO, 0, (Tag.VERSION_MIN, PROTOCOL_VERSION), (Tag.VERSION_MAX, PROTOCOL_VERSION))


class Decoder:
    """Bytes in, frames out, however they are cut. Holds at most one frame's bytes and what was fed last."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes, at once, and give each frame that they complete, as they are asked for.

        Raises:
            FrameError: a length or a field cannot be right. The decoder is of no use after it.
        """
        self._buffer += data
        return self._whole_frames()

    def _whole_frames(self) -> Iterator[Frame]:
        buffer = self._buffer
        start, held = 0, len(buffer)
        try:
            while held - start >= HEADER.size:
                size, kind, _flags, command = HEADER.unpack_from(buffer, start)
                if size > FRAME_BODY_MAX:
                    raise FrameError(f"a frame says it is {size} bytes, over the {FRAME_BODY_MAX} allowed")
                body = start + HEADER.size
                if held < body + size:
                    break
                fields = _fields(bytes(buffer[body : body + size]))
                start = body + size
                yield Frame(kind, command, fields)
        finally:
            del buffer[:start]


def _fields(body: bytes) -> tuple[tuple[int, bytes], ...]:
    found: list[tuple[int, bytes]] = []
    at, end = 0, len(body)
    while at < end:
        if end - at < FIELD.size:
            raise FrameError("a frame ends within a field's head")
        tag, length = FIELD.unpack_from(body, at)
        at += FIELD.size
        if length > end - at:
            raise FrameError(f"field {tag} says it is {length} bytes and the frame has {end - at} left")
        if length != NUMBER.size and tag in _NUMBERS:
            raise FrameError(f"field {tag} is a number and has {length} bytes, not 8")
        found.append((tag, body[at : at + length]))
        at += length
    return tuple(found)
