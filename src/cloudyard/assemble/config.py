"""Configuration of a yard's server side: where its files are, and the few numbers that its processes share.

It is made once, by `cloudyard up`, kept in the state directory, and read once by each process. Nothing else
in the server parts reads the environment; what they need is passed to them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from cloudyard.errors import InvalidRequest, NotFound
from cloudyard.model import MIB, parse_size

STATE_DEFAULT = Path("/var/lib/cloudyard")
RUN_DEFAULT = Path("/run/cloudyard")
HOST_DEFAULT = "127.0.0.1"
PORT_DEFAULT = 8470
EDGE_DEFAULT = "e1"
CPU_OVERCOMMIT = 100.0  # a sandbox waits for its model most of the time
MEMORY_OVERCOMMIT = 4.0  # and uses a small part of what it may
DISK_POOL_MIN_BYTES = 256 * MIB
OVERCOMMIT_MIN = 0.01
OVERCOMMIT_MAX = 10_000.0
SOCKET_PATH_MAX = 107  # bytes of a unix socket's path
RUN_PATH_MAX = (
    SOCKET_PATH_MAX - 47
)  # what is left for the run directory, below which sockets are named by sandbox ids


class YardConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One yard on this machine. Paths are absolute."""

    state: str
    run: str
    depot: str
    host: str = HOST_DEFAULT
    port: int = PORT_DEFAULT
    edge: str = EDGE_DEFAULT
    nats_url: str = ""
    """An external NATS; ours is started if empty."""
    nats_port: int = 0
    """Where ours listens, on loopback."""
    cpu_overcommit: float = CPU_OVERCOMMIT
    """Cores promised to sandboxes, for each that there is."""
    memory_overcommit: float = MEMORY_OVERCOMMIT
    """Bytes of memory promised to sandboxes, for each that there is."""

    disk_pool_bytes: int | None = None
    """What the pool of sandboxes' disks may take of this machine's; None: all but a reserve; 0: no pool."""

    @property
    def url(self) -> str:
        """Where clients reach the gateway."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def paths(self) -> YardPaths:
        return YardPaths(state=Path(self.state), run=Path(self.run), depot=Path(self.depot))


class ClientFile(Struct, frozen=True, kw_only=True):
    """What STATE/client.json tells a client on this machine."""

    url: str
    token: str

    def __repr__(self) -> str:
        return f"ClientFile(url={self.url!r}, token=<secret>)"


@dataclass(frozen=True, kw_only=True)
class YardPaths:
    """Every file and directory of a yard that more than one part knows."""

    state: Path
    run: Path
    depot: Path

    @property
    def config(self) -> Path:
        return self.state / "yard.json"

    @property
    def client(self) -> Path:
        """URL and token for clients on this machine."""
        return self.state / "client.json"

    @property
    def secrets(self) -> Path:
        """Passwords of the roles at NATS."""
        return self.state / "nats" / "credentials.json"

    @property
    def nats_config(self) -> Path:
        return self.state / "nats" / "server.conf"

    @property
    def nats_data(self) -> Path:
        return self.state / "nats" / "data"

    @property
    def edge(self) -> Path:
        """Records and outputs of the edge."""
        return self.state / "edge"

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the running supervisor."""
        return self.state / "supervisor.lock"

    @property
    def change_lock(self) -> Path:
        """Held by `up` or `down` while at work."""
        return self.state / "change.lock"

    @property
    def children(self) -> Path:
        """A file for each process that the supervisor keeps: its pid and start time."""
        return self.run / "children"


def make_config(
    *,
    state: Path,
    run: Path | None,
    depot: Path | None,
    host: str = HOST_DEFAULT,
    port: int = PORT_DEFAULT,
    nats_url: str = "",
    cpu_overcommit: float = CPU_OVERCOMMIT,
    memory_overcommit: float = MEMORY_OVERCOMMIT,
    disk_pool: str = "",
) -> YardConfig:
    """A configuration from what `up` was told, with the rest filled in.

    Raises:
        InvalidRequest: a path is too long for sockets, directories lie in one another, or a number or URL is
            none that can work.
    """
    state = Path(os.path.abspath(state))
    if run is None:
        digest = hashlib.sha256(str(state).encode()).hexdigest()[:8]
        run = RUN_DEFAULT if state == STATE_DEFAULT else RUN_DEFAULT.with_name(f"{RUN_DEFAULT.name}-{digest}")
    run = Path(os.path.abspath(run))
    if len(os.fsencode(run)) > RUN_PATH_MAX:
        raise InvalidRequest(
            f"The run directory {run} is {len(os.fsencode(run))} bytes long, too long for the sockets in it.",
            code="run_path_too_long",
            hint=f"Give one of at most {RUN_PATH_MAX} bytes with --run.",
        )
    depot = Path(os.path.abspath(depot)) if depot else state / "depot"
    _refuse_overlap(state, run, depot)
    if not 0 < port < 65536:
        raise InvalidRequest(
            f"--port is {port}, which is no port.", code="bad_port", hint="Between 1 and 65535."
        )
    _refuse_overcommit("--cpu-overcommit", cpu_overcommit)
    _refuse_overcommit("--memory-overcommit", memory_overcommit)
    if nats_url:
        _refuse_nats_url(nats_url)
    return YardConfig(
        state=str(state),
        run=str(run),
        depot=str(depot),
        host=host,
        port=port,
        nats_url=nats_url,
        cpu_overcommit=cpu_overcommit,
        memory_overcommit=memory_overcommit,
        disk_pool_bytes=_pool_size(disk_pool) if disk_pool else None,
    )


