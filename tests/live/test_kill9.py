"""kill -9 of each of the yard's processes, at random, under load: nothing is lost, nothing runs twice,
nothing is left.

The load is what a trainer gives: many sandboxes, each with one command after the other and one that runs all
the while. Every command leaves a line in a file of its sandbox, so that one which ran twice, or never, is
seen there.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field

import anyio
import pytest
from anyio import to_thread

import cloudyard
import support
from yards import TestYard

pytestmark = [pytest.mark.live, pytest.mark.slow]

SANDBOXES = 32
ROUNDS = 2  # kills of each process
COMMANDS_BETWEEN = 2 * SANDBOXES  # that must end between two kills: the yard is at work again
PARTS = ("nats", "control", "edge", "supervisor")
BACK_S = 30.0  # bound of the yard's return after a kill
COMMAND = "echo {n} >> /root/ran; echo begin {n}; sleep 0.2; echo end {n}"
DATA = bytes(range(256)) * 4096  # 1 MiB: several pieces of an upload, and more than a result carries itself
COMERS = 4  # clients that make and stop sandboxes all the while
TICKER = "n=0; while :; do n=$((n+1)); echo tick $n; sleep 0.1; done"


@dataclass
class Load:
    """What the clients have done so far."""

    ended: int = 0
    over: bool = False
    came_and_went: int = 0
    wrong: list[str] = field(default_factory=list)

    async def wait_for(self, goal: int, what: str) -> None:
        await support.wait_until(lambda: self.ended >= goal, what, within_s=BACK_S)


async def keep_busy(box: cloudyard.Sandbox, load: Load) -> None:
    """One command after the other until the load is over; then look whether each ran exactly once."""
    n = 0
    while not load.over:
        n += 1
        done = await box.run(COMMAND.format(n=n), timeout_s=60)
        load.ended += 1
        if done.stdout != f"begin {n}\nend {n}\n".encode() or done.exit_code != 0 or done.fault:
            load.wrong.append(f"{box.id} command {n}: {done!r}")
    ran = [int(word) for word in (await box.read("/root/ran")).split()]
    if ran != list(range(1, n + 1)):
        lost = sorted(set(range(1, n + 1)) - set(ran))
        twice = sorted({i for i in ran if ran.count(i) > 1})
        load.wrong.append(f"{box.id}: of {n} commands, {lost} never ran and {twice} ran more than once")


async def come_and_go(client: cloudyard.Yard, load: Load) -> None:
    """Make a sandbox, put a file of many pieces into it, read it by a command, stop it; and again."""
    while not load.over:
        async with client.sandbox(image="debian", memory="64MiB") as box:
            await box.write("/root/data", DATA)
            done = await box.run("cat /root/data", timeout_s=60)
            load.came_and_went += 1
            if done.stdout != DATA or done.exit_code != 0 or await box.read("/root/data") != DATA:
                load.wrong.append(
                    f"{box.id} gave other bytes than it took: {len(done.stdout)}, {done.exit_code}"
                )


async def kill_parts(yard: TestYard, load: Load, chance: random.Random) -> None:
    """Kill each part ROUNDS times in random order, each time when the yard has worked again for a while."""
    began = anyio.current_time()
    order = list(PARTS) * ROUNDS
    chance.shuffle(order)
    for part in order:
        goal = load.ended + COMMANDS_BETWEEN
        await load.wait_for(goal, f"work goes on before {part} is killed")
        before = yard.pids()
        print(f"{anyio.current_time() - began:.1f} s: {load.ended} commands have ended; killing {part}")
        os.kill(before[part], signal.SIGKILL)
        if part == "supervisor":
            await support.wait_until(lambda: "supervisor" not in yard.pids(), "the supervisor is gone")
            done = await to_thread.run_sync(yard.up)
            assert done.returncode == 0, done.stderr
            assert yard.pids() | {part: 0} == before | {part: 0}
        else:
            await support.wait_until(
                lambda part=part, old=before[part]: yard.pids().get(part, old) != old,
                f"{part} is started again",
            )
    goal = load.ended + COMMANDS_BETWEEN
    await load.wait_for(goal, "work goes on after the last kill")
    load.over = True


async def check_ticker(box: cloudyard.Sandbox, ticker: cloudyard.Process, load: Load) -> None:
    """The process that ran all the while is the same one, and every line that it wrote is there once, in
    order."""
    now = next(info for info in await box.commands() if info.command_id == ticker.id)
    if (now.pid, now.pid_start, now.running) != (ticker.pid, ticker.pid_start, True):
        load.wrong.append(f"{box.id} has another process: {now!r}, it was {ticker.info!r}")
    await ticker.kill()
    done = await ticker.wait()
    text = b"".join([chunk async for chunk in ticker.stdout()])
    lines = text.decode().splitlines()
    if (
        done.signal != signal.SIGKILL
        or lines != [f"tick {i + 1}" for i in range(len(lines))]
        or len(lines) < 10
    ):
        load.wrong.append(f"{box.id} ticked {lines[:3]}...{lines[-3:]}, {done!r}")


async def test_nothing_is_lost_or_done_twice_whatever_is_killed(yard: TestYard) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown with a failure
    assert yard.up().returncode == 0
    load = Load()
    async with yard.connect() as client:
        boxes = await client.create_many(SANDBOXES, image="debian", memory="64MiB")
        tickers = [await box.start(TICKER) for box in boxes]
        async with anyio.create_task_group() as tasks:
            for box in boxes:
                tasks.start_soon(keep_busy, box, load)
            for _ in range(COMERS):
                tasks.start_soon(come_and_go, client, load)
            tasks.start_soon(kill_parts, yard, load, random.Random(seed))
        async with anyio.create_task_group() as tasks:
            for box, ticker in zip(boxes, tickers, strict=True):
                tasks.start_soon(check_ticker, box, ticker, load)
        infos = await client.list()
    assert not load.wrong, "\n".join(load.wrong)
    assert {info.id for info in infos} == {box.id for box in boxes}  # no create made one that nobody knows
    assert load.came_and_went >= COMERS
    down = yard.down()
    assert down.returncode == 0, (
        down.stderr
    )  # and the fixture counts processes, mounts, cgroups, namespaces and claims
