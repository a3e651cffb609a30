"""Commands through an edge, to the real guest and back."""

from __future__ import annotations

import hashlib
import time

import anyio
import pytest

from cloudyard.errors import Conflict, InvalidRequest, NotFound
from cloudyard.model import (
    CommandInfo,
    CommandList,
    CommandSpec,
    Done,
    Exec,
    ExecResult,
    ListCommands,
    OutputChunk,
    Pty,
    ReadOutput,
    Resize,
    SendStdin,
    Signal,
    Start,
    Wait,
)
from cloudyard.wire.messages import CallCancel
from flow.edge_kit import Box, EdgeKit, alive, kit, until

__all__ = ["kit"]


@pytest.fixture
async def box(kit: EdgeKit) -> Box:
    return await kit.create()


async def test_a_command_gives_its_bytes_and_facts(box: Box):
    done = await box.run("printf 'a\\377\\0b'; echo bad >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code) == (b"a\xff\0b", b"bad\n", 3)
    assert done.fault is not None
    assert (done.fault.label, done.fault.reason) == ("policy", "exit")
    assert done.duration_s > 0
    assert done.peak_memory_bytes > 0
    assert not done.truncated


async def test_a_success_has_no_fault(box: Box):
    assert (await box.run("true")).fault is None


async def test_argv_is_not_interpreted(box: Box):
    spec = CommandSpec(argv=["printf", "%s", "$HOME; a b"])
    done = await box.get(ExecResult, Exec(command=spec))
    assert done.stdout == b"$HOME; a b"


async def test_environment_of_sandbox_and_command_are_laid_over_the_images(kit: EdgeKit):
    box = await kit.create(5, env={"A": "sandbox", "B": "sandbox"})
    done = await box.run("echo $A $B $C; echo $PATH | grep -c bin", env={"B": "command", "C": "command"})
    assert done.stdout == b"sandbox command command\n1\n"


@pytest.mark.parametrize(
    ("argv", "code", "name"),
    [
        (["no-such-program"], 127, "program_not_found"),
        (["/etc/passwd"], 126, "not_executable"),
        (["/etc"], 126, "is_a_directory"),
    ],
)
async def test_a_command_that_cannot_start_is_the_callers_fault(
    box: Box, argv: list[str], code: int, name: str
):
    done = await box.get(ExecResult, Exec(command=CommandSpec(argv=argv)))
    assert (done.exit_code, done.error_code) == (code, name)
    assert done.error
    assert done.fault is not None
    assert (done.fault.label, done.fault.reason) == ("policy", "not_started")


async def test_a_missing_directory_is_named(box: Box):
    done = await box.run("true", cwd="/no/such/place")
    assert "/no/such/place" in done.error
    assert done.fault is not None
    assert done.fault.label == "policy"


async def test_a_background_command_that_cannot_start_is_an_error_and_frees_its_place(box: Box):
    with pytest.raises(InvalidRequest) as caught:
        await box.get(CommandInfo, Start(command=CommandSpec(argv=["no-such-program"])))
    assert caught.value.code == "program_not_found"
    assert (await box.run("true")).exit_code == 0


async def test_a_signal_is_told_from_an_exit(box: Box):
    done = await box.run("kill -TERM $$")
    assert (done.exit_code, done.signal) == (None, 15)
    assert done.fault is not None
    assert done.fault.reason == "signal"


async def test_a_timeout_keeps_the_output_so_far_and_kills_what_left_the_session(box: Box):
    script = "echo before; setsid sh -c 'echo $$; exec sleep 1000' & wait"
    began = time.monotonic()
    done = await box.run(script, timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert done.timed_out
    assert done.stdout.startswith(b"before\n")
    assert done.fault is not None
    assert (done.fault.label, done.fault.reason) == ("policy", "timeout")
    assert not alive(int(done.stdout.split()[1]))


async def test_output_past_the_limit_is_counted_and_never_blocks(box: Box):
    done = await box.run("head -c 20000000 /dev/zero; echo end >&2", output_limit_bytes=1_000_000)
    assert done.exit_code == 0
    assert (done.stdout_total, done.stdout_kept) == (20_000_000, 1_000_000)
    assert done.truncated
    assert done.stderr == b"end\n"
    data = await box.read(done.command_id)
    assert data == bytes(1_000_000)


async def test_a_small_limit_holds_too(box: Box):
    done = await box.run("head -c 300000 /dev/zero", output_limit_bytes=10)
    assert (done.stdout, done.stdout_total, done.truncated) == (bytes(10), 300_000, True)


async def test_large_output_is_read_whole_with_its_hash(box: Box):
    done = await box.run("seq 1 300000")
    expected = b"".join(b"%d\n" % number for number in range(1, 300_001))
    assert done.stdout == expected[: len(done.stdout)]
    assert len(done.stdout) < len(expected)
    assert await box.read(done.command_id) == expected
    last = await box.get(OutputChunk, ReadOutput(command_id=done.command_id, offset=len(expected) - 5))
    assert last.eof
    assert (last.total, last.sha256) == (len(expected), hashlib.sha256(expected).hexdigest())


async def test_output_of_a_background_command_is_read_while_it_runs_and_again_from_any_offset(box: Box):
    info = await box.start("echo one; read line; echo $line", keep_stdin=True)
    assert info.running
    assert alive(info.pid)
    first = await box.get(OutputChunk, ReadOutput(command_id=info.command_id, wait_s=10))
    assert (first.data, first.eof) == (b"one\n", False)
    assert await box.get(Done, SendStdin(command_id=info.command_id, data=b"two\n")) == Done(step=3, taken=4)
    assert await box.read(info.command_id, offset=2) == b"e\ntwo\n"
    assert await box.read(info.command_id) == b"one\ntwo\n"
    done = await box.wait(info.command_id)
    assert done.exit_code == 0
    assert done.stdout == b"one\ntwo\n"


async def test_wait_gives_what_is_known_when_its_time_is_up(box: Box):
    info = await box.start("sleep 100")
    still = await box.get(CommandInfo, Wait(command_id=info.command_id, wait_s=0.05))
    assert still.running
    await box.do(Signal(command_id=info.command_id, signal=15))
    assert (await box.wait(info.command_id)).signal == 15


async def test_stdin_of_any_size_arrives_whole(box: Box):
    data = bytes(range(256)) * 2800
    done = await box.run("sha256sum", stdin=data)
    assert done.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_stdin_repeats_are_dropped_and_gaps_refused(box: Box):
    info = await box.start("cat", keep_stdin=True)
    for _ in range(2):
        await box.do(SendStdin(command_id=info.command_id, data=b"abc", offset=0))
    with pytest.raises(Conflict) as caught:
        await box.do(SendStdin(command_id=info.command_id, data=b"x", offset=9))
    assert caught.value.code == "stdin_gap"
    await box.do(SendStdin(command_id=info.command_id, data=b"cde", offset=2, eof=True))
    assert (await box.wait(info.command_id)).stdout == b"abcde"[:3] + b"de"
    with pytest.raises(Conflict):
        await box.do(SendStdin(command_id=info.command_id, data=b"x", offset=5))


async def test_a_reader_that_stops_reading_stdin_does_not_hold_its_writer(box: Box):
    info = await box.start("sleep 100", keep_stdin=True)
    sent = await box.get(Done, SendStdin(command_id=info.command_id, data=bytes(200_000), wait_s=0.2))
    assert sent.taken < 200_000
    await box.do(Signal(command_id=info.command_id))


async def test_a_terminal_has_the_size_it_was_given(box: Box):
    info = await box.start("stty size; read x; stty size", pty=Pty(30, 100), keep_stdin=True)
    await until_output(box, info.command_id, b"30 100")
    await box.do(Resize(command_id=info.command_id, pty=Pty(40, 120)))
    await box.do(SendStdin(command_id=info.command_id, data=b"\n"))
    assert b"40 120" in (await box.wait(info.command_id)).stdout


async def test_commands_are_listed_while_they_run_and_after(box: Box):
    info = await box.start("sleep 100")
    await box.run("true")
    listed = (await box.get(CommandList, ListCommands())).commands
    assert [(one.command_id, one.running) for one in listed] == [(info.command_id, True), (2, False)]
    assert listed[0].argv == ["/bin/sh", "-c", "sleep 100"]
    await box.do(Signal(command_id=info.command_id))


async def test_an_unknown_command_is_not_found(box: Box):
    for op in (Wait(command_id=77), ReadOutput(command_id=77), Signal(command_id=77)):
        with pytest.raises(NotFound) as caught:
            await box.do(op)
        assert caught.value.code == "command_not_found"


async def test_a_cancelled_request_kills_its_command(kit: EdgeKit, box: Box):
    results: list[ExecResult] = []

    async def run() -> None:
        results.append(await box.run("echo $$; exec sleep 1000", cause="c7"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(lambda: bool(kit.edge.yard.sandboxes[box.id].commands.live))
        live = next(iter(kit.edge.yard.sandboxes[box.id].commands.live.values()))
        await until(lambda: live.stdout.kept > 0)
        await kit.reply(CallCancel(project="p2", cause="c7"))
        assert kit.edge.yard.sandboxes[box.id].commands.live
        await kit.reply(CallCancel(project="p1", cause="c7"))
    assert results[0].fault is not None
    assert results[0].fault.reason == "killed"
    assert not alive(int(results[0].stdout))


async def test_children_outlive_a_normal_exit_and_can_still_be_signalled(box: Box):
    done = await box.run("sleep 1000 & echo $!")
    child = int(done.stdout)
    assert alive(child)
    await box.do(Signal(command_id=done.command_id))
    await until(lambda: not alive(child))


async def test_more_commands_than_the_guest_holds_wait_their_turn(box: Box):
    codes: list[int | None] = []

    async def run(number: int) -> None:
        codes.append((await box.run(f"exit {number % 7}")).exit_code)

    async with anyio.create_task_group() as tasks:
        for number in range(400):
            tasks.start_soon(run, number)
    assert sorted(codes) == sorted(number % 7 for number in range(400))


async def kill_for_memory(box: Box, info: CommandInfo) -> None:
    """As the kernel does, once the command runs."""
    await until_output(box, info.command_id, b"runs")
    box.instance.killed_for_memory += 1


async def test_an_out_of_memory_kill_is_of_the_command_in_whose_time_it_was(box: Box):
    info = await box.start("echo runs; read x; kill -9 $$", keep_stdin=True)
    await kill_for_memory(box, info)
    await box.do(SendStdin(command_id=info.command_id, data=b"\n"))
    done = await box.wait(info.command_id)
    assert done.oom
    assert done.fault is not None
    assert done.fault.reason == "oom"
    assert "oom_kill" in done.fault.evidence
    assert "other commands" not in done.fault.evidence
    box.instance.killed_for_memory += 1  # nothing of ours ran
    again = await box.run("sh -c 'kill -9 $$'; exit 137")
    assert not again.oom
    assert again.fault is not None
    assert again.fault.reason == "exit"


async def test_a_command_that_ends_well_although_memory_ran_out_has_no_fault(box: Box):
    info = await box.start("echo runs; read x", keep_stdin=True)
    await kill_for_memory(box, info)
    await box.do(SendStdin(command_id=info.command_id, data=b"\n"))
    done = await box.wait(info.command_id)
    assert (done.exit_code, done.oom, done.fault) == (0, True, None)
    after = await box.run("kill -9 $$")
    assert not after.oom
    assert after.fault is not None
    assert after.fault.reason == "signal"


async def test_an_out_of_memory_kill_while_several_commands_ran_says_so(box: Box):
    first = await box.start("echo runs; read x; kill -9 $$", keep_stdin=True)
    await box.start("sleep 1000")
    await kill_for_memory(box, first)
    await box.do(SendStdin(command_id=first.command_id, data=b"\n"))
    done = await box.wait(first.command_id)
    assert done.fault is not None
    assert done.fault.reason == "oom"
    assert "other commands" in done.fault.evidence


async def until_output(box: Box, command_id: int, wanted: bytes) -> None:
    """Wait until a command has written something."""

    async def written() -> bool:
        chunk = await box.get(OutputChunk, ReadOutput(command_id=command_id, wait_s=1))
        return wanted in chunk.data

    await until(written)
