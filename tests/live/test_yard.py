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

import anyio
import pytest

import support
from cloudyard.assemble import children
from cloudyard.fabric import find_nats_server
from yards import TestYard, new_yard

pytestmark = pytest.mark.live


@contextmanager
def external_nats(store: Path, *, jetstream: bool = True) -> Iterator[str]:
    """A nats-server that is not the yard's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(find_nats_server()), "-a", "127.0.0.1", "-p", str(port)]
    if jetstream:
        command += ["-js", "-sd", str(store)]
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


async def test_a_yard_with_a_damaged_configuration_goes_down_and_comes_up_again(yard: TestYard) -> None:
    assert yard.up().returncode == 0
    async with yard.connect() as client:
        await client.create("debian")
    config = yard.config
    config.paths.config.write_text('{"state": "/tmp')
    again = yard.up()
    assert again.returncode == 2
    assert "cloudyard down stops that yard all the same" in again.stderr
    done = yard.down()
    assert done.returncode == 0, done.stderr
    assert "cannot be read" in done.stdout
    assert not any(children.find(plan) for plan in children.plans(config))
    assert not config.paths.run.exists()
    assert yard.up().returncode == 0
    async with yard.connect() as client, client.sandbox(image="debian") as box:
        assert (await box.run("true")).ok
    (yard.state / "yard.json").write_text('{"state": "/tmp')
    assert yard.down("--purge").returncode == 0
    assert not yard.state.exists()


async def test_killing_all_ends_what_runs_and_what_hides_and_leaves_files(yard: TestYard) -> None:
    assert yard.up().returncode == 0
    async with yard.connect() as client, client.sandbox(image="debian") as box:
        hidden = "while :; do echo x >> /tmp/log; sleep 0.01; done"
        await box.run(["setsid", "sh", "-c", f"trap '' TERM HUP; ({hidden}) </dev/null >/dev/null 2>&1 &"])
        process = await box.start("echo ready; sleep 1000")
        async for _ in process.stdout():
            break
        await box.kill_all()
        done = await process.wait()
        assert done.signal == signal.SIGKILL
        assert done.fault is not None
        assert (done.fault.label, done.fault.reason) == ("policy", "killed")
        seen = await box.run("echo /proc/[0-9]*")
        assert len(seen.text.split()) == 3  # PID 1, the keeper of this command, and its shell
        before = await box.read("/tmp/log")
        assert before.startswith(b"x\n")
        assert await box.read("/tmp/log") == before


async def test_kill_all_returns_when_a_command_ends_meanwhile(yard: TestYard) -> None:
    assert yard.up().returncode == 0
    async with yard.connect() as client, client.sandbox(image="debian") as box:
        for _ in range(10):
            with anyio.move_on_after(0.1):
                await box.run("sleep 1000")  # its cancellation kills it, and so does what follows
            with anyio.fail_after(support.WAIT_S):
                await box.kill_all()


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
    assert not yard.state.exists()
    assert not (yard.directory / "run").exists()


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


@contextmanager
def full_disk(directory: Path) -> Iterator[None]:
    """The directory on a file system with hardly any room."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "tmpfs", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_full_disk_is_named_and_nothing_is_started(yard: TestYard) -> None:
    with full_disk(yard.state):
        done = yard.up()
        assert done.returncode == 1
        assert f"0 MiB free in {yard.state}" in done.stderr
        assert "--state" in done.stderr
        assert list(yard.state.iterdir()) == []


@pytest.mark.parametrize("option", ["--state", "--run"])
def test_a_directory_that_holds_something_else_is_refused_and_left_as_it_was(
    yard: TestYard, option: str
) -> None:
    theirs = yard.directory / "theirs"
    theirs.mkdir(mode=0o755)
    (theirs / "notes.txt").write_text("not a yard's")
    before = theirs.stat()
    done = yard.up(option, str(theirs))
    assert done.returncode == 1
    assert f"{option} {theirs} is not empty and is no yard's" in done.stderr
    after = theirs.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert not yard.state.exists()


