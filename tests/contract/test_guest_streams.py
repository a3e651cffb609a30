"""Output and many commands: windows, slow readers, reconnects, limits, and memory that stays flat."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest

from cloudyard.testing.guest_client import GuestClient, RunningGuest
from cloudyard.wire.guest import (
    GUEST_COMMANDS_MAX,
    OUTPUT_WINDOW,
    PROTOCOL_VERSION,
    STDERR,
    STDOUT,
    Kind,
    Options,
    Tag,
    encode,
)
from guest_fixture import client, guest, guest_binary

__all__ = ["client", "guest", "guest_binary"]

MANY = 100
RSS_MAX_KIB = 1024
CYCLE = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done"


def test_both_streams_come_whole_and_in_order(client: GuestClient) -> None:
    told = client.run(1, f"({CYCLE}) ; ({CYCLE}) >&2")
    expected = b"".join(b"line %d\n" % i for i in range(20_000))
    assert told.stdout == told.stderr == expected
    assert told.result is not None
    assert told.result.number(Tag.STDOUT_TOTAL) == told.result.number(Tag.STDERR_TOTAL) == len(expected)


def test_a_reader_that_never_acknowledges_blocks_its_own_command_only(guest: RunningGuest) -> None:
    """E2B#1587, #1352: one stalled reader froze everybody's output."""
    with guest.connect(acknowledge=False) as client:
        slow = client.start(1, ["dd", "if=/dev/zero", "bs=64k", "count=64", "status=none"])
        client.until(lambda: len(slow.stdout) == OUTPUT_WINDOW)
        for command in range(2, 12):
            assert client.run(command, ["echo", "quick"]).stdout == b"quick\n"
        assert client.list()[1].number(Tag.STDOUT_TOTAL) == OUTPUT_WINDOW
        while slow.result is None:
            client.send(Kind.OUTPUT_ACK, 1, (Tag.STREAM, STDOUT), (Tag.OFFSET, len(slow.stdout)))
            client.pump(0.2)
        assert len(slow.stdout) == 64 * 64 * 1024


def test_a_full_window_of_one_stream_leaves_the_other_open(guest: RunningGuest) -> None:
    with guest.connect(acknowledge=False) as client:
        told = client.start(1, "(dd if=/dev/zero bs=64k count=64 status=none &) ; echo other >&2; sleep 60")
        client.until(lambda: len(told.stdout) == OUTPUT_WINDOW and told.stderr == b"other\n")
        client.signal(1, signal.SIGKILL)


def test_what_lies_in_the_pipe_at_the_end_is_read_however_slow_the_edge_is(guest: RunningGuest) -> None:
    size = OUTPUT_WINDOW + 50_000  # a full window, and the rest in the pipe
    with guest.connect(acknowledge=False) as client:
        told = client.start(1, f"sleep 60 & exec head -c {size} /dev/zero")
        client.until(lambda: len(told.stdout) == OUTPUT_WINDOW)
        assert not client.pump(0.4)
        client.send(Kind.OUTPUT_ACK, 1, (Tag.STREAM, STDOUT), (Tag.OFFSET, OUTPUT_WINDOW))
        client.until(lambda: told.result is not None)
        assert told.result is not None
        assert (len(told.stdout), told.result.number(Tag.DETACHED)) == (size, 1)
        client.signal(1, signal.SIGKILL)
        client.until(lambda: told.last(Kind.TREE_GONE) is not None)


def test_fifty_megabytes_pass_and_memory_stays_flat(guest: RunningGuest, client: GuestClient) -> None:
    before = guest.rss_kib()
    client.run(1, ["dd", "if=/dev/urandom", "bs=1M", "count=1", "status=none"])
    told = client.run(2, "yes 0123456789abcdef | head -c 52428800; echo end >&2", bound_s=60)
    assert (
        hashlib.sha256(told.stdout).digest()
        == hashlib.sha256((b"0123456789abcdef\n" * 3_084_048)[:52428800]).digest()
    )
    assert told.stderr == b"end\n"
    assert guest.rss_kib() - before < RSS_MAX_KIB


