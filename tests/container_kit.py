"""What tests of the container backend look at on the host."""

from __future__ import annotations

from pathlib import Path

from cloudyard.edge.backends.container import ContainerOptions

POOL_SIZE = 3


def places(options: ContainerOptions) -> dict[str, set[str]]:
    """What is on the host of each slot of this yard."""
    groups = Path("/sys/fs/cgroup").glob(f"*/cloudyard/{options.tag}/*/")
    return {
        "cgroups": {group.name for group in groups},
        "boxes": {path.name for path in options.boxes.glob("*")},
        "sockets": {path.stem for path in options.guests.glob("*")},
    }
