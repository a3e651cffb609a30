"""Tasks made of a package: planting faults until so many are found that its own tests notice.

Which faults are tried, in which order and which are kept depends on the package, the image and the seed, and
on nothing else: not on time, and not on which of many parallel trials ends first.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from cloudyard.errors import Conflict, InvalidRequest, LimitExceeded
from cloudyard.rollout.making import faults, files, trial
from cloudyard.rollout.making.faults import Fault
from cloudyard.rollout.making.files import Plant
from cloudyard.rollout.making.source import Source, unpack
from cloudyard.rollout.making.suite import Package, Suite, describe, suites, survey, tidy
from cloudyard.rollout.making.trial import Judged
from cloudyard.rollout.making.verdict import Outcome
from cloudyard.sdk.client import Yard
from cloudyard.sdk.tasks import plain_task_group

COUNT_MAX = 1000
TRIALS_AT_ONCE = 8  # sandboxes
FAULTS_PER_FUNCTION = 8  # tried before a function is given up
LOOKED_UP_PER_FUNCTION = 2 * FAULTS_PER_FUNCTION  # in the image, which may hold the lines of some
LINE_CHARS_MIN = 10  # a shorter line says nothing by being elsewhere


class Order(Struct, frozen=True, kw_only=True):
    """What is to be made."""

    source: Source
    image: str
    """An image of the yard, with Python."""
    out: Path
    """Directory in which the tasks' directories are made."""
    count: int
    seed: int = 0
    test_command: str = ""
    """How the package's tests are run, from its directory; found out if empty."""


class Progress(Struct, frozen=True, kw_only=True):
    """How far it is."""

    doing: str
    kept: int = 0
    tried: int = 0


class Made(Struct, frozen=True, kw_only=True):
    """What was made."""

    tasks: tuple[Path, ...]
    command: str
    """How the tests are run."""
    tests: int
    """How many there are."""
    tried: int
    """Faults that were tried in a sandbox."""


Tell = Callable[[Progress], None]


class _Candidate(Struct, frozen=True, kw_only=True):
    file: str
    fault: Fault
    original: str
    rank: bytes
    """Decides about order; a hash of the seed and the fault."""

    @property
    def function(self) -> str:
        return f"{self.file}:{self.fault.function}"


async def make(yard: Yard, order: Order, *, tell: Tell = lambda progress: None) -> Made:
    """Make tasks of a package.

    Raises:
        InvalidRequest: the package has no modules or no tests, or its tests fail as it is (`suite_fails`).
        NotFound: the yard has no such image.
        Conflict: `out` holds a task that would be made.
        LimitExceeded: too few good faults were found (`too_few_faults`). Nothing is written then.
        SandboxUnavailable, YardUnavailable: the yard failed.
    """
    if not 1 <= order.count <= COUNT_MAX:
        raise InvalidRequest(f"{order.count} tasks were asked for.", hint=f"Between 1 and {COUNT_MAX}.")
    names = [_task_name(order, number) for number in range(order.count)]
    for name in names:
        if (order.out / name).exists():
            raise Conflict(
                f"{order.out / name} exists already.",
                code="task_exists",
                hint="Name another --out or --seed.",
            )
    with TemporaryDirectory(prefix="cloudyard-tasks-") as work:
        maker = _Maker(yard, order, Path(work), tell)
        await maker.prepare()
        plants = await maker.plants()
        for name, plant in zip(names, plants, strict=True):
            maker.write(Path(work, "made", name), plant)
        order.out.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.move(Path(work, "made", name), order.out / name)
    return Made(
        tasks=tuple(order.out / name for name in names),
        command=maker.suite.command,
        tests=maker.whole.outcome.ran if maker.whole.outcome else 0,
        tried=maker.tried,
    )


