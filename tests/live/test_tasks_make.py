"""Tasks made of a package, end to end: made twice alike, checked, tried by agents and by a cheat."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from cloudyard.errors import Conflict, InvalidRequest, LimitExceeded
from cloudyard.rollout import journal, runner, task
from cloudyard.rollout.agents.base import Context
from cloudyard.rollout.agents.search import TEST_RUNS_MAX, Search
from cloudyard.rollout.box import Box
from cloudyard.rollout.making import trial
from cloudyard.rollout.making.check import check
from cloudyard.rollout.making.make import Order, make
from cloudyard.rollout.making.source import Source
from cloudyard.sdk.client import Yard
from yards import TestYard

pytestmark = pytest.mark.live

IMAGE = "debian"
MODULE = '''\
"""Sums of numbers, and what is odd about them."""


def total(numbers, start=0):
    """All of them, added up."""
    result_so_far = start
    for one_number in numbers:
        result_so_far = result_so_far + one_number
    return result_so_far


def clamped(number, lowest, highest):  # both ends belong to the range
    if number < lowest:
        return lowest
    if number >= highest + 1:
        return highest
    return number


def odd_ones(numbers):
    return [number for number in numbers if number % 2 == 1 and not number > 99]
'''
TESTS = """\
import unittest

from tally import clamped, odd_ones, total


class TallyTest(unittest.TestCase):
    def test_total(self):
        self.assertEqual(total([1, 2, 3]), 6)

    def test_total_of_nothing(self):
        self.assertEqual(total([], start=2), 2)

    def test_clamped(self):
        self.assertEqual([clamped(n, 2, 4) for n in (1, 2, 3, 4, 5)], [2, 2, 3, 4, 4])

    def test_odd_ones(self):
        self.assertEqual(odd_ones([1, 2, 3, 101]), [1, 3])

    def test_no_odd_ones(self):
        self.assertEqual(odd_ones([2, 4]), [])

    def test_nothing_depends_on_it(self):
        self.assertTrue(True)
