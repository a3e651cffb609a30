"""What a call runs, what came of it, and the frames between an edge and a worker's host: all without one."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cloudyard.edge.functions import programs
from cloudyard.edge.functions.frames import ANSWER_MAX_BYTES, SIZE, Answer, Decoder, HostError, pack
from cloudyard.edge.functions.programs import Outcome
from cloudyard.model import CALL_OUTPUT_MAX_BYTES, MIB, CallSpec, Case, CaseResult, Comparison, Verdict

KEEP = 1000
NAMES = st.text(max_size=8)
FRAMES = st.lists(st.dictionaries(NAMES, st.binary(max_size=64), max_size=5), max_size=6)


def spec(**more: object) -> CallSpec:
    return CallSpec(**{"code": "pass", "memory": 64 * MIB, **more})  # type: ignore[arg-type]


def ended(exit_code: int | None = 0, stdout: bytes = b"", **more: object) -> Outcome:
    fields = {"signal": None, "stderr": b"", "stdout_total": len(stdout), **more}
    return Outcome(exit_code=exit_code, stdout=stdout, **fields)  # type: ignore[arg-type]


# --- frames ---------------------------------------------------------------------------------------------


@given(FRAMES, st.data())
def test_answers_come_out_however_their_bytes_are_cut(
    frames: list[dict[str, bytes]], data: st.DataObject
) -> None:
    whole = b"".join(pack(frame.items()) for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    decoder, answers = Decoder(), []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        answers += decoder.feed(whole[begin:end])
    assert answers == [Answer(frame) for frame in frames]


@given(st.binary(max_size=200))
def test_no_bytes_do_worse_than_break_the_protocol(noise: bytes) -> None:
    try:
        for answer in Decoder().feed(noise):
            answer.number("exit")
    except HostError:
        pass


def test_a_frame_too_large_is_refused_before_it_has_come() -> None:
    with pytest.raises(HostError, match="over the"):
        list(Decoder().feed(SIZE.pack(ANSWER_MAX_BYTES + 1)))


@pytest.mark.parametrize("body", [b"\x01", b"\x05\0\0\0\x05\0\0\0abc", b"\xff\xff\xff\xff\xff\xff\xff\xff"])
def test_a_field_past_its_frame_is_refused(body: bytes) -> None:
    with pytest.raises(HostError):
        list(Decoder().feed(SIZE.pack(len(body)) + body))


# --- verdicts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (ended(0, b"9\n"), "passed"),
        (ended(0, b"8\n"), "wrong"),
        (ended(1, b"9\n"), "failed"),
        (ended(None, b"9\n", signal=11), "failed"),
        (ended(None, signal=9, timed_out=True), "timeout"),
        (ended(None, signal=9, timed_out=True, oom=True), "timeout"),
        (ended(None, signal=9, oom=True), "memory"),
        (ended(1, oom=True), "memory"),
        (ended(0, b"9\n", oom=True), "passed"),  # a child of it was killed, and it did without
        (ended(0, b"9\n", stdout_total=5000), "output"),
        (programs.killed_for_memory(), "memory"),
    ],
)
def test_each_end_has_its_verdict(outcome: Outcome, verdict: Verdict) -> None:
    assert programs.judged(Case(expected=b"9"), outcome, "lines", keep=KEEP).verdict == verdict


def test_without_expected_output_only_the_exit_code_counts() -> None:
    assert programs.judged(Case(), ended(0, b"x", stdout_total=5000), "exact", keep=KEEP).verdict == "passed"
    assert programs.judged(Case(), ended(2), "exact", keep=KEEP).verdict == "failed"


@pytest.mark.parametrize(
    ("expected", "said", "comparison", "same"),
    [
        (b"a\nb\n", b"a\nb\n", "exact", True),
        (b"a\nb\n", b"a\nb", "exact", False),
        (b"a\nb\n", b"a  \r\nb\n\n\n", "lines", True),
        (b"a\nb\n", b"a\n\nb\n", "lines", False),
        (b"a\n", b" a\n", "lines", False),
        (b"", b"\n \n\t\n", "lines", True),
        (b"", b"a", "lines", False),
        (b"\xff\xfe\n", b"\xff\xfe", "lines", True),
        (b"\xff\n", b"\xfe\n", "lines", False),
    ],
)
def test_outputs_are_compared_as_asked(
    expected: bytes, said: bytes, comparison: Comparison, same: bool
) -> None:
    case = programs.judged(Case(expected=expected), ended(0, said), comparison, keep=KEEP)
    assert case.verdict == ("passed" if same else "wrong")


@given(st.binary(max_size=60))
def test_every_output_is_equal_to_itself(said: bytes) -> None:
    for comparison in ("exact", "lines"):
        case = programs.judged(Case(expected=said), ended(0, said), comparison, keep=KEEP)
        assert case.verdict == "passed"


def test_what_is_compared_may_be_more_than_what_is_kept() -> None:
    long = b"x" * (10 * KEEP)
    case = Case(expected=long)
    run = programs.running(spec(output_limit_bytes=KEEP), b"", b"", compared_to=case.expected)
    assert run.limit_bytes > len(long)
    done = programs.judged(case, ended(0, long), "lines", keep=KEEP)
    assert (done.verdict, len(done.stdout), done.truncated) == ("passed", KEEP, True)


# --- results --------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, CALL_OUTPUT_MAX_BYTES), st.integers(0, CALL_OUTPUT_MAX_BYTES)), max_size=8
    )
)
def test_the_outputs_of_all_cases_together_are_bounded(sizes: list[tuple[int, int]]) -> None:
    cases = [CaseResult(verdict="passed", stdout=bytes(out), stderr=bytes(err)) for out, err in sizes]
    result = programs.result_of_cases(spec(cases=[Case()] * len(cases)), cases)
    assert len(result.cases) == len(cases)
    assert sum(len(case.stdout) for case in result.cases) <= CALL_OUTPUT_MAX_BYTES
    assert sum(len(case.stderr) for case in result.cases) <= CALL_OUTPUT_MAX_BYTES
    for (out, err), case in zip(sizes, result.cases, strict=True):
        assert case.truncated == (len(case.stdout) < out or len(case.stderr) < err)


def test_cases_that_do_not_pass_are_the_code_s_own_fault() -> None:
    cases = [CaseResult(verdict=verdict) for verdict in ("passed", "wrong", "timeout")]
    result = programs.result_of_cases(spec(cases=[Case()] * 5), cases)
    assert result.fault is not None
    assert (result.fault.label, result.passed, result.timed_out) == ("policy", False, True)
    assert "2 of 5" in result.fault.evidence
    assert "first of them 2: wrong" in result.fault.evidence


def test_an_answer_becomes_an_outcome() -> None:
    fields = {"exit": b"-11", "stdout": b"x", "stdout_total": b"9", "timed_out": b"0", "cpu_us": b"1500"}
    outcome = programs.outcome_of(Answer(fields), oom=False)
    assert (outcome.exit_code, outcome.signal, outcome.truncated, outcome.cpu_s) == (None, 11, True, 0.0015)
    assert outcome.stderr == b""
    fault = programs.fault_of(outcome, timeout_s=1.0)
    assert fault is not None
    assert fault.label == "policy"


# --- runs -----------------------------------------------------------------------------------------------


def test_python_runs_where_it_is_loaded_unless_its_start_is_asked_for() -> None:
    assert programs.running(spec(args=["a"]), b"", b"").argv == ("main.py", "a")
    assert programs.running(spec(), b"", b"").here
    run = programs.running(spec(env={"PYTHONHASHSEED": "0"}), b"", b"")
    assert (run.argv, run.here) == (("python3", "main.py"), False)


def test_shell_and_c_run_what_they_were_given() -> None:
    run = programs.running(spec(language="shell", code="echo"), b"", b"")
    assert (run.argv, run.files) == (("/bin/sh", "main.sh"), ((0o644, "main.sh", b"echo"),))
    run = programs.running(spec(language="c", files={"a": b"b"}), b"in", b"\x7fELF")
    assert (run.argv, run.stdin) == (("./main",), b"in")
    assert run.files == ((0o644, "a", b"b"), (0o755, "main", b"\x7fELF"))


def test_the_program_cannot_be_hidden_by_a_file_of_the_same_name() -> None:
    files = programs.running(spec(files={"main.py": b"other"}), b"", b"").files
    assert files[-1] == (0o644, "main.py", b"pass")


def test_a_call_s_own_environment_goes_before_the_image_s() -> None:
    env = programs.environment(spec(env={"A": "call", "HOME": "/x"}), {"A": "image", "B": "image"})
    assert (env["A"], env["B"], env["HOME"]) == ("call", "image", "/x")
