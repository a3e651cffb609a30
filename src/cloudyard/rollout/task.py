"""A task: a directory in Harbor's layout, read and checked once, before anything runs.

    task.toml             which image, how much of it, how long
    instruction.md        what the agent is asked to do
    environment/          files for the working directory
    solution/solve.sh     what the oracle does
    tests/test.sh         writes /logs/verifier/reward.txt or reward.json

Knows local files and the format; knows no yard. Whether a yard has the image is asked when a run begins.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from cloudyard.errors import InvalidRequest, NotFound
from cloudyard.model import MIB, SandboxSpec, normalised, parse_size
from cloudyard.rollout import harbor
from cloudyard.rollout.harbor import Healthcheck

AGENT_TIMEOUT_DEFAULT_S = 3600.0  # where the task does not say
TIMEOUT_MAX_S = 24 * 3600.0
TASK_FILES_MAX = 20_000
TASK_BYTES_MAX = 1024 * MIB
INSTRUCTION_BYTES_MAX = 1 * MIB
_TOML = "task.toml"
_TEMPLATE = re.compile(r"\$\{(?P<name>[^}:]+)(?::-(?P<default>.*))?\}")
_BUILD_FILES = ("Dockerfile", "docker-compose.yaml")
_HOW_TO_NAME_AN_IMAGE = (
    f'Name an image of the yard in {_TOML}: [environment] docker_image = "debian". `cloudyard image build` '
    f"makes one with the packages that the Dockerfile installs, and environment/ may hold further files."
)


class Task(Struct, frozen=True, kw_only=True):
    """A task that can be run. Times are seconds, `memory` is bytes."""

    name: str
    """That of [task], else of its directory."""
    path: Path
    digest: str
    """SHA-256 of all its files."""
    instruction: str
    image: str
    cpu: float
    memory: int
    workdir: str = ""
    """Where the agent and the tests start; the image's own directory if empty."""
    env: dict[str, str] = {}
    """Of every command. A value `${NAME}` or `${NAME:-default}` is filled in when a run begins."""
    agent_env: dict[str, str] = {}
    """Of the oracle's solve.sh besides."""
    verifier_env: dict[str, str] = {}
    """Of tests/test.sh besides."""
    agent_user: str = ""
    verifier_user: str = ""
    start_timeout_s: float = harbor.START_TIMEOUT_DEFAULT_S
    agent_timeout_s: float = AGENT_TIMEOUT_DEFAULT_S
    verifier_timeout_s: float = harbor.VERIFIER_TIMEOUT_DEFAULT_S
    healthcheck: Healthcheck | None = None
    reward_range: tuple[float, float] = (0.0, 1.0)
    absent: tuple[str, ...] = ()
    """Texts that must be nowhere in the sandbox's own files when the agent starts."""
    metadata: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    """A sentence for each field of task.toml that is not heeded."""

    @property
    def tests(self) -> Path:
        """Its tests/ here."""
        return self.path / "tests"

    @property
    def solution(self) -> Path:
        """Its solution/ here; may not exist."""
        return self.path / "solution"

    @property
    def environment(self) -> Path | None:
        """Its environment/ here, if files of it are uploaded: there are some, and no Dockerfile says how an
        image was made of them."""
        directory = self.path / "environment"
        if any((directory / name).exists() for name in _BUILD_FILES):
            return None
        return directory if directory.is_dir() and any(directory.iterdir()) else None


class BrokenTask(Struct, frozen=True, kw_only=True):
    """A directory that was named as a task and is none that can be run."""

    name: str
    path: Path
    error: str
    """A sentence that says why, and what to do."""


