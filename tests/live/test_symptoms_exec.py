"""Faults of exec and processes that users of other platforms reported, as behaviour of ours, in one yard.

Each docstring names the reports, with the numbers in them; where the real thing takes minutes, it is scaled
down, and what is told of clocks is tested with a clock that is moved by hand (tests/flow/test_edge_exec.py).
Pause and resume of symptom 2 do not apply: no sandbox can be paused yet.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

import cloudyard
import support
from cloudyard import Completed, Sandbox
from cloudyard.edge.journal import Journal
from yards import TestYard

pytestmark = pytest.mark.live

MIB = 2**20
ANSWER_S = 2.0  # an innocent call beside a hog; what its reporters saw took minutes or never came


@asynccontextmanager
async def box_of(up: TestYard, **options: object) -> AsyncIterator[Sandbox]:
    async with up.connect() as yard, yard.sandbox("debian", **options) as box:  # type: ignore[arg-type]
        yield box


@pytest.fixture
async def box(up: TestYard) -> AsyncIterator[Sandbox]:
    async with box_of(up) as made:
        yield made


async def answers(box: Sandbox) -> float:
    """How long an innocent command takes."""
    began = time.monotonic()
    with anyio.fail_after(30):
        done = await box.run("echo here")
    assert done.stdout == b"here\n", done
    return time.monotonic() - began


async def processes(box: Sandbox) -> list[str]:
    """What runs in it besides PID 1, keepers and the shell that looks: lines of pid, name and state."""
    others = "for p in /proc/[0-9]*; do [ $p = /proc/$$ ] || { read -r line <$p/stat && echo $line; }; done"
    lines = [line.split()[:3] for line in (await box.run(others)).text.splitlines()]
    return [" ".join(line) for line in lines if line[1] not in ("(guest)", "(keeper)")]


def hit(done: Completed) -> tuple[str, str, list[str]]:
    assert done.fault is not None
    return done.fault.label, done.fault.reason, list(done.limits_hit)


async def test_a_background_command_outlives_its_client_and_is_found_again_with_live_output(
    up: TestYard,
) -> None:
    """e2b-dev/E2B#1074: its PID was gone after a stream deadline of 60 s; client dropped at 70 s, back at
    130 s. There is no deadline here, so a second stands for each half minute."""
    async with up.connect() as yard:
        box = await yard.create("debian")
        process = await box.start("for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done; exit 7")
        started = await anext(process.stdout())
    assert started == b"1\n"
    await anyio.sleep(1)
    async with up.connect() as yard:
        box = await yard.get(box.id)
        again = await box.attach(process.id)
        assert (again.pid, again.pid_start) == (process.pid, process.pid_start)
        pieces = [piece async for piece in again.stdout()]
        assert (b"".join(pieces), len(pieces) > 1) == (b"1\n2\n3\n4\n5\n6\n", True)
        assert (await again.wait()).exit_code == 7
        await box.stop()


async def test_a_reader_that_stalls_holds_up_nobody(up: TestYard, box: Sandbox) -> None:
    """E2B#1587, #1352: one stalled reader froze the output for every other one of that process."""
    size = 8 * MIB
    process = await box.start(f"sleep 0.2; head -c {size} /dev/zero; echo end >&2; cat", stdin=True)
    stalled = process.stdout()
    assert await anext(stalled)
    async with up.connect() as yard:
        other = await (await yard.get(box.id)).attach(process.id)
        got = 0
        with anyio.fail_after(30):
            async for piece in other.stdout():
                got += len(piece)
                if got == size:
                    await process.close_stdin()
        assert got == size
    rest = sum([len(piece) async for piece in stalled])
    assert 0 < rest < size
    assert (await process.wait(output=False)).exit_code == 0


async def test_a_hog_does_not_make_other_calls_of_its_sandbox_time_out(up: TestYard) -> None:
    """E2B#412, #339: all processors busy and 95% of the memory taken."""
    hog_program = "import os\nhold = b'x' * (215 << 20)\nfor _ in range(3): os.fork()\nprint(1, flush=True)\n"
    async with box_of(up, cpu=1, memory="256MiB") as box:
        hog = await box.start(["python3", "-c", hog_program + "while True: pass"])
        assert await anext(hog.stdout())
        for _ in range(3):
            assert await answers(box) < ANSWER_S
        await hog.kill()


