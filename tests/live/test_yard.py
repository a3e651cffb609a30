"""`cloudyard up`, `down` and `doctor` on the real machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import support
from cloudyard.fabric import find_nats_server
from yards import TestYard, new_yard

pytestmark = pytest.mark.live


@contextmanager
def external_nats(store: Path) -> Iterator[str]:
    """A nats-server that is not the yard's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(find_nats_server()), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(store)]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(support.WAIT_S)


async def test_a_command_runs_from_up_to_down(yard: TestYard) -> None:
    done = yard.up()
    assert done.returncode == 0, done.stderr
    assert f"http://127.0.0.1:{yard.port}" in done.stdout
    async with yard.connect() as client, client.sandbox(image="debian") as box:
        result = await box.run("python3 -c 'print(6 * 7)'", timeout_s=20)
        assert (result.stdout, result.exit_code) == (b"42\n", 0)
    assert yard.down().returncode == 0
    assert yard.pids() == {}


def test_a_second_up_says_that_the_yard_is_up(yard: TestYard) -> None:
    assert json.loads(yard.up("--json").stdout)["started"] is True
    before = yard.pids()
    again = yard.up("--json")
    assert (again.returncode, json.loads(again.stdout)["started"]) == (0, False)
    assert yard.pids() == before


def test_a_second_yard_on_the_same_state_with_other_settings_is_refused(yard: TestYard) -> None:
    assert yard.up().returncode == 0
    other = yard.call("up", "--state", str(yard.state), "--port", "1")
    assert other.returncode == 1
    assert "other settings" in other.stderr


def test_two_yards_run_side_by_side(yard: TestYard, yard_dir: Path, depot: Path) -> None:
    assert yard.up().returncode == 0
    (yard_dir / "b").mkdir()
    with new_yard(yard_dir / "b", depot) as other:
        done = other.up()
        assert done.returncode == 0, done.stderr
        assert set(yard.pids().values()).isdisjoint(other.pids().values())


def test_a_taken_port_is_named_with_its_owner_and_nothing_is_left(yard: TestYard) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", yard.port))
        taken.listen()
        done = yard.up()
    assert done.returncode == 1
    assert f"Port {yard.port} on 127.0.0.1 is in use by" in done.stderr
    assert f"process {os.getpid()}" in done.stderr


def test_up_after_the_supervisor_was_killed_adopts_what_runs(yard: TestYard) -> None:
    assert yard.up().returncode == 0
    before = yard.pids()
    os.kill(before["supervisor"], signal.SIGKILL)
    support.wait_until_sync(lambda: "supervisor" not in yard.pids(), "the supervisor is gone")
    assert yard.up().returncode == 0
    after = yard.pids()
    assert after.pop("supervisor") != before.pop("supervisor")
    assert after == before


async def test_down_cleans_up_after_everything_was_killed(yard: TestYard) -> None:
    assert yard.up().returncode == 0
    async with yard.connect() as client:
        await client.create_many(3, image="debian")
    for name in ("supervisor", "edge", "control", "nats"):
        os.kill(yard.pids()[name], signal.SIGKILL)
    assert yard.down().returncode == 0  # and the leak check of the fixture sees the rest


def test_the_client_file_belongs_to_whoever_ran_sudo_and_is_within_reach(yard: TestYard) -> None:
    assert yard.up(environment={"SUDO_UID": "1234", "SUDO_GID": "1234"}).returncode == 0
    client = yard.state / "client.json"
    assert (client.stat().st_uid, stat.S_IMODE(client.stat().st_mode)) == (1234, 0o600)
    assert stat.S_IMODE(yard.state.stat().st_mode) == 0o711
    for secret in (yard.config.paths.secrets, yard.config.paths.nats_config):
        assert (secret.stat().st_uid, stat.S_IMODE(secret.stat().st_mode)) == (0, 0o600)


def test_purge_removes_what_the_yard_kept_and_nothing_else(yard: TestYard) -> None:
    assert yard.up().returncode == 0
    theirs = yard.state / "notes.txt"
    theirs.write_text("not a yard's")
    assert yard.down("--purge").returncode == 0
    assert [path.name for path in yard.state.iterdir()] == ["notes.txt"]
    assert (yard.depot / "images" / "debian.json").exists()
    assert not (yard.directory / "run").exists()


def test_without_root_up_says_what_needs_it_and_the_other_ways(yard: TestYard) -> None:
    command = ["unshare", "--user", sys.executable, "-m", "cloudyard.cli", "up", "--state", str(yard.state)]
    environment = {**os.environ, "PYTHONPATH": str(support.REPOSITORY / "src")}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, env=environment
    )
    assert done.returncode == 1
    for words in ("needs root", "mounts", "CLOUDYARD_URL", "virtual machine"):
        assert words in done.stderr
    assert not yard.state.exists()


async def test_an_external_nats_serves_as_well_as_the_yards_own(yard: TestYard) -> None:
    with external_nats(yard.directory / "nats") as url:
        done = yard.up("--url", url)
        assert done.returncode == 0, done.stderr
        assert set(yard.pids()) == {"supervisor", "control", "edge"}
        async with yard.connect() as client, client.sandbox(image="debian") as box:
            assert (await box.run("echo there", timeout_s=20)).stdout == b"there\n"
        assert yard.down().returncode == 0


def test_doctor_starts_a_real_sandbox_and_leaves_nothing(yard: TestYard) -> None:
    done = yard.call("doctor", "--json", "--for", "100", "--state", str(yard.state))
    report = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert done.returncode == 0, done.stdout
    assert findings["a sandbox"]["level"] == "ok"
    assert {bound["name"] for bound in report["bounds"]} >= {"kernel.pid_max", "memory", "uid ranges"}
