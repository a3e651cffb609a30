"""A whole control side for tests: real NATS, echo edges, and the gateway in memory or on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx

from cloudyard.control.gateway import Gateway
from cloudyard.control.service import Address, ControlConfig, open_yard, serve_control
from cloudyard.control.store_keeper import OwnStore
from cloudyard.core.iam import Grant, hash_token
from cloudyard.fabric import Fabric
from cloudyard.model import ProjectId
from cloudyard.testing.nats import NatsServer, nats_server

TOKENS = {"red": "cy_red", "blue": "cy_blue", "reader": "cy_reader"}
GRANTS = [
    Grant(project=ProjectId("red"), principal="ann", token_hash=hash_token(TOKENS["red"])),
    Grant(project=ProjectId("blue"), principal="ben", token_hash=hash_token(TOKENS["blue"])),
    Grant(
        project=ProjectId("red"),
        principal="eye",
        token_hash=hash_token(TOKENS["reader"]),
        actions=["sandbox.read"],
    ),
]
BOUND_S = 30.0


def bearer(who: str = "red") -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[who]}"}


@asynccontextmanager
async def nats(directory: Path) -> AsyncIterator[NatsServer]:
    """A NATS server that knows the edges e1 and e2."""
    async with nats_server(directory, edges=["e1", "e2"]) as server:
        yield server


@asynccontextmanager
async def gateway(server: NatsServer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway in memory, with the token of project red."""
    async with (
        Fabric.connect(server.url, server.credentials(), name="control") as fabric,
        anyio.create_task_group() as tasks,
    ):
        yard = await open_yard(fabric, tasks, GRANTS)
        transport = httpx.ASGITransport(Gateway(yard))  # type: ignore[arg-type]
        async with httpx.AsyncClient(
            transport=transport, base_url="http://yard", headers=bearer(), timeout=BOUND_S
        ) as client:
            yield client
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def served(server: NatsServer, own_store: OwnStore | None = None) -> AsyncIterator[Address]:
    """The address of a gateway on a real socket."""
    async with anyio.create_task_group() as tasks:
        config = ControlConfig(nats_url=server.url, credentials=server.credentials(), port=0, grants=GRANTS)
        yield await tasks.start(serve_control, config, own_store)
        tasks.cancel_scope.cancel()
