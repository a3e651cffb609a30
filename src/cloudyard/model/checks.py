"""Bounds of what users send: each refusal is a sentence that names the field, the value and the range."""

from __future__ import annotations

import re

from msgspec.structs import replace

from cloudyard.errors import InvalidRequest, LimitExceeded
from cloudyard.model.basics import (
    COMMAND_BYTES_MAX,
    CPU_MAX,
    CPU_MIN,
    GIB,
    KEY_BYTES_MAX,
    KIB,
    LABEL_BYTES_MAX,
    LABELS_MAX,
    MEMORY_MAX_BYTES,
    MEMORY_MIN_BYTES,
    MIB,
    NAME,
    OUTPUT_LIMIT_MAX_BYTES,
    PATH_BYTES_MAX,
    PIDS_MAX,
    PIDS_MIN,
    TIMEOUT_MAX_S,
    TTL_MAX_S,
    TTL_MIN_S,
    parse_size,
)
from cloudyard.model.specs import CommandSpec, SandboxSpec


def normalised(spec: SandboxSpec) -> SandboxSpec:
    """The spec with sizes in bytes, after every bound has been checked.

    Raises:
        InvalidRequest: a value is out of its range; the sentence names the field, the value and the range.
    """
    memory = parse_size(spec.memory, what="memory")
    _in_range("cpu", spec.cpu, CPU_MIN, CPU_MAX, "cores")
    _in_range("memory", memory, MEMORY_MIN_BYTES, MEMORY_MAX_BYTES, "bytes")
    _in_range("pids", spec.pids, PIDS_MIN, PIDS_MAX, "processes")
    for name, ttl in (("idle_ttl_s", spec.idle_ttl_s), ("max_ttl_s", spec.max_ttl_s)):
        if ttl is not None:
            _in_range(name, ttl, TTL_MIN_S, TTL_MAX_S, "seconds")
    if not NAME.match(spec.image):
        raise InvalidRequest(
            f"image is {spec.image!r}, which is no image name.",
            code="bad_image_name",
            hint="Names are lower-case letters, digits, dots, dashes and underscores, such as debian.",
        )
    if not re.match(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62})\Z", spec.hostname):
        raise InvalidRequest(f"hostname is {spec.hostname!r}, which is no host name.", code="bad_hostname")
    if len(spec.labels) > LABELS_MAX or any(
        len(k) + len(v) > LABEL_BYTES_MAX for k, v in spec.labels.items()
    ):
        raise InvalidRequest(
            f"labels hold {len(spec.labels)} entries.",
            code="bad_labels",
            hint=f"At most {LABELS_MAX} labels of {LABEL_BYTES_MAX} characters, name and value together.",
        )
    check_env(spec.env)
    _check_text("The spec", spec.cwd, spec.user, *spec.labels, *spec.labels.values())
    _check_cwd(spec.cwd)
    return replace(spec, memory=memory)


def check_command(command: CommandSpec) -> None:
    """Check a command's own bounds.

    Raises:
        InvalidRequest: neither or both of argv and shell, a NUL byte, a bad name in env, a cwd that is not
            absolute, what cannot be written as UTF-8, a number out of range. LimitExceeded: argv or shell,
            env and stdin together are over COMMAND_BYTES_MAX.
    """
    if bool(command.argv) == bool(command.shell):
        raise InvalidRequest(
            "A command needs either argv or shell, and not both."
            if command.argv
            else "The command is empty.",
            code="bad_command",
            hint='Pass one string to run through /bin/sh, or a list such as ["ls", "-l"].',
        )
    if any("\0" in part for part in (*command.argv, command.shell, command.cwd, command.user)):
        raise InvalidRequest("The command holds a NUL byte, which no argument can carry.", code="bad_command")
    _check_text("The command", *command.argv, command.shell, command.cwd, command.user)
    _check_cwd(command.cwd)
    if command.timeout_s is not None and not 0 < command.timeout_s <= TIMEOUT_MAX_S:
        raise InvalidRequest(
            f"timeout_s is {command.timeout_s}.",
            code="bad_timeout",
            hint=f"Above 0, and at most {_readable(TIMEOUT_MAX_S, 'seconds')}.",
        )
    _in_range("output_limit_bytes", command.output_limit_bytes, 0, OUTPUT_LIMIT_MAX_BYTES, "bytes")
    check_env(command.env)
    size = len(command.shell.encode()) + len(command.stdin) + sum(len(part.encode()) for part in command.argv)
    size += sum(len(name.encode()) + len(value.encode()) for name, value in command.env.items())
    if size > COMMAND_BYTES_MAX:
        raise LimitExceeded(
            f"The command with its environment and stdin is {size} bytes; at most {COMMAND_BYTES_MAX} fit.",
            code="command_too_large",
            hint="Write large input to a file first, or send it through stdin of a started command.",
        )


def check_env(env: dict[str, str]) -> None:
    """Check names and values of an environment.

    Raises:
        InvalidRequest: a name is empty or holds `=` or NUL, a value holds NUL, or one of them is no text.
    """
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidRequest(
                f"env has the entry {name!r}, which no environment can carry.",
                code="bad_env",
                hint="A name is not empty and holds no =, and nothing holds a NUL byte.",
            )
        _check_text("env", name, value)


def check_path(path: str) -> None:
    """Check a path inside a sandbox: absolute, within PATH_BYTES_MAX, no NUL.

    Raises:
        InvalidRequest: it is not.
    """
    _check_text("path", path)
    if not path.startswith("/") or "\0" in path or len(path.encode()) > PATH_BYTES_MAX:
        raise InvalidRequest(
            f"path is {path[:200]!r}.",
            code="bad_path",
            hint=f"Paths are absolute and at most {PATH_BYTES_MAX} bytes.",
        )


def check_key(key: str) -> None:
    """Check a step key or create key.

    Raises:
        InvalidRequest: it is too long or holds control characters.
    """
    _check_text("The key", key)
    if len(key.encode()) > KEY_BYTES_MAX or any(ord(char) < 32 for char in key):
        raise InvalidRequest(
            f"The key {key[:80]!r} cannot be used.",
            code="bad_key",
            hint=f"Printable, at most {KEY_BYTES_MAX} bytes.",
        )


def _readable(value: float, unit: str) -> str:
    """A quantity as a person would write it: in the largest unit of which it is a whole number."""
    steps = {
        "bytes": ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")),
        "seconds": ((24 * 3600, "days"), (3600, "hours"), (60, "minutes")),
    }
    for size, name in steps.get(unit, ()):
        if value >= size and value % size == 0:
            return f"{value / size:.15g} {name if value > size else name.removesuffix('s')}"
    return f"{value:.15g} {unit if value != 1 else unit.removesuffix('s')}"


def _check_text(what: str, *texts: str) -> None:
    for text in texts:
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise InvalidRequest(
                f"{what} holds half a character (a surrogate), which cannot be written as UTF-8.",
                code="bad_text",
                hint="Send bytes that are no text through stdin or a file.",
            )


def _check_cwd(cwd: str) -> None:
    if cwd and not cwd.startswith("/"):
        raise InvalidRequest(
            f"cwd is {cwd[:200]!r}, which is not absolute.",
            code="bad_cwd",
            hint="Write it from the root of the sandbox, such as /root/work.",
        )


def _in_range(name: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:  # NaN fails both comparisons and is refused too
        raise InvalidRequest(
            f"{name} is {_readable(value, unit)}, out of range.",
            code="out_of_range",
            hint=f"Between {_readable(low, unit)} and {_readable(high, unit)}.",
        )
