"""The measurements of `cloudyard bench`: each through the public SDK, each with its floor between its own
samples.

They know the SDK, the floors and /proc/meminfo of this machine; of the yard they know nothing that a user
could not.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from statistics import median

import anyio

from cloudyard.cli.benchmarks.floors import TRUE, subprocess_s
from cloudyard.cli.benchmarks.memory import available_mb, daemons_mb, own_mb, settled_mb
from cloudyard.cli.benchmarks.neighbours import neighbour
from cloudyard.cli.benchmarks.report import Metric, timed
from cloudyard.cli.benchmarks.rollouts import call_ms, mixed, rollouts_per_s
from cloudyard.cli.benchmarks.samples import CLIENTS, GONE_MAX_S, MEMORY, Bench, creates_s, stop_all
from cloudyard.errors import CloudyardError
from cloudyard.sdk.client import Yard
from cloudyard.sdk.sandbox import Sandbox
from cloudyard.sdk.tasks import plain_task_group

MEMORY_BACK_MAX_S = 60.0
MEMORY_BACK_PART = 0.95  # of what the sandboxes held
IN_FLIGHT = 1000
IN_FLIGHT_BOXES = 40  # a sandbox holds at most 256 commands
IDLE_CPU = 0.1  # cores promised to one of many that idle: a yard of few cores still takes them all


async def exec_ms(bench: Bench) -> list[Metric]:
    """One `true` after another over the mux socket."""
    return [await _exec(bench, "exec_ms", bench.yard)]


async def exec_http_ms(bench: Bench) -> list[Metric]:
    """One `true` after another, an HTTP request each."""
    return [await _exec(bench, "exec_http_ms", bench.http_yard)]


async def create_to_first_exec_ms(bench: Bench) -> list[Metric]:
    """From asking for a sandbox to the result of its first command, in an empty yard that is
    otherwise idle."""
    samples, floors = await creates_s(bench, "create_to_first_exec_ms", bench.plan.samples // 2)
    note = "" if floors else "the floor needs root and bubblewrap on this machine"
    return [timed("create_to_first_exec_ms", samples, floors, note=note)]


async def exec_in_flight(bench: Bench) -> list[Metric]:
    """Commands finished per second by one client that always has IN_FLIGHT under way."""
    boxes = await bench.yard.create_many(IN_FLIGHT_BOXES, bench.image, cpu=1, memory=MEMORY)
    done = failed = 0
    started = time.perf_counter()

    async def caller(number: int) -> None:
        nonlocal done, failed
        box = boxes[number % len(boxes)]
        for _ in range(-(-bench.plan.calls // IN_FLIGHT)):
            try:
                result = await box.run([TRUE])
            except CloudyardError as error:
                failed += 1
                bench.notes["exec_in_flight"] = str(error)
                continue
            done += 1
            failed += 0 if result.ok else 1
            bench.tell("exec_in_flight", done / bench.plan.calls)

    try:
        async with plain_task_group() as tasks:
            for number in range(IN_FLIGHT):
                tasks.start_soon(caller, number)
        took = time.perf_counter() - started
    finally:
        await stop_all(bench, boxes)
    note = f"{IN_FLIGHT} in flight, {done} done, {failed} failed"
    if reason := bench.notes.get("exec_in_flight"):
        note += f": {reason}"
    return [Metric(name="exec_in_flight", unit="1/s", value=round(done / took, 1), note=note)]


async def creates_per_s(bench: Bench) -> list[Metric]:
    """Sandboxes created and stopped per second by some clients at once, once the pool is in its steady
    state."""
    made = failed = 0
    counting_from = ends = float("inf")
    counted = 0

    async def client() -> None:
        nonlocal made, failed, counted, counting_from, ends
        while time.perf_counter() < ends:
            try:
                box = await bench.create()
                await box.stop()
            except CloudyardError as error:
                failed += 1
                bench.notes["creates_per_s"] = str(error)
                if failed > made + CLIENTS:
                    return  # nothing works any more
                continue
            made += 1
            now = time.perf_counter()
            if made >= bench.plan.pool_turns and counting_from == float("inf"):
                counting_from, ends = now, now + bench.plan.seconds
            elif counting_from < now <= ends:
                counted += 1
            bench.tell("creates_per_s", min(1.0, max(0.0, 1 - (ends - now) / bench.plan.seconds)))

    async with plain_task_group() as tasks:
        for _ in range(CLIENTS):
            tasks.start_soon(client)
    note = f"{CLIENTS} at once for {bench.plan.seconds:g} s, after {bench.plan.pool_turns}; {failed} failed"
    if reason := bench.notes.get("creates_per_s"):
        note += f": {reason}"
    return [Metric(name="creates_per_s", unit="1/s", value=round(counted / bench.plan.seconds, 1), note=note)]


async def density(bench: Bench) -> list[Metric]:
    """Many idle sandboxes: memory of each, creating beside them, and how fast all are gone."""
    alive = bench.plan.alive
    empty, _ = await creates_s(bench, "create at 0 alive", bench.plan.samples // 4, floor=False)
    before = await settled_mb()
    ours_before = _ours_mb(bench)
    boxes: list[Sandbox] = []
    metrics: list[Metric] = []
    try:
        await _fill(bench, boxes, alive)
        held = before - await settled_mb()
        metrics.append(_idle(held, len(boxes)))
        theirs = held - (_ours_mb(bench) - ours_before)
        full, _ = await creates_s(bench, f"create at {alive} alive", bench.plan.samples // 4, floor=False)
        ratio = median(full) / median(empty)
        note = (
            f"p50 {median(full) * 1000:.1f} ms at {len(boxes)} alive, {median(empty) * 1000:.1f} ms at none"
        )
        metrics.append(Metric(name="create_at_1000_ratio", unit="x", value=round(ratio, 2), note=note))
    finally:
        started = time.perf_counter()
        bench.tell("stopping all", 0.0)
        await stop_all(bench, boxes)
        with anyio.move_on_after(GONE_MAX_S):
            ours = {box.id for box in boxes}
            while any(info.id in ours for info in await bench.yard.list()):  # noqa: ASYNC110 (nothing tells us)
                await anyio.sleep(0.05)
        gone = time.perf_counter() - started
    metrics.append(
        Metric(name="gone_s", unit="s", value=round(gone, 2), note=f"{len(boxes)} stopped and unlisted")
    )

    def missing() -> tuple[float, float]:
        grown = _ours_mb(bench) - ours_before
        return before - available_mb() - grown, grown

    metrics.append(await _memory_back(missing, theirs=theirs, started=started, tell=bench.tell))
    return metrics


MEASURES: dict[str, Callable[[Bench], Awaitable[list[Metric]]]] = {
    "create_to_first_exec_ms": create_to_first_exec_ms,
    "exec_ms": exec_ms,
    "exec_http_ms": exec_http_ms,
    "exec_in_flight": exec_in_flight,
    "call_ms": call_ms,
    "creates_per_s": creates_per_s,
    "idle_sandbox_mb": density,
    "create_at_1000_ratio": density,
    "gone_s": density,
    "memory_back_s": density,
    "mixed_exec_ratio": mixed,
    "mixed_create_ratio": mixed,
    "mixed_call_ratio": mixed,
    "neighbour_exec_ratio": neighbour,
    "neighbour_info_ratio": neighbour,
    "rollouts_per_s": rollouts_per_s,
}
GROUPS = {
    "mixed": ("mixed_exec_ratio", "mixed_create_ratio", "mixed_call_ratio"),
    "neighbour": ("neighbour_exec_ratio", "neighbour_info_ratio"),
}


async def measure(bench: Bench, only: str = "") -> list[Metric]:
    """Run every measurement, or those that give the metric or the group named. Each runs once, however many
    it gives."""
    names = GROUPS.get(only, (only,)) if only else tuple(MEASURES)
    metrics: list[Metric] = []
    for act in dict.fromkeys(MEASURES[name] for name in names):
        metrics += [metric for metric in await act(bench) if metric.name in names]
    return metrics


async def _exec(bench: Bench, name: str, yard: Yard) -> Metric:
    samples, floors = [], []
    box = await bench.create()
    try:
        handle = await yard.get(box.id)
        for number in range(bench.plan.samples + 5):
            floors.append(subprocess_s())
            started = time.perf_counter()
            await handle.run([TRUE])
            samples.append(time.perf_counter() - started)
            bench.tell(name, number / bench.plan.samples)
    finally:
        await stop_all(bench, [box])
    return timed(name, samples[5:], floors[5:])  # the first ones warm caches and connections up


async def _fill(bench: Bench, boxes: list[Sandbox], count: int) -> None:
    slots = anyio.Semaphore(CLIENTS)

    async def one() -> None:
        async with slots:
            box = await bench.create(IDLE_CPU)
            boxes.append(box)
            await box.run([TRUE])
            bench.tell(f"creating {count}", len(boxes) / count)

    async with plain_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(one)


def _idle(held: float, count: int) -> Metric:
    note = f"{count} alive, one command run in each"
    if held <= 0:
        note += f"; {_unmeasured(held)}"
    value = round(held / count, 3) if held > 0 else None
    return Metric(name="idle_sandbox_mb", unit="MB", value=value, note=note)


async def _memory_back(
    missing: Callable[[], tuple[float, float]],
    *,
    theirs: float,
    started: float,
    tell: Callable[[str, float], None],
) -> Metric:
    """How soon what the sandboxes held is there again.

    Args:
        missing: how much is not, in MB, and by how much our own processes have grown, which is in it no more.
        theirs: what the sandboxes held, in MB.
        started: when their end began, by the performance counter.
        tell: as in Bench.
    """
    if theirs <= 0:
        return Metric(name="memory_back_s", unit="s", note=_unmeasured(theirs))
    back = False
    with anyio.move_on_after(MEMORY_BACK_MAX_S):
        while missing()[0] > (1 - MEMORY_BACK_PART) * theirs:
            tell("memory back", min(1.0, (time.perf_counter() - started) / MEMORY_BACK_MAX_S))
            await anyio.sleep(0.1)
        back = True
    took = time.perf_counter() - started
    absent, grown = missing()
    note = f"until {MEMORY_BACK_PART:.0%} of the sandboxes' {theirs:.0f} MB were available again"
    if not back:
        note = f"not {note} ({absent:.0f} MB are missing)"
    note += f"; the daemons and this client keep {grown:.0f} MB more than before"
    return Metric(name="memory_back_s", unit="s", value=round(took, 1), note=note)


def _ours_mb(bench: Bench) -> float:
    return daemons_mb(bench.state) + own_mb()


def _unmeasured(held: float) -> str:
    """Why memory could not be measured: other programs ended meanwhile, so the difference says nothing."""
    return f"not to be told, {-held:.0f} MB came free elsewhere on this machine"
