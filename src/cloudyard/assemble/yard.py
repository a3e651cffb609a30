"""Raising and lowering a yard: what `cloudyard up` and `cloudyard down` do, without printing or arguments.

Both may be interrupted or killed anywhere and run again. Lowering needs no process of the yard to be alive:
it ends what runs, has the backend sweep everything of this yard off the node, and then looks for itself
whether anything is left.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import msgspec
from msgspec import Struct

from cloudyard.assemble import children, network, places, supervisor
from cloudyard.assemble.children import ChildPlan
from cloudyard.assemble.config import (
    ClientFile,
    YardConfig,
    YardPaths,
    load_config,
    read_client,
    save_config,
    server_environment,
    write_private,
)
from cloudyard.assemble.edge_main import clear_node, container_options
from cloudyard.assemble.secrets import make_secrets
from cloudyard.control.auth import new_token
from cloudyard.edge.host.cgroups import parent_names
from cloudyard.errors import (
    CloudyardError,
    Conflict,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    YardUnavailable,
)

READY_S = 30.0  # from the supervisor's start to a gateway that knows an edge
READY_POLL_S = 0.05
RESTARTS_MAX = 4  # starts of one child while waiting: more means that it cannot run
STOP_S = 20.0  # for the supervisor to end its children
SETTINGS = (
    "run",
    "depot",
    "host",
    "port",
    "nats_url",
    "cpu_overcommit",
    "memory_overcommit",
    "disk_pool_bytes",
)  # which a running yard must agree on with who wants it up
SWEEP_S = 120.0  # for thousands of sandboxes to go
GONE_S = 20.0  # for the kernel to take away what was killed
LOG_TAIL_LINES = 8

Say = Callable[[str], None]


class Health(Struct, frozen=True):
    """What the gateway says of itself."""

    ok: bool = False
    edges: list[str] = []


def need_root(doing: str) -> None:
    """Refuse to go on without root.

    Raises:
        Forbidden: this process is not root; says what needs it, and the two other ways.
    """
    if os.geteuid() != 0:
        raise Forbidden(
            f"{doing} needs root: sandboxes are made of mounts, uid ranges in user namespaces, and cgroups.",
            code="needs_root",
            hint="Run it with sudo; or use a yard elsewhere by setting CLOUDYARD_URL and CLOUDYARD_TOKEN; "
            "or run it in a virtual machine or a privileged container where you are root.",
        )


def prepare(config: YardConfig, *, owner: tuple[int, int]) -> None:
    """Make the directories, passwords and token that a yard lacks in the directories it took, and keep its
    configuration.

    Args:
        config: the yard.
        owner: uid and gid of whoever may read the client file.
    """
    paths = config.paths
    for directory in (paths.edge, paths.logs, paths.nats_data.parent, paths.nats_data, paths.children):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths.depot.mkdir(parents=True, exist_ok=True)
    save_config(config)
    make_secrets(config)
    try:
        token = read_client(config).token
    except InvalidRequest:
        token = new_token()
    text = msgspec.json.encode(ClientFile(url=config.url, token=token))
    write_private(paths.client, text + b"\n", owner=owner)


@contextmanager
def taken(config: YardConfig, *, owner: tuple[int, int]) -> Iterator[bool]:
    """Have the yard's directories, and be the only one at work on it, within the context. What was taken now
    is given back if that ends with an error. Gives whether the yard's supervisor runs already.

    Raises:
        Conflict: a directory is not ours to take; or another `up` or `down` is at work.
        InvalidRequest: a directory cannot be used.
        LimitExceeded: the disk is full.
    """
    mode = 0o700 if owner[0] == 0 else 0o711  # the owner of the client file has to reach it
    with translated(config.paths.state):
        fresh = places.take(config, mode=mode)
    try:
        with changing(config.paths):
            yield supervisor.is_locked(config.paths.supervisor_lock)
    except BaseException:
        places.give_back(config.paths, fresh)
        raise


async def make_ready(config: YardConfig, *, owner: tuple[int, int]) -> YardConfig:
    """Everything that a supervisor needs, in directories that were taken. Gives the final configuration.

    Raises:
        CloudyardError: the gateway cannot listen where it should, the external NATS is not there, or the
            kernel refuses to write the files.
    """
    config = settle(config)
    if not children.find(_plan(config, "control")):
        network.refuse_taken_port(config.host, config.port)
    if config.nats_url:
        await network.refuse_silent_nats(config.nats_url)
    with translated(config.paths.state):
        prepare(config, owner=owner)
    return config


async def raise_yard(config: YardConfig, *, owner: tuple[int, int], say: Say) -> bool:
    """Have the yard running and answering. Gives False when it was running already.

    Raises:
        Forbidden: not root. Conflict: it runs with other settings, or its port is taken. YardUnavailable: it
            did not come up; the message has the last words of what failed. Nothing is left running, and of
            a first `up` no file either.
    """
    need_root("Starting a yard")
    with taken(config, owner=owner) as running:
        if running:
            _same_settings(config)
            await wait_ready(config, say=say)
            return False
        config = await make_ready(config, owner=owner)
        try:
            process = _start_supervisor(config)
            await wait_ready(config, say=say, process=process)
        except (CloudyardError, anyio.get_cancelled_exc_class(), KeyboardInterrupt):
            with anyio.CancelScope(shield=True):
                await _end_processes(config)
            raise
    return True


async def lower_yard(config: YardConfig, *, say: Say, purge: bool = False) -> list[str]:
    """Stop every sandbox and process of the yard, and check that nothing is left. Gives a sentence for each
    thing removed.

    Raises:
        Forbidden: not root.
        CloudyardError: something would not go; the message lists it.
    """
    need_root("Stopping a yard")
    with changing(config.paths):
        say("ending the yard's processes")
        await _end_processes(config)
        say("stopping sandboxes")
        with anyio.fail_after(SWEEP_S):
            removed = await clear_node(config)
        say("checking that nothing is left")
        await _wait_nothing_left(config)
        places.remove_run(config.paths)
        if purge:
            say("removing its files")
            places.remove_state(config.paths, images=True)
    return removed


@contextmanager
def changing(paths: YardPaths) -> Iterator[None]:
    """Be the only one that raises or lowers this yard.

    Raises:
        Conflict: another `up` or `down` is at work.
    """
    what = f"Another cloudyard up or down is at work on {paths.state}"
    with supervisor.hold_lock(paths.change_lock, code="yard_changing", what=what):
        yield


@contextmanager
def translated(state: Path) -> Iterator[None]:
    """Turn the kernel's refusals to write a yard's files into our errors.

    Raises:
        LimitExceeded: the disk is full.
        InvalidRequest: the directory cannot be used.
    """
    try:
        yield
    except OSError as exc:
        message = f"Making the yard's files in {state} failed at {exc.filename or state}: {exc.strerror}."
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LimitExceeded(
                message, code="disk_full", hint="Free some space, or use another --state."
            ) from exc
        raise InvalidRequest(message, code="bad_state", hint="Give another directory with --state.") from exc


def _plan(config: YardConfig, name: str) -> ChildPlan:
    return next(plan for plan in children.plans(config) if plan.name == name)


def _same_settings(config: YardConfig) -> None:
    there = load_config(config.paths.state)
    differing = [name for name in SETTINGS if getattr(there, name) != getattr(config, name)]
    if differing:
        settings = ", ".join(f"{name} {getattr(there, name) or 'its own'}" for name in differing)
        raise Conflict(
            f"A yard runs in {config.state} already, with other settings: {settings}.",
            code="yard_running",
            hint="Stop it first with cloudyard down, or give a second yard another --state and --port.",
        )


def settle(config: YardConfig) -> YardConfig:
    """The configuration with a port for NATS: the one it had, if it had one that is free or ours."""
    if config.nats_url:
        return config
    try:
        port = load_config(config.paths.state).nats_port
    except CloudyardError:
        port = 0
    kept = msgspec.structs.replace(config, nats_port=port)
    if port and (children.find(_plan(kept, "nats")) or network.is_free("127.0.0.1", port)):
        return kept
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return msgspec.structs.replace(config, nats_port=int(probe.getsockname()[1]))


def _start_supervisor(config: YardConfig) -> subprocess.Popen[bytes]:
    with open(config.paths.logs / "supervisor.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, *children.role_arguments("supervisor", config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=server_environment(),
            start_new_session=True,
            umask=0o077,
        )


async def wait_ready(config: YardConfig, *, say: Say, process: subprocess.Popen[bytes] | None = None) -> None:
    """Return once the gateway answers and knows an edge.

    Raises:
        YardUnavailable: it does not within READY_S, or something of it cannot run.
    """
    said = ""
    with anyio.move_on_after(READY_S):
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while True:
                state = await _health(client, config)
                if state == "ready":
                    return
                if state != said:
                    say(state)
                    said = state
                if process is not None and process.poll() is not None:
                    raise _not_ready(config, "supervisor", "its supervisor ended")
                for note in children.read_notes(config).values():
                    if note.starts > RESTARTS_MAX:
                        raise _not_ready(config, note.name, f"its {note.name} ends again and again")
                await anyio.sleep(READY_POLL_S)
    slow = "edge" if "edge" in said else "control"
    raise _not_ready(config, slow, f"it was still {said or 'silent'} after {READY_S:g} s")


async def _health(client: httpx.AsyncClient, config: YardConfig) -> str:
    try:
        answer = await client.get(f"{config.url}/v1/health")
        health = msgspec.json.decode(answer.content, type=Health)
    except httpx.TransportError:
        return "waiting for the gateway"
    except msgspec.MsgspecError as exc:
        raise Conflict(
            f"What answers at {config.url} is no gateway of ours.",
            code="port_in_use",
            hint="Give another --port.",
        ) from exc
    return "ready" if health.edges else "waiting for the edge"


def _not_ready(config: YardConfig, name: str, why: str) -> YardUnavailable:
    log = config.paths.logs / f"{name}.log"
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        lines = []
    last = "\n".join(f"  {line}" for line in lines)
    return YardUnavailable(
        f"The yard did not come up: {why}. Last lines of {log}:\n{last}\n",
        code="yard_not_ready",
        hint="cloudyard doctor says what this machine lacks.",
        retry_safe=False,
    )


async def _end_processes(config: YardConfig) -> None:
    """End the supervisor and then whatever child is left, whoever started it."""
    arguments = children.role_arguments("supervisor", config)
    for process in children.find_by_arguments(arguments):
        with anyio.move_on_after(STOP_S):
            await children.stop(process)
    await supervisor.stop_children(config, children.plans(config))


async def _wait_nothing_left(config: YardConfig) -> None:
    left = leftovers(config)
    with anyio.move_on_after(GONE_S):
        while left:
            await anyio.sleep(READY_POLL_S)
            left = leftovers(config)
    if left:
        raise CloudyardError(
            f"{len(left)} things of the yard would not go: {'; '.join(left[:10])}.",
            code="left_behind",
            hint="Run cloudyard down again; if they stay, please report it with this message.",
        )


def leftovers(config: YardConfig) -> list[str]:
    """What is still there of a yard that was lowered: cgroups that carry its name, processes in them, mounts
    in its directories. A process that has ended, and that the init here does not wait for, holds nothing.
    """
    names = parent_names(container_options(config).tag)
    groups = Path("/sys/fs/cgroup")
    patterns = [pattern for name in names for pattern in (name, f"*/{name}")]
    found = [f"cgroup {path}" for pattern in patterns for path in groups.glob(pattern)]
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                group = Path(f"/proc/{entry}/cgroup").read_text()
            except OSError:
                continue
            if any(f"/{name}/" in group for name in names) and children.start_time(int(entry)):
                found.append(f"process {entry}")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where = line.split()[4]
        if where.startswith((f"{config.run}/", f"{config.state}/")):
            found.append(f"mount {where}")
    return found
