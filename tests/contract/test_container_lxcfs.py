"""Sandboxes that see their own memory, processors and uptime in /proc, and the daemon that shows them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from cloudyard.assemble.edge_main import lxcfs_program
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.errors import SandboxUnavailable, Unsupported
from cloudyard.images.depot import Depot
from cloudyard.model import MIB, Image
from cloudyard.testing.backend_contract import SPEC, new_id, run
from support import cannot_run, wait_until

pytestmark = pytest.mark.live

MEMORY_MIB = 200
SHOWN = replace(SPEC, lxcfs=True, memory=MEMORY_MIB * MIB)
ASK = """
import os, re
text = open("/proc/meminfo").read()
print(int(re.search(r"MemTotal: +(\\d+) kB", text)[1]) // 1024, os.cpu_count())
print(open("/proc/cpuinfo").read().count("processor"), float(open("/proc/uptime").read().split()[0]) < 600)
"""


@pytest.fixture
def shown(options: ContainerOptions) -> ContainerOptions:
    program = lxcfs_program()
    if program is None:
        cannot_run("needs lxcfs: run scripts/setup")
    return replace(options, lxcfs=program)


def backend_of(options: ContainerOptions, depot: Path) -> ContainerBackend:
    return ContainerBackend(options, Depot(depot).layer_path)


def daemons(options: ContainerOptions) -> list[int]:
    """Daemons of this yard, by their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if command.endswith(os.fsencode(options.run / "lxcfs/mount") + b"\0"):
            found.append(int(path.parent.name))
    return found


async def test_a_sandbox_sees_its_own_memory_processors_and_uptime(
    shown: ContainerOptions, depot: Path, image: Image
) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    async with backend_of(shown, depot) as backend:
        instance = await backend.create(new_id(), SHOWN, image)
        told = await run(instance, "python3", "-c", ASK)
        assert told.stdout.split() == [str(MEMORY_MIB), "1", "1", "True"], told
        used = "awk '/MemFree/ {print $2}' /proc/meminfo; head -c 60000000 /dev/zero > /dev/shm/x;"
        told = await run(instance, used + "awk '/MemFree/ {print $2}' /proc/meminfo")
        first, second = map(int, told.stdout.split())
        assert first - second > 50_000  # KiB: it changes with use
        assert (await run(instance, "echo 1 > /proc/uptime; umount /proc/meminfo")).exit_code != 0
        assert Path("/proc/self/mountinfo").read_text() == before
        await instance.stop()
        (pid,) = daemons(shown)
        assert f"/cloudyard/{shown.tag}/lxcfs" in Path(f"/proc/{pid}/cgroup").read_text()
        await backend.sweep(set())
    assert not daemons(shown)


async def test_one_daemon_serves_all_sandboxes_across_edges_and_ends_when_none_is_left(
    shown: ContainerOptions, depot: Path, image: Image
) -> None:
    async with backend_of(shown, depot) as backend:
        first = await backend.create(new_id(), SHOWN, image)
        plain = await backend.create(new_id(), SPEC, image)
        assert (await run(plain, "python3", "-c", ASK)).stdout.split()[0] != str(MEMORY_MIB)
        await plain.stop()
    (pid,) = daemons(shown)
    async with backend_of(shown, depot) as backend:
        adopted = await backend.adopt(first.facts)
        assert adopted is not None
        await backend.sweep({first.facts.slot})
        second = await backend.create(new_id(), replace(SHOWN, memory=300 * MIB), image)
        assert daemons(shown) == [pid]
        assert (await run(adopted, "python3", "-c", ASK)).stdout.split()[0] == str(MEMORY_MIB)
        assert (await run(second, "python3", "-c", ASK)).stdout.split()[0] == "300"
        await adopted.stop()
        await second.stop()
    async with backend_of(replace(shown, pool_size=0), depot) as backend:
        assert await backend.sweep(set()) == ["ended the daemon lxcfs"]
    assert not daemons(shown)


async def test_after_the_daemons_end_new_sandboxes_have_a_new_one(
    shown: ContainerOptions, depot: Path, image: Image
) -> None:
    async with backend_of(replace(shown, stock_size=1), depot) as backend:
        orphan = await backend.create(new_id(), SHOWN, image)
        await wait_until(lambda: any(backend._stock._ready.values()), "one raised ahead")
        (pid,) = daemons(shown)
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: not daemons(shown), "it has ended")
        assert (await run(orphan, "/bin/true")).exit_code == 0  # all but those files works
        assert (await run(orphan, "cat /proc/uptime")).exit_code != 0
        fresh = await backend.create(new_id(), SHOWN, image)
        assert (await run(fresh, "python3", "-c", ASK)).stdout.split()[0] == str(MEMORY_MIB)
        await orphan.stop()
        await fresh.stop()
        await backend.sweep(set())


async def test_without_the_program_it_is_refused(
    options: ContainerOptions, depot: Path, image: Image
) -> None:
    async with backend_of(options, depot) as backend:
        with pytest.raises(Unsupported, match="lxcfs") as refused:
            await backend.create(new_id(), SHOWN, image)
        assert refused.value.code == "no_lxcfs"


async def test_a_daemon_that_does_not_start_is_told_with_its_last_words(
    options: ContainerOptions, depot: Path, image: Image, tmp_path: Path
) -> None:
    script = tmp_path / "lxcfs"
    script.write_text("#!/bin/sh\necho no fuse in this house\n")
    script.chmod(0o755)
    async with backend_of(replace(options, lxcfs=script), depot) as backend:
        with pytest.raises(SandboxUnavailable, match="no fuse in this house"):
            await backend.create(new_id(), SHOWN, image)
