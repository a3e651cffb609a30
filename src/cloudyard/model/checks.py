"""Bounds of what users send: each refusal is a sentence that names the field, the value and the range."""

from __future__ import annotations

import re

from msgspec.structs import replace

from cloudyard.errors import InvalidRequest, LimitExceeded, Unsupported
from cloudyard.model.basics import (
    COMMAND_BYTES_MAX,
    COMMAND_ENTRY_BYTES,
    CPU_MAX,
    CPU_MIN,
    CPU_WEIGHT_MAX,
    CPU_WEIGHT_MIN,
    DISK_MAX_BYTES,
    DISK_MIN_BYTES,
    ENV_BYTES_MAX,
    GIB,
    KEY_BYTES_MAX,
    KIB,
    LABEL_BYTES_MAX,
    LABELS_MAX,
    MEMORY_MAX_BYTES,
    MEMORY_MIN_BYTES,
    MIB,
    NAME,
    OPEN_FILES_MAX,
    OPEN_FILES_MIN,
    OUTPUT_LIMIT_MAX_BYTES,
    PATH_BYTES_MAX,
    PIDS_MAX,
    PIDS_MIN,
    SWAP_MAX_BYTES,
    TIMEOUT_MAX_S,
    TTL_MAX_S,
    TTL_MIN_S,
    USER_BYTES_MAX,
    parse_size,
)
from cloudyard.model.calls import (
    CALL_ARGS_BYTES_MAX,
    CALL_BYTES_MAX,
    CALL_CASES_MAX,
    CALL_FILES_MAX,
    CALL_MEMORY_MAX_BYTES,
    CALL_MEMORY_MIN_BYTES,
    CALL_OUTPUT_MAX_BYTES,
    CALL_PATH_BYTES_MAX,
    CALL_PRELOAD_MAX,
    CALL_TIMEOUT_MAX_S,
    CALL_TOTAL_MAX_S,
    CallSpec,
)
from cloudyard.model.specs import CommandSpec, SandboxSpec

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")


def normalised(spec: SandboxSpec) -> SandboxSpec:
    """The spec with sizes in bytes, after every bound has been checked.

    Raises:
        InvalidRequest: a value is out of its range; the sentence names the field, the value and the range.
        LimitExceeded: env is over ENV_BYTES_MAX.
        Unsupported: the backend makes no sandboxes.
    """
    if spec.backend == "function":
        raise Unsupported(
            "The backend function makes no sandbox.",
            code="backend_not_offered",
            hint="Call code without one by yard.call(...), or POST /v1/calls.",
        )
    memory = parse_size(spec.memory, what="memory")
    swap, disk = parse_size(spec.swap, what="swap"), parse_size(spec.disk, what="disk")
    _in_range("cpu", spec.cpu, CPU_MIN, CPU_MAX, "cores")
    _in_range("memory", memory, MEMORY_MIN_BYTES, MEMORY_MAX_BYTES, "bytes")
    _in_range("swap", swap, 0, SWAP_MAX_BYTES, "bytes")
    _in_range("disk", disk, DISK_MIN_BYTES, DISK_MAX_BYTES, "bytes")
    _in_range("pids", spec.pids, PIDS_MIN, PIDS_MAX, "processes")
    _in_range("open_files", spec.open_files, OPEN_FILES_MIN, OPEN_FILES_MAX, "files")
    _in_range("cpu_weight", spec.cpu_weight, CPU_WEIGHT_MIN, CPU_WEIGHT_MAX, "parts")
    for name, ttl in (("idle_ttl_s", spec.idle_ttl_s), ("max_ttl_s", spec.max_ttl_s)):
        if ttl is not None:
            _in_range(name, ttl, TTL_MIN_S, TTL_MAX_S, "seconds")
    _check_image(spec.image)
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
    if (size := _entries_size(*spec.env.items())) > ENV_BYTES_MAX:
        raise LimitExceeded(
            f"env has {size} bytes; at most {_readable(ENV_BYTES_MAX, 'bytes')} fit.",
            code="env_too_large",
            hint="Write large values to a file in the sandbox.",
        )
    _check_text("The spec", spec.cwd, spec.user, *spec.labels, *spec.labels.values())
    _check_cwd(spec.cwd)
    _check_user(spec.user)
    return replace(spec, memory=memory, swap=swap, disk=disk)


