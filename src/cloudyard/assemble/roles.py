"""Wiring: an edge and a control process from their real parts, by the yard's configuration."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec

from cloudyard.assemble.config import ClientFile, YardConfig
from cloudyard.assemble.secrets import credentials_of, nats_address
from cloudyard.control.service import ControlConfig, serve_control
from cloudyard.core.iam import Grant, hash_token
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.errors import InvalidRequest
from cloudyard.fabric import Credentials
from cloudyard.fabric.nats_server import CONTROL_USER
from cloudyard.images.depot import Depot
from cloudyard.model import ProjectId

BINARIES = Path(__file__).resolve().parents[1] / "_bin"  # the compiled guest and launcher
LOCAL_PROJECT = ProjectId("local")
LOCAL_PRINCIPAL = "local"


def container_backend(config: YardConfig, *, pool_size: int | None = None) -> ContainerBackend:
    """The backend that makes containers of this yard.

    Args:
        config: the yard.
        pool_size: launchers that wait ready; the backend's own number if left out.
    """
    options = container_options(config)
    if pool_size is not None:
        options = msgspec.structs.replace(options, pool_size=pool_size)
    return ContainerBackend(options, Depot(config.depot).layer_path)


def container_options(config: YardConfig) -> ContainerOptions:
    """Where this yard's containers are on the machine, and what they are called there."""
    return ContainerOptions(
        state=config.paths.state,
        run=config.paths.run,
        launcher=BINARIES / "launch",
        guest=BINARIES / "guest",
    )


async def sweep_node(config: YardConfig) -> list[str]:
    """Remove every sandbox of this yard from the node, whatever state it is in. No edge may be running."""
    async with container_backend(config, pool_size=0) as backend:
        return await backend.sweep(set())


def run_control(config: YardConfig) -> None:
    """Be the control process until SIGTERM."""
    client = read_client(config)
    grant = Grant(project=LOCAL_PROJECT, principal=LOCAL_PRINCIPAL, token_hash=hash_token(client.token))
    control = ControlConfig(
        nats_url=nats_address(config),
        credentials=credentials_of(config, CONTROL_USER) or Credentials(),
        host=config.host,
        port=config.port,
        grants=[grant],
    )
    anyio.run(until_told, lambda: serve_control(control), backend_options={"use_uvloop": True})


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


async def until_told(work: Callable[[], Awaitable[None]]) -> None:
    """Do the work until SIGTERM or SIGINT, which cancel it."""
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await work()
            tasks.cancel_scope.cancel()

        tasks.start_soon(run)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                tasks.cancel_scope.cancel()
                return