def test_down_leaves_directories_that_were_there_before_with_what_others_put_into_them(
    yard: TestYard,
) -> None:
    run = yard.directory / "run"
    for directory in (yard.state, run):
        directory.mkdir(mode=0o755)
    assert yard.up().returncode == 0
    (run / "notes.txt").write_text("not a yard's")
    assert stat.S_IMODE(yard.state.stat().st_mode) == 0o755
    assert yard.down("--purge").returncode == 0
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    assert list(yard.state.iterdir()) == []


def test_the_run_directory_of_another_yard_is_refused(yard: TestYard) -> None:
    assert yard.up().returncode == 0
    other = yard.directory / "other"
    done = yard.call("up", "--state", str(other), "--run", str(yard.directory / "run"))
    assert done.returncode == 1
    assert f"belongs to the yard in {yard.state}" in done.stderr
    assert not other.exists()
    assert yard.pids()


def test_a_directory_that_others_can_write_to_is_refused(yard: TestYard) -> None:
    yard.state.mkdir()
    yard.state.chmod(0o777)
    done = yard.up()
    assert done.returncode == 2
    assert "written to by other users" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--url", "foo"), "'foo' is no address of NATS"),
        (("--url", "http://127.0.0.1:4222"), "is no address of NATS"),
        (("--url", "nats://127.0.0.1:1"), "No NATS listens at 127.0.0.1:1"),
        (("--host", "nosuch.invalid"), "'nosuch.invalid' cannot be resolved"),
        (("--host", "192.0.2.1"), "no address of this machine"),
        (("--host", ""), "--host"),
        (("--cpu-overcommit", "-1"), "--cpu-overcommit is -1"),
        (("--memory-overcommit", "nan"), "--memory-overcommit is nan"),
        (("--port", "0"), "--port is 0"),
    ],
)
def test_an_option_that_cannot_work_is_named_and_nothing_is_left(
    yard: TestYard, words: tuple[str, ...], said: str
) -> None:
    done = yard.up(*words)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in yard.directory.iterdir() if path.name in ("state", "run")) == []


def test_a_run_directory_around_the_images_is_refused(yard: TestYard) -> None:
    done = yard.up("--run", str(yard.depot.parent))
    assert done.returncode == 2
    assert "which cloudyard down removes" in done.stderr


def test_a_first_up_that_fails_leaves_no_file(yard: TestYard, tmp_path: Path) -> None:
    with external_nats(tmp_path / "nats", jetstream=False) as url:
        done = yard.up("--url", url)
    assert done.returncode == 1
    assert "did not come up" in done.stderr
    assert not yard.state.exists()
    assert not (yard.directory / "run").exists()


def test_a_state_directory_that_is_a_file_is_named(yard: TestYard) -> None:
    yard.state.write_text("")
    done = yard.up()
    assert done.returncode == 2
    assert str(yard.state) in done.stderr


def test_doctor_starts_a_real_sandbox_and_leaves_nothing(yard: TestYard) -> None:
    done = yard.call("doctor", "--json", "--for", "100", "--state", str(yard.state))
    report = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert done.returncode == 0, done.stdout
    assert findings["a sandbox"]["level"] == "ok"
    assert {bound["name"] for bound in report["bounds"]} >= {"kernel.pid_max", "memory", "uid ranges"}


def test_doctor_fails_where_so_many_sandboxes_do_not_fit(yard: TestYard) -> None:
    done = yard.call("doctor", "--json", "--for", "100000000", "--state", str(yard.state))
    report = json.loads(done.stdout)
    assert (done.returncode, report["good"]) == (1, False)
    assert "100,000,000 are too many for one machine" in report["verdict"]


@pytest.mark.parametrize("count", ["0", "-5"])
def test_doctor_refuses_a_number_of_sandboxes_below_one(yard: TestYard, count: str) -> None:
    done = yard.call("doctor", f"--for={count}", "--state", str(yard.state))
    assert done.returncode == 2
    assert f"--for is {count}" in done.stderr