async def test_a_fork_storm_is_refused_by_name_and_the_sandbox_answers_on(up: TestYard) -> None:
    """daytona#5140: a bare 502, and the state stayed "started" for minutes. Here within 10 s."""
    async with box_of(up, pids=40) as box:
        bomb = "import os, time\nn = 0\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.01)"
        with anyio.fail_after(10):
            done = await box.run(["python3", "-c", bomb], timeout_s=1)
        assert hit(done) == ("policy", "timeout", ["pids"])
        assert await answers(box) < ANSWER_S
        assert await processes(box) == []
        done = await box.run("for i in $(seq 60); do sleep 5 & done; wait", timeout_s=5)
        assert done.exit_code not in (0, None)
        assert hit(done)[2] == ["pids"]
        assert "of 40 processes," in done.fault.evidence  # type: ignore[union-attr]


async def test_a_kill_for_memory_is_named_with_the_limit_and_an_exit_137_is_not(up: TestYard) -> None:
    """daytona#4489, SandboxFusion#43, centaur#1454: it looked like a plain failure. Twice the limit
    is taken."""
    async with box_of(up, memory="64MiB") as box:
        take = "hold = bytearray(128 * 2**20); print(len(hold))"
        done = await box.run(["python3", "-c", take], timeout_s=20)
        assert (done.signal, done.oom) == (9, True)
        assert hit(done) == ("policy", "oom", ["oom"])
        assert "oom_kill counter grew by 1" in done.fault.evidence  # type: ignore[union-attr]
        assert f"{64 * MIB} bytes" in done.fault.evidence  # type: ignore[union-attr]
        assert hit(await box.run("exit 137")) == ("policy", "exit", [])
        assert hit(await box.run("kill -9 $$")) == ("policy", "signal", [])
        made_do = await box.run(f"python3 -c '{take}'; echo made do", timeout_s=20)
        assert (made_do.exit_code, made_do.fault, made_do.limits_hit) == (0, None, ["oom"])


async def test_a_timeout_is_kept_by_the_yard_with_the_output_and_is_no_success(box: Sandbox) -> None:
    """OpenSandbox#217: no deadline on the server, so the caller hung. SWE-ReX#151, #29: the output before the
    timeout was lost. ROCK#374: a call that timed out was reported as a success."""
    began = time.monotonic()
    done = await box.run("echo before; echo err >&2; exec sleep inf", timeout_s=2)
    assert time.monotonic() - began < 3
    assert (done.stdout, done.stderr) == (b"before\n", b"err\n")
    assert (done.timed_out, done.ok, done.exit_code, done.signal) == (True, False, None, 9)
    assert hit(done) == ("policy", "timeout", [])


async def test_silence_ends_a_command_and_chatter_does_not(box: Sandbox) -> None:
    """SWE-ReX#152: no way to stop on silence. 2 s in the report."""
    began = time.monotonic()
    silent = await box.run("echo started; sleep 100", no_output_timeout_s=1)
    assert 0.9 < time.monotonic() - began < 3
    assert (silent.stdout, silent.timed_out, silent.ok) == (b"started\n", True, False)
    assert hit(silent) == ("policy", "no_output", [])
    chatty = await box.run("for i in 1 2 3 4 5 6; do echo $i >&2; sleep 0.3; done", no_output_timeout_s=1)
    assert (chatty.exit_code, chatty.fault) == (0, None)


async def test_orphans_leave_no_zombies(box: Sandbox) -> None:
    """microsandbox#1201: 793 zombies under PID 1. 200 orphans here."""
    make = "import os\nfor _ in range(200):\n  if os.fork() == 0:\n    os.fork()\n    os._exit(0)"
    assert (await box.run(["python3", "-c", make], timeout_s=20)).exit_code == 0

    async def none() -> bool:
        return await processes(box) == []

    await support.wait_until(none, "no zombie is left")


