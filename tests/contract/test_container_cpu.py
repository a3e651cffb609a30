"""Processor time and what programs see of it: classes, weights, and as many processors as a sandbox has
cores."""

from __future__ import annotations

import os
from operator import sub
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.edge.backends.container.pool import Pool
from cloudyard.edge.host.cgroups import open_cgroups
from cloudyard.edge.meminfo import swap_total_bytes
from cloudyard.errors import Unsupported
from cloudyard.images.depot import Depot
from cloudyard.model import MIB, Image
from cloudyard.testing.backend_contract import SPEC, guest_of, new_id, run
from container_kit import POOL_SIZE, places
from support import wait_until

pytestmark = pytest.mark.live

CPUS = len(os.sched_getaffinity(0))
BUSY_S = 60.0  # bound of a wait for processor time, on a machine that has other work
BEST_EFFORT = replace(SPEC, cpu_class="best_effort")


def backend_of(options: ContainerOptions, depot: Path) -> ContainerBackend:
    return ContainerBackend(options, Depot(depot).layer_path)


def group_of(pid: int) -> str:
    """The processor group of a process, from the root of its hierarchy."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    found = {name: path for _, controllers, path in lines for name in controllers.split(",")}
    return found.get("cpu", found.get("", ""))


def parked(pool: Pool) -> dict[str, int]:
    return {name: len(launchers) for name, launchers in pool._parked.items()}


async def test_a_best_effort_sandbox_is_in_the_idle_group_from_its_start_and_across_edges(
    options: ContainerOptions, depot: Path, image: Image
) -> None:
    async with backend_of(options, depot) as backend:
        usual = await backend.create(new_id(), SPEC, image)
        effort = await backend.create(new_id(), BEST_EFFORT, image)
        assert group_of(usual.facts.pid) == f"/cloudyard/{options.tag}/{usual.facts.slot}"
        assert group_of(effort.facts.pid) == f"/cloudyard-best-effort/{options.tag}/{effort.facts.slot}"
        await usual.stop()
    async with backend_of(options, depot) as backend:
        adopted = await backend.adopt(effort.facts)
        assert adopted is not None
        assert not await backend.sweep({effort.facts.slot})
        assert (await run(adopted, "/bin/true")).exit_code == 0
        assert adopted.usage().cpu_s > 0
        await adopted.stop()
        assert str(effort.facts.slot) not in places(options)["cgroups"]


async def test_an_unknown_best_effort_sandbox_is_swept(
    options: ContainerOptions, depot: Path, image: Image
) -> None:
    async with backend_of(options, depot) as backend:
        await backend.create(new_id(), BEST_EFFORT, image)
    async with backend_of(replace(options, pool_size=0), depot) as backend:
        assert await backend.sweep(set())
    assert places(options)["cgroups"] == set()


async def test_the_pool_follows_demand_for_a_class_and_stays_within_its_size(
    options: ContainerOptions, depot: Path, image: Image
) -> None:
    highest = 0
    async with backend_of(options, depot) as backend, anyio.create_task_group() as tasks:
        pool = backend._pool

        async def watch() -> None:
            nonlocal highest
            while True:
                highest = max(highest, sum(parked(pool).values()))
                await anyio.sleep(0.001)

        tasks.start_soon(watch)
        await wait_until(lambda: parked(pool) == {"latency": POOL_SIZE, "best_effort": 0}, "a usual pool")
        for _ in range(POOL_SIZE):
            await (await backend.create(new_id(), BEST_EFFORT, image)).stop()
        await wait_until(lambda: parked(pool) == {"latency": 0, "best_effort": POOL_SIZE}, "it follows")
        await (await backend.create(new_id(), SPEC, image)).stop()
        await wait_until(lambda: parked(pool) == {"latency": 1, "best_effort": POOL_SIZE - 1}, "both")
        tasks.cancel_scope.cancel()
    assert highest <= POOL_SIZE


async def test_a_weight_gives_its_share_of_a_busy_processor(
    options: ContainerOptions, depot: Path, image: Image
) -> None:
    """A hog in each, one with ten times the weight of the other.

    Both are tied to one and the same processor. Where each may choose, the scheduler can leave the light
    one a processor that the heavy one does not want (1.6 times the time was seen, for ten times the weight).
    On one, what else the machine does takes from both alike, and the window lasts until the kernel has given
    them so much time.
    """
    hog = f"exec taskset -c {min(os.sched_getaffinity(0))} sh -c 'while :; do :; done'"
    async with backend_of(options, depot) as backend:
        light = await backend.create(new_id(), replace(SPEC, cpu=float(CPUS), cpu_weight=20), image)
        heavy = await backend.create(new_id(), replace(SPEC, cpu=float(CPUS), cpu_weight=200), image)

        def used() -> list[float]:
            return [instance.usage().cpu_s for instance in (light, heavy)]

        async with guest_of(light) as in_light, guest_of(heavy) as in_heavy:
            before = used()
            await in_light.start(hog)
            await in_heavy.start(hog)
            await wait_until(lambda: min(map(sub, used(), before)) > 0.05, "both run", within_s=BUSY_S)
            before = used()
            await wait_until(lambda: sum(used()) > sum(before) + 1.1, "time is given", within_s=BUSY_S)
            took = list(map(sub, used(), before))
        await light.stop()
        await heavy.stop()
    assert took[1] > 5 * took[0]


async def test_swap_is_refused_where_there_is_none(
    options: ContainerOptions, depot: Path, image: Image
) -> None:
    asked = replace(SPEC, swap=64 * MIB)
    groups = open_cgroups(options.tag)
    offered = swap_total_bytes() > 0 and groups.limits_swap
    groups.close()
    async with backend_of(options, depot) as backend:
        if offered:
            instance = await backend.create(new_id(), asked, image)
            fill = f"python3 -c 'bytearray({SPEC.memory} + {MIB} * 16)'"
            assert (await run(instance, fill)).exit_code == 0
            await instance.stop()
        else:
            with pytest.raises(Unsupported, match="swap") as refused:
                await backend.create(new_id(), asked, image)
            assert refused.value.code == "no_swap"
