"""What tests of the container backend share: its programs, and a yard that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from cloudyard.edge.backends.container import ContainerOptions
from cloudyard.images.depot import Depot
from cloudyard.model import Image
from container_kit import compiled, options_in, places, sweep


@pytest.fixture(scope="session")
def programs() -> Path:
    """The directory with the guest and the launcher, compiled."""
    return compiled()


@pytest.fixture
def yard(yard_dir: Path, programs: Path) -> Iterator[ContainerOptions]:
    """Options of a yard. What a failed test leaves of it is removed."""
    options = options_in(yard_dir, programs)
    yield options
    if any(places(options).values()):
        anyio.run(sweep, options)


@pytest.fixture
def options(yard: ContainerOptions, leaks: None) -> ContainerOptions:
    """The same; and the test fails for what is left."""
    return yard


@pytest.fixture
def image(depot: Path) -> Image:
    return Depot(depot).image("debian")
