"""The whole chain: real NATS, a gateway in a process of its own that a test can kill, and an edge.

Run as a program it is that process: it reads what it needs as JSON from stdin and prints its address.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process
from msgspec.structs import replace

from cloudyard.core.iam import Grant, hash_token
from cloudyard.edge.backends.base import Backend
from cloudyard.edge.calls import Functions
from cloudyard.edge.daemon import Edge, serve
from cloudyard.fabric import Credentials, Fabric
from cloudyard.model import GIB
from cloudyard.testing.fake_backend import FakeBackend, fake_images
from cloudyard.testing.nats import NatsServer, nats_server
from flow.edge_kit import config_for, guest_program, mirrored_root

TOKEN = "cy_chain_token"
START_S, STOP_S = 20.0, 30.0
ROOT = Path(__file__).resolve().parents[2]


class Chain:
    """Addresses, and the means to break things."""

    def __init__(self, nats: NatsServer) -> None:
        self.nats = nats
        self.url = ""
        self.token = TOKEN
        self._port = 0
        self._control: Process | None = None

    async def start_control(self) -> None:
        """Start the gateway, on the port of its first start; returns when it listens."""
        credentials = self.nats.credentials()
        told = {
            "nats_url": self.nats.url,
            "role": credentials.user,
            "password": credentials.password,
            "port": self._port,
        }
        path = f"{ROOT / 'src'}:{ROOT / 'tests'}"
        self._control = await anyio.open_process(
            [sys.executable, __file__], stderr=None, cwd=ROOT, env={"PYTHONPATH": path}
        )
        assert self._control.stdin is not None
        assert self._control.stdout is not None
        await self._control.stdin.send(json.dumps(told).encode() + b"\n")
        with anyio.fail_after(START_S):
            self.url = (await self._control.stdout.receive()).decode().strip()
        self._port = int(self.url.rsplit(":", 1)[1])

    async def kill_control(self) -> None:
        """SIGKILL to the gateway."""
        if self._control is not None:
            self._control.kill()
            await self._control.wait()
            await self._control.aclose()
            self._control = None


@asynccontextmanager
async def chain(directory: Path) -> AsyncIterator[Chain]:
    """NATS and a gateway, without an edge."""
    async with nats_server(directory, edges=["e1", "e2"]) as nats:
        made = Chain(nats)
        try:
            await made.start_control()
            yield made
        finally:
            with anyio.CancelScope(shield=True):
                await made.kill_control()


@asynccontextmanager
async def real_edge(
    made: Chain, directory: Path, *, name: str = "e1", functions: Functions | None = None
) -> AsyncIterator[Edge]:
    """An edge on the fake backend with the real guest, served over NATS. Its sandboxes are stopped at
    the end. File operations see the parent of `directory`, under its own name as commands do.
    """
    credentials = made.nats.credentials(f"edge-{name}")
    backend = FakeBackend(directory / "fake", guest_program(), files_root=mirrored_root(directory.parent))
    backends: dict[str, Backend] = {"container": backend}
    config = replace(config_for(directory, memory_total_bytes=8 * GIB), edge=name)
    edge = Edge(
        config,
        backends=backends,
        images=fake_images,
        image_names=lambda: ["debian"],
        functions=functions,
    )
    async with (
        backend,
        edge,
        Fabric.connect(made.nats.url, credentials, name=name) as fabric,
        anyio.create_task_group() as tasks,
    ):
        await tasks.start(serve, edge, fabric)
        try:
            yield edge
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(STOP_S):
                await edge.stop_all()
            tasks.cancel_scope.cancel()


def main() -> None:
    from cloudyard.control.service import Address, ControlConfig, serve_control

    told = json.loads(sys.stdin.readline())
    config = ControlConfig(
        nats_url=told["nats_url"],
        credentials=Credentials(told["role"], told["password"]),
        port=told["port"],
        grants=[Grant(token_hash=hash_token(TOKEN), project="p", principal="tests")],
    )

    async def serve() -> None:
        async with anyio.create_task_group() as tasks:
            address: Address = await tasks.start(serve_control, config)
            print(address.url, flush=True)

    anyio.run(serve, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
