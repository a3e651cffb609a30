"""A package's tree of files: which are its modules, which its tests, and how its own tests are run.

Pure but for reading the tree: nothing in it is imported or run.
"""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path, PurePosixPath

from msgspec import Struct

from cloudyard.errors import InvalidRequest
from cloudyard.rollout.making.text import NotPython, parse

FILE_BYTES_MAX = 1 * 2**20  # a larger module is data, and no fault is planted in it
_TEST_DIRECTORIES = ("tests", "test", "testing")
_NOT_THE_PACKAGE = frozenset(
    (*_TEST_DIRECTORIES, "docs", "doc", "examples", "example", "benchmarks", "benchmark", "bench", "tools")
)
_NOT_MODULES = frozenset(("setup.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py"))
_BUILT = frozenset(("build", "dist"))
_PYTEST = "python3 -m pytest -q -p no:cacheprovider -o addopts="


class Suite(Struct, frozen=True):
    """A way to run tests."""

    kind: str
    """unittest, pytest, or custom: a command that somebody named."""
    command: str
    """For a shell in the package's directory."""


class Package(Struct, frozen=True, kw_only=True):
    """What a tree holds. Paths are relative to `tree`, with slashes."""

    name: str
    tree: Path
    base: str
    """Directory that is on Python's path: `src`, or `.`."""
    imports: tuple[str, ...]
    """What can be imported from it: names of packages and modules."""
    modules: tuple[str, ...]
    """Files of the package itself, its tests left out."""
    tests: tuple[str, ...]
    """Files that hold tests."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which it can be imported from its directory."""
        return {} if self.base == "." else {"PYTHONPATH": self.base}


def tidy(tree: Path) -> None:
    """Take hidden files out of an unpacked package, and whatever a build made of its modules."""
    for entry in sorted(tree.rglob("*"), reverse=True):
        top = len(entry.relative_to(tree).parts) == 1
        unwanted = entry.name == "__pycache__" or entry.suffix == ".pyc" or entry.name.endswith(".egg-info")
        if unwanted or (top and (entry.name.startswith(".") or entry.name in _BUILT)):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)


def survey(tree: Path, name: str) -> Package:
    """Find modules and tests in a tree.

    Raises:
        InvalidRequest: it has no modules of pure Python (`no_modules`), or no tests (`no_tests`).
    """
    base, roots = _import_roots(tree, name)
    if not roots:
        raise InvalidRequest(
            f"{name} holds no module of Python that could be imported.",
            code="no_modules",
            hint="Tasks are made from packages of pure Python, with their modules at the top or in src/.",
        )
    inside = [file for root in roots for file in _python_files(tree, root)]
    tests = [file for file in _python_files(tree, tree) if _is_test(PurePosixPath(file))]
    if not tests:
        raise InvalidRequest(
            f"The source distribution of {name} holds no tests.",
            code="no_tests",
            hint="Many packages leave them out: take another version, or another package.",
        )
    return Package(
        name=name,
        tree=tree,
        base=base,
        imports=tuple(sorted(root.stem for root in roots)),
        modules=tuple(sorted(file for file in inside if not _belongs_to_tests(PurePosixPath(file)))),
        tests=tuple(sorted(tests)),
    )


def describe(package: Package, version: str) -> None:
    """Write the metadata that installing it would have left, if its modules ask for their own version."""
    asked = (b"importlib.metadata", b"importlib import metadata", b"importlib_metadata", b"pkg_resources")
    texts = [(package.tree / module).read_bytes() for module in package.modules]
    if any(word in text for text in texts for word in asked):
        place = package.tree / package.base / f"{package.name.replace('-', '_')}-{version}.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {version}\n")


