"""Bytes that are no message, or nearly one: every decoder of what others send gives a message or its one
refusal."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from cloudyard.errors import InvalidRequest
from cloudyard.wire import messages
from cloudyard.wire.messages import UNREADABLE, decode_call, decode_call_head, decode_op, op_tag

GOLDEN = Path(__file__).parent.parent / "golden" / "messages"
MESSAGES = [path.read_bytes() for path in sorted(GOLDEN.glob("*.msgpack"))]
DECODERS = {
    name: getattr(messages, name)
    for name in dir(messages)
    if isinstance(getattr(messages, name), msgspec.msgpack.Decoder)
}
DEEP = b"\x91" * 100_000 + b"\xc0"
ARRAY_OF_4G, BYTES_OF_4G = b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"
DEEP_FIELD = b"\x81\xa4else" + DEEP
CHANGES = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6)


def check(data: bytes) -> None:
    for decoder in DECODERS.values():
        with suppress(*UNREADABLE):
            decoder.decode(data)
    for decode in (decode_op, decode_call, decode_call_head):
        with suppress(InvalidRequest):
            decode(data)
    assert isinstance(op_tag(msgspec.Raw(data)), str)


@pytest.mark.parametrize("data", [DEEP, DEEP_FIELD, b"", b"\xc1", ARRAY_OF_4G, BYTES_OF_4G])
def test_what_is_nested_without_end_or_lies_about_its_size_is_refused(data: bytes) -> None:
    check(data)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        decode_op(data)


@given(st.binary(max_size=200))
def test_noise_is_a_message_or_refused(noise: bytes) -> None:
    check(noise)


@given(st.sampled_from(MESSAGES), CHANGES, st.integers(0, 10_000))
def test_messages_changed_and_cut_anywhere_are_messages_or_refused(
    message: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(message)
    for place, value in changes:
        data[place % len(data)] = value
    check(bytes(data[: len(data) - cut % len(data)]))
