"""The supervisor with real processes: what ends is started again, and what lives is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import support
from cloudyard.assemble import children, supervisor
from cloudyard.assemble.children import ChildPlan
from cloudyard.assemble.config import YardConfig, make_config, save_config

SCRIPT = """
import sys, anyio
from pathlib import Path
from cloudyard.assemble import supervisor
from cloudyard.assemble.children import ChildPlan
from cloudyard.assemble.config import load_config
config = load_config(Path(sys.argv[1]))
plan = ChildPlan("sleeper", ("/bin/sleep", sys.argv[2]), config.paths.logs / "sleeper.log")
anyio.run(supervisor.supervise, config, [plan])
"""


@pytest.fixture
def config(yard_dir: Path) -> YardConfig:
    made = make_config(
        state=yard_dir / "state", run=yard_dir / "run", depot=None, host="127.0.0.1", port=8470
    )
    made.paths.logs.mkdir(parents=True)
    save_config(made)
    return made


@pytest.fixture
def plan(config: YardConfig) -> Iterator[ChildPlan]:
    unique = (
        f"9{os.getpid()}.{abs(hash(config.state)) % 10**6:06}"  # a length of sleep that nobody else asks for
    )
    made = ChildPlan("sleeper", ("/bin/sleep", unique), config.paths.logs / "sleeper.log")
    yield made
    for process in children.find_by_arguments(made.argv[1:]):
        os.kill(process.pid, signal.SIGKILL)


def start(config: YardConfig, plan: ChildPlan) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(support.REPOSITORY / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, config.state, plan.argv[1]],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


def wait_child(plan: ChildPlan, *, other_than: int = 0) -> children.Running:
    def there() -> bool:
        found = children.find(plan)
        return found is not None and found.pid != other_than

    support.wait_until_sync(there, "the child runs")
    found = children.find(plan)
    assert found is not None
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_a_killed_child_is_started_again(config: YardConfig, plan: ChildPlan) -> None:
    running = start(config, plan)
    try:
        first = wait_child(plan)
        os.kill(first.pid, signal.SIGKILL)
        second = wait_child(plan, other_than=first.pid)
        assert os.getsid(second.pid) == second.pid
        support.wait_until_sync(
            lambda: children.read_notes(config)["sleeper"].pid == second.pid, "the note names the new process"
        )
    finally:
        kill(running)


def test_children_outlive_a_killed_supervisor_and_are_adopted_by_the_next(
    config: YardConfig, plan: ChildPlan
) -> None:
    first = start(config, plan)
    child = wait_child(plan)
    kill(first)
    assert children.is_alive(child)
    second = start(config, plan)
    try:
        support.wait_until_sync(
            lambda: supervisor.is_locked(config.paths.supervisor_lock), "the second supervisor holds the lock"
        )
        support.wait_until_sync(
            lambda: children.read_notes(config)["sleeper"].starts == 0, "the second supervisor adopted it"
        )
        assert children.find_by_arguments(plan.argv[1:]) == [child]
        os.kill(child.pid, signal.SIGKILL)  # one that it did not start is watched all the same
        assert wait_child(plan, other_than=child.pid) != child
    finally:
        kill(second)


def test_sigterm_ends_the_children(config: YardConfig, plan: ChildPlan) -> None:
    running = start(config, plan)
    wait_child(plan)
    running.terminate()
    assert running.wait(support.WAIT_S) == 0
    assert children.find(plan) is None
    assert children.read_notes(config) == {}


def test_a_second_supervisor_of_the_same_state_is_refused(config: YardConfig, plan: ChildPlan) -> None:
    first = start(config, plan)
    try:
        child = wait_child(plan)
        second = start(config, plan)
        assert second.wait(support.WAIT_S) == 1
        assert children.find_by_arguments(plan.argv[1:]) == [child]
    finally:
        kill(first)
