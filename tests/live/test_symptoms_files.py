"""Faults of files and disk that users of other platforms reported, as behaviour of ours, in one yard.

Each docstring names the reports, with the numbers in them. Others of that kind are elsewhere: what a sandbox
may fill of the disk (CubeSandbox#1385, microsandbox#1007) and of memory as files (Conch#140) is in
test_disks.py. No images are pulled by tag yet; ten names of one content are here.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

import support
from cloudyard import Sandbox
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.edge.host.layers import LayerMount
from cloudyard.images.build import build_from_tree
from cloudyard.images.depot import Depot
from cloudyard.model import CHUNK_BYTES_MAX
from cloudyard.sdk import local, transport
from cloudyard.testing.backend_contract import SPEC, new_id, run
from yards import TestYard

pytestmark = pytest.mark.live

KIB, MIB, GIB = 2**10, 2**20, 2**30
FLAT_BYTES = 24 * MIB  # that a process may grow by while a file goes through it, whatever the file's size
LARGE_MIB = int(os.environ.get("CLOUDYARD_LARGE_MIB", "256"))  # the report's is 2048
PATIENCE_S = 1.0  # of a client, for one answer
MOVE = """
import json, resource, sys
from cloudyard import blocking

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

url, token, name, source, back = sys.argv[1:]
with blocking.connect(url=url, token=token) as yard:
    box = yard.get(name)
    held = [peak()]
    box.upload(source, "/root/large")
    held.append(peak())
    box.download("/root/large", back)
    held.append(peak())
print(json.dumps(held))
"""


@pytest.fixture
async def box(up: TestYard) -> AsyncIterator[Sandbox]:
    async with up.connect() as yard, yard.sandbox("debian") as made:
        yield made


async def sha256_inside(box: Sandbox, path: str) -> str:
    return (await box.run(["sha256sum", path])).text.split()[0]


@pytest.mark.parametrize(
    "size", [0, 17 * KIB, 18 * KIB + 1, 19 * KIB, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX + 1, 270_000, 5 * MIB]
)
async def test_a_file_of_any_size_arrives_whole_and_comes_back_so(box: Sandbox, size: int) -> None:
    """OpenSandbox#1016: an upload of over 18 KB said ok, and the file was absent."""
    data = random.Random(size).randbytes(size)
    done = await box.write("/root/data", data)
    assert done.size == size
    assert await sha256_inside(box, "/root/data") == hashlib.sha256(data).hexdigest()
    assert await box.read("/root/data") == data


