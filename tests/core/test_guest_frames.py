"""The guest's frames against the golden bytes, and against any way a stream of them can be cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from cloudyard.wire.guest import FRAME_BODY_MAX, Decoder, Frame, FrameError, Kind, Tag, encode
from guest_fixture import guest_frames_test

__all__ = ["guest_frames_test"]

GOLDEN = Path(__file__).parent.parent / "golden" / "frames"


@dataclass(frozen=True)
class Golden:
    """One file: a frame in words, and its bytes. The C test reads the same lines."""

    kind: int
    command: int
    fields: list[tuple[int, int | bytes]]
    wire: bytes
    bad: bool
    read_only: bool


def read(path: Path) -> Golden:
    kind = command = 0
    fields: list[tuple[int, int | bytes]] = []
    wire, bad, read_only = b"", False, False
    for line in path.read_text().splitlines():
        match line.split():
            case ["#", *_]:
                pass
            case ["bad"]:
                bad = True
            case ["read-only"]:
                read_only = True
            case ["frame", name, number, about]:
                assert Kind[name] == int(number)
                kind, command = int(number), int(about)
            case ["number" | "bytes" as how, name, tag, value]:
                assert name == "-" or Tag[name] == int(tag)
                raw = b"" if value == "-" else bytes.fromhex(value) if how == "bytes" else int(value)
                fields.append((int(tag), raw))
            case ["wire", text]:
                wire = bytes.fromhex(text)
            case _:
                raise AssertionError(line)
    return Golden(kind, command, fields, wire, bad, read_only)


GOLDENS = {path.stem: read(path) for path in sorted(GOLDEN.glob("*.txt"))}
GOOD = {name: golden for name, golden in GOLDENS.items() if not golden.bad}
BAD = {name: golden for name, golden in GOLDENS.items() if golden.bad}


def as_bytes(value: int | bytes) -> bytes:
    return value.to_bytes(8, "little") if isinstance(value, int) else value


@pytest.mark.parametrize("name", GOOD)
def test_golden_bytes_decode_to_the_frame(name: str) -> None:
    golden = GOOD[name]
    (frame,) = Decoder().feed(golden.wire)
    expected = tuple((tag, as_bytes(value)) for tag, value in golden.fields)
    assert frame == Frame(golden.kind, golden.command, expected)


@pytest.mark.parametrize("name", [name for name, golden in GOOD.items() if not golden.read_only])
def test_the_frame_encodes_to_the_golden_bytes(name: str) -> None:
    golden = GOOD[name]
    assert encode(golden.kind, golden.command, *golden.fields) == golden.wire  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BAD)
def test_bad_bytes_are_refused(name: str) -> None:
    with pytest.raises(FrameError):
        list(Decoder().feed(BAD[name].wire))


def test_every_kind_has_a_golden_frame() -> None:
    assert {golden.kind for golden in GOOD.values()} == set(Kind)


def test_every_tag_has_a_golden_field() -> None:
    assert {tag for golden in GOOD.values() for tag, _ in golden.fields} >= set(Tag)


def test_a_body_over_the_bound_is_not_encoded() -> None:
    assert len(encode(Kind.STDIN, 1, (Tag.DATA, bytes(FRAME_BODY_MAX - 6)))) == FRAME_BODY_MAX + 16
    with pytest.raises(FrameError, match="over the"):
        encode(Kind.STDIN, 1, (Tag.DATA, bytes(FRAME_BODY_MAX - 5)))


def test_numbers_and_texts_are_read_by_tag() -> None:
    (frame,) = Decoder().feed(encode(Kind.NOT_STARTED, 5, (Tag.ERRNO, 13), (Tag.TEXT, b"caf\xe9")))
    assert (frame.number(Tag.ERRNO), frame.number(Tag.PID, 9), frame.maybe_number(Tag.PID)) == (13, 9, None)
    assert (frame.text(Tag.TEXT), frame.data(Tag.WHAT)) == ("caf\ufffd", b"")
    with pytest.raises(FrameError, match="lacks the field PID"):
        frame.number(Tag.PID)


SEQUENCES = st.lists(st.sampled_from(sorted(GOOD)), max_size=8)


@given(
    names=SEQUENCES,
    cuts=st.lists(st.integers(1, 60), max_size=40),
    ending=st.sampled_from(["", *sorted(BAD)]),
)
def test_however_a_stream_is_cut_the_frames_are_the_same(
    names: list[str], cuts: list[int], ending: str
) -> None:
    stream = b"".join(GOOD[name].wire for name in names) + (BAD[ending].wire if ending else b"")
    expected = [frame for name in names for frame in Decoder().feed(GOOD[name].wire)]
    decoder, at, got, refused = Decoder(), 0, [], False
    for size in [*cuts, len(stream) + 1]:
        try:
            for frame in decoder.feed(stream[at : at + size]):
                got.append(frame)
        except FrameError:
            refused = True
            break
        at += size
    assert got == expected
    assert refused == bool(ending)


@given(st.binary(max_size=300))
def test_noise_is_frames_or_an_error_and_nothing_else(noise: bytes) -> None:
    try:
        for frame in Decoder().feed(noise):
            assert encode(frame.kind, frame.command, *frame.fields)  # type: ignore[arg-type]
    except FrameError:
        pass


def test_the_c_side_agrees_on_the_goldens(guest_frames_test: list[str]) -> None:
    assert guest_frames_test[-1] == f"{len(GOLDENS)} golden frames agree"
