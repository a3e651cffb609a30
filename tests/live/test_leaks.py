"""Hundreds of sandboxes come and go while parts of the yard and sandboxes are killed: nothing is left of any.

The fixture of the yard counts processes, mounts, cgroups, namespaces, loop devices and claims on uids once it
is down. While it is still up, the pool alone may hold slots.
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress

import anyio
import pytest
from anyio import to_thread

import cloudyard
import support
from cloudyard.assemble.edge_main import container_options
from cloudyard.edge.backends.container.options import POOL_SIZE, STOCK_SIZE
from cloudyard.errors import CloudyardError, SandboxUnavailable
from container_kit import disk_names
from yards import TestYard

pytestmark = [pytest.mark.live, pytest.mark.slow]

CYCLES = int(os.environ.get("LEAK_CYCLES", "500"))  # create, work, stop
CLIENTS = 6
CYCLES_BETWEEN_KILLS = 20
PARTS = ("edge", "nats", "guest", "control", "supervisor", "guest", "edge", "guest")
BACK_S = 40.0
# Each tries to stay: a process in a session of its own that ignores signals, shared memory, a reader of a
# FIFO, an abstract socket, a file that was removed and is still open.
LITTER = """
dd if=/dev/zero of=/root/file bs=64k count=8 2>/dev/null
dd if=/dev/zero of=/dev/shm/file bs=64k count=8 2>/dev/null
mkfifo /root/fifo
setsid sh -c 'cat /root/fifo' >/dev/null 2>&1 &
setsid sh -c 'trap "" TERM HUP INT; exec 3>/root/gone; rm /root/gone; sleep 1000' >/dev/null 2>&1 &
setsid python3 -c '
import socket, time
held = socket.socket(socket.AF_UNIX)
held.bind(chr(0) + "stay")
time.sleep(1000)' >/dev/null 2>&1 &
echo littered
"""


class Cycles:
    """How many sandboxes have come and gone."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.broken: list[str] = []


async def come_and_go(client: cloudyard.Yard, cycles: Cycles) -> None:
    """Make a sandbox, leave litter in it and stop it, again and again. One that was killed may say so."""
    while cycles.begun < CYCLES:
        cycles.begun += 1
        try:
            box = await client.create("debian", memory="64MiB", max_ttl_s=600)
        except SandboxUnavailable as exc:  # its PID 1 was killed before the edge had greeted it
            cycles.broken.append(f"no sandbox: {exc}")
            cycles.ended += 1
            continue
        try:
            done = await box.run(LITTER, timeout_s=60)
            if done.stdout != b"littered\n":
                cycles.broken.append(f"{box.id}: {done.fault!r}")
        except CloudyardError as exc:
            cycles.broken.append(f"{box.id}: {exc}")
        await box.stop()
        cycles.ended += 1


def guests(yard: TestYard) -> list[int]:
    """PID 1 of each sandbox of the yard, those raised ahead too."""
    pids = support.yard_pids(container_options(yard.config).tag)
    return sorted(pid for pid in pids if support.comm(pid) == "guest")


async def kill(yard: TestYard, part: str, chance: random.Random) -> None:
    """Kill one part of the yard, or one sandbox's PID 1, and see that the yard is whole again."""
    if part == "guest":
        if pids := guests(yard):
            with suppress(ProcessLookupError):
                os.kill(chance.choice(pids), signal.SIGKILL)
        return
    before = yard.pids()
    os.kill(before[part], signal.SIGKILL)
    if part == "supervisor":
        await support.wait_until(lambda: "supervisor" not in yard.pids(), "the supervisor is gone")
        assert (await to_thread.run_sync(yard.up)).returncode == 0
    else:
        await support.wait_until(
            lambda: yard.pids().get(part, before[part]) != before[part], f"{part} is back", within_s=BACK_S
        )


async def test_hundreds_of_sandboxes_come_and_go_among_kills_and_leave_nothing(yard: TestYard) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown with a failure
    chance = random.Random(seed)
    assert yard.up().returncode == 0
    cycles = Cycles()
    async with yard.connect() as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(CLIENTS):
                tasks.start_soon(come_and_go, client, cycles)
            kills = 0
            while cycles.ended < CYCLES:
                goal = min(CYCLES, cycles.ended + CYCLES_BETWEEN_KILLS)
                await support.wait_until(
                    lambda goal=goal: cycles.ended >= goal, "sandboxes come and go", within_s=BACK_S
                )
                await kill(yard, PARTS[kills % len(PARTS)], chance)
                kills += 1
        assert await client.list() == []
    print(f"{cycles.ended} sandboxes, {kills} kills, {len(cycles.broken)} noticed: {cycles.broken[:4]}")
    options = container_options(yard.config)
    await support.wait_until(
        lambda: len(disk_names(options)) <= POOL_SIZE + STOCK_SIZE,
        "only the pool holds disks",
        within_s=BACK_S,
    )
    assert kills >= CYCLES // (2 * CYCLES_BETWEEN_KILLS)
    assert len(cycles.broken) <= 2 * kills
    down = yard.down()
    assert down.returncode == 0, down.stderr
