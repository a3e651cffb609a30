"""Measurements of calls and rollouts: a warm call, what each thing takes beside 32 busy rollouts, and a long
run of rollouts that do nothing.

Rollouts are made through the public runner. Of the daemons only their memory is looked at, in this machine's
/proc.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import anyio

from cloudyard.cli.benchmarks.memory import daemons_mb
from cloudyard.cli.benchmarks.report import Metric, timed
from cloudyard.cli.benchmarks.samples import MEMORY, Bench, call_s, creates_s, execs_s, first_call
from cloudyard.rollout.agents.base import Context
from cloudyard.rollout.agents.nop import Nop
from cloudyard.rollout.box import Box
from cloudyard.rollout.records import Attempt
from cloudyard.rollout.runner import run
from cloudyard.rollout.summary import Summary
from cloudyard.rollout.task import load
from cloudyard.sdk.tasks import plain_task_group

BESIDE = 32  # rollouts
BUSY = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo $i > /tmp/at"  # some 30 ms of a core
BUSY_PAUSE_S = 0.05  # as an agent that thinks, if not for long
WARM_PART = 0.1  # of the trivial rollouts, before memory is looked at
TASK = """\
[environment]
docker_image = "{image}"
cpus = 1
memory_mb = {memory}

[agent]
timeout_sec = 3600.0
"""
TEST = "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt\n"


class Busy:
    """An agent that works until it is told that it is over."""

    name = "busy"

    def __init__(self) -> None:
        self.at_work = 0
        self.over = anyio.Event()

    async def run(self, box: Box, context: Context) -> None:
        """Use the processor and the disk, and pause between."""
        self.at_work += 1
        while not self.over.is_set():
            await box.run(BUSY)
            with anyio.move_on_after(BUSY_PAUSE_S):
                await self.over.wait()


async def call_ms(bench: Bench) -> list[Metric]:
    """One Python program that does nothing after another, in a warm worker."""
    if reason := await first_call(bench):
        return [Metric(name="call_ms", unit="ms", note=reason)]
    samples, floors = [], []
    for number in range(bench.plan.samples):
        floors.append(_python_s())
        samples.append(await call_s(bench))
        bench.tell("call_ms", number / bench.plan.samples)
    return [timed("call_ms", samples, floors, note="the floor is python3 -c pass")]


async def mixed(bench: Bench) -> list[Metric]:
    """An exec, a create and a call, alone and while rollouts run: p50 beside them by p50 alone."""
    reason = await first_call(bench)
    alone = await _each(bench, "alone", calls=not reason)
    busy = Busy()
    with _task(bench.image) as path:
        async with plain_task_group() as tasks:
            tasks.start_soon(_roll_out, bench, path, busy)
            try:
                bench.tell(f"{BESIDE} rollouts begin", 0.0)
                while busy.at_work < BESIDE:  # noqa: ASYNC110 (the runner tells of ends only)
                    await anyio.sleep(0.05)
                beside = await _each(bench, "beside rollouts", calls=not reason)
            finally:
                busy.over.set()
    metrics = []
    for what, samples in beside.items():
        ratio = median(samples) / median(alone[what])
        note = f"p50 {median(samples) * 1000:.1f} ms beside {BESIDE} rollouts, "
        note += f"{median(alone[what]) * 1000:.1f} ms alone"
        metrics.append(Metric(name=f"mixed_{what}_ratio", unit="x", value=round(ratio, 2), note=note))
    if reason:
        metrics.append(Metric(name="mixed_call_ratio", unit="x", note=reason))
    return metrics


async def rollouts_per_s(bench: Bench) -> list[Metric]:
    """Rollouts of a task that asks nothing, one agent that does nothing: how many a second, what stays."""
    before_mb = 0.0
    warm = round(bench.plan.rollouts * WARM_PART)

    def tell(_: Attempt, so_far: Summary) -> None:
        nonlocal before_mb
        done = so_far.total.attempts
        if done == warm:
            before_mb = daemons_mb(bench.state)
        bench.tell("rollouts", done / bench.plan.rollouts)

    with _task(bench.image) as path:
        started = time.perf_counter()
        summary = await run(
            bench.yard,
            [load(path)],
            [Nop()],
            out=path.parent / "out",
            attempts=bench.plan.rollouts,
            tell=tell,
        )
        took = time.perf_counter() - started
    left = len(await bench.yard.list())
    total = summary.total
    note = f"{total.attempts} rollouts, {total.void} void, {total.tries} made again, {left} sandboxes left"
    if before_mb:
        grown = daemons_mb(bench.state) - before_mb
        note += f"; the yard's daemons grew by {grown:.1f} MB after the first {warm}"
    return [Metric(name="rollouts_per_s", unit="1/s", value=round(total.attempts / took, 1), note=note)]


async def _roll_out(bench: Bench, path: Path, busy: Busy) -> None:
    await run(bench.yard, [load(path)], [busy], out=path.parent / "out", attempts=BESIDE, concurrency=BESIDE)


async def _each(bench: Bench, when: str, *, calls: bool) -> dict[str, list[float]]:
    samples = {"exec": await execs_s(bench, f"exec {when}")}
    samples["create"] = (await creates_s(bench, f"create {when}", bench.plan.samples // 4, floor=False))[0]
    if calls:
        samples["call"] = [await call_s(bench) for _ in range(bench.plan.samples)]
    return samples


@contextmanager
def _task(image: str) -> Iterator[Path]:
    """The directory of a task that is always solved."""
    with TemporaryDirectory(prefix="cloudyard-bench-") as directory:
        path = Path(directory) / "trivial"
        (path / "tests").mkdir(parents=True)
        (path / "task.toml").write_text(TASK.format(image=image, memory=MEMORY.removesuffix("MiB")))
        (path / "instruction.md").write_text("Do as you like.\n")
        (path / "tests/test.sh").write_text(TEST)
        yield path


def _python_s() -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "pass"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60.0,
    )
    return time.perf_counter() - started
