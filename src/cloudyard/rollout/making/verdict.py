"""What a run of tests said, read from its last lines, and whether that is a pass.

This file is also copied into the tests of every task that is made, and runs in the sandbox after them:

    python3 verdict.py unittest STATUS OUTPUT TESTS SKIPPED

prints 1 if as many tests ran as of the pristine package, no more were skipped, and all others passed; else 0.
So it knows Python's standard library and nothing else. It does not believe an exit code alone: code under
test can end the run early with any code it likes.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

TAIL_BYTES = 65536  # of the output: the summary stands at its end
_UNITTEST = re.compile(r"^Ran (\d+) tests? in [\d.]+s\n\n(?:OK|FAILED)(?: \(([^()\n]*)\))?\s*$", re.MULTILINE)
_PYTEST = re.compile(
    r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s(?: \([\d:]+\))?(?: =+)?\s*$", re.MULTILINE
)
_BAD = ("failures", "errors", "unexpected successes", "failed", "error")


class Outcome(NamedTuple):
    """How many tests ran, of these how many were skipped, and how many ended badly.

    `failed` may be more than `ran`: a test with several parts can fail several times.
    """

    ran: int
    skipped: int
    failed: int

    @property
    def passed(self) -> int:
        return max(0, self.ran - self.skipped - self.failed)


def read(kind: str, output: str) -> Outcome | None:
    """The summary at the end of an output; None where there is none.

    Args:
        kind: `unittest` or `pytest`; anything else: whichever of the two is found.
        output: stdout and stderr together.
    """
    readers = {"unittest": _read_unittest, "pytest": _read_pytest}
    for reader in [readers[kind]] if kind in readers else readers.values():
        if (outcome := reader(output[-TAIL_BYTES:])) is not None:
            return outcome
    return None


def accept(kind: str, *, status: int, output: str, tests: int, skipped: int) -> bool:
    """Whether a run is a pass: ended with 0, all `tests` ran, at most `skipped` of them skipped, none bad."""
    outcome = read(kind, output)
    if status != 0 or outcome is None:
        return False
    return outcome.ran >= tests and outcome.skipped <= skipped and outcome.failed == 0


def _read_unittest(output: str) -> Outcome | None:
    found = _UNITTEST.findall(output)
    if not found:
        return None
    ran, details = found[-1]
    counts = {name: int(number) for name, number in re.findall(r"([a-z][a-z ]*)=(\d+)", details)}
    return Outcome(int(ran), counts.get("skipped", 0), sum(counts.get(name, 0) for name in _BAD))


def _read_pytest(output: str) -> Outcome | None:
    found = _PYTEST.findall(output)
    if not found:
        return None
    counts = {name: int(number) for number, name in re.findall(r"(\d+) ([a-z]+)", found[-1])}
    failed = sum(counts.get(name, 0) for name in _BAD)
    skipped = counts.get("skipped", 0)
    ran = failed + skipped + sum(counts.get(name, 0) for name in ("passed", "xfailed", "xpassed"))
    return Outcome(ran, skipped, failed)


def main(arguments: list[str]) -> int:
    """Print the reward for one run of tests."""
    kind, status, path, tests, skipped = arguments
    with open(path, "rb") as file:
        output = file.read().decode(errors="replace")
    passed = accept(kind, status=int(status), output=output, tests=int(tests), skipped=int(skipped))
    print(1 if passed else 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