async def test_a_timeout_and_a_cancelled_call_leave_no_child(box: Sandbox) -> None:
    """openclaw#110735: only the client's process died, children lived on in the box."""
    tree = "setsid sleep 1000 & (sleep 1000 & sleep 1001 &) ; trap '' TERM; nohup sleep 1002 & wait"
    done = await box.run(tree, timeout_s=0.5)
    assert done.timed_out
    assert await processes(box) == []
    with anyio.move_on_after(0.5):
        await box.run(tree)
    await support.wait_until(lambda: none_left(box), "nothing is left of what was cancelled")
    process = await box.start(tree)
    await process.kill()
    await process.wait()
    assert await processes(box) == []


async def none_left(box: Sandbox) -> bool:
    return await processes(box) == []


async def test_characters_in_pieces_and_every_byte_come_through(box: Sandbox) -> None:
    """strands harness-sdk#4289, inspect_k8s_sandbox#209: characters split over two reads became U+FFFD, and
    binary output raised."""
    slow = "import os, time\nfor b in 'é€😀'.encode() * 5:\n  os.write(1, bytes([b])); time.sleep(0.01)"
    done = await box.run(["python3", "-c", slow])
    assert done.text == "é€😀" * 5
    every = bytes(range(256)) * 3
    done = await box.run("tee /dev/stderr", stdin=every)
    assert (done.stdout, done.stderr) == (every, every)
    assert "\ufffd" in done.text


async def test_output_over_the_limit_is_said_to_be_cut_with_its_true_length(box: Sandbox) -> None:
    """inspect_ai#4778: it was cut in silence instead of the documented error."""
    done = await box.run("head -c 3000000 /dev/zero; echo short >&2", output_limit_bytes=MIB)
    assert (len(done.stdout), done.stdout_total, done.truncated) == (MIB, 3_000_000, True)
    assert (done.exit_code, done.fault, done.limits_hit) == (0, None, ["output"])
    assert (done.stderr, done.stderr_total) == (b"short\n", 6)
    whole = await box.run(f"head -c {MIB} /dev/zero", output_limit_bytes=MIB)
    assert (whole.truncated, whole.limits_hit) == (False, [])


async def test_a_terminal_has_the_size_asked_for_from_the_start_and_after_a_change(box: Sandbox) -> None:
    """docker/sbx-releases#63, OpenShell#3080: a PTY started 0x0, or never resized."""
    process = await box.start(
        "stty size; trap 'stty size; exit' WINCH; echo set; while :; do sleep 0.05; done",
        pty=cloudyard.Pty(rows=33, cols=101),
    )
    seen = b""
    with anyio.fail_after(20):
        async for piece in process.stdout():
            seen += piece
            if b"set" in seen and b"33 101" in seen and b"50 132" not in seen:
                await process.resize(50, 132)
    assert seen.split() == [b"33", b"101", b"set", b"50", b"132"]


async def test_a_heredoc_does_not_spoil_the_session(box: Sandbox) -> None:
    """cloudflare/sandbox#30: it hung, and the shell session that was reused was poisoned."""
    async with box.session() as session:
        with anyio.fail_after(20):
            await session.run("cat > /tmp/file <<'EOF'\n$HOME 'quoted\nEOF")
            assert (await session.run("echo ok; cat /tmp/file")).stdout == b"ok\n$HOME 'quoted\n"
            await session.run("cat > /tmp/file <<EOF\nwithout an end")
            assert (await session.run("echo ok")).stdout == b"ok\n"
            hung = await session.run("cat <(sleep 100) - ; sleep 100", timeout_s=0.5)
            assert (hung.timed_out, hung.shell) == (True, "restored")
            assert (await session.run("echo ok")).stdout == b"ok\n"


async def test_a_session_of_a_plain_user_in_a_sandbox_keeps_its_state(box: Sandbox) -> None:
    async with box.session(user="nobody", cwd="/tmp") as session:
        await session.run("mkdir -p d; cd d; f() { id -un; }; x=1")
        done = await session.run("f; pwd; echo $x; stat -c %a /tmp/.cloudyard-session-*")
        assert (done.stdout, done.shell) == (b"nobody\n/tmp/d\n1\n600\n", "kept")
    assert (await box.run("ls -A /tmp")).text.split() == ["d"]


