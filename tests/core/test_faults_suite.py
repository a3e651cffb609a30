"""Finding a package's modules and tests, and reading what a run of its tests said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cloudyard.errors import InvalidRequest
from cloudyard.rollout.making import suite, verdict
from cloudyard.rollout.making.verdict import Outcome

UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): pass\n"
PYTEST = "import pytest\ndef test_it(): pass\n"


def tree(root: Path, **files: str) -> Path:
    """A tree of files; `__` stands for a slash and every name gets the suffix .py."""
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def init(root: Path, *directories: str) -> None:
    for directory in directories:
        (root / directory).mkdir(parents=True, exist_ok=True)
        (root / directory / "__init__.py").touch()


def commands(root: Path, name: str) -> list[str]:
    return [way.command for way in suite.suites(suite.survey(root, name))]


def test_a_flat_package_with_tests_beside_it(tmp_path: Path) -> None:
    tree(tmp_path, setup="", pkg__core="", tests__test_core=UNITTEST)
    init(tmp_path, "pkg", "tests")
    found = suite.survey(tmp_path, "pkg")
    assert (found.base, found.imports) == (".", ("pkg",))
    assert found.modules == ("pkg/__init__.py", "pkg/core.py")
    assert found.tests == ("tests/test_core.py",)
    assert commands(tmp_path, "pkg")[0] == "python3 -m unittest discover -s tests -t ."


def test_a_package_in_src_is_put_on_the_path(tmp_path: Path) -> None:
    tree(tmp_path, src__pkg__core="", tests__test_core=UNITTEST)
    init(tmp_path, "src/pkg")
    found = suite.survey(tmp_path, "pkg")
    assert found.environment == {"PYTHONPATH": "src"}
    assert commands(tmp_path, "pkg")[0] == "python3 -m unittest discover -s tests"


def test_tests_inside_of_the_package_are_no_modules_of_it(tmp_path: Path) -> None:
    tree(tmp_path, pkg__core="", pkg__tests__test_core=UNITTEST)
    init(tmp_path, "pkg", "pkg/tests")
    assert suite.survey(tmp_path, "pkg").modules == ("pkg/__init__.py", "pkg/core.py")
    assert commands(tmp_path, "pkg")[0] == "python3 -m unittest discover -s pkg/tests -t ."


def test_one_module_with_a_test_beside_it(tmp_path: Path) -> None:
    tree(tmp_path, my_pkg="", my_pkg_test=UNITTEST, setup="")
    assert suite.survey(tmp_path, "my-pkg").modules == ("my_pkg.py",)
    assert commands(tmp_path, "my-pkg")[0] == "python3 -m unittest discover -s . -p '*_test.py'"


def test_functions_and_imports_of_pytest_need_pytest(tmp_path: Path) -> None:
    tree(tmp_path, pkg="", tests__test_a=UNITTEST, tests__test_b=PYTEST)
    assert commands(tmp_path, "pkg") == ["python3 -m pytest -q -p no:cacheprovider -o addopts= tests"]


def test_a_package_without_tests_and_one_without_modules_are_refused(tmp_path: Path) -> None:
    tree(tmp_path, pkg="")
    with pytest.raises(InvalidRequest, match="holds no tests") as no_tests:
        suite.survey(tmp_path, "pkg")
    assert no_tests.value.code == "no_tests"
    with pytest.raises(InvalidRequest, match="no module") as no_modules:
        suite.survey(tmp_path, "other")
    assert no_modules.value.code == "no_modules"


def test_hidden_files_and_copies_of_modules_are_taken_out(tmp_path: Path) -> None:
    tree(tmp_path, pkg__core="", build__lib__pkg__core="", tests__build__test_it="")
    for name in ("pkg/__pycache__/core.cpython-311.pyc", "pkg.egg-info/SOURCES.txt", ".github/x.yml"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    suite.tidy(tmp_path)
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert kept == ["pkg/core.py", "tests/build/test_it.py"]


def test_a_package_that_asks_for_its_own_version_finds_it(tmp_path: Path) -> None:
    tree(tmp_path, src__my_pkg__core="", tests__test_core=UNITTEST)
    (tmp_path / "src/my_pkg/__init__.py").write_text(
        "import importlib.metadata as m; print(m.version('my-pkg'))"
    )
    suite.describe(suite.survey(tmp_path, "my-pkg"), "1.2")
    command = [sys.executable, "-c", "import my_pkg"]
    done = subprocess.run(
        command, cwd=tmp_path / "src", capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "1.2\n"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("Ran 69 tests in 0.007s\n\nOK\n", Outcome(69, 0, 0)),
        ("Ran 1 test in 0.1s\n\nOK (skipped=1)\n", Outcome(1, 1, 0)),
        ("Ran 9 tests in 0.1s\n\nFAILED (failures=1, errors=2, skipped=3)\n", Outcome(9, 3, 3)),
        ("Ran 9 tests in 0.1s\n\nFAILED (expected failures=1, unexpected successes=2)\n", Outcome(9, 0, 2)),
        ("...\n12 passed in 0.05s\n", Outcome(12, 0, 0)),
        (
            "=== 2 failed, 10 passed, 1 skipped, 3 errors, 1 xfailed in 75.10s (0:01:15) ===\n",
            Outcome(17, 1, 5),
        ),
        ("1 passed, 2 warnings in 0.1s", Outcome(1, 0, 0)),
        ("Traceback (most recent call last):\n", None),
        ("no tests ran in 0.01s\n", None),
    ],
)
def test_the_last_lines_of_unittest_and_pytest_are_read(output: str, expected: Outcome | None) -> None:
    assert verdict.read("custom", output) == expected


def judge(tmp_path: Path, status: int, output: str) -> str:
    """The verdict as a task's test.sh asks for it: a program of its own, without the rest of Cloudyard."""
    (tmp_path / "output").write_text(output)
    command = [
        sys.executable,
        "-I",
        "-S",
        verdict.__file__,
        "unittest",
        str(status),
        str(tmp_path / "output"),
    ]
    done = subprocess.run([*command, "3", "0"], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("status", "output", "reward"),
    [
        (0, "Ran 3 tests in 0.1s\n\nOK\n", "1"),
        (1, "Ran 3 tests in 0.1s\n\nFAILED (failures=1)\n", "0"),
        (0, "Ran 3 tests in 0.1s\n\nFAILED (failures=1)\n", "0"),
        (0, "Ran 2 tests in 0.1s\n\nOK\n", "0"),
        (0, "Ran 3 tests in 0.1s\n\nOK (skipped=1)\n", "0"),
        (0, "", "0"),
        (137, "Ran 3 tests in 0.1s\n\nOK\n", "0"),
    ],
)
def test_only_as_many_tests_as_ever_and_none_skipped_are_a_pass(
    tmp_path: Path, status: int, output: str, reward: str
) -> None:
    assert judge(tmp_path, status, output) == reward
