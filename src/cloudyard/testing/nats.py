"""The real nats-server for tests, as `cloudyard up` configures it: `async with nats_server(directory,
edges=["e1"])`.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process

from cloudyard.fabric import Credentials, NatsServerConfig, find_nats_server, render_config, write_private

START_S, STOP_S = 15.0, 5.0
CHECK_S = 0.01


class NatsServer:
    """A server under test: its address, its credentials, and the means to kill it and start it again."""

    def __init__(self, directory: Path, passwords: dict[str, str]) -> None:
        self._directory = directory
        self._passwords = passwords
        self._process: Process | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Where it listens, without credentials."""
        return f"nats://127.0.0.1:{self._port}"

    def credentials(self, role: str = "control") -> Credentials:
        """Those of `control` or `edge-<id>`."""
        return Credentials(role, self._passwords[role])

    async def start(self) -> None:
        """Start it, on the port of its first start, and return when it answers."""
        write_private(
            self._directory / "nats.conf",
            render_config(
                NatsServerConfig(
                    port=self._port,
                    store_dir=str(self._directory / "store"),
                    ports_dir=str(self._directory),
                    passwords=self._passwords,
                )
            ),
        )
        log = self._directory / "nats.log"
        with log.open("ab") as output:
            self._process = await anyio.open_process(
                [str(find_nats_server()), "--config", str(self._directory / "nats.conf")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        with anyio.fail_after(START_S):
            while not await self._listening():
                if self._process.returncode is not None:
                    raise RuntimeError(f"nats-server ended while starting:\n{log.read_text()[-2000:]}")
                await anyio.sleep(CHECK_S)

    async def kill(self) -> None:
        """End it at once, without any goodbye."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            with anyio.fail_after(STOP_S):
                await self._process.wait()
        self._process = None

    async def _listening(self) -> bool:
        assert self._process is not None
        ports = self._directory / f"nats-server_{self._process.pid}.ports"
        try:
            url = json.loads(ports.read_text())["nats"][0]
            self._port = int(url.rsplit(":", 1)[1])
            async with await anyio.connect_tcp("127.0.0.1", self._port) as stream:
                return (await stream.receive()).startswith(b"INFO")
        except (OSError, ValueError, KeyError, anyio.EndOfStream):
            return False


@asynccontextmanager
async def nats_server(directory: Path, *, edges: Sequence[str] = ("e1",)) -> AsyncIterator[NatsServer]:
    """A running server with its files in `directory`; killed at the end."""
    passwords = {role: secrets.token_hex(16) for role in ("control", *(f"edge-{edge}" for edge in edges))}
    server = NatsServer(directory, passwords)
    try:
        await server.start()
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await server.kill()
