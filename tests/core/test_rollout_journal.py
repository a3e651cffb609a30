"""The JSONL of a run: torn lines, other runs, and what is left to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from cloudyard.errors import Conflict, InvalidRequest, NotFound
from cloudyard.rollout.box import ARGUMENT_SHOWN_BYTES, shown
from cloudyard.rollout.journal import FILE, actions, open_journal, read
from cloudyard.rollout.records import FORMAT, Action, Attempt, AttemptKey, Cost, Run, Status
from cloudyard.rollout.runner import seed_of
from cloudyard.rollout.summary import Summary

RUN = Run(format=FORMAT, id="r", begin=1.0, seed=7, attempts=2, agents=("a",), tasks=())


def attempt(number: int, *, status: Status = "scored", reward: float | None = 1.0, try_: int = 0) -> Attempt:
    return Attempt(
        task="t", agent="a", attempt=number, try_=try_, seed=1, begin=1.0, end=2.0, status=status,
        reward=reward if status == "scored" else None, error="" if status == "scored" else "why",
        cost=Cost(wall_s=1.0, cpu_s=0.5, actions=3),
    )  # fmt: skip


def action(number: int, *, try_: int = 0, count: int = 0) -> Action:
    return Action(
        task="t", agent="a", attempt=number, try_=try_, number=count, phase="agent", op="run", begin=1, end=2
    )


def written(out: Path) -> Path:
    journal, past = open_journal(out)
    assert past is None
    with journal:
        for line in (RUN, action(0), attempt(0), action(1), action(1, count=1)):
            journal.write(line)
    return out / FILE


def test_lines_are_json_with_a_type_and_zero_is_a_reward(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    with journal:
        journal.write(RUN)
        journal.write(attempt(0, reward=0.0))
        journal.write(attempt(1, status="void"))
    run, zero, void = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert (run["type"], run["format"], run["seed"]) == ("run", 1, 7)
    assert (zero["type"], zero["status"], zero["reward"], zero["try"]) == ("attempt", "scored", 0.0, 0)
    assert (void["status"], "reward" in void) == ("void", False)


def test_what_was_begun_and_not_ended_is_known_with_a_fresh_number_for_its_next_try(tmp_path: Path) -> None:
    written(tmp_path)
    past = read(tmp_path)
    assert past.ended.keys() == {AttemptKey("t", "a", 0)}
    assert past.next_try == {AttemptKey("t", "a", 0): 1, AttemptKey("t", "a", 1): 1}


@given(st.data())
def test_a_journal_cut_anywhere_is_read_to_its_last_whole_line_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = written(tmp_path_factory.mktemp("run"))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    cut = data.draw(st.integers(first, len(whole)))
    path.write_bytes(whole[:cut])
    journal, past = open_journal(path.parent)
    assert past is not None
    with journal:
        journal.write(attempt(1))
    lines = path.read_bytes().splitlines(keepends=True)
    assert all(json.loads(line) for line in lines)
    assert b"".join(lines[:-1]) == whole[: whole.rindex(b"\n", 0, cut) + 1]


def test_a_journal_whose_first_line_is_torn_begins_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'{"type":"ru')
    journal, past = open_journal(tmp_path)
    journal.__exit__(None, None, None)
    assert past is None
    assert (tmp_path / FILE).read_bytes() == b""


def test_the_last_line_of_an_attempt_counts(tmp_path: Path) -> None:
    path = written(tmp_path)
    journal, _ = open_journal(tmp_path)
    with journal:
        journal.write(attempt(1, status="void"))
        journal.write(attempt(1, try_=1, reward=0.5))
    past = read(path.parent)
    assert past.ended[AttemptKey("t", "a", 1)].reward == 0.5


def test_one_runner_holds_a_journal_at_a_time(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    with journal, pytest.raises(Conflict, match="Another runner"):
        open_journal(tmp_path)
    open_journal(tmp_path)[0].__exit__(None, None, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"type":"attempt"}\n', "line 1"),
        ("notes\n", "line 1"),
        (
            '{"type":"run","format":99,"id":"r","begin":1,"seed":1,"attempts":1,"agents":[],"tasks":[]}\n',
            "99",
        ),
    ],
)
def test_another_file_is_refused_and_left_as_it_was(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        open_journal(tmp_path)
    assert (tmp_path / FILE).read_text() == text


def test_a_directory_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holds no run"):
        read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot hold the run"):
        open_journal(tmp_path / "file")


def test_the_actions_of_one_try_come_in_their_order(tmp_path: Path) -> None:
    written(tmp_path)
    assert [found.number for found in actions(tmp_path, "t/a/1", try_=0)] == [0, 1]
    assert actions(tmp_path, "t/a/1", try_=1) == []


def test_voids_are_counted_apart_and_are_no_zeros() -> None:
    summary = Summary([attempt(0), attempt(1, reward=0.0), attempt(2, status="void"),
                       attempt(3, status="unscored")])  # fmt: skip
    (row,) = summary.rows
    assert (row.attempts, row.scored, row.void, row.unscored) == (4, 2, 1, 1)
    assert (row.mean_reward, row.void_rate) == (0.5, 0.25)
    assert (row.cpu_s, row.errors) == (2.0, {"why": 2})
    assert Summary([attempt(0, status="void")]).total.mean_reward is None


def test_seeds_are_the_same_everywhere_and_differ_between_attempts() -> None:
    assert seed_of(0, "one", 0) == 5039382739880914264
    assert len({seed_of(s, t, a) for s in range(3) for t in ("one", "two") for a in range(50)}) == 300
    assert all(0 <= seed_of(s, "t", 0) < 1 << 63 for s in range(100))


@given(st.binary(max_size=3000), st.integers(0, 10_000))
def test_what_is_shown_is_bounded_and_says_what_is_left_out(data: bytes, beyond: int) -> None:
    text = shown(data, len(data) + beyond, limit=1000)
    assert len(text) <= 1000 + 40
    if len(data) + beyond <= 1000:
        assert text == data.decode(errors="replace")
    else:
        kept = min(len(data), 500) + (min(len(data) - 500, 500) if not beyond else 0)
        assert f"[{len(data) + beyond - kept} bytes left out]" in text
    assert ARGUMENT_SHOWN_BYTES < 10_000
