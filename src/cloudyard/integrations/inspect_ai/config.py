"""What a task may say of its sandboxes, in Python or in a YAML file. Knows inspect-ai's forms of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

CONFIG_FILES = ("cloudyard.yaml", "cloudyard.yml")  # beside a task; taken without being named
IDLE_TTL_DEFAULT_S = 24 * 3600.0  # a sample that waits this long for its model is given up


class CloudyardConfig(BaseModel):
    """The sandbox of a sample. What is None is left to the yard; see `Yard.create` for what it means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str = "debian"
    user: str = ""
    """Who commands and file operations run as that name nobody; see docs/inspect.md for the default."""
    cwd: str = ""
    """The sample's directory. It is made, and given to that user, if it does not exist."""
    env: dict[str, str] = {}
    hostname: str | None = None
    cpu: float | None = None
    cpu_weight: int | None = None
    cpu_class: Literal["latency", "best_effort"] | None = None
    memory: int | str | None = None
    swap: int | str | None = None
    disk: int | str | None = None
    pids: int | None = None
    open_files: int | None = None
    user_namespaces: bool | None = None
    lxcfs: bool | None = None
    idle_ttl_s: float | None = IDLE_TTL_DEFAULT_S
    """Seconds without a call after which it stops, for what a killed evaluation leaves; None: never."""
    max_ttl_s: float | None = None

    def __hash__(self) -> int:  # inspect-ai looks for equal configurations by hash
        return hash(self.model_dump_json())

    def options(self) -> dict[str, Any]:
        """What `Yard.create` is given besides the image. The user is this plugin's affair: it may have to be
        made first."""
        options: dict[str, Any] = self.model_dump(exclude={"image", "user", "cwd"}, exclude_none=True)
        return options


def read_config(config: BaseModel | str | None) -> CloudyardConfig:
    """The configuration that inspect-ai hands over: none, a model, or the path of a YAML file.

    Raises:
        ValueError: it is none of these, or says what a sandbox has not; the sentence names what and where.
    """
    match config:
        case None:
            return CloudyardConfig()
        case CloudyardConfig():
            return config
        case str():
            return _read_file(Path(config))
        case _:
            raise ValueError(
                f"The sandbox cloudyard cannot use a {type(config).__name__}: give a CloudyardConfig or the "
                f"path of a file such as {CONFIG_FILES[0]}."
            )


def _read_file(path: Path) -> CloudyardConfig:
    try:
        said = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ValueError(f"The sandbox configuration {path} cannot be read: {exc}") from exc
    if said is not None and not isinstance(said, dict):
        raise ValueError(f"The sandbox configuration {path} is no mapping such as `image: debian`.")
    try:
        return CloudyardConfig(**(said or {}))
    except ValidationError as exc:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg'].lower()}" for each in exc.errors()
        )
        raise ValueError(f"The sandbox configuration {path} is wrong: {wrong}.") from exc
