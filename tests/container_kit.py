"""What tests of the container backend share: its programs, a yard's options, and what is left on the host."""

from __future__ import annotations

import subprocess
from pathlib import Path

from msgspec.structs import replace

from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
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


def places(options: ContainerOptions) -> dict[str, set[str]]:
    """What is on the host of each slot of this yard."""
    groups = [group for parent in yard_groups(options.tag) for group in parent.glob("*/")]
    return {
        "cgroups": {group.name for group in groups},
        "boxes": {path.name for path in options.boxes.glob("*")},
        "sockets": {path.stem for path in options.guests.glob("*")},
    }


async def sweep(options: ContainerOptions) -> None:
    """Remove every sandbox of this yard."""
    async with ContainerBackend(replace(options, pool_size=0), lambda layer: Path(layer)) as backend:
        await backend.sweep(set())
