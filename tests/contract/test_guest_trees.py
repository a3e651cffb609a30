"""Trees of processes: reaping, signals that reach everybody, what outlives a command, and killed keepers."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

import support
from cloudyard.testing.guest_client import GuestClient, RunningGuest, Told, running_guest
from cloudyard.wire.guest import Kind, Tag
from guest_fixture import client, guest, guest_binary

__all__ = ["client", "guest", "guest_binary"]

ORPHANS = 200
LEAVERS = (
    "(setsid sleep 333 &) ; (sh -c 'setsid sleep 333 &' &) ; "
    "setsid sh -c 'trap : TERM HUP INT; while :; do sleep 333; done' &"
)
PID_1 = pytest.param(True, id="pid1", marks=pytest.mark.live)


def descendants(root: int) -> dict[int, tuple[int, str, str]]:
    """pid: (parent, state, name) of every process below `root`, as this machine sees them."""
    found: dict[int, tuple[int, str, str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                head, _, rest = Path(f"/proc/{entry}/stat").read_text().rpartition(")")
            except OSError:
                continue
            state, parent = rest.split()[:2]
            found[int(entry)] = (int(parent), state, head.partition("(")[2])
    below = {root}
    while grown := {pid for pid, (parent, _, _) in found.items() if parent in below} - below:
        below |= grown
    return {pid: found[pid] for pid in below - {root}}


def wait_for_nobody(guest: RunningGuest) -> None:
    support.wait_until_sync(lambda: not descendants(guest.pid), f"processes left: {descendants(guest.pid)}")


def wait_for(guest: RunningGuest, name: str, count: int) -> None:
    def there() -> bool:
        return sum(each[2] == name for each in descendants(guest.pid).values()) >= count

    support.wait_until_sync(there, f"{count} processes named {name}")


def test_two_hundred_orphans_are_reaped(guest: RunningGuest, client: GuestClient) -> None:
    """microsandbox#1201 had 793 zombies under PID 1."""
    told = client.run(1, f"i=0; while [ $i -lt {ORPHANS} ]; do (sleep 0.2 &) ; i=$((i+1)); done; echo made")
    assert (told.stdout, told.exit_code) == (b"made\n", 0)
    client.until(lambda: told.last(Kind.TREE_GONE) is not None)
    wait_for_nobody(guest)


def test_kill_reaches_children_that_left_the_session(guest: RunningGuest, client: GuestClient) -> None:
    """openclaw#110735: children lived on after a timeout."""
    told = client.start(1, LEAVERS + " wait")
    wait_for(guest, "sleep", 3)
    client.signal(1, signal.SIGKILL)
    client.until(lambda: told.result is not None)
    assert told.signal == signal.SIGKILL
    wait_for_nobody(guest)


def test_a_signal_reaches_the_whole_tree(guest: RunningGuest, client: GuestClient) -> None:
    told = client.start(1, "(setsid sleep 333 &) ; (setsid sleep 334 &) ; sleep 335; echo survived")
    wait_for(guest, "sleep", 3)
    client.signal(1, signal.SIGTERM)
    client.until(lambda: told.result is not None)
    assert told.signal == signal.SIGTERM
    wait_for_nobody(guest)


def test_one_trees_signal_leaves_the_others_alone(guest: RunningGuest, client: GuestClient) -> None:
    other = client.start(1, ["sleep", "60"])
    told = client.start(2, ["sleep", "60"])
    client.until(lambda: told.started is not None and other.started is not None)
    client.signal(2, signal.SIGKILL)
    client.until(lambda: told.result is not None)
    assert client.list()[1].number(Tag.RUNNING) == 1
    client.signal(1, signal.SIGKILL)
    client.until(lambda: other.result is not None)


def test_a_fork_storm_is_killed(guest: RunningGuest, client: GuestClient) -> None:
    work = "while :; do (sleep 0.1 &) ; sleep 0.1; done"
    node = "f() { [ $1 = 0 ] || { f $(($1 - 1)) & f $(($1 - 1)) & } ; %s; }" % work  # noqa: UP031 - full of braces
    told = client.start(1, f"{node}; f 5")
    wait_for(guest, "sh", 60)
    client.signal(1, signal.SIGKILL)
    client.until(lambda: told.result is not None)
    wait_for_nobody(guest)


def test_a_background_child_outlives_the_command_and_holds_nothing_up(
    guest: RunningGuest, client: GuestClient
) -> None:
    told = client.run(1, "sleep 60 & echo done")
    assert told.result is not None
    assert (told.stdout, told.exit_code) == (b"done\n", 0)
    assert told.result.number(Tag.DETACHED) == 1
    assert told.result.number(Tag.TREE_ALIVE) == 1
    assert told.result.number(Tag.DURATION_US) < 100_000
    assert [each[2] for each in descendants(guest.pid).values() if each[2] == "sleep"] == ["sleep"]
    client.signal(1, signal.SIGTERM)
    client.until(lambda: told.last(Kind.TREE_GONE) is not None)
    wait_for_nobody(guest)


def test_what_a_background_child_prints_at_once_is_still_read(client: GuestClient) -> None:
    told = client.run(1, "(sleep 0.03; echo late) & echo early")
    assert told.result is not None
    assert (told.stdout, told.result.number(Tag.DETACHED)) == (b"early\nlate\n", 0)


