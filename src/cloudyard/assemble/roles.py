"""Wiring: an edge and a control process from their real parts, by the yard's configuration."""

from __future__ import annotations

import logging
import os
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
from cloudyard.edge.config import EdgeConfig
from cloudyard.edge.daemon import Edge, serve
from cloudyard.errors import CloudyardError, InvalidRequest
from cloudyard.fabric import Credentials, Fabric
from cloudyard.fabric.nats_server import CONTROL_USER, edge_user
from cloudyard.images.depot import Depot
from cloudyard.model import ProjectId

BINARIES = Path(__file__).resolve().parents[1] / "_bin"  # the compiled guest and launcher
LOCAL_PROJECT = ProjectId("local")
LOCAL_PRINCIPAL = "local"

log = logging.getLogger(__name__)


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


def make_edge(config: YardConfig, backend: ContainerBackend) -> Edge:
    """The edge of this node, not yet entered."""
    depot = Depot(config.depot)
    edge = EdgeConfig(
        edge=config.edge,
        state_dir=config.paths.state,
        cpu_total=float(len(os.sched_getaffinity(0))),
        memory_total_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        cpu_overcommit=config.cpu_overcommit,
        memory_overcommit=config.memory_overcommit,
        sandboxes_max=backend.capacity(),
    )
    return Edge(edge, backends={backend.name: backend}, images=depot.image, image_names=depot.names)


def run_edge(config: YardConfig) -> None:
    """Be the edge process until SIGTERM; sandboxes live on."""
    anyio.run(
        until_told, lambda: _serve_edge(config)
    )  # not uvloop: starting processes costs three times as much there


async def _serve_edge(config: YardConfig) -> None:
    user = edge_user(config.edge)
    async with (
        container_backend(config) as backend,
        make_edge(config, backend) as edge,  # brings node and records together, before and without NATS
        Fabric.connect(nats_address(config), credentials_of(config, user), name=user) as fabric,
    ):
        await serve(edge, fabric)


async def clear_node(config: YardConfig) -> list[str]:
    """Stop every sandbox of this yard, and remove whatever is left of any. No edge may be running.

    Gives a sentence for each thing that was removed beyond the sandboxes that could be stopped.
    """
    async with container_backend(config, pool_size=0) as backend:
        try:
            async with make_edge(config, backend) as edge:
                await edge.stop_all()
        except CloudyardError as exc:
            log.warning("sandboxes could not be stopped one by one: %s", exc)
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
