"""The container backend keeps the contract of backends, and what is its own: where its things lie and what it
says when it cannot go on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from msgspec import json
from msgspec.structs import replace

from cloudyard.edge.backends.base import Backend, InstanceFacts, Resizable
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.edge.host.slots import SLOTS_MAX, Slots, live_slots
from cloudyard.errors import Conflict, InvalidRequest, LimitExceeded, SandboxUnavailable, Unsupported
from cloudyard.images.depot import Depot
from cloudyard.model import MIB, Image, SandboxSpec
from cloudyard.testing.backend_contract import SPEC, MakeBackend, SandboxContract, new_id, run
from container_kit import POOL_SIZE, places
from support import wait_until, yard_groups

pytestmark = pytest.mark.live

KILLS = 6


def maker(
    options: ContainerOptions, depot: Path
) -> Callable[[], AbstractAsyncContextManager[ContainerBackend]]:
    @asynccontextmanager
    async def make() -> AsyncIterator[ContainerBackend]:
        async with ContainerBackend(options, Depot(depot).layer_path) as backend:
            yield backend

    return make


def loops_of(depot: Path) -> list[str]:
    """Loop devices on this depot's layers."""
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [path.parts[3] for path in files if str(depot) in path.read_text()]


class TestContainer(SandboxContract):
    """The contract, with layers mounted straight from their files."""

    @pytest.fixture
    def make_backend(self, options: ContainerOptions, depot: Path) -> MakeBackend:
        self.options = options
        self.mounts = Path("/proc/self/mountinfo").read_text()
        return maker(options, depot)

    @pytest.fixture
    def image(self, depot: Path) -> Image:
        return Depot(depot).image("debian")

    async def check_empty(self, backend: Backend) -> None:
        await wait_until(lambda: not self.beyond_pool(), "nothing but a pool")
        assert Path("/proc/self/mountinfo").read_text() == self.mounts

    def beyond_pool(self) -> str:
        """What is on the host beyond launchers that wait."""
        found = places(self.options)
        if (
            any(len(names) != POOL_SIZE for names in found.values())
            or len(set(map(frozenset, found.values()))) > 1
        ):
            return str(found)
        if trash := os.listdir(self.options.trash):
            return f"trash: {trash}"
        return str(live_slots() & {int(name) for name in found["disks"]} or "")


async def test_layers_through_loop_devices_free_them_at_the_end(
    options: ContainerOptions, depot: Path, image: Image
) -> None:
    async with maker(replace(options, layer_mount="loop"), depot)() as backend:
        instance = await backend.create(new_id(), SPEC, image)
        assert loops_of(depot)
        assert (await run(instance, "/bin/true")).exit_code == 0
        await instance.stop()
    await wait_until(lambda: not loops_of(depot), "loop devices are free")


# An edge as a process of its own: it makes a sandbox, tells its facts and may make and stop more.
EDGE = textwrap.dedent("""
    import sys, anyio
    from pathlib import Path
    from msgspec import json
    from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
    from cloudyard.images.depot import Depot
    from cloudyard.testing.backend_contract import SPEC, new_id, run

    async def churn(backend, image):
        while True:
            instance = await backend.create(new_id(), SPEC, image)
            await instance.stop()

    async def main():
        state, run_dir, launcher, guest = map(Path, sys.argv[3:])
        options = ContainerOptions(state=state, run=run_dir, launcher=launcher, guest=guest)
        depot = Depot(sys.argv[2])
        image = depot.image("debian")
        async with ContainerBackend(options, depot.layer_path) as backend, anyio.create_task_group() as tasks:
            await backend.sweep(set())
            instance = await backend.create(new_id(), SPEC, image)
            await run(instance, "echo yes > /tmp/made-before")
            print(json.encode(instance.facts).decode(), flush=True)
            for _ in range(4 if sys.argv[1] == "churn" else 0):
                tasks.start_soon(churn, backend, image)
            await anyio.sleep_forever()

    anyio.run(main)
""")


