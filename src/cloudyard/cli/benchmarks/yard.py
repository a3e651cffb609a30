"""A yard for the length of a benchmark: the one that runs here, or one raised for it and taken down after
it."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudyard.errors import CloudyardError

COMMAND_WAIT_S = 300.0


@contextmanager
def own_yard(depot: Path | None, fill: Callable[[Path], None]) -> Iterator[Path]:
    """A yard of its own state, on a free port. Gives its client file.

    Args:
        depot: where its images are; None for a depot in its own state, which goes with it.
        fill: called with the depot's directory before the yard is raised.

    Raises:
        CloudyardError: it could not be raised, or not be taken down; says what `cloudyard` said.
    """
    token = secrets.token_hex(4)
    state, run = Path(f"/var/tmp/cloudyard-bench-{token}"), Path(f"/run/cloudyard-bench-{token}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    depot = depot or state / "depot"
    up = ("up", "--state", str(state), "--run", str(run), "--depot", str(depot), "--port", port, "--json")
    try:
        fill(depot)
        try:
            yield Path(json.loads(_cloudyard(*up))["client_file"])
        finally:
            _cloudyard("down", "--state", str(state), "--purge")
    finally:
        shutil.rmtree(state, ignore_errors=True)


def _cloudyard(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cloudyard.cli", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_WAIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise CloudyardError(
            f"The benchmark's own yard failed at `cloudyard {words[0]}`: {done.stderr.strip()}",
            code="bench_yard",
        )
    return done.stdout
