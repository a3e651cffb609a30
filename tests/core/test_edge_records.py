"""The record file of a sandbox, cut and grown in every way."""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from cloudyard.core.lifecycle import Life, Transition
from cloudyard.edge.backends.base import InstanceFacts
from cloudyard.edge.journal import Journal
from cloudyard.edge.records import (
    ENTRY,
    Answer,
    AnyRecord,
    Ended,
    Head,
    Intent,
    Lives,
    Moved,
    Placed,
    RecordFile,
    Reserved,
    Stalled,
    Used,
    pack,
    unpack,
)
from cloudyard.errors import LimitExceeded
from cloudyard.model import (
    CommandInfo,
    CommandSpec,
    Done,
    ErrorBody,
    ExecResult,
    ImageConfig,
    SandboxId,
    SandboxSpec,
)
from cloudyard.wire.messages import encode

HEAD = Head("sb-e1-000000000001", "p", SandboxSpec(image="debian", memory=1 << 29), ImageConfig(), 5.0, 1.0)
FACTS = InstanceFacts(sandbox=SandboxId(HEAD.sandbox), slot=3, pid=77, pid_start=12345)


def ended(number: int, key: str = "", out: bytes = b"") -> Ended:
    info = CommandInfo(command_id=number, running=False)
    return Ended(number, key, b"d", info, ExecResult(command_id=number, stdout=out, stdout_kept=len(out)))


records: st.SearchStrategy[AnyRecord] = st.one_of(
    st.builds(Placed, st.just(FACTS)),
    st.builds(lambda at: Moved(Transition("Ready", "running", at=at)), st.floats(0, 100)),
    st.builds(Lives, st.none() | st.floats(1, 9), st.none() | st.floats(1, 9)),
    st.builds(Used, st.floats(0, 100)),
    st.builds(Reserved, st.integers(0, 1000)),
    st.builds(
        lambda step, op, key, shell: Intent(step, key, b"d", op, 2.0, CommandSpec(shell=shell)),
        st.integers(1, 50),
        st.sampled_from(["exec", "start", "command"]),
        st.text(max_size=5),
        st.text(min_size=1, max_size=20),
    ),
    st.builds(Stalled, st.integers(1, 50), st.floats(0, 9)),
    st.builds(
        lambda step, key, data: Answer(step, key, b"d", encode(Done(taken=len(data)))),
        st.integers(1, 50),
        st.text(max_size=5),
        st.binary(max_size=20),
    ),
    st.builds(
        lambda step, key: Answer(step, key, b"d", b"", ErrorBody(kind="not_found", code="x", message="y")),
        st.integers(1, 50),
        st.text(max_size=5),
    ),
    st.builds(ended, st.integers(1, 50), st.text(max_size=5), st.binary(max_size=300)),
)


@given(st.lists(records, max_size=20))
def test_what_is_appended_is_loaded(wanted: list[AnyRecord]):
    data = b"".join(pack(record) for record in wanted)
    assert [entry.record for entry in unpack(data)] == wanted


@settings(deadline=None)
@given(st.lists(records, min_size=1, max_size=12), st.data())
def test_a_cut_anywhere_loses_only_the_last_and_appending_goes_on(
    wanted: list[AnyRecord], data: st.DataObject
):
    packed = [pack(record) for record in wanted]
    whole = b"".join(packed)
    cut = data.draw(st.integers(0, len(whole)))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.log"
        path.write_bytes(whole[:cut])
        file = RecordFile(path)
        loaded = [entry.record for entry in file.load()]
        complete = sum(1 for at in range(len(packed)) if sum(map(len, packed[: at + 1])) <= cut)
        assert loaded == wanted[:complete]
        entry = file.append(Used(4.5))
        assert file.read(entry.offset, entry.size) == Used(4.5)
        assert [entry.record for entry in RecordFile(path).load()] == [*loaded, Used(4.5)]


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_foreign_bytes_are_no_records_and_no_error(data: bytes):
    list(unpack(data))


def test_a_record_of_a_newer_edge_is_skipped_and_kept(tmp_path: Path):
    body = msgspec.msgpack.encode(["FromTheFuture", 1, 2])
    foreign = ENTRY.pack(len(body), zlib.crc32(body)) + body
    path = tmp_path / "x.log"
    path.write_bytes(pack(Used(1.0)) + foreign + pack(Used(2.0)) + foreign)
    file = RecordFile(path)
    assert [entry.record for entry in file.load()] == [Used(1.0), Used(2.0)]
    assert file.size == path.stat().st_size


def journal_in(directory: Path) -> Journal:
    journal = Journal(directory / "x.log", HEAD)
    journal.file.create([HEAD])
    return journal


def facts_of(journal: Journal) -> tuple[object, ...]:
    return (
        journal.head,
        journal.facts,
        journal.life,
        journal.lives,
        journal.used_at,
        journal.intents,
        journal.stalled,
        {key: (known.step, journal.read(known.place)) for key, known in journal.keys.items()},
        {number: journal.read(known.place) for number, known in journal.ended.items()},
    )


@settings(deadline=None)
@given(st.lists(records, max_size=25))
def test_a_rewritten_journal_says_the_same(wanted: list[AnyRecord]):
    with tempfile.TemporaryDirectory() as directory:
        journal = journal_in(Path(directory))
        for record in wanted:
            journal.append(record)
        before = facts_of(journal)
        loaded = Journal.load(journal.file.path)
        assert loaded is not None
        assert facts_of(loaded) == before
        journal.rewrite(1 << 20, 1000)
        assert facts_of(journal) == before
        loaded = Journal.load(journal.file.path)
        assert loaded is not None
        assert facts_of(loaded) == before
        assert loaded.next_step >= journal.next_step


def test_a_rewrite_keeps_the_newest_within_its_bounds(tmp_path: Path):
    journal = journal_in(tmp_path)
    for number in range(1, 101):
        journal.append(ended(number, f"k{number}", b"x" * 100))
    dropped: list[int] = []
    journal.on_dropped = lambda number, _known: dropped.append(number)
    journal.rewrite(1 << 20, 10)
    assert dropped == list(range(1, 91))
    assert list(journal.ended) == list(range(91, 101))
    assert list(journal.keys) == [f"k{number}" for number in range(91, 101)]
    journal.rewrite(600, 10)
    assert journal.ended
    assert max(journal.ended) == 100
    assert journal.file.size < 2000
    loaded = Journal.load(journal.file.path)
    assert loaded is not None
    assert loaded.next_step == 101


def test_an_ended_sandbox_is_known_from_the_start_of_its_file(tmp_path: Path):
    journal = journal_in(tmp_path)
    journal.append(Moved(Transition("StopWanted", "stopped", "asked")))
    assert Journal.peek(journal.file.path) is None
    for number in range(1, 200):
        journal.append(ended(number, f"k{number}", b"x" * 5000))
    journal.close(9.0)
    peeked = Journal.peek(journal.file.path)
    assert peeked is not None
    assert (peeked.life, peeked.gone and peeked.gone.at) == (Life("stopped", "asked"), 9.0)
    assert peeked.next_step == 200
    assert not peeked.keys


def test_a_file_that_cannot_be_written_is_said_and_stays_whole(tmp_path: Path):
    journal = journal_in(tmp_path)
    journal.file.path.unlink()
    with pytest.raises(LimitExceeded) as caught:
        journal.append(Used(3.0))
    assert caught.value.code == "edge_disk_full"
    assert journal.used_at == HEAD.created_mono