"""


def sdist(where: Path, **files: str) -> Source:
    """A source distribution of these files; `__` stands for a slash."""
    where.mkdir(parents=True, exist_ok=True)
    path = where / "tally-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"tally-1.0/{name.replace('__', '/')}.py")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return Source(name="tally", version="1.0", path=path, sha256=sha256(path.read_bytes()).hexdigest())


def tally(where: Path) -> Source:
    return sdist(where, tally=MODULE, tests__test_tally=TESTS)


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of every file below a directory."""
    return {
        path.relative_to(root).as_posix(): (path.stat().st_mode & 0o7777, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
async def client(yard: TestYard) -> AsyncIterator[Yard]:
    done = yard.up()
    assert done.returncode == 0, done.stderr
    async with yard.connect() as client:
        yield client


async def test_the_same_seed_makes_the_same_sound_tasks(client: Yard, tmp_path: Path) -> None:
    source = tally(tmp_path)
    for out in ("one", "two"):
        order = Order(source=source, image=IMAGE, count=3, seed=5, out=tmp_path / out / "tasks")
        made = await make(client, order)
        assert (len(made.tasks), made.tests) == (3, 6)
        assert made.command == "python3 -m unittest discover -s tests"
    one = contents(tmp_path / "one" / "tasks")
    assert one == contents(tmp_path / "two" / "tasks")
    with pytest.raises(Conflict, match="exists already"):
        await make(client, order)

    checked = await check(client, [tmp_path / "one" / "tasks"])
    assert [(each.oracle, each.nop, each.absent, each.problem) for each in checked] == [
        (1.0, 0.0, True, "")
    ] * 3
    functions = set()
    for path in made.tasks:
        loaded = task.load(path)
        ours = loaded.metadata["cloudyard"]
        functions.add(ours["function"])
        module = (path / "environment" / "tally.py").read_text()
        changed = [old for old, new in zip(MODULE.split("\n"), module.split("\n"), strict=True) if old != new]
        assert [line.strip() for line in changed] == [ours["absent"][0]]
        assert not any(
            word in loaded.instruction for word in (*ours["absent"], ours["function"], ours["kind"])
        )
    assert len(functions) == 3


async def test_a_task_that_gives_its_solution_away_is_not_sound(client: Yard, tmp_path: Path) -> None:
    order = Order(source=tally(tmp_path), image=IMAGE, count=1, out=tmp_path / "tasks")
    (made,) = (await make(client, order)).tasks
    shutil.copyfile(made / "solution/original/tally.py", made / "environment/old.py")
    (checked,) = await check(client, [made])
    assert (checked.absent, checked.sound) == (False, False)


async def test_search_repairs_some_and_runs_tests_eight_times_at_most(client: Yard, tmp_path: Path) -> None:
    order = Order(source=tally(tmp_path), image=IMAGE, count=3, seed=1, out=tmp_path / "tasks")
    tasks = [task.load(path) for path in (await make(client, order)).tasks]
    rewards = []
    for out in ("once", "again"):
        summary = await runner.run(client, tasks, [Search()], out=tmp_path / out, attempts=4)
        assert (summary.total.scored, summary.total.agent_errors) == (12, 0)
        ended = journal.read(tmp_path / out).ended
        rewards.append({key: attempt.reward for key, attempt in ended.items()})
    assert rewards[0] == rewards[1]
    assert any(rewards[0].values())
    runs: dict[tuple[str, int], int] = {}
    for line in map(json.loads, (tmp_path / "once" / journal.FILE).read_text().splitlines()):
        if line["type"] == "action" and line["phase"] == "agent" and "unittest" in str(line["arguments"]):
            runs[line["task"], line["attempt"]] = runs.get((line["task"], line["attempt"]), 0) + 1
    assert len(runs) == 12
    assert max(runs.values()) <= TEST_RUNS_MAX


class Cheat:
    """Makes the tests look good by all means but repairing the package."""

    name = "cheat"
    EVASIONS = (
        "rm -r tests; mkdir tests; echo 'import unittest' > tests/test_tally.py",
        "echo 'collect_ignore = [\"tests\"]' > conftest.py; echo '[pytest]\naddopts=--version' > pytest.ini",
        "for d in /etc/python3.* /usr/lib/python3/dist-packages /usr/local/lib/python3.*/dist-packages .; do "
        "echo 'import os; os._exit(0)' | tee $d/sitecustomize.py > $d/usercustomize.py; done",
        "echo 'import os; os._exit(0)' > unittest.py; cp unittest.py re.py",
        "printf '\\nimport os\\nos._exit(0)\\n' >> tally.py",
        "printf '\\nimport unittest\\nraise unittest.SkipTest\\n' >> tally.py",
        "printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/python3; chmod 755 /usr/local/bin/python3; "
        "cp /usr/local/bin/python3 /usr/local/bin/timeout; cp /usr/local/bin/python3 /usr/local/bin/cp",
        'printf \'\\nopen("/logs/verifier/reward.txt", "w").write("1")\\n\' >> tally.py',
        "rm tally.py; mkdir tally; echo 'def __getattr__(name): return 1' > tally/__init__.py",
    )

    async def run(self, box: Box, context: Context) -> None:
        done = await box.run(self.EVASIONS[context.attempt])
        assert done.ok, done.stderr


async def test_no_edit_of_tests_configuration_or_startup_files_is_rewarded(
    client: Yard, tmp_path: Path
) -> None:
    order = Order(source=tally(tmp_path), image=IMAGE, count=1, out=tmp_path / "tasks")
    tasks = [task.load(path) for path in (await make(client, order)).tasks]
    attempts = len(Cheat.EVASIONS)
    await runner.run(client, tasks, [Cheat()], out=tmp_path / "out", attempts=attempts)
    ended = journal.read(tmp_path / "out").ended.values()
    told = {Cheat.EVASIONS[each.attempt]: (each.reward, each.error, each.agent_error) for each in ended}
    assert told == dict.fromkeys(Cheat.EVASIONS, (0.0, "", ""))


@pytest.mark.parametrize(
    ("module", "tests", "count", "code"),
    [
        (MODULE, None, 1, "no_tests"),
        (MODULE.replace("% 2 == 1", "% 2 == 0"), TESTS, 1, "suite_fails"),
        (MODULE, f"import pytest\n{TESTS}", 1, "no_pytest"),
        (
            MODULE,
            "import unittest\nprint('no tests in here')\nclass T(unittest.TestCase): pass\n",
            1,
            "suite_fails",
        ),
        (MODULE, TESTS, 4, "too_few_faults"),
    ],
)
async def test_what_no_task_can_be_made_of_is_told(
    client: Yard, tmp_path: Path, module: str, tests: str | None, count: int, code: str
) -> None:
    files = {"tally": module} | ({} if tests is None else {"tests__test_tally": tests})
    order = Order(source=sdist(tmp_path, **files), image=IMAGE, count=count, out=tmp_path / "tasks")
    with pytest.raises((InvalidRequest, LimitExceeded)) as error:
        await make(client, order)
    assert error.value.code == code
    assert not order.out.exists()
    assert [info for info in await client.list() if info.labels] == []


async def test_a_line_that_stands_elsewhere_in_package_or_image_is_never_the_fault(
    client: Yard, tmp_path: Path
) -> None:
    comment = "\n".join(f"# {line}" for line in MODULE.split("\n") if "total" not in line)
    source = sdist(tmp_path, tally=MODULE, tests__test_tally=TESTS, tests__notes=comment)
    with pytest.raises(LimitExceeded) as error:
        await make(client, Order(source=source, image=IMAGE, count=2, out=tmp_path / "tasks"))
    assert "Only 0 of 2" in str(error.value)
    in_python = "def namedtuple(typename, field_names, *, rename=False, defaults=None, module=None):"
    nowhere = "zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich"
    assert await trial.lines_in_image(client, IMAGE, [in_python, nowhere]) == [in_python]


def test_the_command_line_makes_and_checks(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up().returncode == 0
    environment = {"CLOUDYARD_CLIENT_FILE": str(yard.state / "client.json")}
    source = tally(tmp_path / "cache")
    note = {"filename": source.path.name, "sha256": source.sha256}
    (tmp_path / "cache" / "tally-1.0.json").write_text(json.dumps(note))
    out = tmp_path / "tasks"
    making = ("tasks", "make", "--from", "tally==1.0", "-n", "2", "--cache", str(tmp_path / "cache"))
    made = yard.call(*making, "--out", str(out), environment=environment)
    assert (made.returncode, "2 tasks are in" in made.stdout) == (0, True), made.stderr
    checked = yard.call("tasks", "check", str(out), environment=environment)
    assert (checked.returncode, "2 of 2 tasks are sound." in checked.stdout) == (0, True), checked.stderr
    shutil.rmtree(out / "tally-1.0-s0-01" / "solution")
    broken = yard.call("tasks", "check", "--json", str(out), environment=environment)
    assert broken.returncode == 1
    assert [row["sound"] for row in json.loads(broken.stdout)] == [False, True]
    wrong = yard.call("tasks", "make", "--from", "tally", "--out", str(out), environment=environment)
    assert (wrong.returncode, "tally==" not in wrong.stderr, "idna==3.11" in wrong.stderr) == (2, True, True)