async def test_only_the_callers_deadlines_end_a_stream(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dormice#80: streams were killed by a hidden clock of an hour. Here the longest that a client waits for
    one answer is a second, and each stream takes several."""
    pieces = 6
    (tmp_path / "data").write_bytes(random.Random(25).randbytes(pieces * CHUNK_BYTES_MAX))

    class Slow(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            time.sleep(PATIENCE_S / 2)
            return super().read(size)

    monkeypatch.setattr(transport, "ANSWER_GRACE_S", PATIENCE_S)
    monkeypatch.setattr(local, "open_regular", Slow)
    began = time.monotonic()
    await box.upload(tmp_path / "data", "/root/slow")
    assert time.monotonic() - began > 2 * PATIENCE_S
    assert await sha256_inside(box, "/root/slow") == sha256_here(tmp_path / "data")

    process = await box.start(f"for n in $(seq {pieces}); do echo $n; sleep {PATIENCE_S * 0.75}; done")
    seen = [piece async for piece in process.stdout()]
    assert b"".join(seen).split() == [b"%d" % n for n in range(1, pieces + 1)]
    assert (await process.wait()).exit_code == 0


async def test_a_large_fixture_and_a_long_command_arrive_whole(box: Sandbox, tmp_path: Path) -> None:
    """rllm#649: what was sent in the arguments of a command broke at 64 KiB. 11 MB of a fixture and 200 KB of
    a command, as shell text and as stdin of a program."""
    fixture = random.Random(26).randbytes(11_000_000)
    await box.write("/root/fixture", fixture)
    assert await sha256_inside(box, "/root/fixture") == hashlib.sha256(fixture).hexdigest()
    words = "x" * 200_000
    assert (await box.run(f"echo {words} | wc -c")).stdout == b"200001\n"
    assert (await box.run(["wc", "-c"], stdin=words.encode())).stdout == b"200000\n"


@pytest.fixture
def own_depot(tmp_path: Path, depot: Path, leaks: None) -> Iterator[Depot]:
    """A depot on a disk of its own, so that what is free there is nobody else's doing."""
    place = tmp_path / "depot"
    place.mkdir()
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(GIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True, timeout=30, stdin=subprocess.DEVNULL)
    subprocess.run(["mount", "-o", "loop", disk, place], check=True, timeout=10)
    try:
        made = Depot(place)
        debian = Depot(depot).image("debian")
        (place / "layers").mkdir()
        for layer in debian.layers:
            shutil.copy(Depot(depot).layer_path(layer), place / "layers")
        made.save(debian)
        yield made
    finally:
        subprocess.run(["umount", "--lazy", place], check=True, timeout=10)


@pytest.mark.parametrize("way", ["direct", "loop"])
async def test_five_builds_and_removals_of_an_image_in_use_leave_the_disk_as_it_was(
    node: ContainerOptions, own_depot: Depot, tmp_path: Path, way: LayerMount
) -> None:
    """CubeSandbox#822, PR#631: deleting a template leaked its image of 1.1 GB. Here each image is of other
    content, sandboxes ran on it, and more of them are kept ready; one that still runs is not disturbed."""

    def free() -> int:
        facts = os.statvfs(own_depot.path)
        return facts.f_bfree * facts.f_frsize

    options = replace(node, layers_checked_s=0.05, stock_size=2, layer_mount=way)
    debian = own_depot.image("debian")
    async with ContainerBackend(options, own_depot.layer_path) as backend:
        base = await backend.create(new_id(), SPEC, debian)
        before = free()
        for number in range(5):
            tree = tmp_path / f"tree{number}"
            tree.mkdir()
            (tree / "data").write_bytes(random.Random(number).randbytes(16 * MIB))
            layers = [*debian.layers, *build_from_tree(own_depot, "data", tree).layers]
            own_depot.save(replace(debian, name="built", layers=layers))
            boxes = [await backend.create(new_id(), SPEC, own_depot.image("built")) for _ in range(3)]
            own_depot.remove("data")
            own_depot.remove("built")
            *others, last = boxes
            for box in others:
                await box.stop()
            digest = hashlib.sha256((tree / "data").read_bytes()).hexdigest()
            assert (await run(last, "sha256sum /data")).stdout.split()[0] == digest
            assert free() < before - 16 * MIB
            await last.stop()
            await support.wait_until(lambda: free() > before - MIB, "its room is free again")
        await base.stop()


def test_ten_names_of_one_content_take_its_room_once(tmp_path: Path) -> None:
    """agentconnect#2282: the image cache grew with each tag of one digest."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "data").write_bytes(random.Random(32).randbytes(4 * MIB))
    depot = Depot(tmp_path / "depot")
    sizes = []
    for number in range(10):
        build_from_tree(depot, f"tag-{number}", tmp_path / "tree", newest_s=1_000_000_000)
        layers = (depot.path / "layers").iterdir()
        sizes.append(sum(layer.stat().st_size for layer in layers))
    assert len(depot.names()) == 10
    assert sizes[0] > 4 * MIB
    assert set(sizes) == {sizes[0]}


@pytest.mark.slow
async def test_a_file_of_any_size_goes_through_flat_memory(
    up: TestYard, box: Sandbox, tmp_path: Path
) -> None:
    """OpenSandbox#1016 names 2 GiB: run it with CLOUDYARD_LARGE_MIB=2048 in the environment."""
    source, back = tmp_path / "source", tmp_path / "back"
    block = random.Random(23).randbytes(MIB)
    with source.open("wb") as file:
        for number in range(LARGE_MIB):
            file.write(number.to_bytes(8) + block[8:])
    pids = up.pids()
    for pid in pids.values():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # their peak is counted from here on
    before = {name: peak_bytes(pid) for name, pid in pids.items()}
    client = json.loads((up.state / "client.json").read_text())
    words = [client["url"], client["token"], box.id, str(source), str(back)]
    done = await anyio.run_process(
        [sys.executable, "-c", MOVE, *words], stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    first, *later = json.loads(done.stdout)
    grown = {name: peak_bytes(pid) - before[name] for name, pid in pids.items()} | {
        "client": max(later) - first
    }
    print(f"{LARGE_MIB} MiB up and down; MiB grown:", {name: size // MIB for name, size in grown.items()})
    assert max(grown.values()) < FLAT_BYTES
    assert await sha256_inside(box, "/root/large") == sha256_here(source) == sha256_here(back)


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    raise AssertionError(f"process {pid} is gone")


def sha256_here(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
