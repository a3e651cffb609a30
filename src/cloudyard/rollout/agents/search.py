"""`search`: a scripted repairer of Python, without a model. It runs the tests, reads the tracebacks and tries
small edits near them, the failing tests first.

It knows what its instruction says and what it sees through the box, as any agent. How lucky it is depends on
its seed alone, so its mean reward over a set of tasks says how hard they are for whoever edits at random in
the right places.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from random import Random

from msgspec import Struct

from cloudyard.errors import InvalidRequest, NotFound
from cloudyard.rollout.agents.base import Context
from cloudyard.rollout.box import Box
from cloudyard.rollout.making import faults, verdict
from cloudyard.rollout.making.faults import Fault

TEST_RUNS_MAX = 8  # of one attempt
TEST_WAIT_S = 60.0  # for one of them; an edit may make tests hang
FAILING_TESTS_MAX = 5  # that are run again after an edit
MODULES_MAX = 64  # that are read
MODULES_REMEMBERED = 256  # what was found in them, for all attempts of this process
FIND_WAIT_S = 20.0

# How much a place counts: the very line of a frame of a traceback, the function around it; a function named
# in the line where a test failed, or elsewhere in that test; one named in such a function, and so on, less by
# each hop; and of a class that is named, its methods.
AT_LINE, AT_FRAME = 4.0, 1.0
NAMED_AT_LINE, NAMED_IN_TEST = 1.0, 0.4
HOP, HOPS = 0.5, 3
IN_CLASS = 0.3
SHARPNESS = 2.0  # exponent of weights: above 1, the heavy ones go first more often
# How likely an edit of a kind undoes a mistake, whatever its place.
KINDS = {
    "arithmetic": 1.5,
    "and-or": 1.5,
    "boolean": 1.0,
    "comparison": 1.0,
    "jump": 1.0,
    "callee": 0.7,
    "arguments": 0.5,
    "constant": 0.5,
    "negation": 0.3,
    "slice": 0.4,
}
NOT_REMOVED = 1.5  # a `not` that is there is likelier to be wrong than one that is not

_BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+), in ', re.MULTILINE)
_FAILED_UNITTEST = re.compile(r"^(?:FAIL|ERROR): (\w+) \(([\w.]+)\)", re.MULTILINE)
_FAILED_PYTEST = re.compile(r"^(?:FAILED|ERROR) \S+?::(?:\w+::)*(\w+)", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")


# Attempts at one task, and tasks of one package, see the same modules again and again.
_functions = lru_cache(MODULES_REMEMBERED)(faults.functions)
_faults = lru_cache(MODULES_REMEMBERED)(faults.find)


class Search:
    """Edits one line at a time until the tests pass or its runs of them are used up."""

    name = "search"

    async def run(self, box: Box, context: Context) -> None:
        """Try to repair what lies in the working directory.

        Raises:
            InvalidRequest: the instruction does not say how the tests are run.
        """
        tests = _Tests(box, _command(context.instruction))
        output = await tests.run_all()
        if tests.passed:
            return
        tree = await _Tree.read(box, context.workdir)
        for edit in _shuffled(tree.edits(output), Random(context.seed)):
            edited = faults.apply(tree.modules[edit.file], edit.fault)
            if edited is None:
                continue
            await box.write(edit.file, edited.encode())
            await tests.run_failing(output)
            if tests.passed and tests.left:
                await tests.run_all()
            if tests.passed:
                return
            await box.write(edit.file, tree.modules[edit.file].encode())
            if not tests.left:
                return


class _Edit(Struct, frozen=True):
    """An edit to try."""

    file: str
    fault: Fault
    weight: float


class _Tests:
    """The tests of the task, and how often they may still be run."""

    def __init__(self, box: Box, command: str) -> None:
        self.left = TEST_RUNS_MAX
        self.passed = False
        """Whether the last run was a good one."""
        self._box = box
        self._command = f"{command} --tb=native" if "pytest" in command else command

    async def run_all(self) -> str:
        """Run all, and give what they wrote."""
        return await self._run(self._command)

    async def run_failing(self, output: str) -> str:
        """Run some of those that failed in an output, or all where no single one can be told."""
        names = [f"{where}.{name}" for name, where in _FAILED_UNITTEST.findall(output)]
        names = [_full_name(name) for name in dict.fromkeys(names)][:FAILING_TESTS_MAX]
        if names and "unittest" in self._command:
            chosen = " ".join(f"-k {shlex.quote(name)}" for name in names)
        else:
            names = list(dict.fromkeys(_FAILED_PYTEST.findall(output)))[:FAILING_TESTS_MAX]
            chosen = f"-k {shlex.quote(' or '.join(names))}" if names and "pytest" in self._command else ""
        return await self._run(f"{self._command} {chosen}")

    async def _run(self, command: str) -> str:
        self.left -= 1
        done = await self._box.run(command, timeout_s=TEST_WAIT_S)
        output = (done.stdout + done.stderr).decode(errors="replace")
        outcome = verdict.read("", output)
        self.passed = done.ok and (outcome is None or outcome.ran > 0)
        return output


def _full_name(name: str) -> str:
    """`module.Class.test`, of both ways in which versions of Python write it."""
    *start, before_last, last = name.split(".")
    return ".".join([*start, last] if before_last == last else [*start, before_last, last])


def _command(instruction: str) -> str:
    """The first block of code of the instruction."""
    block = _BLOCK.search(instruction)
    if block is None or not block[1].strip():
        raise InvalidRequest(
            "The instruction has no block of code that says how the tests are run.", code="no_test_command"
        )
    return block[1].strip()


def _shuffled(edits: Iterable[_Edit], random: Random) -> list[_Edit]:
    """Edits in an order by chance in which heavy ones tend to be first."""
    return sorted(edits, key=lambda edit: random.random() ** (1 / edit.weight), reverse=True)


class _Tree:
    """The Python files in the working directory."""

    def __init__(self, modules: dict[str, str], tests: dict[str, str]) -> None:
        self.modules = modules
        """Text by absolute path."""
        self._tests = tests

    @classmethod
    async def read(cls, box: Box, workdir: str) -> _Tree:
        """Read them, tests apart from the rest."""
        listed = await box.run(
            ["find", workdir, "-name", "*.py", "-type", "f", "-size", "-1024k"], timeout_s=FIND_WAIT_S
        )
        texts: dict[bool, dict[str, str]] = {True: {}, False: {}}
        for path in sorted(listed.text.splitlines())[:MODULES_MAX]:
            try:
                text = (await box.read(path)).decode()
            except (NotFound, UnicodeDecodeError):
                continue
            texts[_is_test(posixpath.relpath(path, workdir))][path] = text
        return cls(texts[False], texts[True])

    def edits(self, output: str) -> list[_Edit]:
        """Edits of places that an output of the tests points at, each with its weight. Where it points at
        none, of all places."""
        frames = [(path.removeprefix("./"), int(line)) for path, line in _FRAME.findall(output)]
        names = self._reached(self._named_by_tests(frames))
        pointed, all_places = [], []
        for path, source in self.modules.items():
            lines = {line for file, line in frames if path.endswith(file)}
            weights = _weights(source, lines, names)
            for fault in _faults(source):
                if (likely := _likely(fault)) > 0:
                    all_places.append(_Edit(path, fault, likely))
                    if (place := weights[fault.function] + AT_LINE * (fault.line in lines)) > 0:
                        pointed.append(_Edit(path, fault, (place * likely) ** SHARPNESS))
        return pointed or all_places

    def _named_by_tests(self, frames: list[tuple[str, int]]) -> dict[str, float]:
        """Names in the tests that failed, and how much each counts."""
        names: dict[str, float] = {}
        for path, source in self._tests.items():
            lines = {line for file, line in frames if path.endswith(file)}
            text = source.split("\n")
            for _, first, last in _functions(source):
                if any(first <= line <= last for line in lines):
                    _count(names, text[first - 1 : last], NAMED_IN_TEST)
            for line in lines:
                _count(names, text[line - 1 : line], NAMED_AT_LINE)
        return names

    def _reached(self, names: dict[str, float]) -> dict[str, float]:
        """The names, and those in the functions that they name, and so on."""
        reached = dict(names)
        for _ in range(HOPS):
            before = dict(reached)
            for source in self.modules.values():
                weights, text = _weights(source, set(), before), source.split("\n")
                for function, first, last in _functions(source):
                    if weights[function]:
                        _count(reached, text[first - 1 : last], HOP * weights[function])
        return reached


def _count(names: dict[str, float], lines: list[str], weight: float) -> None:
    """Let every name in the lines count at least so much."""
    for name in _NAME.findall("\n".join(lines)):
        names[name] = max(names.get(name, 0.0), weight)


def _is_test(path: str) -> bool:
    parts = path.split("/")
    return any(part in ("test", "tests") for part in parts[:-1]) or parts[-1].startswith("test")


def _likely(fault: Fault) -> float:
    """How likely an edit of its kind undoes a mistake."""
    if fault.kind == "negation" and not fault.text:
        return NOT_REMOVED
    return KINDS.get(fault.kind, 0.0)


def _weights(source: str, lines: set[int], names: dict[str, float]) -> defaultdict[str, float]:
    """How much each function of a module counts."""
    weights: defaultdict[str, float] = defaultdict(float)
    for function, first, last in _functions(source):
        *classes, own = function.split(".")
        in_class = IN_CLASS * max((names.get(name, 0.0) for name in classes), default=0.0)
        at_frame = AT_FRAME * any(first <= line <= last for line in lines)
        weights[function] = max(weights[function], max(names.get(own, 0.0), in_class) + at_frame)
    return weights
