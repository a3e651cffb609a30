"""What a sandbox does within its limits or at them is felt by no neighbour and not by the yard; no more is
promised than there is. Symptoms are faults that users of other platforms reported, by number.
"""

from __future__ import annotations

import os
import time

import anyio
import pytest

import cloudyard
from cloudyard.edge.meminfo import swap_total_bytes
from cloudyard.errors import LimitExceeded
from support import wait_until
from yards import TestYard

pytestmark = [pytest.mark.live, pytest.mark.slow]

BOUND_S = 120.0
ANSWER_S = 2.0  # the most that a neighbour may wait
CORES = 8  # promised by the yard below
ASKED = 10 * CORES
CPUS = len(os.sched_getaffinity(0))


async def up(yard: TestYard, *words: str) -> cloudyard.Yard:
    done = await anyio.to_thread.run_sync(yard.up, *words)
    assert done.returncode == 0, done.stderr
    return yard.connect()


async def worst_answer_s(box: cloudyard.Sandbox, seconds: float) -> float:
    """The longest that an `echo` in it took, of one after another for so long."""
    worst = 0.0
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        started = time.monotonic()
        done = await box.run("echo here", timeout_s=30)
        assert done.stdout == b"here\n"
        worst = max(worst, time.monotonic() - started)
        await anyio.sleep(0.05)
    return worst


async def test_a_sandbox_at_its_own_limits_still_answers(yard: TestYard) -> None:
    """Symptom 4: saturate all processors and 95% of memory; `echo` beside it must return in 2 s."""
    hog = "python3 -c 'x = b\"x\" * (%d << 20)\nwhile 1: pass'"
    with anyio.fail_after(BOUND_S):
        async with await up(yard) as client:
            box = await client.create("debian", memory="256MiB", cpu=1)
            await box.start(hog % (256 * 95 // 100 - 24))  # the rest is the interpreter's own
            for _ in range(2 * CPUS):
                await box.start("while :; do :; done")

            async def nearly_full() -> bool:
                return ((await box.info()).memory_used_bytes or 0) > 0.85 * (256 << 20)

            await wait_until(nearly_full, "its memory is nearly full")
            assert await worst_answer_s(box, 3) < ANSWER_S


async def ask_for_many(yard: cloudyard.Yard) -> tuple[int, list[LimitExceeded]]:
    """Ask for ASKED sandboxes at once. Gives how many were made, and the refusals."""
    made = 0
    refused: list[LimitExceeded] = []

    async def one() -> None:
        nonlocal made
        try:
            await yard.create("debian", cpu=1, memory="64MiB")
            made += 1
        except LimitExceeded as error:
            refused.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(ASKED):
            tasks.start_soon(one)
    return made, refused


async def test_no_more_is_promised_than_there_is_and_what_was_cancelled_is_free_again(yard: TestYard) -> None:
    """Symptom 38: with room for K ask for 10 K at once, and exactly K are admitted. Symptom 52: cancel them
    while they wait, and nothing stays promised."""
    with anyio.fail_after(BOUND_S):
        async with await up(yard, "--cpu-overcommit", str(CORES / CPUS)) as client:

            async def none_left() -> bool:
                return not await client.list()

            made, refused = await ask_for_many(client)
            assert made == CORES
            assert len(refused) == ASKED - CORES
            assert all(error.retry_safe for error in refused)
            await stop_all(client)
            for delay_s in (0.0, 0.01, 0.05, 0.2):
                with anyio.move_on_after(delay_s):
                    await ask_for_many(client)
            await wait_until(none_left, "no sandbox is left of creates that were cancelled")
            made = 0

            async def full_again() -> bool:  # what became free is known with the next heartbeat
                nonlocal made
                more, _ = await ask_for_many(client)
                made += more
                return made >= CORES

            await wait_until(full_again, "all the room can be had again")
            assert made == CORES


async def stop_all(yard: cloudyard.Yard) -> None:
    async with anyio.create_task_group() as tasks:
        for info in await yard.list():
            tasks.start_soon(yard.stop, info.id)


def test_the_command_line_gives_what_is_asked_for_and_refuses_what_is_not_here(
    yard: TestYard,
) -> None:
    done = yard.up()
    assert done.returncode == 0, done.stderr
    client = {"CLOUDYARD_CLIENT_FILE": str(yard.state / "client.json")}
    words = (
        "run",
        "--image",
        "debian",
        "--memory",
        "200MiB",
        "--cpu-weight",
        "50",
        "--best-effort",
        "--lxcfs",
    )
    done = yard.call(
        *words, "nproc; grep -c ^processor /proc/cpuinfo; grep MemTotal /proc/meminfo", environment=client
    )
    assert done.stdout.split() == ["1", "1", "MemTotal:", str(200 << 10), "kB"], done
    if not swap_total_bytes():
        done = yard.call("run", "--image", "debian", "--swap", "64MiB", "true", environment=client)
        assert done.returncode != 0
        assert "this machine has no swap" in done.stderr
    done = yard.call("run", "--image", "debian", "--cpu-weight", "0", "true", environment=client)
    assert "cpu_weight is 0 parts, out of range" in done.stderr