def _pool_size(text: str) -> int:
    size = parse_size(text, what="--disk-pool")
    if 0 < size < DISK_POOL_MIN_BYTES:
        raise InvalidRequest(
            f"--disk-pool is {text}.",
            code="bad_disk_pool",
            hint=f"At least {DISK_POOL_MIN_BYTES // MIB}MiB; or 0: no pool, and disks without limits.",
        )
    return size


def _refuse_overlap(state: Path, run: Path, depot: Path) -> None:
    """What lies in the run directory goes with `down`, what lies in the state directory with a purge."""
    for name, path in (("state", state), ("depot", depot)):
        if path.is_relative_to(run):
            raise InvalidRequest(
                f"The {name} directory {path} lies in the run directory {run}, which cloudyard down removes.",
                code="directories_overlap",
                hint="Give --run a directory of its own, such as one below /run.",
            )
    if state.is_relative_to(depot):
        raise InvalidRequest(
            f"The state directory {state} lies in the depot {depot}.",
            code="directories_overlap",
            hint="Give --state or --depot a directory of its own.",
        )


def _refuse_overcommit(option: str, value: float) -> None:
    if not OVERCOMMIT_MIN <= value <= OVERCOMMIT_MAX:  # nor if it is no number
        raise InvalidRequest(
            f"{option} is {value:g}.",
            code="bad_overcommit",
            hint=f"Between {OVERCOMMIT_MIN:g} and {OVERCOMMIT_MAX:g}; 1 promises no more than there is.",
        )


def _refuse_nats_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise InvalidRequest(
            f"--url {url.rpartition('@')[2]!r} is no address of NATS.",
            code="bad_nats_url",
            hint="Write it like nats://host:4222, or tls://host:4222.",
        )


def load_config(state: Path) -> YardConfig:
    """The configuration that `up` left in a state directory.

    Raises:
        NotFound: there is none, so no yard was ever raised there.
        InvalidRequest: the file cannot be read as one.
    """
    path = Path(os.path.abspath(state)) / "yard.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=YardConfig)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise NotFound(
            f"There is no yard in {state}: {path.name} is missing.",
            code="no_yard",
            hint="cloudyard up makes one.",
        ) from exc
    except (OSError, msgspec.MsgspecError) as exc:
        raise InvalidRequest(
            f"The yard's configuration {path} cannot be read: {exc}.",
            code="bad_yard_config",
            hint="cloudyard down stops that yard all the same, and the next cloudyard up writes it anew.",
        ) from exc


def read_client(config: YardConfig) -> ClientFile:
    """What the client file says.

    Raises:
        InvalidRequest: it is missing or damaged.
    """
    try:
        return msgspec.json.decode(config.paths.client.read_bytes(), type=ClientFile)
    except (OSError, msgspec.MsgspecError) as exc:
        raise InvalidRequest(
            f"The client file {config.paths.client} cannot be read: {exc}.",
            code="bad_client_file",
            hint="cloudyard down, then cloudyard up writes it anew, with a new token if need be.",
        ) from exc


def save_config(config: YardConfig) -> None:
    """Keep the configuration in its state directory, replaced in one move."""
    text = msgspec.json.format(msgspec.json.encode(config), indent=2)
    write_private(config.paths.config, text + b"\n")


def write_private(
    path: Path, data: bytes, *, owner: tuple[int, int] | None = None, mode: int = 0o600
) -> None:
    """Write a file that only its owner may read, in one move: it is never there half, nor readable by
    others."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(descriptor, mode)
            if owner is not None:
                os.fchown(descriptor, *owner)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def invoking_user(environ: Mapping[str, str]) -> tuple[int, int]:
    """Uid and gid of whoever ran sudo, or of this process."""
    uid, gid = environ.get("SUDO_UID", ""), environ.get("SUDO_GID", "")
    if uid.isdecimal() and gid.isdecimal() and os.geteuid() == 0:
        return int(uid), int(gid)
    return os.geteuid(), os.getegid()


def server_environment() -> dict[str, str]:
    """The whole environment of our server processes: nothing of whoever ran `up` leaks into a yard."""
    package_root = Path(__file__).resolve().parents[2]
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "HOME": "/root",
        "PYTHONPATH": str(package_root),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        "MALLOC_ARENA_MAX": "2",
    }
