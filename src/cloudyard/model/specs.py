"""What a user asks for: sandboxes and commands. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from cloudyard.model.basics import OUTPUT_LIMIT_DEFAULT_BYTES, BackendName, CpuClass


class SandboxSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A sandbox that a user wants. Sizes are bytes or text such as "512MiB"; times are seconds."""

    image: str
    backend: BackendName = "container"
    cpu: float = 1.0
    """Cores the sandbox may use at most."""
    cpu_weight: int = 100
    """Its share of a busy processor beside others of its class, which have 100 unless they ask."""
    cpu_class: CpuClass = "latency"
    """`best_effort`: it runs in the time that those of class `latency` leave."""
    memory: int | str = "512MiB"
    """Memory it may use at most, page cache and tmpfs included."""
    swap: int | str = 0
    """Swap it may use at most, beyond its memory, where the machine has swap."""
    disk: int | str = "10GiB"
    """What it may write at most, beyond what its image holds."""
    pids: int = 256
    """Processes and threads it may have at once."""
    open_files: int = 16_384
    """Files that one process of it may have open at once, sockets and pipes included."""
    user_namespaces: bool = False
    """Let programs in it make user namespaces, and others in them, as the sandboxes of browsers do. More of
    the kernel can be reached then."""
    lxcfs: bool = False
    """Have /proc say its own memory, processors, load and uptime, for programs that read them there."""
    env: dict[str, str] = {}
    """Environment of every command, under what the command itself sets."""
    cwd: str = ""
    """Where commands start; the image's own directory if empty."""
    user: str = ""
    """Who commands run as: a name, a uid or uid:gid; the image's own (usually root) if empty."""
    hostname: str = "sandbox"
    idle_ttl_s: float | None = None
    """Stop it after so long without a request; None: never for that reason."""
    max_ttl_s: float | None = None
    """Stop it so long after its creation; None: never for that reason."""
    labels: dict[str, str] = {}


class CreateRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A spec and the key that makes creating idempotent: the same key gives the same sandbox."""

    spec: SandboxSpec
    key: str = ""


class Pty(Struct, frozen=True, forbid_unknown_fields=True):
    """Size of a terminal, in characters."""

    rows: Annotated[int, Meta(ge=1, le=4096)] = 24
    cols: Annotated[int, Meta(ge=1, le=4096)] = 80


class CommandSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A command to start: `argv` as it is, or one string through `/bin/sh -c`."""

    argv: list[str] = []
    shell: str = ""
    env: dict[str, str] = {}
    cwd: str = ""
    user: str = ""
    stdin: bytes = b""
    """Bytes to feed at once."""
    keep_stdin: bool = False
    """Leave stdin open for `SendStdin`; else it ends after `stdin`."""
    pty: Pty | None = None
    timeout_s: float | None = None
    no_output_timeout_s: float | None = None
    """Kill it once it has written nothing for so long."""
    output_limit_bytes: int = OUTPUT_LIMIT_DEFAULT_BYTES
    """Bytes kept of each stream. What comes past it is counted and dropped, and the command never waits for
    it."""
