"""What tests of the container backend share: its programs, and a yard that leaves nothing behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.images.depot import Depot
from cloudyard.model import Image
from container_kit import POOL_SIZE, places
from support import REPOSITORY

GUEST_DIR = REPOSITORY / "guest"


@pytest.fixture(scope="session")
def programs() -> Path:
    """The directory with the guest and the launcher, compiled."""
    subprocess.run(["make", "-s", "-C", str(GUEST_DIR)], check=True, timeout=300, stdin=subprocess.DEVNULL)
    return GUEST_DIR / "build"


@pytest.fixture
def yard(yard_dir: Path, programs: Path) -> Iterator[ContainerOptions]:
    """Options of a yard. What a failed test leaves of it is removed."""
    options = ContainerOptions(
        state=yard_dir / "state",
        run=yard_dir / "run",
        launcher=programs / "launch",
        guest=programs / "guest",
        pool_size=POOL_SIZE,
        prepared_at_once=2,
        stock_size=0,  # so that what is left can be counted; sandboxes raised ahead have tests of their own
    )
    yield options
    if any(places(options).values()):
        anyio.run(sweep, options)


async def sweep(options: ContainerOptions) -> None:
    async with ContainerBackend(replace(options, pool_size=0), lambda layer: Path(layer)) as backend:
        await backend.sweep(set())


@pytest.fixture
def options(yard: ContainerOptions, leaks: None) -> ContainerOptions:
    """The same; and the test fails for what is left."""
    return yard


@pytest.fixture
def image(depot: Path) -> Image:
    return Depot(depot).image("debian")