async def killed_edge(options: ContainerOptions, depot: Path, what: str, after_s: float) -> InstanceFacts:
    """Run an edge, kill it so long after its first sandbox, and give that sandbox's facts."""
    paths = map(str, (depot, options.state, options.run, options.launcher, options.guest))
    edge = subprocess.Popen(
        [sys.executable, "-c", EDGE, what, *paths],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    with edge:
        assert edge.stdout is not None
        line = await anyio.to_thread.run_sync(edge.stdout.readline)
        await anyio.sleep(after_s)
        edge.kill()
    return json.decode(line, type=InstanceFacts)


async def test_a_sandbox_outlives_its_killed_edge_and_keeps_its_files(
    options: ContainerOptions, depot: Path
) -> None:
    facts = await killed_edge(options, depot, "wait", 0)
    async with maker(options, depot)() as backend:
        instance = await backend.adopt(facts)
        assert instance is not None
        await backend.sweep({facts.slot})
        assert (await run(instance, "cat /tmp/made-before")).stdout == "yes\n"
        await instance.stop()


async def test_an_edge_killed_at_any_moment_leaves_nothing_that_the_next_does_not_remove(
    options: ContainerOptions, depot: Path
) -> None:
    dice = random.Random(11)
    for _ in range(KILLS):
        facts = await killed_edge(options, depot, "churn", dice.uniform(0, 0.3))
        async with maker(options, depot)() as backend:
            instance = await backend.adopt(facts)
            assert instance is not None
            await backend.sweep({facts.slot})
            assert (await run(instance, "/bin/true")).exit_code == 0
            await instance.stop()
    assert places(options) == {"cgroups": set(), "disks": set(), "sockets": set()}


async def test_yards_live_side_by_side_with_slots_of_their_own(
    options: ContainerOptions, depot: Path, image: Image
) -> None:
    other = replace(options, state=options.state / "other", run=options.run / "other")
    async with maker(options, depot)() as first, maker(other, depot)() as second:
        await first.sweep(set())
        one = await first.create(new_id(), SPEC, image)
        two = await second.create(new_id(), SPEC, image)
        assert one.facts.slot // 64 != two.facts.slot // 64
        await second.sweep(set())
        assert (await run(one, "/bin/true")).exit_code == 0
        await two.stop()
        await one.stop()


async def test_a_second_edge_on_one_state_directory_is_refused(
    options: ContainerOptions, depot: Path
) -> None:
    async with maker(options, depot)():
        with pytest.raises(Conflict, match="Another edge") as caught:
            await maker(options, depot)().__aenter__()
    assert caught.value.code == "state_in_use"


async def test_a_machine_without_free_slots_says_who_has_them(
    options: ContainerOptions, depot: Path, image: Image
) -> None:
    options = replace(options, claims=options.state / "claims", pool_size=1)
    holder = Slots(options.state / "holder", claims=options.claims)
    options.claims.mkdir(parents=True)
    holder.open()
    for _ in range(SLOTS_MAX):
        holder.take()
    async with maker(options, depot)() as backend:
        with pytest.raises(LimitExceeded, match="holder") as caught:
            await backend.create(new_id(), SPEC, image)
        assert caught.value.code == "no_slot"
        assert places(options) == {"cgroups": set(), "disks": set(), "sockets": set()}
    holder.close()


async def test_a_guest_that_ends_at_once_is_told_with_its_last_words(
    options: ContainerOptions, depot: Path, image: Image, tmp_path: Path
) -> None:
    script = tmp_path / "guest"
    script.write_text("#!/bin/sh\necho the guest has no heart >&2\n")
    script.chmod(0o755)
    async with maker(replace(options, guest=script), depot)() as backend:
        with pytest.raises(SandboxUnavailable, match="the guest has no heart"):
            await backend.create(new_id(), SPEC, image)
        await wait_until(lambda: len(places(options)["disks"]) == POOL_SIZE, "only parked launchers are left")


async def test_a_run_directory_that_is_too_long_is_refused(options: ContainerOptions, depot: Path) -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        await maker(replace(options, run=options.run / ("x" * 90)), depot)().__aenter__()


async def test_a_missing_program_is_named(options: ContainerOptions, depot: Path) -> None:
    with pytest.raises(Unsupported, match="no-such-bwrap"):
        await maker(replace(options, bubblewrap=Path("/usr/bin/no-such-bwrap")), depot)().__aenter__()


async def test_limits_are_those_of_the_spec(options: ContainerOptions, depot: Path, image: Image) -> None:
    spec = SandboxSpec(image="debian", cpu=0.5, memory=64 * MIB, pids=20)
    async with maker(options, depot)() as backend:
        instance = await backend.create(new_id(), spec, image)
        names = ("memory.limit_in_bytes", "memory.max", "cpu.cfs_quota_us", "cpu.max", "pids.max")
        groups = [parent / str(instance.facts.slot) for parent in yard_groups(options.tag)]
        files = [group / name for name in names for group in groups if (group / name).exists()]
        found = [path.read_text().split()[0] for path in files]
        await instance.stop()
    assert found == [str(64 * MIB), "50000", "28"]


async def test_every_user_of_a_sandbox_may_enter_its_root_whatever_our_umask(
    options: ContainerOptions, depot: Path, image: Image
) -> None:
    before = os.umask(0o077)  # as the edge of a yard has it
    try:
        async with maker(options, depot)() as backend:
            instance = await backend.create(new_id(), SPEC, image)
            told = await run(instance, "setpriv --reuid=1000 --regid=1000 --clear-groups ls -ld / /tmp /usr")
            assert told.exit_code == 0, told
            assert told.stdout.startswith("drwxr-xr-x")
            await instance.stop()
    finally:
        os.umask(before)


async def test_only_root_of_a_nesting_sandbox_can_make_namespaces(
    options: ContainerOptions, depot: Path
) -> None:
    image = Depot(depot).image("debian")
    async with maker(options, depot)() as backend:
        plain = await backend.create(new_id(), SPEC, image)
        nesting = await backend.create_nesting(new_id(), SPEC, image)
        try:
            command = ("/usr/bin/unshare", "--mount", "--pid", "--ipc", "--fork", "/bin/true")
            assert (await run(nesting, *command)).exit_code == 0
            assert (await run(plain, *command)).exit_code != 0
        finally:
            await plain.stop()
            await nesting.stop()


async def test_a_sandbox_is_given_other_limits_while_it_runs(options: ContainerOptions, depot: Path) -> None:
    image = Depot(depot).image("debian")
    fill = ("/usr/bin/python3", "-c", "bytearray(100 * 2**20)")
    async with maker(options, depot)() as backend:
        instance = await backend.create(new_id(), SPEC, image)
        try:
            assert isinstance(instance, Resizable)
            assert (await run(instance, *fill)).exit_code == 0
            instance.resize(replace(SPEC, memory=64 * MIB))
            assert (await run(instance, *fill)).signal == signal.SIGKILL
            instance.resize(SPEC)
            assert (await run(instance, *fill)).exit_code == 0
        finally:
            await instance.stop()