def suites(package: Package) -> list[Suite]:
    """Ways in which the package's tests may run, the likeliest first; at least one."""
    start = _start(package)
    files = [file for file in package.tests if file.startswith(f"{start}/") or start == "."]
    styles = [_style(package.tree / file) for file in files]
    found = [Suite("pytest", f"{_PYTEST} {_pytest_target(package, start)}")]
    if "unittest" in styles and "pytest" not in styles:
        found.insert(0, Suite("unittest", _unittest_command(package, start, files)))
    return found


def _import_roots(tree: Path, name: str) -> tuple[str, list[Path]]:
    """The directory on Python's path, and packages and modules in it."""
    source = tree / "src"
    base = source if source.is_dir() and not (source / "__init__.py").exists() else tree
    packages = [
        entry
        for entry in sorted(base.iterdir())
        if (entry / "__init__.py").is_file() and entry.name not in _NOT_THE_PACKAGE
    ]
    own = re.sub(r"[-_.]+", "_", name).lower()
    modules = [
        file
        for file in sorted(base.glob("*.py"))
        if file.name not in _NOT_MODULES
        and not _is_test(PurePosixPath(file.name))
        and (base is source or own in (file.stem.lower(), f"python_{file.stem.lower()}"))
    ]
    return ("src" if base is source else "."), packages + modules


def _python_files(tree: Path, root: Path) -> list[str]:
    files = [root] if root.is_file() else sorted(root.rglob("*.py"))
    return [
        file.relative_to(tree).as_posix()
        for file in files
        if file.is_file() and not file.is_symlink() and file.stat().st_size <= FILE_BYTES_MAX
    ]


def _is_test(path: PurePosixPath) -> bool:
    stem = path.stem
    return stem.startswith("test_") or stem.endswith("_test") or stem in ("test", "tests")


def _belongs_to_tests(path: PurePosixPath) -> bool:
    in_tests = any(part in _TEST_DIRECTORIES[:2] for part in path.parts[:-1])
    return in_tests or _is_test(path) or path.name == "conftest.py"


def _start(package: Package) -> str:
    """The directory to look for tests in: one that is named so, the nearest to the top; else theirs."""
    directories = sorted(
        {parent for file in package.tests for parent in PurePosixPath(file).parents},
        key=lambda path: (len(path.parts), str(path)),
    )
    for directory in directories:
        if directory.name in _TEST_DIRECTORIES:
            return str(directory)
    return str(min((PurePosixPath(file).parent for file in package.tests), key=lambda p: len(p.parts)))


def _pytest_target(package: Package, start: str) -> str:
    """A directory named for its tests, or the files: pytest does not find every name by itself."""
    if PurePosixPath(start).name in _TEST_DIRECTORIES:
        return start
    return " ".join(file for file in package.tests if str(PurePosixPath(file).parent) == start)


def _unittest_command(package: Package, start: str, files: list[str]) -> str:
    command = f"python3 -m unittest discover -s {start}"
    here = package.tree / start
    base = package.tree / package.base
    if here != base and (here / "__init__.py").exists():  # its modules are imported by their full names
        command += f" -t {package.base if here.is_relative_to(base) else '.'}"
    stems = [PurePosixPath(file).stem for file in files]
    if not all(stem.startswith("test") for stem in stems):
        command += " -p '*_test.py'" if all(stem.endswith("_test") for stem in stems) else " -p '*test*.py'"
    return command


def _style(file: Path) -> str:
    """unittest, pytest, or neither, by what a file of tests says."""
    try:
        tree = parse(file.read_text())
    except (NotPython, UnicodeDecodeError):
        return ""
    style = ""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(name.name.split(".")[0] == "pytest" for name in names):
                return "pytest"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "pytest":
                return "pytest"
            case ast.ClassDef(bases=bases) if any("TestCase" in ast.unparse(base) for base in bases):
                style = "unittest"
            case _:
                pass
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) if name.startswith("test_") and name != "test_suite":
                return "pytest"
            case ast.ClassDef(name=name, bases=[]) if name.startswith("Test"):
                return "pytest"
            case _:
                pass
    return style
