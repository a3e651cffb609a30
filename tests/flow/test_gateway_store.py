"""The yard's store on a disk that fills up and is freed: what callers are told, and that it comes back."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import httpx
import pytest

from cloudyard.testing.nats import NatsServer
from flow.echo_edge import echo_edge
from flow.gateway_yard import BOUND_S, bearer, nats, served
from support import cannot_run


class _SmallDisk:
    """A tmpfs of 16 MiB, filled and freed; as the yard's own store it starts its NATS server again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server: NatsServer | None = None
        self.restarts = 0

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    async def restart(self) -> None:
        assert self.server is not None
        self.restarts += 1
        await self.server.kill()
        await self.server.start()

    def fill(self) -> None:
        for piece in (64 * 1024, 64):
            with suppress(OSError), (self.path / "filler").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(piece))

    def free(self) -> None:
        (self.path / "filler").unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[_SmallDisk]:
    if os.geteuid() != 0:
        cannot_run("needs root: mounts a tmpfs")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", path], check=True)
    try:
        yield _SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.live
async def test_a_full_disk_is_named_at_once_and_freed_it_works_again_by_itself(
    small_disk: _SmallDisk,
) -> None:
    with anyio.fail_after(BOUND_S):
        async with (
            nats(small_disk.path) as server,
            echo_edge(server),
            served(server, small_disk) as address,
            httpx.AsyncClient(base_url=address.url, headers=bearer(), timeout=BOUND_S) as client,
        ):
            small_disk.server = server

            async def create(key: str) -> httpx.Response:
                return await client.post("/v1/sandboxes", json={"spec": {"image": "debian"}, "key": key})

            before = (await create("before")).json()["id"]
            small_disk.fill()
            number = 0
            begun = anyio.current_time()
            while (answer := await create(f"full-{number}")).status_code == 201:
                number += 1  # the last block of the store's file has room for some
                begun = anyio.current_time()
            assert anyio.current_time() - begun < 3.0
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["retry_safe"]) == (
                503,
                "store_unavailable",
                False,
            )
            assert "disk" in error["message"]
            assert "Free disk space" in error["hint"]
            begun = anyio.current_time()
            assert (await create("again")).json()["error"]["code"] == "store_unavailable"
            assert anyio.current_time() - begun < 1.0
            assert (await client.get("/v1/health")).json() == {"ok": True, "edges": ["e1"], "store": False}
            assert (await client.get(f"/v1/sandboxes/{before}")).status_code == 200
            assert small_disk.restarts == 0
            small_disk.free()
            while (answer := await create("after")).status_code != 201:
                assert answer.status_code == 503, answer.text
                await anyio.sleep(0.1)
            assert small_disk.restarts == 1
            assert (await create("before")).json()["id"] == before
            while not (await client.get("/v1/health")).json()["store"]:
                await anyio.sleep(0.1)
