"""The SDK through everything that is real but the isolation: gateway, NATS, edge and guest.

Commands run on this machine, as this user: they touch nothing outside their test's directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import anyio
import pytest

from cloudyard import (
    Conflict,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Pty,
    Sandbox,
    Yard,
    blocking,
    connect,
)
from flow.chain import TOKEN, Chain, chain, real_edge
from support import REPOSITORY, wait_until

MIB = 2**20
BOUND_S = 60.0
both = pytest.mark.parametrize("transport", ["mux", "http"])


@asynccontextmanager
async def yard_of(directory: Path, transport: str = "mux") -> AsyncIterator[tuple[Chain, Yard]]:
    """A whole yard and an open client of it."""
    state = directory / "state"
    state.mkdir()
    async with (
        chain(directory) as made,
        real_edge(made, state),
        connect(made.url, TOKEN, transport=transport) as yard,
    ):
        yield made, yard


@both
async def test_a_command_gives_its_bytes_and_facts(yard_dir: Path, transport: str) -> None:
    async with yard_of(yard_dir, transport) as (_, yard), yard.sandbox("debian") as box:
        done = await box.run("echo out; echo err >&2; exit 3")
        assert (done.stdout, done.stderr, done.exit_code, done.ok) == (b"out\n", b"err\n", 3, False)
        assert done.fault is not None
        assert done.fault.label == "policy"
        done = await box.run(["printf", "%s|", "a b", "$HOME", "*"], env={"HOME": "/"})
        assert done.stdout == b"a b|$HOME|*|"
        done = await box.run("cat; pwd; echo $X", stdin=b"in\0put\n", cwd="/usr", env={"X": "y z"})
        assert done.stdout == b"in\0put\n/usr\ny z\n"
        done = await box.run("kill -9 $$")
        assert (done.exit_code, done.signal) == (None, 9)
        done = await box.run(["/no/such/program"])
        assert done.error
        assert not done.ok
        every = bytes(range(256))
        assert (await box.run("cat", stdin=every)).stdout == every


async def test_a_timeout_gives_the_output_so_far(yard_dir: Path) -> None:
    async with yard_of(yard_dir) as (_, yard), yard.sandbox("debian") as box:
        with anyio.fail_after(10):
            done = await box.run("echo before; sleep 600", timeout_s=0.3)
        assert (done.stdout, done.timed_out, done.ok) == (b"before\n", True, False)


@both
async def test_large_output_comes_whole_and_is_cut_where_it_was_asked_to_be(
    yard_dir: Path, transport: str
) -> None:
    async with yard_of(yard_dir, transport) as (_, yard), yard.sandbox("debian") as box:
        done = await box.run("seq 1 3000000 | head -c 20000000", output_limit_bytes=32 * MIB)
        expected = "".join(f"{n}\n" for n in range(1, 3_000_001)).encode()[:20_000_000]
        assert done.stdout == expected
        assert (done.stdout_total, done.truncated) == (20_000_000, False)
        done = await box.run("seq 1 3000000 | head -c 20000000", output_limit_bytes=MIB)
        assert done.stdout == expected[:MIB]
        assert (done.stdout_total, done.truncated) == (20_000_000, True)


async def test_a_stream_that_was_cut_does_not_end_as_if_it_were_whole(yard_dir: Path) -> None:
    async with yard_of(yard_dir) as (_, yard), yard.sandbox("debian") as box:
        process = await box.start("head -c 3000000 /dev/zero", output_limit_bytes=MIB)
        got = bytearray()

        async def read() -> None:
            async for piece in process.stdout():
                got.extend(piece)

        with pytest.raises(LimitExceeded, match=f"3000000 bytes, of which {MIB} were kept") as caught:
            await read()
        assert (len(got), caught.value.code) == (MIB, "output_truncated")
        assert [piece async for piece in process.stderr()] == []
        done = await process.wait()
        assert (len(done.stdout), done.truncated) == (MIB, True)
        done = await process.wait(output=False)
        assert (done.stdout, done.stdout_total, done.truncated) == (b"", 3_000_000, True)
        whole = await box.start("head -c 20000000 /dev/zero")
        assert sum([len(piece) async for piece in whole.stdout()]) == 20_000_000


@both
async def test_text_that_is_none_is_refused(yard_dir: Path, transport: str) -> None:
    async with yard_of(yard_dir, transport) as (_, yard), yard.sandbox("debian") as box:
        for call in (
            lambda: box.run("echo \udcff"),
            lambda: box.run("true", cwd="/\udcff"),
            lambda: box.run("true", key="\udcff"),
            lambda: box.read("/\udcff"),
            lambda: yard.create("debian", labels={"a": "\udcff"}),
        ):
            with pytest.raises(InvalidRequest):
                await call()
        assert (await box.run("echo on")).text == "on\n"


async def test_errors_of_local_files_name_them(yard_dir: Path, tmp_path: Path) -> None:
    top = yard_dir / "files"
    async with yard_of(yard_dir) as (_, yard), yard.sandbox("debian") as box:
        await box.write(f"{top}/f", b"x")
        with pytest.raises(NotFound, match=f"no directory {tmp_path}/missing"):
            await box.download(f"{top}/f", tmp_path / "missing" / "f")
        with pytest.raises(InvalidRequest, match="is a directory"):
            await box.download(f"{top}/f", tmp_path)
        (tmp_path / "file").touch()
        with pytest.raises(InvalidRequest, match="not a directory"):
            await box.download(f"{top}/f", tmp_path / "file" / "f")
        with pytest.raises(InvalidRequest, match=f"{tmp_path}/file"):
            await box.download(str(top), tmp_path / "file")
        with pytest.raises(NotFound):
            await box.upload(tmp_path / "missing", f"{top}/g")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


async def test_text_goes_as_utf8_and_what_is_neither_text_nor_bytes_is_refused(yard_dir: Path) -> None:
    """Text is not read as base64 on the way, as the encoding of messages would have it."""
    file = str(yard_dir / "file")
    async with yard_of(yard_dir) as (_, yard), yard.sandbox("debian") as box:
        assert (await box.run("cat", stdin="text")).stdout == b"text"
        assert (await box.write(file, "naïve", mode=0o600)).size == 6
        process = await box.start("cat", stdin=True)
        await process.write("more text")
        await process.close_stdin()
        assert (await process.wait()).text == "more text"
        refused: list[Callable[[], Awaitable[object]]] = [
            lambda: box.run("cat", stdin=5),  # type: ignore[arg-type]
            lambda: box.run("cat", stdin="\udcff"),
            lambda: box.write(file, None),  # type: ignore[arg-type]
            lambda: box.write(file, b"", mode=-1),
            lambda: box.mkdir(file + "-d", mode=0o77777),
            lambda: box.run(b"echo"),  # type: ignore[arg-type]
            lambda: box.run(5),  # type: ignore[arg-type]
        ]
        for ask in refused:
            with pytest.raises(InvalidRequest):
                await ask()
        assert await box.read(file) == "naïve".encode()


@both
async def test_stdin_of_any_size(yard_dir: Path, transport: str) -> None:
    data = os.urandom(5 * MIB)
    async with yard_of(yard_dir, transport) as (_, yard), yard.sandbox("debian") as box:
        done = await box.run("sha256sum", stdin=data)
        assert done.stdout.split()[0].decode() == sha256(data).hexdigest()
        with anyio.fail_after(20):
            done = await box.run("head -c 3; exec 0<&-; sleep 0.2; echo done", stdin=data)
        assert done.stdout == data[:3] + b"done\n"


async def test_a_started_command_is_written_to_signalled_and_waited_for(yard_dir: Path) -> None:
    async with yard_of(yard_dir) as (_, yard), yard.sandbox("debian") as box:
        process = await box.start("while read line; do echo got $line; done; echo end", stdin=True)
        stream = process.stdout()
        for word in (b"one", b"two"):
            await process.write(word + b"\n")
            assert await anext(stream) == b"got " + word + b"\n"
        other = await box.attach(process.id)
        assert (other.pid, other.pid_start) == (process.pid, process.pid_start)
        await other.write(b"three\n")
        assert await anext(stream) == b"got three\n"
        await other.close_stdin()
        assert b"".join([piece async for piece in stream]) == b"end\n"
        assert (await process.wait()).stdout == b"got one\ngot two\ngot three\nend\n"
        with pytest.raises(Conflict):
            await process.write(b"late")

        sleeper = await box.start("trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.05; done")
        assert await anext(sleeper.stdout()) == b"ready\n"
        await sleeper.signal(15)
        done = await sleeper.wait()
        assert (done.exit_code, done.stdout) == (7, b"ready\nbye\n")
        await sleeper.kill()  # it has ended: no error
        with pytest.raises(InvalidRequest):
            await (await box.start("sleep 5")).write(b"x")
        with pytest.raises(NotFound):
            await box.attach(10**6)


async def test_output_is_replayed_from_an_offset_and_followed(yard_dir: Path) -> None:
    gate = yard_dir / "gate"
    async with yard_of(yard_dir) as (made, yard), yard.sandbox("debian") as box:
        process = await box.start(
            f"seq 1 200000; while [ ! -e {gate} ]; do sleep 0.02; done; seq 200001 400000; echo err >&2"
        )
        whole = "".join(f"{n}\n" for n in range(1, 400_001)).encode()
        first = "".join(f"{n}\n" for n in range(1, 200_001)).encode()
        got = bytearray()
        async for piece in process.stdout():
            got += piece
            if len(got) == len(first):
                gate.touch()
        assert got == whole
        async with connect(made.url, TOKEN) as another:
            again = await (await another.get(box.id)).attach(process.id)
            assert b"".join([piece async for piece in again.stdout(123_456)]) == whole[123_456:]
            assert b"".join([piece async for piece in again.stderr()]) == b"err\n"
            assert (await again.wait()).stdout == whole


async def test_a_terminal_has_a_size_that_changes(yard_dir: Path) -> None:
    async with yard_of(yard_dir) as (_, yard), yard.sandbox("debian") as box:
        process = await box.start(
            "stty size; read x; stty size; tty -s && echo tty", pty=Pty(rows=30, cols=90)
        )
        got = bytearray()
        async for piece in process.stdout():
            before, got = bytes(got), got + piece
            if b"30 90" in got and b"30 90" not in before:
                await process.resize(41, 101)
                await process.write(b"\n")
        assert b"41 101" in got
        assert b"tty\r\n" in got
        shell = await box.shell(rows=10, cols=40)
        await shell.write(b"stty size; exit 5\n")
        done = await shell.wait()
        assert done.exit_code == 5
        assert b"10 40" in done.stdout


BOTH_WAYS = """
import resource, sys
from cloudyard import blocking
url, token, transport, box, source, inside, back = sys.argv[1:]
with blocking.connect(url, token, transport=transport) as yard:
    box = yard.get(box)
    box.run("true")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    box.upload(source, inside)
    box.download(inside, back)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@both