@pytest.mark.parametrize(
    ("how", "code", "name", "said"),
    [
        ({"user": "nosuch"}, 126, "user_not_found", "nosuch"),
        ({"cwd": "/no/such"}, 126, "directory_not_found", "/no/such"),
        ({"cwd": "/etc/passwd"}, 126, "not_a_directory", "/etc/passwd"),
        ({"cwd": "/root", "user": "nobody"}, 126, "directory_forbidden", "/root"),
        ({"command": ["/etc"]}, 126, "is_a_directory", "/etc"),
        ({"command": ["/etc/passwd"]}, 126, "not_executable", "/etc/passwd"),
        ({"command": ["nosuch"]}, 127, "program_not_found", "nosuch"),
    ],
)
async def test_what_cannot_start_is_named(
    box: Sandbox, how: dict[str, object], code: int, name: str, said: str
) -> None:
    command = how.pop("command", "true")
    done = await box.run(command, **how)  # type: ignore[arg-type]
    assert (done.exit_code, done.error_code, done.ok) == (code, name, False)
    assert said in done.error
    assert hit(done) == ("policy", "not_started", [])
    with pytest.raises(cloudyard.InvalidRequest) as caught:
        await box.start(command, **how)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.fault) == (name, "policy")


async def test_open_files_are_bounded_as_asked_and_nobody_inside_raises_the_bound(up: TestYard) -> None:
    async with box_of(up) as box:
        assert (await box.run("ulimit -Sn; ulimit -Hn")).text.split() == ["16384", "16384"]
    async with box_of(up, open_files=100) as box:
        done = await box.run("ulimit -Sn; ulimit -Hn; ulimit -n 101; echo $?")
        assert done.text.split() == ["100", "100", "2"]
        take = "import os\nn = 0\nwhile n < 200:\n  os.open('/', 0)\n  n += 1\n  print(n, flush=True)"
        done = await box.run(["python3", "-c", take])
        assert done.text.split()[-1] == "97"
        assert b"Too many open files" in done.stderr
        process = await box.start("ulimit -n; sh -c 'ulimit -n'")
        assert (await process.wait()).text.split() == ["100", "100"]
    async with up.connect() as yard:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if most < 1_048_576 and not may_raise_limits():
            with pytest.raises(cloudyard.Unsupported) as caught:
                await yard.create("debian", open_files=1_048_576)
            assert caught.value.code == "open_files_unsupported"


def may_raise_limits() -> bool:
    """Whether this process, and so the yard, has CAP_SYS_RESOURCE."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return bool(next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff")) >> 24 & 1)


async def test_the_guests_memory_stays_flat_at_500_mb_of_output(up: TestYard) -> None:
    async with box_of(up, cpu=2) as box:
        assert (await box.run("true")).ok
        guest = guest_pid(box, up)
        before = resident(guest)
        done = await box.run("head -c 500000000 /dev/zero | cat; head -c 1000000 /dev/zero >&2", timeout_s=60)
        assert (done.exit_code, done.stdout_total, done.stderr_total) == (0, 500_000_000, 1_000_000)
        assert done.limits_hit == ["output"]
        assert resident(guest, peak=True) - before < MIB


def guest_pid(box: Sandbox, up: TestYard) -> int:
    """PID 1 of a sandbox, as this machine sees it."""
    journal = Journal.load(next((up.state / "edge" / "records").glob(f"{box.id}*")))
    assert journal is not None
    assert journal.facts is not None
    return journal.facts.pid


def resident(pid: int, *, peak: bool = False) -> int:
    """Resident memory of a process in bytes, now or at most."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


async def test_output_is_not_lost_or_doubled_when_the_edge_is_killed_during_a_session(up: TestYard) -> None:
    async with box_of(up) as box, box.session() as session:
        await session.run("x=1")
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                await anyio.sleep(0.2)
                os.kill((await anyio.to_thread.run_sync(up.pids))["edge"], 9)

            tasks.start_soon(kill)
            done = await session.run("seq 1 1000; sleep 1; x=$((x + 1)); seq 1 10 >&2")
        assert (done.text.count("\n"), done.stderr.count(b"\n"), done.shell) == (1000, 10, "kept")
        assert (await session.run("echo $x")).text == "2\n"
