"""What a sandbox may write: bounded for each, shared from one pool, given back at its end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import cloudyard
import support
from cloudyard.edge.backends.base import Instance
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.edge.backends.container.maker import PARKED_DISK_BYTES
from cloudyard.edge.host import disk_pool, loops
from cloudyard.edge.host.disk_pool import open_pool
from cloudyard.errors import LimitExceeded, Unsupported
from cloudyard.images.depot import Depot
from cloudyard.model import GIB, MIB
from cloudyard.testing.backend_contract import SPEC, new_id, run
from yards import TestYard

pytestmark = pytest.mark.live

SMALL = 256 * MIB  # a pool that is soon full
FILL = "dd if=/dev/zero of=/root/{name} bs=1M count={mib} 2>&1; stat -c %s /root/{name}"


@pytest.fixture
async def backend(node: ContainerOptions, depot: Path) -> AsyncIterator[ContainerBackend]:
    async with ContainerBackend(replace(node, pool_size=1), Depot(depot).layer_path) as made:
        yield made


@pytest.fixture
def path(yard_dir: Path, leaks: None) -> Path:
    return yard_dir / "disks.btrfs"


async def create(backend: ContainerBackend, depot: Path, disk: int = PARKED_DISK_BYTES) -> Instance:
    return await backend.create(new_id(), replace(SPEC, disk=disk), Depot(depot).image("debian"))


def free_on_the_machine(path: Path) -> int:
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


async def test_a_sandbox_writes_as_much_as_it_may_and_the_machines_disk_stays_as_it_is(
    backend: ContainerBackend, node: ContainerOptions, depot: Path
) -> None:
    """CubeSandbox#1385, microsandbox#1007: a writable directory of a sandbox could fill the host's disk."""
    box, neighbour = await create(backend, depot, 32 * MIB), await create(backend, depot)
    before, pool = free_on_the_machine(node.state), box.disk().free_bytes
    said = (await run(box, FILL.format(name="much", mib=200))).stdout
    assert "Disk quota exceeded" in said
    assert 30 * MIB <= int(said.split()[-1]) <= 32 * MIB
    assert 30 * MIB <= box.disk().used_bytes <= box.disk().limit_bytes == 32 * MIB
    assert free_on_the_machine(node.state) > before - 64 * MIB  # others use the machine too
    said = (await run(neighbour, FILL.format(name="some", mib=40))).stdout
    assert int(said.split()[-1]) == 40 * MIB
    await box.stop()
    await neighbour.stop()
    last = await create(backend, depot)
    await support.wait_until(
        lambda: last.disk().free_bytes > pool - 16 * MIB, "what they wrote is free again", within_s=60
    )
    await last.stop()


async def test_what_was_removed_may_be_written_again(backend: ContainerBackend, depot: Path) -> None:
    box = await create(backend, depot, 32 * MIB)
    for _ in range(3):
        said = (await run(box, FILL.format(name="much", mib=24) + "; rm /root/much; sync -f /root")).stdout
        assert int(said.split()[-1]) == 24 * MIB
    await box.stop()


async def test_thousands_of_files_are_bounded_too(backend: ContainerBackend, depot: Path) -> None:
    box = await create(backend, depot, 4 * MIB)
    script = (
        "i=0; while echo x > /root/f$i; do i=$((i+1)); [ $i -lt 40000 ] || break; done 2>/dev/null; echo $i"
    )
    assert 100 < int((await run(box, script)).stdout) < 40_000
    await box.stop()


async def test_a_full_tmp_is_no_lack_of_memory(backend: ContainerBackend, depot: Path) -> None:
    """Conch#140: a full /tmp had programs killed for memory instead of telling them that it was full."""
    spec = replace(SPEC, memory=128 * MIB, disk=256 * MIB)
    box = await backend.create(new_id(), spec, Depot(depot).image("debian"))
    said = (await run(box, "dd if=/dev/zero of=/tmp/much bs=1M count=1000 2>&1; stat -c %s /tmp/much")).stdout
    assert "Disk quota exceeded" in said
    assert int(said.split()[-1]) > 240 * MIB
    assert box.oom_kills() == 0
    await box.stop()


async def test_a_limit_may_change_while_it_lives(backend: ContainerBackend, depot: Path) -> None:
    box = await create(backend, depot, 16 * MIB)
    box.resize(replace(SPEC, disk=48 * MIB))
    said = (await run(box, FILL.format(name="much", mib=40))).stdout
    assert int(said.split()[-1]) == 40 * MIB
    await box.stop()