def test_a_hundred_commands_run_at_once(client: GuestClient) -> None:
    everyone = [client.start(n, f"read x; echo {n} $x", options=Options.STDIN) for n in range(1, MANY + 1)]
    client.until(lambda: all(told.started for told in everyone))
    for n in range(1, MANY + 1):
        client.send(Kind.STDIN, n, (Tag.OFFSET, 0), (Tag.DATA, b"go\n"), (Tag.EOF, 1))
    client.until(lambda: all(told.result for told in everyone))
    assert [told.stdout for told in everyone] == [b"%d go\n" % n for n in range(1, MANY + 1)]


def test_more_commands_than_the_limit_are_refused_until_one_is_forgotten(client: GuestClient) -> None:
    everyone = [client.start(n, ["true"]) for n in range(1, GUEST_COMMANDS_MAX + 1)]
    client.until(lambda: all(told.result for told in everyone))
    assert {told.exit_code for told in everyone} == {0}
    refused = client.start(1000, ["true"])
    client.until(lambda: refused.result is not None)
    assert refused.result is not None
    assert (refused.result.kind, refused.result.text(Tag.WHAT)) == (Kind.NOT_STARTED, "limit")
    client.send(Kind.FORGET, 7)
    assert client.run(1001, ["true"]).exit_code == 0


def test_a_new_connection_replaces_the_old_after_its_hello(guest: RunningGuest, client: GuestClient) -> None:
    with guest.connect(hello=False) as newer:
        client.send(Kind.PING, 0, (Tag.DATA, b"still here"))
        client.until(lambda: any(frame.data(Tag.DATA) == b"still here" for frame in client.frames))
        newer.send(Kind.HELLO, 0, (Tag.VERSION_MIN, PROTOCOL_VERSION), (Tag.VERSION_MAX, PROTOCOL_VERSION))
        newer.until(lambda: bool(newer.frames))
        with pytest.raises(ConnectionError):
            client.until(lambda: False, bound_s=5)


def test_a_command_survives_the_edge_with_its_pid_and_every_byte(guest: RunningGuest) -> None:
    with guest.connect() as first:
        told = first.start(
            1, "i=0; while [ $i -lt 60 ]; do echo line $i; i=$((i+1)); sleep 0.01; done; exit 9"
        )
        first.until(lambda: len(told.stdout) > 30)
        seen, before = told.stdout, told.started
    with guest.connect() as second:
        state = second.list()[1]
        assert before is not None
        assert state.number(Tag.RUNNING) == 1
        assert [state.number(tag) for tag in (Tag.PID, Tag.PID_START)] == [
            before.number(tag) for tag in (Tag.PID, Tag.PID_START)
        ]
        told = second.resume(1, stdout=len(seen))
        second.until(lambda: told.result is not None)
        assert seen + told.stdout == b"".join(b"line %d\n" % i for i in range(60))
        assert told.exit_code == 9
        assert told.started == before


def test_a_result_is_sent_again_until_it_is_forgotten(guest: RunningGuest) -> None:
    with guest.connect(acknowledge=False) as client:
        told = client.start(1, "echo out; echo err >&2; exit 3")
        failed = client.start(2, ["no-such-program"])
        client.until(lambda: told.result is not None and failed.result is not None)
    for _ in range(2):
        with guest.connect(acknowledge=False) as client:
            assert {n: state.number(Tag.RUNNING) for n, state in client.list().items()} == {1: 0, 2: 0}
            assert not client.pump(0.1), "nothing is told before it is asked for"
            told, failed = client.resume(1), client.resume(2)
            client.until(
                lambda told=told, failed=failed: told.result is not None and failed.result is not None
            )
            assert (told.stdout, told.stderr, told.exit_code) == (b"out\n", b"err\n", 3)
            assert failed.result is not None
            assert failed.result.text(Tag.TEXT) == "no-such-program"
    with guest.connect() as client:
        client.send(Kind.FORGET, 1)
        client.send(Kind.FORGET, 2)
        assert client.list() == {}


