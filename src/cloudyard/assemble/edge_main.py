"""The edge process: a daemon on the container backend, the depot and NATS, by the yard's configuration."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import msgspec

from cloudyard.assemble.config import YardConfig
from cloudyard.assemble.secrets import credentials_of, nats_address
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.edge.config import EdgeConfig
from cloudyard.edge.daemon import Edge, serve
from cloudyard.edge.functions import Functions
from cloudyard.errors import CloudyardError
from cloudyard.fabric import Fabric
from cloudyard.fabric.nats_server import edge_user
from cloudyard.images.depot import Depot

BINARIES = Path(__file__).resolve().parents[1] / "_bin"  # the compiled guest and launcher

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
        disk_pool_bytes=config.disk_pool_bytes,
        lxcfs=lxcfs_program(),
    )


def lxcfs_program() -> Path | None:
    """The program lxcfs: the system's, or what scripts/setup fetched."""
    found = shutil.which("lxcfs", path=f"/usr/bin:/usr/local/bin:{BINARIES / 'lxcfs'}")
    return Path(found) if found else None


def make_edge(config: YardConfig, backend: ContainerBackend, functions: Functions | None = None) -> Edge:
    """The edge of this node, not yet entered. Without `functions` it takes no calls."""
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
    return Edge(
        edge,
        backends={backend.name: backend},
        images=depot.image,
        image_names=depot.names,
        functions=functions,
    )


def make_functions(config: YardConfig, backend: ContainerBackend) -> Functions:
    """What makes stateless calls on this node, not yet entered."""
    return Functions(config.edge, backend, Depot(config.depot).image, cores=len(os.sched_getaffinity(0)))


async def be_edge(config: YardConfig) -> None:
    """Serve this node's sandboxes until cancelled; they live on."""
    user = edge_user(config.edge)
    async with (
        container_backend(config) as backend,
        make_functions(config, backend) as functions,
        make_edge(
            config, backend, functions
        ) as edge,  # brings node and records together, before and without NATS
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
