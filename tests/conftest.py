"""Fixtures for every test. See `support.py` for the helpers behind them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import support

collect_ignore = ["integrations"]  # run in environments of their own
LEAK_GRACE_S = 10.0  # namespaces and cgroups die some time after their processes


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A live test runs where it can, skips with a reason where it cannot, and fails there if it must work."""
    if item.get_closest_marker("live") is not None and (reason := support.why_not_live()):
        support.cannot_run(reason)


@pytest.fixture
def token() -> str:
    """A unique word. What a live test makes on the host carries it: yard name, state and run directory."""
    return support.new_token()


@pytest.fixture
def yard_dir(token: str) -> Iterator[Path]:
    """An empty directory, short enough for socket paths, named by the token; removed at the end."""
    path = Path(tempfile.gettempdir()) / f"cy-{token}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def leaks(token: str, yard_dir: Path) -> Iterator[None]:
    """Fails the test when anything that carries its token is left on the host a bounded time after it."""
    before = support.take_census(token)
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    while left := support.take_census(token).beyond(before):
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n" + "\n".join(left[:40]), pytrace=False)
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def no_yard_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test talks by accident to the yard that whoever runs the tests works with."""
    for name in [
        name for name in os.environ if name.startswith("CLOUDYARD_") and name != "CLOUDYARD_MUST_WORK"
    ]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def depot() -> Path:
    """A depot with the image `debian`, which has Python. Built once, and kept for later runs and the demo."""
    if reason := support.why_not_live():
        support.cannot_run(reason)
    return support.debian_depot()
