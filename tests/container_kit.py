"""What tests of the container backend share: its programs, a yard's options, and what is left on the host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from msgspec.structs import replace

from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.edge.host import loops, syscalls
from support import REPOSITORY, yard_groups

POOL_SIZE = 3
GUEST_DIR = REPOSITORY / "guest"


def compiled() -> Path:
    """The directory with the guest and the launcher, compiled."""
    subprocess.run(["make", "-s", "-C", str(GUEST_DIR)], check=True, timeout=300, stdin=subprocess.DEVNULL)
    return GUEST_DIR / "build"


def options_in(directory: Path, programs: Path) -> ContainerOptions:
    """Options of a yard there."""
    return ContainerOptions(
        state=directory / "state",
        run=directory / "run",
        launcher=programs / "launch",
        guest=programs / "guest",
        pool_size=POOL_SIZE,
        prepared_at_once=2,
        stock_size=0,  # so that what is left can be counted; sandboxes raised ahead have tests of their own
    )


def disk_names(options: ContainerOptions) -> list[str]:
    """Disks of this yard's sandboxes: in its directory, and in its pool as long as somebody uses that."""
    names = os.listdir(options.boxes) if options.boxes.exists() else []
    if options.disk_pool.exists():
        with open(options.disk_pool, "rb") as file:
            found = loops.find(file.fileno())
        if found is not None:
            device, name = found
            mount = syscalls.new_mount("btrfs", name, attributes=0, options=())
            os.close(device)
            names += os.listdir(f"/proc/self/fd/{mount}")
            os.close(mount)
    return names


def places(options: ContainerOptions) -> dict[str, set[str]]:
    """What is on the host of each slot of this yard."""
    groups = [group for parent in yard_groups(options.tag) for group in parent.glob("*/")]
    return {
        "cgroups": {group.name for group in groups},
        "disks": set(disk_names(options)),
        "sockets": {path.stem for path in options.guests.glob("*")},
    }


async def sweep(options: ContainerOptions) -> None:
    """Remove every sandbox of this yard."""
    async with ContainerBackend(replace(options, pool_size=0), lambda layer: Path(layer)) as backend:
        await backend.sweep(set())