class _Maker:
    """The making of one order's tasks."""

    suite: Suite
    whole: Judged
    """What the tests made of the package as it is."""

    def __init__(self, yard: Yard, order: Order, work: Path, tell: Tell) -> None:
        self.tried = 0
        self._kept: list[Plant] = []
        self._yard = yard
        self._order = order
        self._work = work
        self._tell = tell
        self._refused: Counter[str] = Counter()
        self._title = f"{order.source.name} {order.source.version}"
        tree = work / "tree"
        unpack(order.source.path, tree)
        tidy(tree)
        self._package: Package = survey(tree, order.source.name)
        describe(self._package, order.source.version)
        self._tests = work / "tests"

    async def prepare(self) -> None:
        """Find how the package's tests run, and run them twice on the package as it is.

        Raises:
            InvalidRequest: they fail, or differ from one run to the next.
        """
        command = self._order.test_command
        ways = [Suite("custom", command)] if command else suites(self._package)
        failures: list[InvalidRequest] = []
        for number, way in enumerate(ways):
            self._tell(Progress(doing=f"running {way.command}"))
            tests = self._work / f"tests-{number}"
            files.write_tests(tests, self._package, way, title=self._title, expected=None)
            async with trial.sandbox(self._yard, self._order.image, self._package) as box:
                judged = [await trial.judge(box, tests) for _ in range(2)]
            try:
                expected = self._passing(judged, way)
            except InvalidRequest as error:
                failures.append(error)
                continue
            self.suite, self.whole = way, judged[0]
            files.write_tests(self._tests, self._package, way, title=self._title, expected=expected)
            return
        raise failures[0]

    def _passing(self, judged: list[Judged], way: Suite) -> Outcome:
        first, second = judged
        outcome = first.outcome
        if "No module named pytest" in first.output:
            raise InvalidRequest(
                f"The tests of {self._title} need pytest, which the image {self._order.image!r} lacks.",
                code="no_pytest",
                hint="Build one with it: `cloudyard image build debian --package python3 "
                "--package python3-pytest`.",
            )
        if first.timed_out:
            reason = f"did not end within {files.TESTS_WAIT_S} s"
        elif outcome is None:
            reason = "end without a summary of unittest or pytest"
        elif not outcome.passed or outcome.failed:
            reason = f"fail as it is: of {outcome.ran} tests {outcome.failed} failed"
        elif outcome != second.outcome:
            reason = "give another result when they are run again"
        else:
            return outcome
        raise InvalidRequest(
            f"The tests of {self._title} {reason}. They were run with `{way.command}`, and wrote last:\n"
            f"{first.output}\n",
            code="suite_fails",
            hint="Name another way to run them with --test-command, or take another image or version.",
        )

    async def plants(self) -> list[Plant]:
        """As many good faults as were ordered, of different functions.

        Raises:
            LimitExceeded: there are fewer.
        """
        kept = self._kept
        waiting = await self._candidates()
        while waiting and len(kept) < self._order.count:
            done = set()
            first = [candidates[0] for candidates in waiting.values()]
            for at in range(0, len(first), TRIALS_AT_ONCE):
                for candidate, plant in await self._try(first[at : at + TRIALS_AT_ONCE]):
                    if plant is not None:
                        kept.append(plant)
                        done.add(candidate.function)
                if len(kept) >= self._order.count:
                    return kept[: self._order.count]
                self._tell(Progress(doing="trying faults", kept=len(kept), tried=self.tried))
            waiting = {
                function: candidates[1:]
                for function, candidates in waiting.items()
                if function not in done and len(candidates) > 1
            }
        if len(kept) < self._order.count:
            self._too_few(len(kept))
        return kept

    def write(self, target: Path, plant: Plant) -> None:
        """Write one task."""
        files.write_task(
            target,
            self._package,
            self.suite,
            plant=plant,
            tests=self._tests,
            source=self._order.source,
            image=self._order.image,
            seed=self._order.seed,
        )

    async def _candidates(self) -> dict[str, list[_Candidate]]:
        """Faults to try, by function. A line that stands somewhere else as well is left alone: whoever finds
        the other place need not find the fault."""
        self._tell(Progress(doing="looking for faults"))
        everything = b"\0".join(
            path.read_bytes() for path in sorted(self._package.tree.rglob("*")) if path.is_file()
        )
        once = lru_cache(None)(lambda line: everything.count(line.encode()) == 1)
        found: dict[str, list[_Candidate]] = {}
        of_all = [one for file in self._package.modules for one in self._of_module(file)]
        for candidate in sorted(of_all, key=lambda candidate: candidate.rank):
            enough = len(found.get(candidate.function, ())) >= LOOKED_UP_PER_FUNCTION
            if not enough and once(candidate.original):
                found.setdefault(candidate.function, []).append(candidate)
        lines = sorted({candidate.original for of_function in found.values() for candidate in of_function})
        elsewhere = set(await trial.lines_in_image(self._yard, self._order.image, lines))
        self._refused["the line stands in the image too"] += len(elsewhere)
        left = {
            function: [one for one in of_function if one.original not in elsewhere][:FAULTS_PER_FUNCTION]
            for function, of_function in found.items()
        }
        return {function: candidates for function, candidates in left.items() if candidates}

    def _of_module(self, file: str) -> list[_Candidate]:
        try:
            source = (self._package.tree / file).read_bytes().decode()
        except UnicodeDecodeError:
            return []
        lines = source.split("\n")
        return [
            _Candidate(file=file, fault=fault, original=original, rank=self._rank(file, fault))
            for fault in faults.find(source)
            if len(original := lines[fault.line - 1].strip()) >= LINE_CHARS_MIN
        ]

    async def _try(self, candidates: list[_Candidate]) -> list[tuple[_Candidate, Plant | None]]:
        """Try faults at once, and give them in the order they came in."""
        results: list[Plant | None] = [None] * len(candidates)

        async def one(at: int) -> None:
            if (plant := self._plant(candidates[at])) is None:
                self._refused["the line would stay recognisable"] += 1
                return
            tried = await trial.attempt(
                self._yard,
                self._order.image,
                self._package,
                plant=plant,
                tests=self._tests,
                solution=self._work / "solutions" / plant.id,
                whole=self.whole,
            )
            self.tried += 1
            if tried.refused:
                self._refused[tried.refused] += 1
            else:
                results[at] = plant

        async with plain_task_group() as tasks:
            for at in range(len(candidates)):
                tasks.start_soon(one, at)
        return list(zip(candidates, results, strict=True))

    def _plant(self, candidate: _Candidate) -> Plant | None:
        source = (self._package.tree / candidate.file).read_bytes().decode()
        edited = faults.apply(source, candidate.fault)
        if edited is None or candidate.original in edited:
            return None
        return Plant(
            file=candidate.file,
            fault=candidate.fault,
            original=candidate.original,
            edited=edited,
            id=self._rank(candidate.file, candidate.fault).hex()[:16],
        )

    def _rank(self, file: str, fault: Fault) -> bytes:
        words = (
            self._order.seed,
            self._title,
            file,
            fault.function,
            fault.kind,
            fault.line,
            fault.start,
            fault.end,
            fault.text,
        )
        return sha256("\0".join(map(str, words)).encode()).digest()

    def _too_few(self, kept: int) -> None:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in self._refused.most_common() if count)
        raise LimitExceeded(
            f"Only {kept} of {self._order.count} tasks can be made of {self._title}, one for each function "
            f"with a fault that its tests notice. Of the other faults: {reasons or 'there are none'}.",
            code="too_few_faults",
            hint=f"Ask for {kept} (-n {kept})." if kept else "Take another package.",
        )


def _task_name(order: Order, number: int) -> str:
    """Says where the task comes from and nothing of its fault."""
    return f"{order.source.name}-{order.source.version}-s{order.seed}-{number + 1:02d}"