def normalised_call(spec: CallSpec) -> CallSpec:
    """The call with its memory in bytes, after every bound has been checked.

    Raises:
        InvalidRequest: a value cannot be used or is out of its range; the sentence names the field.
        LimitExceeded: it is too large to send (`call_too_large`).
    """
    memory = parse_size(spec.memory, what="memory")
    _in_range("memory", memory, CALL_MEMORY_MIN_BYTES, CALL_MEMORY_MAX_BYTES, "bytes")
    _in_range("output_limit_bytes", spec.output_limit_bytes, 0, CALL_OUTPUT_MAX_BYTES, "bytes")
    if not 0 < spec.timeout_s <= CALL_TIMEOUT_MAX_S:
        raise InvalidRequest(
            f"timeout_s is {spec.timeout_s}.",
            code="bad_timeout",
            hint=f"Above 0, and at most {_readable(CALL_TIMEOUT_MAX_S, 'seconds')}.",
        )
    _check_image(spec.image)
    _check_code(spec)
    _check_cases(spec)
    check_env(spec.env)
    _check_files(spec.files)
    _check_call_size(spec)
    return replace(spec, memory=memory)


def _check_code(spec: CallSpec) -> None:
    """What runs and what it is called with."""
    _check_text("The call", spec.code, *spec.args)
    if not spec.code.strip():
        raise InvalidRequest("The call has no code.", code="no_code", hint='Pass it as code="...".')
    if "\0" in spec.code or any("\0" in arg for arg in spec.args):
        raise InvalidRequest(
            "The code or an argument holds a NUL byte, which no program text and no argument can carry.",
            code="bad_code",
            hint="Bytes can go through stdin or in a file.",
        )
    if spec.preload and spec.language != "python":
        raise InvalidRequest(
            f"preload is given with language {spec.language}.",
            code="bad_preload",
            hint="Only Python imports modules ahead of a call.",
        )
    if len(spec.preload) > CALL_PRELOAD_MAX:
        raise InvalidRequest(
            f"preload names {len(spec.preload)} modules.",
            code="bad_preload",
            hint=f"At most {CALL_PRELOAD_MAX}.",
        )
    for module in spec.preload:
        if not _MODULE.match(module):
            raise InvalidRequest(
                f"preload has {module[:200]!r}, which is no name of a Python module.",
                code="bad_preload",
                hint="Names look like numpy or xml.etree.",
            )


def _check_cases(spec: CallSpec) -> None:
    if len(spec.cases) > CALL_CASES_MAX:
        raise InvalidRequest(
            f"The call has {len(spec.cases)} cases.",
            code="too_many_cases",
            hint=f"At most {CALL_CASES_MAX}: send the rest in another call.",
        )
    if spec.cases and spec.stdin:
        raise InvalidRequest(
            "The call has both cases and stdin.", code="bad_cases", hint="Each case brings its own stdin."
        )
    if spec.timeout_s * len(spec.cases) > CALL_TOTAL_MAX_S:
        raise InvalidRequest(
            f"{len(spec.cases)} cases of {_readable(spec.timeout_s, 'seconds')} each may take "
            f"{_readable(spec.timeout_s * len(spec.cases), 'seconds')}.",
            code="bad_timeout",
            hint=f"At most {_readable(CALL_TOTAL_MAX_S, 'seconds')} for all together.",
        )


def _check_files(files: dict[str, bytes]) -> None:
    """Paths stay below the working directory, and none of them is both a file and a directory."""
    if len(files) > CALL_FILES_MAX:
        raise InvalidRequest(
            f"The call has {len(files)} files.",
            code="too_many_files",
            hint=f"At most {CALL_FILES_MAX}: pack them into an archive, or use a sandbox.",
        )
    for path in files:
        _check_text("files", path)
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in path:
            raise InvalidRequest(
                f"files has the path {path[:200]!r}.",
                code="bad_path",
                hint="Paths are relative to the working directory, such as data/input.txt, without . and ..",
            )
        if len(path.encode()) > CALL_PATH_BYTES_MAX or any(len(part.encode()) > 255 for part in parts):
            raise InvalidRequest(
                f"files has the path {path[:80]!r}..., which is too long.",
                code="bad_path",
                hint=f"At most {CALL_PATH_BYTES_MAX} bytes, and 255 for each name in it.",
            )
        for end in range(1, len(parts)):
            if (above := "/".join(parts[:end])) in files:
                raise InvalidRequest(
                    f"files has {above!r} and {path[:200]!r}.",
                    code="bad_path",
                    hint="One path cannot be a file and a directory.",
                )


