"""What a run in a cell means: a verdict on a test case, or the result of a call. Pure."""

from __future__ import annotations

from msgspec import Struct

from cloudyard.edge.functions.frames import Answer
from cloudyard.edge.verdict import Ending, judge
from cloudyard.model import CallPhase, CallResult, Case, CaseResult, Comparison, Verdict


class Run(Struct, frozen=True, kw_only=True):
    """How a program ran in a cell."""

    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_total: int = 0
    stderr_total: int = 0
    timed_out: bool = False
    oom_kills: int = 0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0


def run_of(answer: Answer, *, oom_kills: int) -> Run:
    """What a host answered, as a run."""
    code = answer.number("exit")
    return Run(
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=answer.data("stdout"),
        stderr=answer.data("stderr"),
        stdout_total=answer.number("stdout_total"),
        stderr_total=answer.number("stderr_total"),
        timed_out=bool(answer.number("timed_out")),
        oom_kills=oom_kills,
        duration_s=answer.number("duration_us") / 1e6,
        cpu_s=answer.number("cpu_us") / 1e6,
        peak_memory_bytes=answer.number("peak"),
    )


def result_of(run: Run, *, keep: int, timeout_s: float, phase: CallPhase = "run") -> CallResult:
    """A call without cases, or one that the compiler refused.

    Args:
        run: how it ran.
        keep: bytes to keep of each stream.
        timeout_s: the limit it had.
        phase: what ran.
    """
    ending = Ending(
        exit_code=run.exit_code,
        signal=run.signal,
        timed_out=timeout_s if run.timed_out else None,
        oom_kills=run.oom_kills,
    )
    verdict = judge(ending)
    return CallResult(
        phase=phase,
        exit_code=run.exit_code,
        signal=run.signal,
        stdout=run.stdout[:keep],
        stderr=run.stderr[:keep],
        stdout_total=run.stdout_total,
        stderr_total=run.stderr_total,
        truncated=max(run.stdout_total, run.stderr_total) > keep,
        timed_out=run.timed_out,
        oom=verdict.oom,
        duration_s=run.duration_s,
        cpu_s=run.cpu_s,
        peak_memory_bytes=run.peak_memory_bytes,
        fault=verdict.fault,
    )


def case_of(run: Run, case: Case, *, compare: Comparison, keep_out: int, keep_err: int) -> CaseResult:
    """A run judged by its test case.

    Args:
        run: how it ran; its stdout may hold more than is kept of it, so that it can be compared.
        case: what it was given and had to print.
        compare: how outputs are compared.
        keep_out: bytes to keep of stdout.
        keep_err: bytes to keep of stderr.
    """
    return CaseResult(
        verdict=_verdict(run, case.expected, compare),
        exit_code=run.exit_code,
        signal=run.signal,
        stdout=run.stdout[:keep_out],
        stderr=run.stderr[:keep_err],
        truncated=run.stdout_total > keep_out or run.stderr_total > keep_err,
        duration_s=run.duration_s,
        cpu_s=run.cpu_s,
        peak_memory_bytes=run.peak_memory_bytes,
    )


def _verdict(run: Run, expected: bytes | None, compare: Comparison) -> Verdict:
    if run.timed_out:
        return "timeout"
    if run.exit_code != 0:
        return "memory" if run.oom_kills else "failed"
    if expected is None:
        return "passed"
    if run.stdout_total > len(run.stdout):
        return "output"
    return "passed" if same(run.stdout, expected, compare) else "wrong"


def same(printed: bytes, expected: bytes, compare: Comparison) -> bool:
    """Whether a program has printed what was expected of it."""
    return printed == expected or (compare == "lines" and _lines(printed) == _lines(expected))


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
