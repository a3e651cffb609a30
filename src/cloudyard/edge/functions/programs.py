"""What a call runs, and what came of it: specs into runs of a cell, answers into results. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from cloudyard.edge.functions.frames import Answer
from cloudyard.edge.verdict import Ending, judge
from cloudyard.model import (
    CALL_COMPILE_MAX_S,
    CALL_OUTPUT_MAX_BYTES,
    MIB,
    CallResult,
    CallSpec,
    Case,
    CaseResult,
    Comparison,
    Fault,
    Verdict,
)

SIGKILL = 9
SOURCE, PROGRAM = "main.c", "main"
COMPILER = "gcc"
COMPILE_ARGS = ("-O2", "-o", PROGRAM, SOURCE, "-lm")
COMPILE_MEMORY_BYTES = 1024 * MIB  # a compiler is no part of what is judged
COMPILE_OUTPUT_BYTES = 64 * 1024
NO_HEADERS = (b"stdio.h: No such file", b"cannot find crt1.o", b"cannot find Scrt1.o")
SCRATCH_SHARE = 0.5  # of a run's memory, for each of its writable directories: a full one is no kill
COMPARE_SPARE_BYTES = 4 * 1024  # blanks that a comparison by lines does not count
HOME = "/tmp"
USER = "call"


class Run(NamedTuple):
    """One program in one cell."""

    argv: tuple[str, ...]
    files: tuple[tuple[int, str, bytes], ...]
    """Mode, path in the working directory, content."""
    stdin: bytes
    timeout_s: float
    memory_bytes: int
    limit_bytes: int
    """Kept of each stream."""
    here: bool = False
    """In the Python that is there already."""
    keep: str = ""
    """A file to bring back: its absolute path."""

    def fields(self, env: dict[str, str]) -> Iterator[tuple[str, bytes]]:
        """The frame for the host."""
        yield "how", b"here" if self.here else b"exec"
        yield "timeout_us", str(round(self.timeout_s * 1e6)).encode()
        yield "limit", str(self.limit_bytes).encode()
        yield "scratch", str(int(self.memory_bytes * SCRATCH_SHARE)).encode()
        yield "stdin", self.stdin
        for part in self.argv:
            yield "arg", part.encode()
        for name, value in env.items():
            yield "env", f"{name}={value}".encode()
        for mode, path, content in self.files:
            yield "file", f"{mode:o}\0{path}\0".encode() + content
        if self.keep:
            yield "keep", self.keep.encode()


class Outcome(NamedTuple):
    """How a run ended."""

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_total: int = 0
    stderr_total: int = 0
    timed_out: bool = False
    oom: bool = False
    duration_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    kept: bytes = b""

    @property
    def truncated(self) -> bool:
        """More was written than is kept."""
        return self.stdout_total > len(self.stdout) or self.stderr_total > len(self.stderr)


def outcome_of(answer: Answer, *, oom: bool) -> Outcome:
    """What a host's answer says."""
    code = answer.number("exit")
    return Outcome(
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=answer.data("stdout"),
        stderr=answer.data("stderr"),
        stdout_total=answer.number("stdout_total"),
        stderr_total=answer.number("stderr_total"),
        timed_out=bool(answer.number("timed_out")),
        oom=oom,
        duration_s=answer.number("duration_us") / 1e6,
        cpu_s=answer.number("cpu_us") / 1e6,
        peak_memory_bytes=answer.number("peak"),
        kept=answer.data("kept"),
    )


def killed_for_memory() -> Outcome:
    """A run whose whole cell the kernel has killed for memory: nothing of it could be told."""
    return Outcome(None, SIGKILL, b"", b"", oom=True)


def compiling(spec: CallSpec) -> Run:
    """The compiler's run."""
    return Run(
        argv=(COMPILER, *COMPILE_ARGS),
        files=(*_laid(spec), (0o644, SOURCE, spec.code.encode())),
        stdin=b"",
        timeout_s=CALL_COMPILE_MAX_S,
        memory_bytes=COMPILE_MEMORY_BYTES,
        limit_bytes=COMPILE_OUTPUT_BYTES,
        keep=f"{HOME}/{PROGRAM}",
    )


def running(spec: CallSpec, stdin: bytes, program: bytes, *, compared_to: bytes | None = None) -> Run:
    """The program's own run.

    Args:
        spec: the call.
        stdin: what it reads.
        program: what the compiler has made of it; empty for other languages.
        compared_to: what its stdout is compared to, which must fit into what is kept of it.
    """
    code = spec.code.encode()
    # Python reads these when it starts, and the worker's has started: another one is then.
    here = spec.language == "python" and not any(name.startswith("PYTHON") for name in spec.env)
    argv: tuple[str, ...] = ("main.py",) if here else ("python3", "main.py")
    file = (0o644, "main.py", code)
    if spec.language == "shell":
        argv, file = ("/bin/sh", "main.sh"), (0o644, "main.sh", code)
    elif spec.language == "c":
        argv, file = (f"./{PROGRAM}",), (0o755, PROGRAM, program)
    assert isinstance(spec.memory, int), "the spec is normalised"
    return Run(
        argv=(*argv, *spec.args),
        files=(*_laid(spec), file),
        stdin=stdin,
        timeout_s=spec.timeout_s,
        memory_bytes=spec.memory,
        limit_bytes=max(spec.output_limit_bytes, len(compared_to or b"") + COMPARE_SPARE_BYTES)
        if compared_to is not None
        else spec.output_limit_bytes,
        here=here,
    )


