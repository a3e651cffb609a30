"""Fixtures of live tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

import support
from cloudyard.edge.backends.container import ContainerOptions
from container_kit import compiled, options_in, places, sweep
from functions_kit import Calls, calls_in
from yards import TestYard, new_yard


@pytest.fixture
def yard(yard_dir: Path, depot: Path, leaks: None) -> Iterator[TestYard]:
    """A yard of this test's own, not up yet. It is brought down at the end, and nothing may be left of it."""
    with new_yard(yard_dir, depot) as made:
        yield made


@pytest.fixture(scope="module")
def up(depot: Path) -> Iterator[TestYard]:
    """A yard that is up, for all tests of a module. Nothing may be left of it at the end."""
    token = support.new_token()
    before = support.take_census(token)
    directory = Path("/tmp") / f"cy-{token}"
    directory.mkdir(mode=0o700)
    with new_yard(directory, depot) as yard:
        done = yard.up()
        assert done.returncode == 0, done.stderr
        yield yard
    directory.rmdir()
    support.wait_until_sync(lambda: not support.take_census(token).beyond(before), "nothing is left")


@pytest.fixture(scope="session")
def programs() -> Path:
    """The directory with the guest and the launcher, compiled."""
    return compiled()


@pytest.fixture
def node(yard_dir: Path, programs: Path, leaks: None) -> Iterator[ContainerOptions]:
    """Options of a container backend without a yard around it. Nothing of it may be left."""
    options = options_in(yard_dir, programs)
    yield options
    if any(places(options).values()):
        anyio.run(sweep, options)


@pytest.fixture
async def calls(node: ContainerOptions, depot: Path) -> AsyncIterator[Calls]:
    """Makes calls in workers of this test's own."""
    async with calls_in(node, depot) as made:
        yield made
