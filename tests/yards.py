"""A whole yard for live tests: raised and lowered by the command line, as a user does it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cloudyard
import support
from cloudyard.assemble import children
from cloudyard.assemble.config import YardConfig, load_config

COMMAND_S = 90.0  # bound of one call of the command line
LOG_LINES = 30  # the last ones of each log, shown with a failure


@dataclass(frozen=True)
class TestYard:
    """Where a yard of a test is. Everything that it makes on the host carries the test's token."""

    __test__ = False

    directory: Path
    depot: Path
    port: int

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def config(self) -> YardConfig:
        return load_config(self.state)

    def call(
        self, *words: str, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `cloudyard` with these words."""
        return subprocess.run(
            [sys.executable, "-m", "cloudyard.cli", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            env={**os.environ, "PYTHONPATH": str(support.REPOSITORY / "src"), **(environment or {})},
        )

    def up(self, *words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        places = (
            "--state",
            str(self.state),
            "--run",
            str(self.directory / "run"),
            "--depot",
            str(self.depot),
        )
        return self.call("up", *places, "--port", str(self.port), *words, environment=environment)

    def down(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.call("down", "--state", str(self.state), *words)

    def pids(self) -> dict[str, int]:
        """Process of each part, the supervisor's too."""
        config = self.config
        found = {plan.name: children.find(plan) for plan in children.plans(config)}
        supervisors = children.find_by_arguments(children.role_arguments("supervisor", config))
        found["supervisor"] = supervisors[0] if supervisors else None
        return {name: process.pid for name, process in found.items() if process is not None}

    def connect(self) -> cloudyard.Yard:
        """The SDK, as a client on this machine would use it."""
        client = json.loads((self.state / "client.json").read_text())
        return cloudyard.connect(url=client["url"], token=client["token"])


@contextmanager
def new_yard(directory: Path, depot: Path) -> Iterator[TestYard]:
    """A yard that is not up yet, and is down at the end whatever happened."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yard = TestYard(directory, depot, port)
    try:
        yield yard
    finally:
        for log in sorted((yard.state / "log").glob("*.log")):  # pytest shows them with a failure
            print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n")
        done = yard.down("--purge")
        assert done.returncode == 0, done.stdout + done.stderr
