"""What measurements share: the yards, how much is measured, and samples of an exec, a create and a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from cloudyard.cli.benchmarks.floors import TRUE, BubblewrapFloor
from cloudyard.errors import CloudyardError, NotFound, Unsupported
from cloudyard.sdk.client import Yard
from cloudyard.sdk.sandbox import Sandbox
from cloudyard.sdk.tasks import plain_task_group

BETWEEN_CREATES_S = 0.05  # an edge makes up for a sandbox that was taken 30 ms later
CLIENTS = 16  # tasks that create and stop at once
GONE_MAX_S = 60.0
MEMORY = "64MiB"  # limit of each sandbox; they use a fraction
WARM_UP = 5  # samples that are not counted: the first ones warm caches and connections up
CALL = "pass"


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    seconds: float = 60.0
    samples: int = 200
    alive: int = 1000
    pool_turns: int = 640
    """Sandboxes created before a rate is counted: ten times the pool."""
    calls: int = 5000
    """Commands run with 1,000 of them under way."""
    rollouts: int = 2000


QUICK = Plan(seconds=5.0, samples=30, alive=50, pool_turns=64, calls=1000, rollouts=100)


@dataclass
class Bench:
    """What every measurement needs."""

    yard: Yard
    http_yard: Yard
    image: str
    plan: Plan
    floor: BubblewrapFloor | None
    """None where this machine cannot run it: no root, or no bubblewrap."""
    state: Path
    """The state directory of a yard on this machine; elsewhere, of none."""
    tell: Callable[[str, float], None]
    """Told what is being measured and how much of it is done (0 to 1)."""
    notes: dict[str, str] = field(default_factory=dict)

    async def create(self, cpu: float = 1.0) -> Sandbox:
        """A sandbox like all others of this run."""
        return await self.yard.create(self.image, cpu=cpu, memory=MEMORY, pids=64)


async def execs_s(bench: Bench, name: str, yard: Yard | None = None) -> list[float]:
    """Seconds of one `true` after another in a sandbox."""
    samples = []
    box = await bench.create()
    try:
        handle = await (yard or bench.yard).get(box.id)
        for number in range(bench.plan.samples + WARM_UP):
            started = time.perf_counter()
            await handle.run([TRUE])
            samples.append(time.perf_counter() - started)
            bench.tell(name, number / bench.plan.samples)
    finally:
        await stop_all(bench, [box])
    return samples[WARM_UP:]


async def first_call(bench: Bench) -> str:
    """Make the calls that start a worker; gives why there can be none, or nothing."""
    try:
        for _ in range(WARM_UP):
            await call_s(bench)
    except (Unsupported, NotFound) as error:
        return str(error)
    return ""


async def call_s(bench: Bench) -> float:
    """Seconds of one call of a Python program that does nothing."""
    started = time.perf_counter()
    await bench.yard.call(CALL, image=bench.image)
    return time.perf_counter() - started


async def creates_s(
    bench: Bench, name: str, count: int, *, floor: bool = True
) -> tuple[list[float], list[float]]:
    """Seconds from create to the end of the first command, and those of the floor in between."""
    samples, floors = [], []
    for number in range(count + 2):
        await anyio.sleep(BETWEEN_CREATES_S)  # what the sample before set off is over
        if floor and bench.floor is not None:
            floors.append(bench.floor.seconds())
        started = time.perf_counter()
        box = await bench.create()
        try:
            await box.run([TRUE])
            samples.append(time.perf_counter() - started)
        finally:
            await stop_all(bench, [box])
        bench.tell(name, number / count)
    return samples[2:], floors[2:]


async def stop_all(bench: Bench, boxes: list[Sandbox]) -> None:
    """Stop sandboxes, also when the measurement was cancelled."""
    slots = anyio.Semaphore(4 * CLIENTS)

    async def one(box: Sandbox) -> None:
        async with slots:
            try:
                await box.stop()
            except CloudyardError as error:
                bench.notes.setdefault("stop", str(error))

    with anyio.move_on_after(GONE_MAX_S, shield=True):
        async with plain_task_group() as tasks:
            for box in boxes:
                tasks.start_soon(one, box)
