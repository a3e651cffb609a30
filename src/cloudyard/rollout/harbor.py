"""`task.toml` as Harbor writes it: the fields, and what becomes of those that a yard cannot honour.

A field that would change what a task means is refused by name; one that a task survives without is warned
about by name. Nothing is dropped in silence. This module knows the format and touches no file.
"""

from __future__ import annotations

import tomllib
from typing import Any

import msgspec
from msgspec import Struct, field

from cloudyard.errors import InvalidRequest

VERIFIER_TIMEOUT_DEFAULT_S = 600.0
START_TIMEOUT_DEFAULT_S = 600.0
METADATA_TABLE = "cloudyard"  # [metadata.cloudyard] holds what is ours


class Healthcheck(Struct, frozen=True):
    """A command that must succeed before the agent starts. Times are seconds."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class Environment(Struct, frozen=True):
    docker_image: str = ""
    build_timeout_sec: float = START_TIMEOUT_DEFAULT_S
    cpus: float | None = None
    memory_mb: int | None = None
    memory: str = ""  # the older way to write memory_mb
    workdir: str = ""
    env: dict[str, str] = {}
    healthcheck: Healthcheck | None = None
    os: str = "linux"
    network_mode: str = ""


class Agent(Struct, frozen=True):
    timeout_sec: float | None = None
    user: str | int = ""
    network_mode: str = ""


class Verifier(Struct, frozen=True):
    timeout_sec: float = VERIFIER_TIMEOUT_DEFAULT_S
    env: dict[str, str] = {}
    user: str | int = ""
    environment_mode: str = "shared"
    network_mode: str = ""


class Solution(Struct, frozen=True):
    env: dict[str, str] = {}


class Package(Struct, frozen=True):
    name: str = ""
    version: str = ""
    description: str = ""
    authors: list[Any] = []
    keywords: list[str] = []


class Ours(Struct, frozen=True):
    """What `[metadata.cloudyard]` may say to the runner; other keys there are the task maker's own."""

    absent: tuple[str, ...] = ()
    """Texts that must be nowhere in the sandbox's own files when the agent starts."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The least and the greatest reward."""


class Config(Struct, frozen=True):
    schema_version: str = ""
    version: str = ""  # the older name of schema_version
    source: str = ""
    task: Package = field(default_factory=Package)
    metadata: dict[str, Any] = {}
    environment: Environment = field(default_factory=Environment)
    agent: Agent = field(default_factory=Agent)
    verifier: Verifier = field(default_factory=Verifier)
    solution: Solution = field(default_factory=Solution)


# Fields that change what the task means. A value that says nothing (empty, zero, false) is no reason to
# refuse it.
_REFUSED = {
    "steps": "tasks of several steps cannot be run; make a task of each step",
    "environment.gpus": "a sandbox has no GPU",
    "environment.tpu": "a sandbox has no TPU",
    "environment.mcp_servers": "no MCP server is started for an agent; start it inside the sandbox",
    "verifier.environment": "tests run in the agent's sandbox, after its processes were killed; "
    "leave [verifier.environment] out",
    "verifier.collect": "there are no services to collect from; do it at the start of tests/test.sh",
}
# Fields that a task survives without.
_WARNED = {
    "environment.storage_mb": "the disk of a sandbox has the yard's own limit",
    "environment.storage": "the disk of a sandbox has the yard's own limit",
    "environment.gpu_types": "a sandbox has no GPU",
    "environment.skills_dir": "no skills are handed to an agent; its task object tells where they are",
    "environment.allowed_hosts": "sandboxes have no network",
    "agent.allowed_hosts": "sandboxes have no network",
    "verifier.allowed_hosts": "sandboxes have no network",
    "artifacts": "artifacts are not collected",
    "multi_step_reward_strategy": "the task has one step",
}
_LEGACY = {"environment.allow_internet": "environment.network_mode"}


def parse(text: str) -> tuple[Config, Ours, list[str]]:
    """What a `task.toml` says: its fields, our own table in it, and a warning for each field left unheeded.

    Raises:
        InvalidRequest: it is no TOML, a field has the wrong type, or one of them cannot be honoured.
    """
    try:
        raw = tomllib.loads(text)
        config = msgspec.convert(raw, Config)
        table = config.metadata.get(METADATA_TABLE, {})
        ours = msgspec.convert(table, Ours)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as exc:
        raise InvalidRequest(f"task.toml cannot be understood: {exc}.", code="bad_task") from exc
    _refuse(raw, config)
    return config, ours, _warnings(raw, config)


def _refuse(raw: dict[str, Any], config: Config) -> None:
    for name, reason in _REFUSED.items():
        if _at(raw, name):
            raise InvalidRequest(f"task.toml sets {name}: {reason}.", code="task_unsupported")
    if config.environment.os.lower() != "linux":
        raise InvalidRequest(
            f"task.toml sets environment.os to {config.environment.os!r}: sandboxes are Linux.",
            code="task_unsupported",
        )
    if config.verifier.environment_mode != "shared":
        raise InvalidRequest(
            f"task.toml sets verifier.environment_mode to {config.verifier.environment_mode!r}: tests run in "
            f"the agent's sandbox, after its processes were killed.",
            code="task_unsupported",
            hint='Set it to "shared", and let tests/ hold all that tests/test.sh needs.',
        )


def _warnings(raw: dict[str, Any], config: Config) -> list[str]:
    found = [f"{name} is not heeded: {reason}" for name, reason in _WARNED.items() if _at(raw, name)]
    modes = {
        "environment.network_mode": config.environment.network_mode,
        "agent.network_mode": config.agent.network_mode,
        "verifier.network_mode": config.verifier.network_mode,
        "environment.allow_internet": "public" if _at(raw, "environment.allow_internet") else "",
    }
    for name, mode in modes.items():
        if mode not in ("", "no-network"):
            found.append(f"{name} asks for a network: sandboxes have none")
    known = {**_REFUSED, **_WARNED, **_LEGACY}
    for name in _unknown(raw, Config, known, prefix=""):
        found.append(f"{name} is unknown and not heeded")
    return found


def _at(raw: dict[str, Any], name: str) -> Any:
    value: Any = raw
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _unknown(raw: dict[str, Any], kind: type[Struct], known: dict[str, str], *, prefix: str) -> list[str]:
    found = []
    kinds = {entry.name: entry.type for entry in msgspec.structs.fields(kind)}
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if name in known:
            continue
        if key not in kinds:
            found.append(name)
        elif isinstance(kinds[key], type) and issubclass(kinds[key], Struct) and isinstance(value, dict):
            found += _unknown(value, kinds[key], known, prefix=f"{name}.")
    return found
