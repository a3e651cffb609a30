"""Stateless calls: code to run in a fresh process of a warm pool, and what it gave.

A call has no sandbox, no step and no key: nothing of it outlives it, so it may always be sent again.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from cloudyard.model.basics import GIB, KIB, MIB
from cloudyard.model.results import Fault

Language = Literal["python", "shell", "c"]
Comparison = Literal["exact", "lines"]
CallPhase = Literal["compile", "run"]
Verdict = Literal["passed", "wrong", "failed", "timeout", "memory", "output"]

CALL_IMAGE_DEFAULT = "debian"
CALL_TIMEOUT_DEFAULT_S = 10.0
CALL_TIMEOUT_MAX_S = 300.0
CALL_TOTAL_MAX_S = 3600.0  # time limits of all cases of a call together
CALL_COMPILE_MAX_S = 60.0  # for a compiler
CALL_QUEUE_MAX_S = 60.0  # a call waits at most so long for a worker; then it is refused and may be sent again
CALL_MEMORY_DEFAULT = "256MiB"
CALL_MEMORY_MIN_BYTES, CALL_MEMORY_MAX_BYTES = 32 * MIB, 64 * GIB
CALL_BYTES_MAX = 4 * MIB  # code, arguments, files, stdin and test cases of one call together
CALL_ARGS_BYTES_MAX = 64 * KIB  # arguments and environment together: half of what the kernel takes as one
CALL_PATH_BYTES_MAX = 512  # of a file laid into the working directory
CALL_FILES_MAX = 64
CALL_CASES_MAX = 256
CALL_PRELOAD_MAX = 32  # modules
CALL_OUTPUT_DEFAULT_BYTES = 64 * KIB  # kept per stream
CALL_OUTPUT_MAX_BYTES = 1 * MIB  # per stream, of all cases of a call together
CALL_MANY_MAX = 100_000


class Case(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A test case for a program: what it reads, and what it has to print."""

    stdin: bytes = b""
    expected: bytes | None = None
    """Its stdout; None: it only has to end with exit code 0."""


class CallSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Code to run once, in a new process that sees nothing of any other call."""

    code: str
    language: Language = "python"
    image: str = CALL_IMAGE_DEFAULT
    """Image of the yard that holds python3, and gcc with libc6-dev for C."""
    preload: list[str] = []
    """Python modules that a worker has imported before the call, in this order."""
    args: list[str] = []
    stdin: bytes = b""
    files: dict[str, bytes] = {}
    """Laid into the working directory before the call: relative path and content."""
    env: dict[str, str] = {}
    timeout_s: float = CALL_TIMEOUT_DEFAULT_S
    """Of the run, and of each test case; compiling has a limit of its own."""
    memory: int | str = CALL_MEMORY_DEFAULT
    """What the whole call may use at most, its files in /tmp included."""
    output_limit_bytes: int = CALL_OUTPUT_DEFAULT_BYTES
    """Bytes kept of each stream; a program that writes on is not held up."""
    cases: list[Case] = []
    """Judge the program: one run for each, in a process of its own. `stdin` must be empty then."""
    compare: Comparison = "lines"
    """`exact`: every byte. `lines`: blanks at the ends of lines and empty lines at the end do not count."""
    stop_at_first: bool = False
    """Run no further case after the first that does not pass."""


class CaseResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a program did on one test case."""

    verdict: Verdict
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    duration_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0


class CallResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a call ended. With cases, the fields of the run stay as they are and `cases` tells of each."""

    phase: CallPhase = "run"
    """How far it came: `compile` when the compiler refused it, and then the result is the compiler's."""
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_total: int = 0
    """Bytes that it really wrote."""
    stderr_total: int = 0
    truncated: bool = False
    timed_out: bool = False
    oom: bool = False
    duration_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    """Largest resident size of any one process of it."""
    cases: list[CaseResult] = []
    fault: Fault | None = None
    edge: str = ""

    @property
    def text(self) -> str:
        """Its stdout as text; bytes that are no UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def ok(self) -> bool:
        """It ended by itself with exit code 0; with cases, each run did, whatever it printed."""
        if self.cases:
            return all(case.verdict in ("passed", "wrong") for case in self.cases)
        return self.phase == "run" and self.exit_code == 0 and not self.timed_out

    @property
    def passed(self) -> bool:
        """Every case passed; without cases, it ended by itself with exit code 0."""
        return all(case.verdict == "passed" for case in self.cases) if self.cases else self.ok


def call_limit_s(timeout_s: float, cases: int) -> float:
    """The longest that a call may take on its edge, in seconds: in the queue, compiling and running."""
    each_s = min(max(timeout_s, 0.0), CALL_TIMEOUT_MAX_S)
    running_s = min(each_s * min(max(cases, 1), CALL_CASES_MAX), CALL_TOTAL_MAX_S)
    return CALL_QUEUE_MAX_S + CALL_COMPILE_MAX_S + running_s