def environment(spec: CallSpec, image_env: dict[str, str]) -> dict[str, str]:
    """What the program finds in its environment."""
    return {**image_env, "HOME": HOME, "USER": USER, "LOGNAME": USER, **spec.env}


def result_of(outcome: Outcome, *, timeout_s: float) -> CallResult:
    """The result of a call without cases. `timeout_s`: the limit it had."""
    return CallResult(
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        stdout=outcome.stdout,
        stderr=outcome.stderr,
        stdout_total=outcome.stdout_total,
        stderr_total=outcome.stderr_total,
        truncated=outcome.truncated,
        timed_out=outcome.timed_out,
        oom=outcome.oom,
        duration_s=outcome.duration_s,
        cpu_s=outcome.cpu_s,
        peak_memory_bytes=outcome.peak_memory_bytes,
        fault=fault_of(outcome, timeout_s=timeout_s),
    )


def not_compiled(outcome: Outcome) -> CallResult:
    """The result of a call whose code the compiler has refused."""
    return replace(result_of(outcome, timeout_s=CALL_COMPILE_MAX_S), phase="compile")


def fault_of(outcome: Outcome, *, timeout_s: float) -> Fault | None:
    """Whose doing the end was; None for a good one."""
    return judge(
        Ending(
            exit_code=outcome.exit_code,
            signal=outcome.signal,
            timed_out=timeout_s if outcome.timed_out else None,
            oom_kills=int(outcome.oom),
        )
    ).fault


def judged(case: Case, outcome: Outcome, comparison: Comparison, *, keep: int) -> CaseResult:
    """How the program did on a case. `keep`: bytes to keep of each stream, however much was compared."""
    return CaseResult(
        verdict=_verdict(case, outcome, comparison),
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        stdout=outcome.stdout[:keep],
        stderr=outcome.stderr[:keep],
        truncated=max(outcome.stdout_total, outcome.stderr_total) > keep,
        duration_s=outcome.duration_s,
        cpu_s=outcome.cpu_s,
        peak_memory_bytes=outcome.peak_memory_bytes,
    )


def result_of_cases(spec: CallSpec, cases: Sequence[CaseResult]) -> CallResult:
    """The result of a call with cases, whose outputs fit into one message together."""
    failed = [number for number, case in enumerate(cases, 1) if case.verdict != "passed"]
    fault = None
    if failed:
        first = cases[failed[0] - 1].verdict
        evidence = (
            f"{len(failed)} of {len(spec.cases)} cases did not pass, the first of them {failed[0]}: {first}"
        )
        fault = Fault(label="policy", reason="cases", evidence=evidence)
    return CallResult(
        truncated=any(case.truncated for case in cases),
        timed_out=any(case.verdict == "timeout" for case in cases),
        oom=any(case.verdict == "memory" for case in cases),
        duration_s=sum(case.duration_s for case in cases),
        cpu_s=sum(case.cpu_s for case in cases),
        peak_memory_bytes=max((case.peak_memory_bytes for case in cases), default=0),
        cases=list(_bounded(cases)),
        fault=fault,
    )


def _laid(spec: CallSpec) -> Iterator[tuple[int, str, bytes]]:
    return ((0o644, path, content) for path, content in spec.files.items())


def _verdict(case: Case, outcome: Outcome, comparison: Comparison) -> Verdict:
    if outcome.timed_out:
        return "timeout"
    if outcome.exit_code != 0:
        return "memory" if outcome.oom else "failed"
    if case.expected is None:
        return "passed"
    if outcome.stdout_total > len(outcome.stdout):
        return "output"
    return "passed" if _same(case.expected, outcome.stdout, comparison) else "wrong"


def _same(expected: bytes, said: bytes, comparison: Comparison) -> bool:
    return expected == said or (comparison == "lines" and _lines(expected) == _lines(said))


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _bounded(cases: Sequence[CaseResult]) -> Iterator[CaseResult]:
    """The cases with no more output than CALL_OUTPUT_MAX_BYTES of each stream in all."""
    left = {"stdout": CALL_OUTPUT_MAX_BYTES, "stderr": CALL_OUTPUT_MAX_BYTES}
    for case in cases:
        out, err = case.stdout[: left["stdout"]], case.stderr[: left["stderr"]]
        left["stdout"] -= len(out)
        left["stderr"] -= len(err)
        cut = len(out) < len(case.stdout) or len(err) < len(case.stderr)
        yield replace(case, stdout=out, stderr=err, truncated=True) if cut else case
