"""SDK and command line through a real gateway and real NATS, to an edge that answers from memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from cloudyard import (
    Conflict,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Unauthorized,
    YardUnavailable,
    blocking,
    connect,
)
from cloudyard.model import SandboxInfo
from flow.chain import TOKEN, Chain, chain
from flow.echo_edge import EchoEdge, echo_edge
from support import REPOSITORY, wait_until

BIG = bytes(range(256)) * 4096 * 2 + b"end"

both = pytest.mark.parametrize("transport", ["mux", "http"])


@asynccontextmanager
async def yard_with(directory: Path, *, room: int = 1000) -> AsyncIterator[tuple[Chain, EchoEdge]]:
    async with chain(directory) as made, echo_edge(made.nats, room=room) as edge:
        yield made, edge


@both
async def test_sandboxes_come_and_go(yard_dir: Path, transport: str) -> None:
    async with yard_with(yard_dir) as (made, edge), connect(made.url, TOKEN, transport=transport) as yard:
        async with yard.sandbox(image="debian", cpu=2, memory="128MiB") as box:
            info = await box.info()
            assert (info.state, info.cpu, info.memory_bytes) == ("running", 2.0, 128 * 2**20)
            assert [listed.id for listed in await yard.list()] == [box.id]
            assert (await box.run("echo hello")).text == "hello\n"
            assert (await (await yard.get(box.id)).run(["echo", "again"])).text == "again\n"
        assert edge.sandboxes[box.id].state == "stopped"
        assert await yard.list() == []
        assert [listed.state for listed in await yard.list(stopped=True)] == ["stopped"]
        assert {row.name for row in await yard.images()} == {"debian", "python"}
        assert (await yard.create("debian", key="k")).id == (await yard.create("debian", key="k")).id
        with pytest.raises(Conflict, match="another spec"):
            await yard.create("debian", cpu=3, key="k")
        with pytest.raises(NotFound):
            await yard.get("sb-e1-000000000000")
        with pytest.raises(Unauthorized):
            async with connect(made.url, "cy_wrong", transport=transport):
                pass


@pytest.mark.slow
async def test_a_list_is_whole_or_an_error(yard_dir: Path) -> None:
    """An edge whose answer nobody can read keeps its sandboxes from the list."""
    async with yard_with(yard_dir) as (made, edge), connect(made.url, TOKEN) as yard:
        box = await yard.create("debian")
        edge.garbage = b"garbage"
        with pytest.raises(YardUnavailable, match="not whole: e1 did not answer") as caught:
            await yard.list()
        assert caught.value.code == "list_incomplete"
        assert await yard.list(partial=True) == []
        edge.garbage = b""
        assert [info.id for info in await yard.list()] == [box.id]


@both
async def test_files_of_any_size(yard_dir: Path, tmp_path: Path, transport: str) -> None:
    async with yard_with(yard_dir) as (made, edge), connect(made.url, TOKEN, transport=transport) as yard:
        box = await yard.create("debian")
        for data in (b"", b"small", BIG):
            await box.write("/f", data)
            assert await box.read("/f") == data
        (tmp_path / "local").write_bytes(BIG)
        await box.upload(tmp_path / "local", "/g")
        await box.download("/g", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == BIG
        assert edge.largest_piece <= 256 * 1024
        with pytest.raises(NotFound):
            await box.download("/missing", tmp_path / "never")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "local"]
        with pytest.raises(InvalidRequest, match="absolute"):
            await box.read("relative")


@both
async def test_many_sandboxes_are_all_made_or_none(yard_dir: Path, transport: str) -> None:
    async with (
        yard_with(yard_dir, room=60) as (made, edge),
        connect(made.url, TOKEN, transport=transport) as yard,
    ):
        boxes = await yard.create_many(50, "debian", key="base")
        assert len({box.id for box in boxes}) == 50
        again = await yard.create_many(50, "debian", key="base")
        assert [box.id for box in again] == [box.id for box in boxes]
        with pytest.raises(LimitExceeded, match=r"of 20 sandboxes could not be made; .*stopped. The first"):
            await yard.create_many(20, "debian")
        running = {info.id for info in edge.sandboxes.values() if info.state == "running"}
        assert running == {box.id for box in boxes}


async def test_misspelt_options_are_named_before_anything_is_sent(yard_dir: Path) -> None:
    async with yard_with(yard_dir) as (made, edge), connect(made.url, TOKEN) as yard:
        with pytest.raises(InvalidRequest, match=r"no option 'memry'\. Did you mean memory\?"):
            await yard.create("debian", memry="1GiB")  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="cpu is 1000"):
            await yard.create("debian", cpu=1000)
        with pytest.raises(InvalidRequest, match="cpu"):
            await yard.create("debian", cpu="two")  # type: ignore[arg-type]
        box = await yard.create("debian")
        with pytest.raises(InvalidRequest, match="timeout_s"):
            await box.run("true", timeout_s=-1)
        with pytest.raises(InvalidRequest, match="empty"):
            await box.run("")
        assert edge.creates == 1


async def test_a_cancelled_create_leaves_no_sandbox(yard_dir: Path) -> None:
    async with yard_with(yard_dir) as (made, edge), connect(made.url, TOKEN) as yard:
        made_one = anyio.Event()
        create = edge._create

        def create_and_tell(call: object) -> SandboxInfo:
            made_one.set()
            return create(call)

        edge._create = create_and_tell
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(yard.create_many, 30, "debian"))
            await made_one.wait()
            tasks.cancel_scope.cancel()
        assert edge.sandboxes
        assert {info.state for info in edge.sandboxes.values()} == {"stopped"}


@both
async def test_cancelling_run_reaches_the_edge(yard_dir: Path, transport: str) -> None:
    async with yard_with(yard_dir) as (made, edge), connect(made.url, TOKEN, transport=transport) as yard:
        box = await yard.create("debian")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(box.run, "hang")
            await edge.hanging.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(10):
            await edge.cancel_heard.wait()


@both
async def test_a_killed_gateway_is_waited_out(yard_dir: Path, transport: str) -> None:
    """Commands under way, files on their way and new calls all survive; each is done once."""
    async with yard_with(yard_dir) as (made, edge), connect(made.url, TOKEN, transport=transport) as yard:
        box = await yard.create("debian")
        results: list[str] = []

        async def many(index: int) -> None:
            for turn in range(20):
                results.append((await box.run(f"echo {index}-{turn}")).text)

        async def file() -> None:
            await box.write("/f", BIG * 4)

        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(many, index)
            tasks.start_soon(file)
            await wait_until(lambda: len(results) > 20, "some commands are done")
            await made.kill_control()
            await made.start_control()
        assert sorted(results) == sorted(f"{index}-{turn}\n" for index in range(8) for turn in range(20))
        assert await box.read("/f") == BIG * 4
        assert len(edge.keys) == len(results) + 1
        await box.stop()


async def test_the_blocking_facade_does_the_same(yard_dir: Path, tmp_path: Path) -> None:
    def work(url: str) -> None:
        with blocking.connect(url, TOKEN) as yard, yard.sandbox("debian") as box:
            assert box.run("echo hello").text == "hello\n"
            box.write("/f", BIG)
            assert box.read("/f") == BIG
            process = box.start("flood")
            assert b"".join(process.stdout()) == bytes(7)
            assert process.wait().ok
            assert [info.id for info in yard.list()] == [box.id]
            assert len(yard.create_many(3, "debian")) == 3
            with pytest.raises(NotFound):
                box.read("/missing")
        with pytest.raises(Conflict, match="cannot be opened again"), yard:
            pass

    async with yard_with(yard_dir) as (made, _):
        await anyio.to_thread.run_sync(work, made.url)


# --- the command line
# -------------------------------------------------------------------------------------------


async def cloudyard(made: Chain, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    environment |= {"CLOUDYARD_URL": made.url, "CLOUDYARD_TOKEN": TOKEN}
    command = [sys.executable, "-m", "cloudyard.cli", *words]
    with anyio.fail_after(30):
        return await anyio.run_process(command, input=stdin, env=environment, check=False)


async def test_run_ls_and_stop_from_the_command_line(yard_dir: Path) -> None:
    async with yard_with(yard_dir) as (made, edge):
        done = await cloudyard(made, "run", "--memory", "64MiB", "flood")
        assert (done.returncode, done.stdout, done.stderr) == (0, bytes(7), bytes(7))
        assert [info.state for info in edge.sandboxes.values()] == ["stopped"]

        done = await cloudyard(made, "run", "--json", "--", "echo", "a", "b")
        result = json.loads(done.stdout)
        assert (result["stdout"], result["exit_code"], result["ok"]) == ("a b\n", 0, True)

        async with connect(made.url, TOKEN) as yard:
            box = await yard.create("debian")
        done = await cloudyard(made, "ls", "--json")
        assert [info["id"] for info in json.loads(done.stdout)] == [box.id]
        done = await cloudyard(made, "ls")
        assert box.id in done.stdout.decode()
        assert "SANDBOX" in done.stdout.decode()
        done = await cloudyard(made, "run", "--in", box.id, "--json", "echo x")
        assert json.loads(done.stdout)["sandbox"] == box.id
        assert edge.sandboxes[box.id].state == "running"
        done = await cloudyard(made, "stop", box.id)
        assert (done.returncode, done.stdout.decode()) == (0, f"{box.id}\n")
        assert edge.sandboxes[box.id].state == "stopped"


async def test_errors_of_the_command_line_are_one_line_and_an_exit_code(yard_dir: Path) -> None:
    async with yard_with(yard_dir) as (made, _):
        for words, code, text in (
            (["run"], 2, "No command was given."),
            (["run", "--memory", "lots", "true"], 2, "which is not a size. Write it like"),
            (["run", "--env", "x", "true"], 2, "--env is 'x'"),
            (["run", "--in", "sb-e1-000000000000", "true"], 1, "no sandbox"),
            (["shell"], 2, "needs a terminal"),
            (["stop"], 2, "Say which"),
            (["stop", "nonsense"], 1, "not a sandbox id"),
        ):
            done = await cloudyard(made, *words)
            lines = done.stderr.decode().splitlines()
            assert (done.returncode, len(lines)) == (code, 1), (words, lines)
            assert lines[0].startswith("cloudyard: ")
            assert text in lines[0]
