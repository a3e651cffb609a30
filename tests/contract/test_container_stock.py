"""Sandboxes raised ahead of need: whoever asks for one of a shape in demand finds it running."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from cloudyard.edge.backends.base import Instance
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.images.depot import Depot
from cloudyard.model import MIB, Image, SandboxSpec
from cloudyard.testing.backend_contract import new_id
from support import comm, wait_until, yard_groups, yard_pids

pytestmark = pytest.mark.live
STOCK = 2
MEMORY_LIMITS = ("memory.limit_in_bytes", "memory.max")
SPEC = SandboxSpec(image="debian", memory=256 * MIB)


@asynccontextmanager
async def stocked(options: ContainerOptions, depot: Path) -> AsyncIterator[ContainerBackend]:
    async with ContainerBackend(replace(options, stock_size=STOCK), Depot(depot).layer_path) as backend:
        yield backend


def guests(options: ContainerOptions) -> set[int]:
    """Host pids of the yard's PID 1s: the processes in its cgroups that are no launchers."""
    return {pid for pid in yard_pids(options.tag) if comm(pid) == "guest"}


def ready(backend: ContainerBackend) -> int:
    """Sandboxes that the next create may take. A guest is there a little before it is in stock."""
    return sum(len(raised) for raised in backend._stock._ready.values())


async def test_a_second_create_takes_a_sandbox_that_runs_already(
    options: ContainerOptions,
    depot: Path,
    image: Image,
) -> None:
    async with stocked(options, depot) as backend:
        first = await backend.create(new_id(), SPEC, image)
        await wait_until(lambda: ready(backend) == 1, "one raised ahead")
        ahead = guests(options) - {first.facts.pid}
        second = await backend.create(new_id(), SPEC, image)
        assert {second.facts.pid} == ahead
        assert second.usage().memory_bytes > 0
        await stop_all(first, second)


async def test_the_limits_are_those_of_who_takes_it(
    options: ContainerOptions,
    depot: Path,
    image: Image,
) -> None:
    async with stocked(options, depot) as backend:
        first = await backend.create(new_id(), SPEC, image)
        await wait_until(lambda: ready(backend) == 1, "one raised ahead")
        second = await backend.create(new_id(), replace(SPEC, memory=64 * MIB), image)
        slot = second.facts.slot
        files = [group / f"{slot}/{name}" for group in yard_groups(options.tag) for name in MEMORY_LIMITS]
        assert [int(path.read_text()) for path in files if path.exists()] == [64 * MIB]
        await stop_all(first, second)


async def test_another_host_name_is_another_shape(
    options: ContainerOptions,
    depot: Path,
    image: Image,
) -> None:
    async with stocked(options, depot) as backend:
        first = await backend.create(new_id(), SPEC, image)
        await wait_until(lambda: ready(backend) == 1, "one raised ahead")
        ahead = guests(options) - {first.facts.pid}
        other = await backend.create(new_id(), replace(SPEC, hostname="other"), image)
        assert other.facts.pid not in ahead
        await stop_all(first, other)


async def test_the_stock_follows_demand_and_stays_within_its_size(
    options: ContainerOptions,
    depot: Path,
    image: Image,
) -> None:
    async with stocked(options, depot) as backend:
        for hostname in ("a", "b", "c", "c", "c"):
            instance = await backend.create(new_id(), replace(SPEC, hostname=hostname), image)
            await instance.stop()
        await wait_until(lambda: ready(backend) == STOCK == len(guests(options)), "a full stock")
        ahead = guests(options)
        for _ in range(STOCK):
            taken = await backend.create(new_id(), replace(SPEC, hostname="c"), image)
            assert taken.facts.pid in ahead
            await taken.stop()


async def test_one_that_has_died_is_not_given_out(
    options: ContainerOptions,
    depot: Path,
    image: Image,
) -> None:
    async with stocked(options, depot) as backend:
        first = await backend.create(new_id(), SPEC, image)
        await wait_until(lambda: ready(backend) == 1, "one raised ahead")
        (ahead,) = guests(options) - {first.facts.pid}
        os.kill(ahead, signal.SIGKILL)
        await wait_until(lambda: ahead not in guests(options), "its end")
        second = await backend.create(new_id(), SPEC, image)
        assert second.facts.pid != ahead
        await stop_all(first, second)


async def test_leaving_in_the_middle_of_raising_leaves_nothing(
    options: ContainerOptions,
    depot: Path,
    image: Image,
) -> None:
    for _ in range(10):
        async with stocked(options, depot) as backend:
            instance = await backend.create(new_id(), SPEC, image)
            await instance.stop()
    assert not guests(options)


async def test_what_a_killed_edge_had_raised_is_swept(
    options: ContainerOptions,
    depot: Path,
    image: Image,
) -> None:
    """A raised sandbox that no record names is removed by the next edge's sweep."""
    async with stocked(options, depot) as backend:
        kept = await backend.create(new_id(), SPEC, image)
        await wait_until(lambda: ready(backend) == 1, "one raised ahead")
        # As after kill -9: nobody drains the stock, and it is still there when the next backend looks.
        backend._stock.drain()
    assert len(guests(options)) == 2
    async with stocked(options, depot) as backend:
        adopted = await backend.adopt(kept.facts)
        assert adopted is not None
        removed = await backend.sweep({kept.facts.slot})
        assert removed
        await wait_until(lambda: guests(options) == {kept.facts.pid}, "only the adopted one")
        await adopted.stop()


async def stop_all(*instances: Instance) -> None:
    async with anyio.create_task_group() as tasks:
        for instance in instances:
            tasks.start_soon(instance.stop)
