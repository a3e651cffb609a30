"""The files of a made task, in Harbor's layout. Pure text and local files: the same arguments give the same
bytes.

    environment/   the package with one line of it changed
    solution/      the changed file as it was, and solve.sh that puts it back
    tests/         the package's tests and all else that is no module of it, verdict.py, test.sh
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from msgspec import Struct

from cloudyard.rollout.making import verdict
from cloudyard.rollout.making.faults import Fault
from cloudyard.rollout.making.source import Source
from cloudyard.rollout.making.suite import Package, Suite
from cloudyard.rollout.making.verdict import Outcome

WORKDIR = "/app"
CPUS, MEMORY_MB = 1, 512
TESTS_WAIT_S = 120  # for one run of a suite; a task whose tests hang is a failed one
VERIFIER_WAIT_S = TESTS_WAIT_S + 60
AGENT_WAIT_S = 900
_SCRIPT_MODE = 0o755
_DIST_PACKAGES = "/usr/lib/python3/dist-packages"  # Debian's own; what an agent installs is elsewhere

_TEST_SH = """\
#!/bin/bash
# Runs the tests that came with {title} on its modules as they are now in {workdir}. All else is fresh: tests,
# their configuration, the environment. Python starts without its customisation files, and as nobody, who can
# write no verdict.
set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
umask 022
chmod 700 /logs/verifier
output=/logs/verifier/output.txt
base=$(mktemp -d)
tree=$base/package
mkdir "$tree"
(cd {workdir} && find {roots} -type f -name '*.py' \\
    ! -name conftest.py ! -path '*/test/*' ! -path '*/tests/*' -exec cp --parents -t "$tree" {{}} +)
cp -R /tests/suite/. "$tree"
chown -R 65534:65534 "$base"
(
    cd "$tree" || exit
    ulimit -f 65536
    exec timeout -k 5 {wait_s} setpriv --reuid 65534 --regid 65534 --clear-groups \\
        env -i PATH="$PATH" HOME="$base" LANG=C.UTF-8 PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1 \\
        PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH="{python_path}" \\
        sh -c {command}
) </dev/null >"$output" 2>&1
status=$?
echo "$status" >/logs/verifier/status
tail -c 4000 "$output"
python3 -I -S /tests/verdict.py {kind} "$status" "$output" {tests} {skipped} >/logs/verifier/reward.txt
"""

_SOLVE_SH = """\
#!/bin/bash
# Puts the changed file back as it was.
cd "$(dirname "$0")" && cp original/{file} {workdir}/{file}
"""

_INSTRUCTION = """\
# Repair {name}

The Python package {title} lies in `{workdir}`. One line of one of its modules was changed, and now some of
its own tests fail. Find the fault and correct it, so that all tests pass again.

Run the tests with:

```sh
{command}
```

They are right as they are. They will be run from a fresh copy, on the modules of the package as you leave
them; other files that you change or add make no difference. There is no network.
"""


class Plant(Struct, frozen=True, kw_only=True):
    """A fault that was found good for a task."""

    file: str
    """The module it is in, relative to the package's tree."""
    fault: Fault
    original: str
    """The line as it was, without the space around it."""
    edited: str
    """The whole module with the fault in it."""
    id: str
    """Names the fault; stands in no file of a sandbox."""


def agent_command(package: Package, suite: Suite) -> str:
    """How somebody runs the tests in a sandbox of the task."""
    variables = "".join(f"{key}={value} " for key, value in package.environment.items())
    return f"cd {WORKDIR} && {variables}{suite.command}"


def write_tests(
    target: Path, package: Package, suite: Suite, *, title: str, expected: Outcome | None
) -> None:
    """Make `tests/`. Without what is expected of a run, its verdict says nothing."""
    shutil.copytree(package.tree, target / "suite")
    for module in package.modules:
        (target / "suite" / module).unlink()
    shutil.copyfile(verdict.__file__, target / "verdict.py")
    base = "$tree" if package.base == "." else f"$tree/{package.base}"
    command = suite.command
    if command.startswith("python3 "):  # else it is a user's own, and the user's to keep clean
        command = command.replace("python3", "python3 -S", 1)
    script = _TEST_SH.format(
        title=title,
        workdir=WORKDIR,
        roots=" ".join(sorted({_root(package, module) for module in package.modules})),
        wait_s=TESTS_WAIT_S,
        python_path=f"{base}:{_DIST_PACKAGES}",
        command=shlex.quote(command),
        kind=suite.kind,
        tests=expected.ran if expected else 0,
        skipped=expected.skipped if expected else 0,
    )
    _script(target / "test.sh", script)


def write_solution(target: Path, package: Package, file: str) -> None:
    """Make `solution/`."""
    original = target / "original" / file
    original.parent.mkdir(parents=True)
    shutil.copyfile(package.tree / file, original)
    _script(target / "solve.sh", _SOLVE_SH.format(file=file, workdir=WORKDIR))


def write_task(
    target: Path,
    package: Package,
    suite: Suite,
    *,
    plant: Plant,
    tests: Path,
    source: Source,
    image: str,
    seed: int,
) -> None:
    """Make the whole task in a directory that does not exist yet."""
    title = f"{source.name} {source.version}"
    shutil.copytree(package.tree, target / "environment")
    (target / "environment" / plant.file).write_bytes(plant.edited.encode())
    shutil.copytree(tests, target / "tests")
    write_solution(target / "solution", package, plant.file)
    instruction = _INSTRUCTION.format(
        name=source.name, title=title, workdir=WORKDIR, command=agent_command(package, suite)
    )
    (target / "instruction.md").write_text(instruction, encoding="utf-8")
    tables: dict[str, dict[str, Any]] = {
        "task": {
            "name": target.name,
            "description": f"Repair a fault planted in {title}",
            "keywords": ["repair", "python"],
        },
        "metadata.cloudyard": {
            "package": title,
            "sha256": source.sha256,
            "seed": seed,
            "fault": plant.id,
            "kind": plant.fault.kind,
            "file": plant.file,
            "line": plant.fault.line,
            "function": plant.fault.function,
            "absent": [plant.original, plant.id],
        },
        "agent": {"timeout_sec": AGENT_WAIT_S},
        "verifier": {"timeout_sec": VERIFIER_WAIT_S},
        "environment": {"docker_image": image, "workdir": WORKDIR, "cpus": CPUS, "memory_mb": MEMORY_MB},
        "environment.env": {"PYTHONDONTWRITEBYTECODE": "1"},
    }
    toml = "".join(_table(name, values) for name, values in tables.items())
    (target / "task.toml").write_text(f'schema_version = "1.4"\n{toml}', encoding="utf-8")


def _root(package: Package, module: str) -> str:
    """The package or module, below the directory on Python's path, that a file belongs to."""
    prefix = "" if package.base == "." else f"{package.base}/"
    return shlex.quote(prefix + module.removeprefix(prefix).partition("/")[0])


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(_SCRIPT_MODE)


def _table(name: str, values: dict[str, Any]) -> str:
    """A table of TOML, whose strings, numbers and lists are written as those of JSON."""
    rows = (f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    return f"\n[{name}]\n{''.join(rows)}".replace("\x7f", "\\u007f")