def load(path: str | Path) -> Task:
    """The task in a directory.

    Raises:
        NotFound: there is no such directory, or no task.toml in it.
        InvalidRequest: it cannot be run, for the reason in the sentence.
    """
    directory = Path(path).resolve()
    if not (directory / _TOML).is_file():
        missing = "there is no such directory" if not directory.is_dir() else f"it has no {_TOML}"
        raise NotFound(f"{path} is no task: {missing}.", code="task_not_found")
    digest = _digest(directory)
    config, ours, warnings = harbor.parse(_text(directory / _TOML))
    environment = config.environment
    _check_image(directory, environment.docker_image)
    _check_tests(directory)
    low, high = ours.reward_range
    if not -float("inf") < low < high < float("inf"):
        raise InvalidRequest(f"{_TOML} sets reward_range to {low:g} to {high:g}.", code="bad_task")
    if any(not text.strip() or "\n" in text for text in ours.absent):
        raise InvalidRequest(
            f"{_TOML} has an entry in absent that is empty or longer than a line.", code="bad_task"
        )
    if (directory / "trajectory.json").exists():
        warnings.append("trajectory.json is not heeded: an agent starts afresh")
    warnings += [
        f"{place}/.harborignore is not heeded: all files are uploaded"
        for place in ("tests", "solution")
        if (directory / place / ".harborignore").exists()
    ]
    spec = SandboxSpec(image="any", env=environment.env, cwd=environment.workdir)
    spec = normalised(  # the bounds of a sandbox are told before one is made
        SandboxSpec(
            image="any",
            cpu=spec.cpu if environment.cpus is None else environment.cpus,
            memory=_memory(environment, spec.memory),
            env=environment.env,
            cwd=environment.workdir,
        )
    )
    return Task(
        name=config.task.name or directory.name,
        path=directory,
        digest=digest,
        instruction=_text(directory / "instruction.md"),
        image=environment.docker_image,
        cpu=spec.cpu,
        memory=int(spec.memory),
        workdir=environment.workdir,
        env=environment.env,
        agent_env=config.solution.env,
        verifier_env=config.verifier.env,
        agent_user=str(config.agent.user),
        verifier_user=str(config.verifier.user),
        start_timeout_s=_seconds("environment.build_timeout_sec", environment.build_timeout_sec),
        agent_timeout_s=_seconds("agent.timeout_sec", config.agent.timeout_sec, AGENT_TIMEOUT_DEFAULT_S),
        verifier_timeout_s=_seconds("verifier.timeout_sec", config.verifier.timeout_sec),
        healthcheck=environment.healthcheck,
        reward_range=(low, high),
        absent=ours.absent,
        metadata=config.metadata,
        warnings=tuple(warnings),
    )


def find(paths: Sequence[str | Path]) -> tuple[list[Task], list[BrokenTask]]:
    """The tasks that paths name: each a task's directory, or a directory of tasks.

    Raises:
        NotFound: a path names no task at all.
        InvalidRequest: two tasks have one name.
    """
    tasks: list[Task] = []
    broken: list[BrokenTask] = []
    for path in map(Path, paths):
        inside = sorted(entry.parent for entry in path.glob(f"*/{_TOML}"))
        for directory in [path] if (path / _TOML).is_file() or not inside else inside:
            try:
                tasks.append(load(directory))
            except InvalidRequest as error:
                broken.append(BrokenTask(name=directory.name, path=directory.resolve(), error=str(error)))
    seen: dict[str, Task] = {}
    for task in tasks:
        other = seen.setdefault(task.name, task)
        if other is not task:
            raise InvalidRequest(
                f"{other.path} and {task.path} are both named {task.name!r}.",
                code="task_twice",
                hint=f"Give each a name of its own: [task] name in {_TOML}, or another directory's name.",
            )
    return tasks, broken


def filled_in(task: Task, given: Mapping[str, str]) -> Task:
    """The task with `${NAME}` and `${NAME:-default}` in its environments replaced by what was given.

    Nothing is taken from this process's environment unasked: a task may come from a stranger.

    Raises:
        InvalidRequest: a name is not given and has no default.
    """

    def fill(env: dict[str, str]) -> dict[str, str]:
        return {name: _filled(name, value, given) for name, value in env.items()}

    return replace(
        task, env=fill(task.env), agent_env=fill(task.agent_env), verifier_env=fill(task.verifier_env)
    )


def _filled(name: str, value: str, given: Mapping[str, str]) -> str:
    match = _TEMPLATE.fullmatch(value)
    if match is None:
        return value
    found = given.get(match["name"], match["default"])
    if found is None:
        raise InvalidRequest(
            f"The task's variable {name} needs a value for {match['name']}.",
            code="env_missing",
            hint=f"Give it with --env {match['name']}=VALUE, or --env {match['name']} to pass on your own.",
        )
    return found


