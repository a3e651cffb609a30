"""Ids, sizes and the limits that hold for what users send, each with its unit."""

from __future__ import annotations

import re
from typing import Literal, NewType

from cloudyard.errors import InvalidRequest

SandboxId = NewType("SandboxId", str)
EdgeId = NewType("EdgeId", str)
ProjectId = NewType("ProjectId", str)
CommandId = NewType("CommandId", int)

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Limits, each with its unit. A request past one of them is refused with a sentence that names it.
CPU_MIN, CPU_MAX = 0.05, 512.0  # cores
MEMORY_MIN_BYTES, MEMORY_MAX_BYTES = 16 * MIB, 4096 * GIB
SWAP_MAX_BYTES = 4096 * GIB
PIDS_MIN, PIDS_MAX = 8, 65_536  # processes and threads
OPEN_FILES_MIN, OPEN_FILES_MAX = 64, 1_048_576  # descriptors of one process
CPU_WEIGHT_MIN, CPU_WEIGHT_MAX = 1, 10_000
DISK_MIN_BYTES, DISK_MAX_BYTES = 4 * MIB, 65_536 * GIB
TTL_MIN_S, TTL_MAX_S = 1.0, 30 * 24 * 3600.0
TIMEOUT_MAX_S = 7 * 24 * 3600.0
COMMAND_BYTES_MAX = 2 * MIB  # argv or shell string, environment and inline stdin; what Linux takes by default
COMMAND_ENTRY_BYTES = 9  # what each argument and each variable counts besides: a zero byte and a pointer
ENV_BYTES_MAX = 256 * KIB  # of a sandbox, counted likewise: every command gets it besides its own
OUTPUT_LIMIT_DEFAULT_BYTES = 16 * MIB  # kept per stream of a command
OUTPUT_LIMIT_MAX_BYTES = 1 * GIB
OUTPUT_INLINE_BYTES = 192 * KIB  # of each stream, carried in the result itself; the rest is fetched
CHUNK_BYTES_MAX = 256 * KIB  # one piece of a stream or a file over the wire
STREAM_WINDOW = 4  # pieces in flight: 1 MiB outstanding
PATH_BYTES_MAX = 4096
USER_BYTES_MAX = 256
LABELS_MAX = 32
LABEL_BYTES_MAX = 256
KEY_BYTES_MAX = 200
CREATE_MANY_MAX = 4096
LIST_DIR_MAX = 20_000  # entries of one directory
LIST_DIR_BYTES_MAX = 4 * MIB  # of their paths and link targets

BackendName = Literal["function", "container", "microvm", "vm"]
CpuClass = Literal["latency", "best_effort"]
StartError = Literal[
    "program_not_found",
    "not_executable",
    "is_a_directory",
    "not_a_program",
    "too_many_arguments",
    "directory_not_found",
    "directory_forbidden",
    "not_a_directory",
    "user_not_found",
    "user_refused",
    "not_started",
]
LimitName = Literal["oom", "pids", "disk", "output"]
SandboxState = Literal["creating", "running", "stopping", "stopped", "failed"]
StreamName = Literal["stdout", "stderr"]
FileKind = Literal["file", "directory", "symlink", "other"]

SANDBOX_ID = re.compile(r"sb-(?P<edge>[a-z0-9]{1,16})-(?P<unique>[a-z0-9]{12})\Z")
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?i?B?)\s*\Z", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}
_UNITS |= {
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": 1024 * GIB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
}
_UNITS |= {"ki": KIB, "mi": MIB, "gi": GIB, "ti": 1024 * GIB}
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")


def parse_size(value: int | str, *, what: str) -> int:
    """Bytes from a number or from text such as `"512MiB"`, `"2GB"` or `"1.5g"`.

    Raises:
        InvalidRequest: the text is no size.
    """
    if isinstance(value, int):
        return value
    match = _SIZE.match(value)
    unit = match["unit"].lower() if match else None
    if match is None or unit not in _UNITS:
        raise InvalidRequest(
            f"{what} is {value!r}, which is not a size.",
            code="bad_size",
            hint='Write it like "512MiB" or "2GiB".',
        )
    return int(float(match["number"]) * _UNITS[unit])


def edge_of(sandbox: str) -> EdgeId:
    """The edge that a sandbox id names.

    Raises:
        InvalidRequest: the text is no sandbox id.
    """
    match = SANDBOX_ID.match(sandbox)
    if match is None:
        raise InvalidRequest(
            f"{sandbox!r} is not a sandbox id.",
            code="bad_sandbox_id",
            hint="Ids look like sb-e1-0a1b2c3d4e5f.",
        )
    return EdgeId(match["edge"])