def test_a_daemon_that_writes_later_neither_blocks_nor_dies(client: GuestClient, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    told = client.run(
        1, f"(sleep 0.3; dd if=/dev/zero bs=1M count=4 && echo alive >{mark}; sleep 60) & echo up"
    )
    assert (told.stdout, told.exit_code) == (b"up\n", 0)
    support.wait_until_sync(lambda: mark.exists() and mark.read_text() == "alive\n", "the daemon wrote 4 MB")
    assert client.told[1].stdout == b"up\n"
    client.signal(1, signal.SIGKILL)
    client.until(lambda: told.last(Kind.TREE_GONE) is not None)


def keeper_of(guest: RunningGuest, told: Told) -> int:
    """The keeper of the only command, by the host's numbers."""
    assert told.started is not None
    return next(pid for pid, (_, _, name) in descendants(guest.pid).items() if name == "keeper")


def test_a_killed_keeper_ends_its_tree_and_is_told(guest: RunningGuest, client: GuestClient) -> None:
    told = client.start(1, LEAVERS + " echo up; wait")
    other = client.start(2, ["sleep", "60"])
    client.until(lambda: told.stdout == b"up\n" and other.started is not None)
    wait_for(guest, "sleep", 4)
    keepers = [pid for pid, each in descendants(guest.pid).items() if each[2] == "keeper"]
    os.kill(min(keepers), signal.SIGKILL)
    client.until(lambda: told.result is not None)
    assert (told.signal, told.stdout) == (signal.SIGKILL, b"up\n")
    assert client.list()[2].number(Tag.RUNNING) == 1
    client.signal(2, signal.SIGKILL)
    client.until(lambda: other.result is not None)
    wait_for_nobody(guest)


def test_a_killed_keeper_of_a_detached_tree_ends_it(guest: RunningGuest, client: GuestClient) -> None:
    told = client.run(1, "sleep 60 & echo done")
    os.kill(keeper_of(guest, told), signal.SIGKILL)
    client.until(lambda: told.last(Kind.TREE_GONE) is not None)
    wait_for_nobody(guest)


def test_a_stopped_keeper_goes_on(guest: RunningGuest, client: GuestClient) -> None:
    told = client.start(1, ["sleep", "0.3"])
    client.until(lambda: told.started is not None)
    os.kill(keeper_of(guest, told), signal.SIGSTOP)
    client.until(lambda: told.exit_code == 0)


def test_a_keeper_that_dies_between_two_looks_loses_nothing(guest: RunningGuest, client: GuestClient) -> None:
    """Whatever the moment: every command gets its result, and nobody is left."""
    for command in range(1, 31):
        told = client.start(command, "sleep 0.05 & exec sleep 60")
        if command % 3:
            client.until(lambda told=told: told.started is not None)
        while told.result is None:
            for pid, each in descendants(guest.pid).items():
                if each[2] in ("keeper", "guest"):
                    with suppress(ProcessLookupError):  # it has ended since
                        os.kill(pid, signal.SIGKILL)
            client.pump(0.02)
        assert told.signal == signal.SIGKILL
        client.send(Kind.FORGET, command)
    wait_for_nobody(guest)
    assert client.list() == {}


@pytest.mark.parametrize("guest", [PID_1], indirect=True)
def test_root_of_the_sandbox_cannot_hurt_pid_1(guest: RunningGuest, client: GuestClient) -> None:
    told = client.run(
        1,
        "for n in KILL STOP TERM SEGV INT HUP ABRT; do kill -$n 1; done; renice -n 10 1; taskset -p 1 1 >&2;"
        "cat /proc/1/mem /proc/1/environ; readlink /proc/1/fd/* /proc/1/exe; prlimit -p 1 --nofile=1:1;"
        "echo end",
    )
    assert told.stdout == b"end\n"
    assert os.getpriority(os.PRIO_PROCESS, guest.pid) == 0
    assert client.run(2, ["true"]).exit_code == 0


@pytest.mark.parametrize("guest", [PID_1], indirect=True)
def test_a_command_that_kills_all_it_can_ends_and_is_told(guest: RunningGuest, client: GuestClient) -> None:
    other = client.start(1, ["sleep", "60"])
    client.until(lambda: other.started is not None)
    told = client.run(2, "kill -9 -1; sleep 60")
    client.until(lambda: other.result is not None)
    assert (told.signal, other.signal) == (signal.SIGKILL, signal.SIGKILL)
    assert client.run(3, "echo fine").stdout == b"fine\n"
    wait_for_nobody(guest)


def test_a_guest_that_is_killed_leaves_nobody(guest_binary: Path, tmp_path: Path) -> None:
    word = f"cy-guest-{os.getpid()}-left"
    with running_guest(guest_binary) as guest, guest.connect() as client:
        client.start(1, ["sh", "-c", f"(setsid sh -c 'sleep 333; : {word}' &) ; sleep 333; : {word}"])
        wait_for(guest, "sleep", 2)
        os.kill(guest.pid, signal.SIGKILL)

        def nobody() -> bool:
            return not any(word in _arguments(entry) for entry in os.listdir("/proc") if entry.isdigit())

        support.wait_until_sync(nobody, "keepers end their trees when the guest goes")


def _arguments(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
