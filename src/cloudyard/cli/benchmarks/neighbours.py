"""What hogs do to their neighbours: an exec in an idle sandbox, and an answer of the yard's own daemons, by
themselves and beside best-effort sandboxes that take all the processor time they get."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from cloudyard.cli.benchmarks.floors import TRUE
from cloudyard.cli.benchmarks.report import Metric, percentile
from cloudyard.cli.benchmarks.samples import MEMORY, WARM_UP, Bench, stop_all
from cloudyard.sdk.sandbox import Sandbox

HOGS_PER_CPU = 4  # so 8 on two cores
SAMPLES_PER_PLAN = 5  # a p99 takes more samples than a median
TAIL = 0.99
HOG = "while :; do :; done"

Ask = Callable[[], Awaitable[object]]


async def neighbour(bench: Bench) -> list[Metric]:
    """p99 beside hogs by p99 in an otherwise empty yard, which is taken before and after them."""
    box = await bench.create()
    asked: dict[str, Ask] = {"exec": lambda: box.run([TRUE]), "info": box.info}
    alone: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    count = HOGS_PER_CPU * (os.cpu_count() or 1)
    try:
        await _sample(bench, "alone", asked, alone)
        async with _hogs(bench, count):
            await _sample(bench, f"beside {count} hogs", asked, beside)
        await _sample(bench, "alone again", asked, alone)
    finally:
        await stop_all(bench, [box])
    return [_metric(what, alone[what], beside[what], count) for what in asked]


async def _sample(bench: Bench, when: str, asked: dict[str, Ask], into: dict[str, list[float]]) -> None:
    count = bench.plan.samples * SAMPLES_PER_PLAN
    for what, ask in asked.items():
        samples = []
        for number in range(count + WARM_UP):
            started = time.perf_counter()
            await ask()
            samples.append(time.perf_counter() - started)
            bench.tell(f"{what} {when}", number / count)
        into.setdefault(what, []).extend(samples[WARM_UP:])


@asynccontextmanager
async def _hogs(bench: Bench, count: int) -> AsyncIterator[None]:
    """So many sandboxes of class best_effort, each with a loop that never ends."""
    boxes: list[Sandbox] = []
    try:
        for number in range(count):
            bench.tell("starting hogs", number / count)
            box = await bench.yard.create(bench.image, cpu=1, memory=MEMORY, cpu_class="best_effort")
            boxes.append(box)
            await box.start(HOG)
        yield
    finally:
        await stop_all(bench, boxes)


def _metric(what: str, alone: list[float], beside: list[float], count: int) -> Metric:
    def shown(samples: list[float]) -> str:
        return f"p50 {percentile(samples, 0.5) * 1000:.1f}, p99 {percentile(samples, TAIL) * 1000:.1f} ms"

    return Metric(
        name=f"neighbour_{what}_ratio",
        unit="x",
        value=round(percentile(beside, TAIL) / percentile(alone, TAIL), 2),
        note=f"{shown(beside)} beside {count} best-effort hogs, {shown(alone)} alone",
    )
