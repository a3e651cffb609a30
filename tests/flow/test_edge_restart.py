"""What an edge finds when it comes back: the same sandboxes, commands and bytes, and nothing else."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from cloudyard.edge.config import COMMANDS_LIVE_MAX
from cloudyard.edge.records import Answer, Intent, RecordFile
from cloudyard.edge.steps import digest_of
from cloudyard.errors import CloudyardError, Conflict, NotFound, SandboxUnavailable
from cloudyard.model import (
    CommandInfo,
    CommandList,
    CommandSpec,
    Exec,
    ExecResult,
    FileInfo,
    GetSandbox,
    ListCommands,
    MakeDir,
    OutputChunk,
    ReadOutput,
    SandboxInfo,
    SandboxSpec,
    SendStdin,
    Signal,
    Start,
    Wait,
    WriteFile,
)
from cloudyard.testing.fake_backend import FakeBackend
from cloudyard.wire.messages import CallCreate, CallList, CallOp, encode, raw
from flow.edge_kit import (
    BOUND_S,
    PROJECT,
    Box,
    EdgeKit,
    alive,
    command,
    guest_program,
    running_edge,
    sandbox_id,
    until,
)
from flow.edge_process import EdgeProcess, edge_process

COUNT = "i=0; while [ $i -lt {n} ]; do i=$((i+1)); echo line $i; [ $((i % 50)) = 0 ] && sleep 0.01; done"


@pytest.fixture
async def state() -> AsyncIterator[Path]:
    """A state directory; what a failed test leaves in it is ended."""
    with tempfile.TemporaryDirectory(prefix="cy-edge-") as name:
        yield Path(name)
        async with FakeBackend(Path(name) / "fake", guest_program()) as backend:
            await backend.sweep(set())


def again(kit: EdgeKit, box: Box) -> Box:
    """The same sandbox at another edge."""
    return Box(kit, box.id)


def record_file(kit: EdgeKit, box: Box) -> RecordFile:
    file = RecordFile(kit.edge.config.records_dir / f"{box.id}.log")
    file.load()
    return file


async def test_a_command_goes_on_and_its_output_is_complete(state: Path):
    async with running_edge(state) as kit:
        box = await kit.create()
        info = await box.start("echo before; read x; echo after $x", keep_stdin=True)
        await box.get(OutputChunk, ReadOutput(command_id=info.command_id, wait_s=10))
    assert alive(info.pid)
    async with running_edge(state) as kit:
        box = again(kit, box)
        (listed,) = (await box.get(CommandList, ListCommands())).commands
        assert (listed.pid, listed.pid_start, listed.running) == (info.pid, info.pid_start, True)
        await box.do(SendStdin(command_id=info.command_id, data=b"all\n"))
        done = await box.wait(info.command_id)
        assert done.stdout == b"before\nafter all\n"
        assert await box.read(info.command_id) == done.stdout
        await kit.edge.stop_all()


async def test_a_command_that_ended_while_no_edge_was_there_has_its_result(state: Path):
    async with running_edge(state) as kit:
        box = await kit.create()
        info = await box.start("sleep 0.2; seq 1 20000; exit 7")
    await until(lambda: not alive(info.pid))
    async with running_edge(state) as kit:
        done = await again(kit, box).wait(info.command_id)
        assert done.exit_code == 7
        assert done.stdout_total == len(b"".join(b"%d\n" % n for n in range(1, 20_001)))
        await kit.edge.stop_all()


async def test_time_without_an_edge_is_not_counted_to_a_timeout(state: Path):
    async with running_edge(state) as kit:
        box = await kit.create()
        info = await box.start("sleep 1.2; echo done", timeout_s=1.0)
    await anyio.sleep(1.4)  # the length of the restart is what is tested
    async with running_edge(state) as kit:
        done = await again(kit, box).wait(info.command_id)
        assert not done.timed_out
        assert done.stdout == b"done\n"
        assert done.stalled_s >= 0.9
        await kit.edge.stop_all()


async def test_results_and_keys_are_remembered(state: Path):
    async with running_edge(state) as kit:
        box = await kit.create()
        first = await box.run("echo $$; head -c 300000 /dev/zero", key="k")
    async with running_edge(state) as kit:
        box = again(kit, box)
        replayed = await box.run("echo $$; head -c 300000 /dev/zero", key="k")
        assert replayed.replayed
        assert (replayed.stdout, replayed.step) == (first.stdout, first.step)
        with pytest.raises(Conflict):
            await box.run("other", key="k")
        assert (await box.run("true")).step > first.step
        await kit.edge.stop_all()


async def test_steps_that_were_under_way_are_settled(state: Path):
    gone, make = Start(command=command("echo gone")), MakeDir(path=str(state / "never"))
    async with running_edge(state) as kit:
        box = await kit.create()
        await box.run("true")
        file = record_file(kit, box)
        now = kit.edge.yard.clock.monotonic()
        path = str(state / "written")
        write = WriteFile(path=path, data=b"x")
        file.append(Intent(10, "gone", digest_of(gone), "start", now, gone.command))
        started = CommandInfo(step=10, command_id=10, running=True, pid=77)
        file.append(Answer(10, "gone", digest_of(gone), encode(started)))
        file.append(Intent(11, "make", digest_of(make), "make_dir", now))
        file.append(Intent(12, "write", digest_of(write), "write_file", now))
    async with running_edge(state) as kit:
        box = again(kit, box)
        assert (await box.get(CommandInfo, gone, key="gone")).replayed
        lost = await box.wait(10)
        assert lost.fault is not None
        assert (lost.fault.label, lost.fault.reason) == ("infra", "lost")
        for _ in range(2):
            with pytest.raises(CloudyardError) as caught:
                await box.do(make, key="make")
            assert caught.value.code == "step_lost"
        assert not (state / "never").exists()
        info = await box.get(FileInfo, write, key="write")
        assert not info.replayed
        assert Path(path).read_bytes() == b"x"
        await kit.edge.stop_all()


async def test_a_command_that_never_reached_the_guest_is_started_once(state: Path):
    ran = state / "ran"
    run = Exec(command=command("cat >> $RAN; echo out", stdin=b"run\n", env={"RAN": str(ran)}))
    start = Start(command=command("echo start >> $RAN; kill -9 $$", env={"RAN": str(ran)}))
    async with running_edge(state) as kit:
        box = await kit.create()
        await box.run("true")
        file = record_file(kit, box)
        now = kit.edge.yard.clock.monotonic()
        file.append(Intent(10, "run", digest_of(run), "exec", now - 100, run.command, 0))
        file.append(Intent(11, "start", digest_of(start), "start", now, start.command, 0))
        box.instance.killed_for_memory = 1  # before they ran
    for _ in range(2):
        async with running_edge(state) as kit:
            box = again(kit, box)
            done = await box.get(ExecResult, run, key="run")
            assert (done.step, done.replayed, done.stdout, done.exit_code) == (10, True, b"out\n", 0)
            assert done.stalled_s >= 100
            info = await box.get(CommandInfo, start, key="start")
            assert (info.step, info.replayed) == (11, True)
            killed = await box.wait(info.command_id)
            assert (killed.signal, killed.oom) == (9, False)
            assert sorted(ran.read_text().split()) == ["run", "start"]
    async with running_edge(state) as kit:
        await kit.edge.stop_all()


async def test_more_commands_that_never_reached_the_guest_than_it_holds_all_run(state: Path):
    ran = state / "ran"
    run = Exec(command=command("echo $$ >> $RAN", env={"RAN": str(ran)}))
    numbers = range(10, 10 + COMMANDS_LIVE_MAX + 50)
    async with running_edge(state) as kit:
        box = await kit.create()
        file = record_file(kit, box)
        now = kit.edge.yard.clock.monotonic()
        for number in numbers:
            file.append(Intent(number, f"k{number}", digest_of(run), "exec", now, run.command, 0))
    async with running_edge(state) as kit:
        box = again(kit, box)
        for number in numbers:
            assert (await box.get(ExecResult, run, key=f"k{number}")).exit_code == 0
        assert len(ran.read_text().split()) == len(numbers)
        await kit.edge.stop_all()


async def test_a_command_whose_key_a_later_step_has_is_not_started(state: Path):
    run = Exec(command=command("exit 3"))
    async with running_edge(state) as kit:
        box = await kit.create()
        file = record_file(kit, box)
        now = kit.edge.yard.clock.monotonic()
        file.append(Intent(10, "k", digest_of(run), "exec", now, run.command, 0))
        file.append(Intent(11, "k", digest_of(run), "exec", now, run.command, 0))
    async with running_edge(state) as kit:
        box = again(kit, box)
        lost, done = await box.wait(10), await box.wait(11)
        assert lost.fault is not None
        assert (lost.fault.reason, done.exit_code) == ("lost", 3)
        await kit.edge.stop_all()


async def test_a_sandbox_whose_guest_died_meanwhile_is_lost_and_says_so(state: Path):
    async with running_edge(state) as kit:
        box = await kit.create()
        info = await box.start("sleep 1000", key="s")
        await box.instance.crash()
        pid = info.pid
    assert not alive(pid)
    async with running_edge(state) as kit:
        box = again(kit, box)
        found = await box.get(SandboxInfo, GetSandbox())
        assert found.state == "failed"
        assert found.reason in ("lost", "guest_gone")
        with pytest.raises(SandboxUnavailable) as caught:
            await box.run("true")
        assert caught.value.code == "sandbox_failed"
        assert (await box.get(CommandInfo, Start(command=command("sleep 1000")), key="s")).replayed
        assert not list((state / "fake").iterdir())


async def test_a_create_that_was_under_way_leaves_nothing_and_can_be_asked_again(state: Path):
    async with running_edge(state) as kit:
        box = await kit.create()
        file = record_file(kit, box)
        entries = file.load()
        file.replace(file.slice(0, entries[2].offset))  # up to its instance: the probe had not run yet
    async with running_edge(state) as kit:
        with pytest.raises(NotFound):
            await again(kit, box).run("true")
        assert not list((state / "fake").iterdir())
        assert (await (await kit.create()).run("echo new")).stdout == b"new\n"
        await kit.edge.stop_all()


async def test_ended_sandboxes_are_remembered_and_the_second_edge_is_refused(state: Path):
    async with running_edge(state) as kit:
        box = await kit.create()
        await box.run("echo kept", key="k")
        await kit.edge.stop_all()
        with pytest.raises(Conflict) as caught:
            async with running_edge(state):
                pass
        assert caught.value.code == "edge_running"
    async with running_edge(state) as kit:
        page = (await kit.reply(CallList(project=PROJECT, stopped=True))).result
        assert b"asked" in bytes(page)
        box = again(kit, box)
        assert (await box.run("echo kept", key="k")).stdout == b"kept\n"
        with pytest.raises(SandboxUnavailable) as gone:
            await box.run("echo new", key="k2")
        assert gone.value.code == "sandbox_stopped"


async def test_stale_output_goes(state: Path):
    async with running_edge(state) as kit:
        box = await kit.create()
        done = await box.run("head -c 200000 /dev/zero")
        directory = kit.edge.config.output_dir / box.id
        (directory / "999.out").write_bytes(b"left behind")
        (kit.edge.config.output_dir / "sb-e1-nobody000000").mkdir()
    async with running_edge(state) as kit:
        assert [path.name for path in directory.iterdir()] == [f"{done.command_id}.out"]
        assert [path.name for path in kit.edge.config.output_dir.iterdir()] == [box.id]
        await kit.edge.stop_all()


# --- killed hard --------------------------------------------------------------------------------------------


class Client:
    """Asks an edge that is killed again and again."""

    def __init__(self, edge: EdgeProcess) -> None:
        self.edge = edge
        self.id = sandbox_id(1)
        self.key = 0

    async def do(self, op: object) -> object:
        self.key += 1
        call = CallOp(project=PROJECT, sandbox=self.id, op=raw(op), key=f"k{self.key}")  # type: ignore[arg-type]
        return await self.edge.ask(call)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_every_line_is_read_once_whenever_the_edge_is_killed(state: Path, seed: int):
    chance = random.Random(seed)
    lines = 4000
    async with edge_process(state) as edge:
        client = Client(edge)
        await edge.ask(CallCreate(project=PROJECT, sandbox=client.id, spec=SandboxSpec(image="debian")))
        info = await client.do(Start(command=command(COUNT.format(n=lines))))
        assert isinstance(info, CommandInfo)
        received = b""
        done = anyio.Event()

        async def read() -> None:
            nonlocal received
            while True:
                op = ReadOutput(command_id=info.command_id, offset=len(received), wait_s=BOUND_S)
                chunk = await client.do(op)
                assert isinstance(chunk, OutputChunk)
                assert chunk.offset == len(received)
                received += chunk.data
                if chunk.eof:
                    done.set()
                    return

        async def kill() -> None:
            for _ in range(4):
                with anyio.move_on_after(chance.uniform(0.02, 0.4)):
                    await done.wait()
                    return
                await edge.kill()
                await edge.start()

        with anyio.fail_after(BOUND_S * 2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                tasks.start_soon(kill)
        assert received == b"".join(b"line %d\n" % number for number in range(1, lines + 1))
        result = await client.do(Wait(command_id=info.command_id))
        assert isinstance(result, ExecResult)
        assert (result.exit_code, result.stdout_total) in ((0, len(received)), (1, len(received)))
    async with running_edge(state) as kit:
        await kit.edge.stop_all()


@pytest.mark.slow
async def test_a_command_under_way_when_the_edge_is_killed_runs_once_and_answers(state: Path):
    async with edge_process(state) as edge:
        client = Client(edge)
        await edge.ask(CallCreate(project=PROJECT, sandbox=client.id, spec=SandboxSpec(image="debian")))
        mark = state / "mark"
        results: list[object] = []

        async def run() -> None:
            results.append(await client.do(Exec(command=command(f"echo ran >> {mark}; sleep 0.5; echo $$"))))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await until(mark.exists)
            await edge.kill()
            await edge.start()
        (done,) = results
        assert isinstance(done, ExecResult)
        assert done.exit_code == 0
        assert mark.read_text() == "ran\n"
        info = await client.do(Start(command=CommandSpec(argv=["sleep", "1000"])))
        assert isinstance(info, CommandInfo)
        await edge.kill()
        assert alive(info.pid)
        await edge.start()
        await client.do(Signal(command_id=info.command_id))
        ended = await client.do(Wait(command_id=info.command_id))
        assert isinstance(ended, ExecResult)
        assert ended.signal == 9
    shutil.rmtree(state / "edge" / "output", ignore_errors=True)
    async with running_edge(state) as kit:
        await kit.edge.stop_all()