async def test_a_limit_that_cannot_be_kept_is_refused(node: ContainerOptions, depot: Path) -> None:
    options = replace(node, disk_pool_bytes=0, pool_size=0)
    async with ContainerBackend(options, Depot(depot).layer_path) as backend:
        with pytest.raises(Unsupported, match="no disk pool"):
            await create(backend, depot, 1 * GIB)
        box = await create(backend, depot)
        assert (await run(box, FILL.format(name="some", mib=8))).exit_code == 0
        assert box.disk().limit_bytes == 0
        await box.stop()


async def test_a_command_that_fills_its_disk_is_told_from_one_for_which_we_have_no_room(
    yard: TestYard,
) -> None:
    assert yard.up("--disk-pool", f"{SMALL // MIB}MiB").returncode == 0
    async with yard.connect() as client, client.sandbox("debian", disk="16MiB") as small:
        done = await small.run("cat /dev/zero > /root/much")
        assert (done.exit_code, done.limits_hit) == (1, ["disk"])
        assert done.fault is not None
        assert done.fault.label == "policy"
        assert f"of the {16 * MIB} that it may" in done.fault.evidence
        info = await small.info()
        assert 15 * MIB <= (info.disk_used_bytes or 0) <= 16 * MIB
        assert (await small.run("false")).limits_hit == ["disk"]
        await small.run("rm /root/much")

        async def has_room() -> bool:
            return (await small.run("false")).limits_hit == []

        await support.wait_until(has_room, "what was removed is not counted any more", within_s=60)
        async with client.sandbox("debian") as large:
            done = await large.run("cat /dev/zero > /root/much")
            assert done.fault is not None
            assert (done.fault.label, done.fault.reason) == ("infra", "disk")
            assert done.limits_hit == []
            assert "No space left on device" in await refused(client)
            assert (await small.run("echo on")).stdout == b"on\n"
        await support.wait_until(lambda: may_create(client), "there is room again", within_s=60)
        for info in await client.list():
            await client.stop(info.id)


async def refused(client: cloudyard.Yard) -> str:
    """The words with which a create is refused, once those that were made ahead are gone."""
    for _ in range(64):
        try:
            await client.create("debian")
        except LimitExceeded as exc:
            return str(exc)
    return ""


async def may_create(client: cloudyard.Yard) -> bool:
    try:
        await client.create("debian")
    except LimitExceeded:
        return False
    return True


def test_a_pool_in_use_is_taken_up_and_one_that_is_not_is_made_anew(path: Path) -> None:
    first = open_pool(path, most_bytes=SMALL)
    (first.make("7", 8 * MIB) / "file").write_text("kept")
    held = os.open(f"/proc/self/fd/{first.mount}", os.O_PATH)  # as a sandbox holds it
    first.close()
    assert disk_pool.is_in_use(path)
    second = open_pool(path, most_bytes=SMALL)
    assert second.names() == ["7"]
    assert Path(f"/proc/self/fd/{second.mount}/7/file").read_text() == "kept"
    assert second.use("7").limit_bytes == 8 * MIB
    with open(path, "rb") as file:
        found = loops.find(file.fileno())
    assert found is not None
    os.close(found[0])
    os.close(held)
    second.close()
    support.wait_until_sync(lambda: not disk_pool.is_in_use(path), "the device has freed itself", within_s=10)
    third = open_pool(path, most_bytes=SMALL)
    assert third.names() == []
    third.close()


def test_a_pool_grows_ahead_of_need_up_to_its_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_pool, "STEP_BYTES", SMALL)
    pool = open_pool(path, most_bytes=2 * SMALL)
    sizes = []
    for _ in range(3):
        sizes.append(pool._free())
        pool._grow()
    pool.close()
    assert path.stat().st_size == 2 * SMALL
    assert sizes[0] < SMALL < sizes[1] == sizes[2] < 2 * SMALL


def test_a_machine_without_room_for_a_pool_is_told_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_pool, "RESERVE_SHARE", 1.0)
    with pytest.raises(LimitExceeded, match=r"leaves .*: free space there") as caught:
        open_pool(path, most_bytes=SMALL)
    assert caught.value.code == "disk_full"
    assert not path.exists()
