"""When a command is killed for taking too long or for writing nothing, with a clock that is moved by hand."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloudyard.model import CommandInfo, CommandSpec, Done, OutputChunk, ReadOutput, SendStdin, Start
from cloudyard.testing.fake_clock import FakeClock
from flow.edge_kit import Box, EdgeKit, alive, running_edge, until

DAY_S = 24 * 3600.0


@pytest.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def timed(clock: FakeClock) -> AsyncIterator[EdgeKit]:
    with tempfile.TemporaryDirectory(prefix="cy-edge-") as name:
        async with running_edge(Path(name), clock=clock) as made:
            yield made
            await made.edge.stop_all()


async def cat(box: Box, **settings: object) -> CommandInfo:
    """A command that writes what it is told, and ends when told to."""
    spec = CommandSpec(argv=["cat"], keep_stdin=True, **settings)  # type: ignore[arg-type]
    return await box.get(CommandInfo, Start(command=spec))


async def say(box: Box, info: CommandInfo, number: int) -> None:
    """Have it write, and see that it was heard."""
    await box.get(Done, SendStdin(command_id=info.command_id, data=b"x", offset=number))
    read = ReadOutput(command_id=info.command_id, offset=number, wait_s=10)
    assert (await box.get(OutputChunk, read)).data == b"x"


async def test_a_command_has_no_deadline_that_nobody_asked_for(timed: EdgeKit, clock: FakeClock):
    """e2b-dev/E2B#1074, in full: no client is there for days."""
    box = await timed.create()
    info = await cat(box)
    await clock.advance(6 * DAY_S)
    assert alive(info.pid)
    await box.get(Done, SendStdin(command_id=info.command_id, data=b"x", eof=True))
    done = await box.wait(info.command_id)
    assert (done.exit_code, done.stdout, done.fault) == (0, b"x", None)


async def test_silence_is_counted_from_the_last_output(timed: EdgeKit, clock: FakeClock):
    box = await timed.create()
    info = await cat(box, no_output_timeout_s=100.0)
    for number in range(3):
        await clock.advance(90)
        await say(box, info, number)
    await clock.advance(99)
    assert alive(info.pid)
    await clock.advance(1)
    done = await box.wait(info.command_id)
    assert (done.timed_out, done.stdout, done.signal) == (True, b"xxx", 9)
    assert done.fault is not None
    assert (done.fault.label, done.fault.reason) == ("policy", "no_output")
    await until(lambda: not alive(info.pid))


async def test_chatter_does_not_move_the_timeout(timed: EdgeKit, clock: FakeClock):
    box = await timed.create()
    info = await cat(box, timeout_s=250.0, no_output_timeout_s=100.0)
    for number in range(3):
        await clock.advance(80)
        await say(box, info, number)
    await clock.advance(10)
    done = await box.wait(info.command_id)
    assert done.fault is not None
    assert (done.timed_out, done.fault.reason) == (True, "timeout")
