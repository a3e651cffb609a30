"""What one command is promised by the guest: how it starts, what it gets, what it gives back."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from cloudyard.testing.guest_client import GUEST_UID, PATH, GuestClient, RunningGuest, Told
from cloudyard.wire.guest import Kind, Options, Tag
from guest_fixture import client, guest, guest_binary

__all__ = ["client", "guest", "guest_binary"]


def refusal(told: Told) -> tuple[str, int]:
    assert told.result is not None
    assert told.result.kind == Kind.NOT_STARTED
    return told.result.text(Tag.WHAT), told.result.number(Tag.ERRNO)


def test_argv_is_passed_as_it_is(client: GuestClient) -> None:
    told = client.run(1, ["printf", "%s|", "a b", "", "$HOME", "'", "\\"])
    assert (told.stdout, told.stderr, told.exit_code) == (b"a b||$HOME|'|\\|", b"", 0)


def test_arguments_of_a_mebibyte_and_more_are_passed(client: GuestClient) -> None:
    chunk = "x" * 65_536
    told = client.run(1, ["printf", "%s", *[chunk] * 28])
    assert told.stdout == chunk.encode() * 28


def test_more_than_the_kernel_takes_is_told_as_its_refusal(client: GuestClient) -> None:
    assert refusal(client.run(1, ["printf", *["x"] * 240_000])) == ("exec", errno.E2BIG)
    assert client.run(2, ["true"]).exit_code == 0


def test_a_string_runs_through_the_shell(client: GuestClient) -> None:
    told = client.run(1, "echo out; echo err >&2; exit 7")
    assert (told.stdout, told.stderr, told.exit_code) == (b"out\n", b"err\n", 7)


def test_a_heredoc_and_what_follows_it_work(client: GuestClient) -> None:
    told = client.run(1, "cat <<EOF\nline\nEOF\necho ok")
    assert told.stdout == b"line\nok\n"


def test_started_names_the_process_and_its_start(client: GuestClient) -> None:
    told = client.run(1, "read line </proc/self/stat; echo $$; set -- $line; shift 21; echo $1")
    assert told.started is not None
    pid, start = told.started.number(Tag.PID), told.started.number(Tag.PID_START)
    assert told.stdout.split() == [str(pid).encode(), str(start).encode()]


def test_the_signal_that_ended_it_is_told(client: GuestClient) -> None:
    told = client.run(1, "kill -SEGV $$")
    assert (told.signal, told.exit_code) == (signal.SIGSEGV, None)


def test_the_environment_is_what_was_sent_and_the_identity(client: GuestClient) -> None:
    told = client.run(1, ["/usr/bin/env"], env={"A": "1=2", "B": "x\ny", "HOME": "/elsewhere"})
    expected = {
        b"A=1=2",
        b"B=x",
        b"y",
        b"HOME=/elsewhere",
        b"USER=root",
        b"LOGNAME=root",
        b"PATH=" + PATH.encode(),
    }
    assert set(told.stdout.splitlines()) == expected


def test_it_starts_in_the_directory_asked_for(client: GuestClient) -> None:
    assert client.run(1, ["pwd"], cwd="/usr/lib").stdout == b"/usr/lib\n"
    assert client.run(2, ["pwd"]).stdout == b"/\n"


@pytest.mark.live
def test_it_runs_as_the_user_asked_for(client: GuestClient) -> None:
    told = client.run(1, 'id -u; id -g; echo "$HOME $USER $LOGNAME"', user="daemon")
    assert told.stdout == b"1\n1\n/usr/sbin daemon daemon\n"
    assert client.run(2, "id -u; id -g; id -G", user="1:4").stdout == b"1\n4\n4\n"
    assert client.run(3, 'id -u; id -g; echo "$HOME"', user="4321").stdout == b"4321\n0\n/\n"
    assert client.run(4, "id -u; id -g", user="nobody:adm").stdout == b"65534\n4\n"


@pytest.mark.live
def test_another_user_has_no_capabilities(client: GuestClient) -> None:
    told = client.run(1, "grep Cap /proc/self/status", user="nobody")
    values = {line.split()[0]: int(line.split()[1], 16) for line in told.stdout.splitlines()}
    assert {values[b"CapInh:"], values[b"CapPrm:"], values[b"CapEff:"], values[b"CapAmb:"]} == {0}


def test_unknown_users_and_groups_are_refused_by_name(client: GuestClient) -> None:
    for command, user in enumerate(("nobody-here", "root:no-such-group", ":0", "99999999999"), 1):
        what, _ = refusal(client.run(command, ["true"], user=user))
        assert what == "user"


@pytest.mark.parametrize("guest", [pytest.param(True, id="pid1", marks=pytest.mark.live)], indirect=True)
def test_the_guests_own_user_is_refused(client: GuestClient) -> None:
    assert refusal(client.run(1, ["true"], user=str(GUEST_UID))) == ("user", errno.EPERM)


def test_what_cannot_be_run_is_told_by_errno(client: GuestClient, tmp_path: Path) -> None:
    plain, script = tmp_path / "plain", tmp_path / "script"
    plain.write_text("no program")
    script.write_text("true")
    script.chmod(0o755)
    cases: dict[tuple[str, ...], int] = {
        ("no-such-program",): errno.ENOENT,
        ("/no/such/program",): errno.ENOENT,
        ("",): errno.ENOENT,
        ("/etc",): errno.EISDIR,
        ("/etc/passwd/x",): errno.ENOTDIR,
        (str(plain),): errno.EACCES,
        (str(script),): errno.ENOEXEC,
        ("true", "x" * 200_000): errno.E2BIG,
        ("true", "zero\0byte"): errno.EINVAL,
    }
    for command, (argv, reason) in enumerate(cases.items(), 1):
        assert refusal(client.run(command, list(argv))) == ("exec", reason), argv[0]


def test_a_directory_that_is_none_is_refused(client: GuestClient) -> None:
    assert refusal(client.run(1, ["true"], cwd="/nowhere")) == ("cwd", errno.ENOENT)
    assert refusal(client.run(2, ["true"], cwd="/etc/passwd")) == ("cwd", errno.ENOTDIR)


def test_stdin_is_empty_unless_asked_for(client: GuestClient) -> None:
    told = client.run(1, "cat; readlink /proc/self/fd/0")
    assert told.stdout == b"/dev/null\n"


def test_five_megabytes_pass_through_stdin(client: GuestClient) -> None:
    data = os.urandom(5 * 1024 * 1024)
    told = client.start(1, ["cat"], options=Options.STDIN)
    client.feed(1, data)
    client.until(lambda: told.result is not None)
    assert told.stdout == data


def test_stdin_stays_open_until_it_is_ended(client: GuestClient) -> None:
    told = client.start(1, ["cat"], options=Options.STDIN)
    client.feed(1, b"one", eof=False)
    client.until(lambda: told.stdout == b"one")
    client.send(Kind.STDIN, 1, (Tag.OFFSET, 0), (Tag.DATA, b"one two"))
    client.until(lambda: told.stdout == b"one two")
    client.send(Kind.STDIN, 1, (Tag.OFFSET, 7), (Tag.EOF, 1))
    client.until(lambda: told.exit_code == 0)
    assert told.stdout == b"one two"


def test_a_reader_that_goes_is_told(client: GuestClient) -> None:
    told = client.start(1, "exec <&-; sleep 60", options=Options.STDIN)
    at = 0
    while not told.stdin_lost:
        client.send(Kind.STDIN, 1, (Tag.OFFSET, at), (Tag.DATA, b"x"))
        at += 1
        client.until(lambda at=at: told.taken >= at or told.stdin_lost)
    client.signal(1, signal.SIGKILL)
    client.until(lambda: told.signal == signal.SIGKILL)


@pytest.mark.parametrize("offset", [1, 65 * 1024])
def test_a_gap_in_stdin_closes_it_and_nothing_else(client: GuestClient, offset: int) -> None:
    told = client.start(1, ["cat"], options=Options.STDIN)
    client.send(Kind.STDIN, 1, (Tag.OFFSET, offset), (Tag.DATA, b"x"))
    client.until(lambda: told.result is not None)
    assert (told.exit_code, told.stdout, told.stdin_lost) == (0, b"", True)
    assert told.last(Kind.ERROR) is not None


def test_every_byte_value_comes_back(client: GuestClient) -> None:
    everything = bytes(range(256)) * 512
    told = client.start(1, ["cat"], options=Options.STDIN)
    client.feed(1, everything)
    client.until(lambda: told.result is not None)
    assert told.stdout == everything


def test_a_shell_string_of_300_kilobytes_runs(client: GuestClient) -> None:
    text = (
        "echo begin\n"
        + "# padding that is only there to be long\n" * 7500
        + "echo $0; ls /proc/self/fd; exit 5"
    )
    told = client.run(1, text)
    assert len(text) > 300_000
    assert told.stdout.split() == [b"begin", b"/bin/sh", b"0", b"1", b"2", b"3"]  # 3 is ls's own
    assert told.exit_code == 5


def test_a_shell_string_at_the_kernels_bound_runs(client: GuestClient) -> None:
    for command, size in enumerate((131_070, 131_071, 131_072), 1):
        told = client.run(command, "echo ok #".ljust(size, "x"))
        assert told.stdout == b"ok\n"


def test_a_terminal_has_the_size_asked_for_and_follows_changes(client: GuestClient) -> None:
    told = client.start(
        1, "trap 'stty size' WINCH; stty size; tty; read a", options=Options.PTY, size=(33, 101)
    )
    client.until(lambda: b"33 101" in told.stdout and b"/dev/pts/" in told.stdout)
    client.send(Kind.RESIZE, 1, (Tag.ROWS, 50), (Tag.COLS, 132))
    client.send(Kind.STDIN, 1, (Tag.OFFSET, 0), (Tag.DATA, b"\r"))
    client.until(lambda: b"50 132" in told.stdout)
    client.until(lambda: told.result is not None)


def test_a_terminal_is_a_controlling_one_and_ends_by_control_d(client: GuestClient) -> None:
    told = client.start(1, ["sh", "-c", "stty -echo; echo ready >/dev/tty; cat"], options=Options.PTY)
    client.until(lambda: b"ready\r\n" in told.stdout)
    client.send(Kind.STDIN, 1, (Tag.OFFSET, 0), (Tag.DATA, b"hello\n"))
    client.send(Kind.STDIN, 1, (Tag.OFFSET, 6), (Tag.EOF, 1))
    client.until(lambda: told.result is not None)
    assert (told.exit_code, told.stdout) == (0, b"ready\r\nhello\r\n")


def test_control_c_interrupts_what_runs_in_a_terminal(client: GuestClient) -> None:
    told = client.start(1, ["sh", "-c", "echo ready; exec sleep 60"], options=Options.PTY)
    client.until(lambda: b"ready" in told.stdout)
    client.send(Kind.STDIN, 1, (Tag.OFFSET, 0), (Tag.DATA, b"\x03"))
    client.until(lambda: told.signal == signal.SIGINT)


def test_it_has_a_session_default_signals_and_no_descriptor_of_ours(client: GuestClient) -> None:
    told = client.run(
        1, "ls -l /proc/self/fd | wc -l; umask; ulimit -n; exec grep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status"
    )
    lines = told.stdout.split()
    assert lines[0] == b"5"  # a heading, 0, 1, 2 and the directory that is listed
    assert lines[1] == b"0022"
    masks = dict(zip(lines[3::2], lines[4::2], strict=True))
    assert int(masks[b"SigBlk:"], 16) == int(masks[b"SigIgn:"], 16) == 0
    assert client.run(2, "set -- $(cat /proc/$$/stat); [ $1 = $5 ] && [ $1 = $6 ]").exit_code == 0


def test_a_limit_of_open_files_is_soft_and_hard_and_never_over_the_guests_own(client: GuestClient) -> None:
    told = client.run(1, "ulimit -Sn; ulimit -Hn", open_files=64)
    assert told.stdout.split() == [b"64", b"64"]
    least = client.run(2, "ulimit -Hn").stdout
    assert client.run(3, "ulimit -Hn", open_files=1 << 62).stdout == least


def test_processor_time_and_peak_memory_are_of_all_it_waited_for(client: GuestClient) -> None:
    told = client.run(1, "dd if=/dev/zero of=/dev/null bs=48M count=8 2>/dev/null; sleep 0.05")
    assert told.result is not None
    assert told.result.number(Tag.PEAK_BYTES) > 48 * 1024 * 1024
    assert told.result.number(Tag.CPU_US) > 1000
    assert told.result.number(Tag.DURATION_US) > 50_000


@pytest.mark.parametrize("guest", [pytest.param(True, id="pid1", marks=pytest.mark.live)], indirect=True)
def test_commands_can_be_told_apart_from_the_guest_when_memory_runs_out(client: GuestClient) -> None:
    assert client.run(1, ["cat", "/proc/self/oom_score_adj"]).stdout == b"500\n"


def test_a_command_number_in_use_is_refused(client: GuestClient) -> None:
    told = client.start(1, ["sleep", "60"])
    client.start(1, ["true"])
    client.until(lambda: told.last(Kind.ERROR) is not None)
    client.signal(1, signal.SIGTERM)
    client.until(lambda: told.signal == signal.SIGTERM)


def test_frames_about_unknown_commands_are_answered_and_ignored(
    guest: RunningGuest, client: GuestClient
) -> None:
    client.signal(77, signal.SIGTERM)
    client.send(Kind.RESIZE, 78, (Tag.ROWS, 1), (Tag.COLS, 1))
    client.send(Kind.FORGET, 79)
    client.until(lambda: all(client.told[n].last(Kind.ERROR) for n in (77, 78)))
    assert client.run(1, ["true"]).exit_code == 0
    assert 79 not in client.told
