"""The real guest for tests: built by its Makefile, run as a plain process and, for root, as PID 1."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import support
from cloudyard.testing.guest_client import GuestClient, RunningGuest, running_guest

GUEST_SOURCES = support.REPOSITORY / "guest"
HOW = [pytest.param(False, id="process"), pytest.param(True, id="pid1", marks=pytest.mark.live)]


def make_guest(target: str) -> list[str]:
    """What a target of guest/'s Makefile prints."""
    made = subprocess.run(
        ["make", "-C", str(GUEST_SOURCES), target], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if made.returncode != 0:
        pytest.fail(f"make {target} failed:\n{made.stderr}", pytrace=False)
    return made.stdout.splitlines()


@pytest.fixture(scope="session")
def guest_frames_test() -> list[str]:
    """What the C side says about the golden frames."""
    return [line for line in make_guest("check") if not line.startswith("make")]


@pytest.fixture(scope="session")
def guest_binary() -> Path:
    """The guest as it is shipped."""
    make_guest("all")
    return GUEST_SOURCES / "build" / "guest"


@pytest.fixture(params=HOW)
def guest(request: pytest.FixtureRequest, guest_binary: Path) -> Iterator[RunningGuest]:
    """A running guest, each way it can run."""
    with running_guest(guest_binary, as_pid_1=request.param) as running:
        yield running


@pytest.fixture
def client(guest: RunningGuest) -> Iterator[GuestClient]:
    """A connection past its HELLO."""
    with guest.connect() as connected:
        yield connected