async def test_large_files_go_both_ways_with_flat_memory(
    yard_dir: Path, tmp_path: Path, transport: str
) -> None:
    """In a process of its own, whose memory is that of the client alone."""
    source, inside, back = tmp_path / "source", yard_dir / "inside" / "deep" / "file", tmp_path / "back"
    source.write_bytes(os.urandom(MIB) * 64)
    async with yard_of(yard_dir, transport) as (made, yard), yard.sandbox("debian") as box:
        words = (made.url, TOKEN, transport, box.id, source, inside, back)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
        with anyio.fail_after(BOUND_S):
            done = await anyio.run_process(
                [sys.executable, "-c", BOTH_WAYS, *map(str, words)], env=environment, stderr=None
            )
        assert int(done.stdout) * 1024 < 24 * MIB
        done_inside = await box.run(["sha256sum", str(source), str(inside), str(back)])
        assert len({line.split()[0] for line in done_inside.text.splitlines()}) == 1


async def test_directories_keep_modes_and_links(yard_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o750)
    (source / "sub" / "data").write_bytes(os.urandom(600_000))
    (source / "sub" / "link").symlink_to("../run.sh")
    (source / "to-sub").symlink_to("sub")
    for index in range(50):
        (source / f"small-{index}").write_text(str(index))
    inside = yard_dir / "inside"
    async with yard_of(yard_dir) as (_, yard), yard.sandbox("debian") as box:
        await box.upload(source, str(inside))
        assert (await box.run([f"{inside}/sub/link"])).text == "ran\n"
        await box.download(str(inside), tmp_path / "back")
        await box.download(str(inside), tmp_path / "back")  # over what is there

    def tree(top: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for path in sorted(top.rglob("*")):
            name = str(path.relative_to(top))
            if path.is_symlink():
                found[name] = os.readlink(path)
            else:
                found[name] = (path.stat().st_mode, path.read_bytes() if path.is_file() else None)
        return found

    assert tree(inside) == tree(source)
    assert tree(tmp_path / "back") == tree(source)


@both
async def test_file_operations(yard_dir: Path, transport: str) -> None:
    top = str(yard_dir / "files")
    async with yard_of(yard_dir, transport) as (_, yard), yard.sandbox("debian") as box:
        assert (await box.write(f"{top}/a/b", b"text", mode=0o600)).size == 4
        assert await box.read(f"{top}/a/b") == b"text"
        assert (await box.stat(f"{top}/a/b")).mode & 0o777 == 0o600
        await box.mkdir(f"{top}/c/d")
        names = [entry.path.rsplit("/", 1)[-1] for entry in await box.listdir(top)]
        assert names == ["a", "c"]
        with pytest.raises(Conflict):
            await box.read(top)
        with pytest.raises(Conflict):
            await box.remove(top)
        await box.remove(top, recursive=True)
        with pytest.raises(NotFound):
            await box.stat(top)
        await box.remove(top, missing_ok=True)


async def test_a_repeated_key_runs_nothing_again(yard_dir: Path) -> None:
    counter = yard_dir / "count"
    async with yard_of(yard_dir) as (_, yard), yard.sandbox("debian") as box:
        command = f"echo x >> {counter}; wc -l < {counter}"
        first = await box.run(command, key="once")
        again = await box.run(command, key="once")
        assert (first.stdout, first.replayed) == (b"1\n", False)
        assert (again.stdout, again.replayed, again.step) == (b"1\n", True, first.step)
        with pytest.raises(Conflict, match="another operation"):
            await box.run("true", key="once")
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(lambda: box.run(f"sleep 0.2; echo x >> {counter}", key="joined"))
        assert counter.read_text() == "x\n" * 2


async def test_fifty_sandboxes_at_once(yard_dir: Path) -> None:
    async with yard_of(yard_dir) as (_, yard):
        boxes = await yard.create_many(50, "debian", cpu=0.1, memory="16MiB")
        outputs: list[bytes] = []

        async def one(box: Sandbox) -> None:
            outputs.append((await box.run("echo hello")).stdout)
            await box.stop()

        async with anyio.create_task_group() as tasks:
            for box in boxes:
                tasks.start_soon(one, box)
        assert outputs == [b"hello\n"] * 50
        assert await yard.list() == []


async def test_a_thousand_commands_in_flight(yard_dir: Path) -> None:
    async with yard_of(yard_dir) as (_, yard):
        boxes = await yard.create_many(8, "debian")
        gate = yard_dir / "gate"
        outputs: list[bytes] = []

        async def one(index: int) -> None:
            box = boxes[index % len(boxes)]
            outputs.append((await box.run(f"while [ ! -e {gate} ]; do sleep 0.5; done; echo {index}")).stdout)

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                for index in range(1000):
                    tasks.start_soon(one, index)
                gate.touch()
        assert sorted(outputs) == sorted(b"%d\n" % index for index in range(1000))


@both
@pytest.mark.parametrize("size", [0, MIB])
async def test_cancelling_run_kills_the_command(yard_dir: Path, transport: str, size: int) -> None:
    mark = yard_dir / "pid"
    async with yard_of(yard_dir, transport) as (_, yard), yard.sandbox("debian") as box:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: box.run(f"echo $$ > {mark}; sleep 600", stdin=b"x" * size))
            await wait_until(lambda: mark.exists() and bool(mark.read_text()), "the command runs")
            tasks.cancel_scope.cancel()
        pid = int(mark.read_text())
        await wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the command is gone")