def test_a_result_waits_for_both_streams_to_be_resumed(guest: RunningGuest) -> None:
    with guest.connect(acknowledge=False) as client:
        told = client.start(1, "echo out; echo err >&2")
        client.until(lambda: told.result is not None)
    with guest.connect(acknowledge=False) as client:
        told = client.told[1]
        client.send(Kind.RESUME, 1, (Tag.STREAM, STDOUT), (Tag.OFFSET, 2))
        told.offset[STDOUT] = 2
        client.until(lambda: told.stdout == b"t\n")
        assert not client.pump(0.1)
        assert told.result is None
        client.send(Kind.RESUME, 1, (Tag.STREAM, STDERR), (Tag.OFFSET, 0))
        client.until(lambda: told.result is not None)


def test_a_resume_below_what_was_acknowledged_shows_the_gap(guest: RunningGuest) -> None:
    with guest.connect() as client:
        told = client.start(1, "echo first; read x; echo second", options=Options.STDIN)
        client.until(lambda: told.stdout == b"first\n")
        client.list()  # the acknowledgement has been read
    with guest.connect() as client:
        client.send(Kind.STDIN, 1, (Tag.OFFSET, 0), (Tag.DATA, b"\n"))
        told = client.resume(1)
        told.offset[STDOUT] = len(b"first\n")
        client.until(lambda: told.result is not None)
        assert told.stdout == b"second\n"


def test_stdin_goes_on_over_a_reconnect(guest: RunningGuest) -> None:
    with guest.connect() as client:
        told = client.start(1, ["cat"], options=Options.STDIN)
        client.feed(1, b"before ", eof=False)
        client.until(lambda: told.stdout == b"before ")
    with guest.connect() as client:
        assert client.list()[1].number(Tag.STDIN_TAKEN) == 7
        told = client.resume(1, stdout=7)
        client.send(Kind.STDIN, 1, (Tag.OFFSET, 0), (Tag.DATA, b"before and after"), (Tag.EOF, 1))
        client.until(lambda: told.result is not None)
        assert told.stdout == b"and after"


def test_a_command_that_fills_its_window_while_no_edge_is_there_goes_on_later(guest: RunningGuest) -> None:
    with guest.connect(acknowledge=False) as client:
        client.start(1, "head -c 1000000 /dev/zero; echo end >&2")
    with guest.connect() as client:
        client.until(lambda: client.list()[1].number(Tag.STDOUT_TOTAL) == OUTPUT_WINDOW)
        told = client.resume(1)
        client.until(lambda: told.result is not None)
        assert (len(told.stdout), told.stderr, told.exit_code) == (1_000_000, b"end\n", 0)


def test_a_running_command_cannot_be_forgotten(client: GuestClient) -> None:
    told = client.start(1, ["sleep", "60"])
    client.send(Kind.FORGET, 1)
    client.until(lambda: told.last(Kind.ERROR) is not None)
    client.signal(1, signal.SIGKILL)
    client.until(lambda: told.signal == signal.SIGKILL)


def test_a_flood_of_questions_that_nobody_reads_ends_the_connection_only(guest: RunningGuest) -> None:
    with guest.connect() as client:
        pings = encode(Kind.PING, 0, (Tag.DATA, b"x" * 1000)) * 4000
        with pytest.raises((ConnectionError, TimeoutError)):
            client.send_bytes(pings)
    with guest.connect() as client:
        assert client.run(1, ["true"]).exit_code == 0


def test_an_idle_guest_gives_its_memory_back(
    guest: RunningGuest, client: GuestClient, tmp_path: Path
) -> None:
    for n in range(1, 40):
        client.start(n, ["head", "-c", "200000", "/dev/urandom"])
    client.until(lambda: all(client.told[n].result for n in range(1, 40)))
    for n in range(1, 40):
        client.send(Kind.FORGET, n)
    client.pump(1.5)
    rollup = Path(f"/proc/{guest.pid}/smaps_rollup").read_text().splitlines()
    dirty = next(int(line.split()[1]) for line in rollup if line.startswith("Private_Dirty:"))
    assert dirty < 200, f"{dirty} KiB"
    assert os.listdir(f"/proc/{guest.pid}/fd").__len__() < 16