def _check_call_size(spec: CallSpec) -> None:
    given = sum(len(arg.encode()) for arg in spec.args)
    given += sum(len(name.encode()) + len(value.encode()) for name, value in spec.env.items())
    if given > CALL_ARGS_BYTES_MAX:
        raise LimitExceeded(
            f"args and env have {given} bytes; at most {_readable(CALL_ARGS_BYTES_MAX, 'bytes')} fit.",
            code="call_too_large",
            hint="Send large input through stdin or in a file.",
        )
    size = given + len(spec.code.encode()) + len(spec.stdin)
    size += sum(len(path.encode()) + len(content) for path, content in spec.files.items())
    size += sum(len(case.stdin) + len(case.expected or b"") for case in spec.cases)
    if size > CALL_BYTES_MAX:
        raise LimitExceeded(
            f"The call with its files, stdin and cases has {size} bytes; "
            f"at most {_readable(CALL_BYTES_MAX, 'bytes')} fit.",
            code="call_too_large",
            hint="Split the cases over several calls, or use a sandbox, which takes files of any size.",
        )


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
    _check_user(command.user)
    for name, value in (
        ("timeout_s", command.timeout_s),
        ("no_output_timeout_s", command.no_output_timeout_s),
    ):
        if value is not None and not 0 < value <= TIMEOUT_MAX_S:
            raise InvalidRequest(
                f"{name} is {value}.",
                code="bad_timeout",
                hint=f"Above 0, and at most {_readable(TIMEOUT_MAX_S, 'seconds')}.",
            )
    _in_range("output_limit_bytes", command.output_limit_bytes, 0, OUTPUT_LIMIT_MAX_BYTES, "bytes")
    check_env(command.env)
    size = len(command.shell.encode()) + len(command.stdin)
    size += _entries_size(*((part,) for part in command.argv), *command.env.items())
    if size > COMMAND_BYTES_MAX:
        raise LimitExceeded(
            f"The command with its environment and stdin is {size} bytes; at most "
            f"{_readable(COMMAND_BYTES_MAX, 'bytes')} fit, in which each argument and variable counts "
            f"{COMMAND_ENTRY_BYTES} bytes besides its own.",
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


def _entries_size(*entries: tuple[str, ...]) -> int:
    """Bytes of arguments and variables as the kernel counts them: never fewer than they take in a frame."""
    return sum(COMMAND_ENTRY_BYTES + sum(len(text.encode()) for text in entry) for entry in entries)


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


def _check_image(image: str) -> None:
    if not NAME.match(image):
        raise InvalidRequest(
            f"image is {image!r}, which is no image name.",
            code="bad_image_name",
            hint="Names are lower-case letters, digits, dots, dashes and underscores, such as debian.",
        )


def _check_text(what: str, *texts: str) -> None:
    for text in texts:
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise InvalidRequest(
                f"{what} holds half a character (a surrogate), which cannot be written as UTF-8.",
                code="bad_text",
                hint="Send bytes that are no text through stdin or a file.",
            )


def _check_cwd(cwd: str) -> None:
    if cwd and (not cwd.startswith("/") or len(cwd.encode()) > PATH_BYTES_MAX):
        raise InvalidRequest(
            f"cwd is {cwd[:200]!r}, which is not absolute or too long.",
            code="bad_cwd",
            hint=f"Write it from the sandbox's root, such as /root/work, in at most {PATH_BYTES_MAX} bytes.",
        )


def _check_user(user: str) -> None:
    if len(user.encode()) > USER_BYTES_MAX:
        raise InvalidRequest(
            f"user is {user[:80]!r}..., which is too long.",
            code="bad_user",
            hint=f"A name, a uid or uid:gid, of {USER_BYTES_MAX} bytes at most.",
        )


def _in_range(name: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:  # NaN fails both comparisons and is refused too
        raise InvalidRequest(
            f"{name} is {_readable(value, unit)}, out of range.",
            code="out_of_range",
            hint=f"Between {_readable(low, unit)} and {_readable(high, unit)}.",
        )