@both
async def test_a_killed_gateway_costs_nothing_but_time(yard_dir: Path, transport: str) -> None:
    counter = yard_dir / "count"
    gate = yard_dir / "gate"
    async with yard_of(yard_dir, transport) as (made, yard), yard.sandbox("debian") as box:
        process = await box.start(f"seq 1 50000; while [ ! -e {gate} ]; do sleep 0.02; done; seq 50001 90000")
        got = bytearray()

        async def follow() -> None:
            async for piece in process.stdout():
                got.extend(piece)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            for _index in range(10):
                tasks.start_soon(lambda: box.run(f"sleep 0.3; echo x >> {counter}"))
            await wait_until(lambda: len(got) > 1000, "output comes")
            await made.kill_control()
            await made.start_control()
            gate.touch()
        assert got == "".join(f"{n}\n" for n in range(1, 90_001)).encode()
        assert counter.read_text() == "x\n" * 10


async def test_leaving_the_block_by_cancellation_stops_the_sandbox(yard_dir: Path) -> None:
    async with yard_of(yard_dir) as (_, yard):
        made: list[Sandbox] = []

        async def use() -> None:
            async with yard.sandbox("debian") as box:
                made.append(box)
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use)
            await wait_until(lambda: bool(made), "the sandbox is there")
            tasks.cancel_scope.cancel()
        assert (await made[0].info()).state == "stopped"