def _check_image(directory: Path, image: str) -> None:
    if image:
        return
    found = [name for name in _BUILD_FILES if (directory / "environment" / name).exists()]
    reason = f"environment/{found[0]} is not built here" if found else f"{_TOML} names no image"
    raise InvalidRequest(f"The task cannot be run: {reason}.", code="task_image", hint=_HOW_TO_NAME_AN_IMAGE)


def _check_tests(directory: Path) -> None:
    script = directory / "tests" / "test.sh"
    if not script.is_file() or not script.stat().st_size:
        empty = "is empty" if script.is_file() else "does not exist"
        raise InvalidRequest(
            f"The task has no tests: tests/test.sh {empty}.",
            code="task_without_tests",
            hint="It writes the reward to /logs/verifier/reward.txt.",
        )


def _memory(environment: harbor.Environment, default: int | str) -> int | str:
    if environment.memory_mb is not None:
        return environment.memory_mb * MIB
    return parse_size(environment.memory, what="environment.memory") if environment.memory else default


def _seconds(name: str, value: float | None, default: float = 0.0) -> float:
    value = default if value is None else value
    if not 0 < value <= TIMEOUT_MAX_S:
        raise InvalidRequest(
            f"{_TOML} sets {name} to {value:g}.",
            code="bad_task",
            hint=f"Above 0 and at most {TIMEOUT_MAX_S:g} seconds.",
        )
    return value


def _text(path: Path) -> str:
    """A text file of the task.

    Raises:
        InvalidRequest: it is missing, too large or no UTF-8.
    """
    try:
        data = path.read_bytes()
        if len(data) > INSTRUCTION_BYTES_MAX:
            raise ValueError(f"it is larger than {INSTRUCTION_BYTES_MAX // MIB} MiB")
        return data.decode()
    except FileNotFoundError as exc:
        raise InvalidRequest(f"The task has no {path.name}.", code="bad_task") from exc
    except (OSError, ValueError) as exc:
        raise InvalidRequest(f"{path.name} of the task cannot be read: {exc}.", code="bad_task") from exc


def _digest(directory: Path) -> str:
    """Hash of names, kinds, executable bits and contents. Links must stay within the task.

    Raises:
        InvalidRequest: there is too much, or something that cannot be uploaded.
    """
    whole = sha256()
    files = size = 0
    for root, directories, names in os.walk(directory):
        directories.sort()
        for entry in sorted(Path(root, name) for name in (*directories, *names)):
            name = entry.relative_to(directory).as_posix()
            status = entry.lstat()
            match stat.S_IFMT(status.st_mode):
                case stat.S_IFDIR:
                    what = b"d"
                case stat.S_IFLNK:
                    if not entry.resolve().is_relative_to(directory):
                        raise InvalidRequest(f"The link {name} leads out of the task.", code="bad_task")
                    what = b"l" + os.fsencode(os.readlink(entry))
                case stat.S_IFREG:
                    files, size = files + 1, size + status.st_size
                    if files > TASK_FILES_MAX or size > TASK_BYTES_MAX:
                        raise InvalidRequest(
                            f"The task holds more than {TASK_FILES_MAX} files or "
                            f"{TASK_BYTES_MAX // MIB} MiB.",
                            code="bad_task",
                        )
                    what = b"x" if status.st_mode & stat.S_IXUSR else b"f"
                    what += _hash_of(entry)
                case _:
                    raise InvalidRequest(
                        f"{name} of the task is no file, directory or link.", code="bad_task"
                    )
            whole.update(b"%b\0%b\n" % (os.fsencode(name), what))
    return whole.hexdigest()


def _hash_of(path: Path) -> bytes:
    digest = sha256()
    try:
        with path.open("rb") as source:
            while piece := source.read(MIB):
                digest.update(piece)
    except OSError as exc:
        raise InvalidRequest(f"{path} cannot be read: {exc.strerror}.", code="bad_task") from exc
    return digest.digest()