async def test_cancelling_around_the_client_stops_the_sandbox(yard_dir: Path) -> None:
    mark = yard_dir / "pid"
    async with yard_of(yard_dir) as (made, yard):

        async def use() -> None:
            async with connect(made.url, TOKEN) as inner, inner.sandbox("debian") as box:
                await box.run(f"echo $$ > {mark}; sleep 600")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use)
            await wait_until(lambda: mark.exists() and bool(mark.read_text()), "the command runs")
            tasks.cancel_scope.cancel()
        assert not Path(f"/proc/{int(mark.read_text())}").exists()
        assert await yard.list() == []


async def test_the_blocking_facade_does_the_same(yard_dir: Path) -> None:
    top = str(yard_dir / "files")

    def work(url: str) -> None:
        with blocking.connect(url, TOKEN) as yard:
            with yard.sandbox("debian") as box:
                done = box.run("echo out; exit 3", timeout_s=10)
                assert (done.stdout, done.exit_code) == (b"out\n", 3)
                process = box.start("cat", stdin=True)
                process.write(b"hello\n")
                stream = process.stdout()
                assert next(stream) == b"hello\n"
                process.close_stdin()
                assert list(stream) == []
                assert process.wait().ok
                box.write(f"{top}/f", b"x")
                assert [entry.path for entry in box.listdir(top)] == [f"{top}/f"]
                name = box.id
            assert yard.get(name).info().state == "stopped"

    async with yard_of(yard_dir) as (made, _):
        await anyio.to_thread.run_sync(work, made.url)
