"""What calls may do to themselves: every kind of end, flood and bomb gives a result in bounded time and
memory, and the next call finds all as new."""

from __future__ import annotations

import hashlib
import signal

import anyio
import pytest

from cloudyard.model import MIB, CallResult
from functions_kit import Calls

pytestmark = pytest.mark.live

BOUND_S = 20.0


async def ended(calls: Calls, code: str, **more: object) -> CallResult:
    """The result of a call that ends within a bound, and after which others work well."""
    with anyio.fail_after(BOUND_S):
        done = await calls(code, **more)
        await calls.work_well()
    return done


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("import os; os.abort()", signal.SIGABRT),
        ("import ctypes; ctypes.string_at(0)", signal.SIGSEGV),
        ("import os; os.kill(os.getpid(), 9)", signal.SIGKILL),
        ("import os, signal; signal.signal(15, signal.SIG_DFL); os.killpg(0, 15)", signal.SIGTERM),
        ("raise KeyboardInterrupt", signal.SIGINT),
        ("import os; os.system('kill -SEGV $PPID')", signal.SIGSEGV),
    ],
)
async def test_a_signal_is_told_by_its_number(calls: Calls, code: str, number: int) -> None:
    done = await ended(calls, code)
    assert (done.exit_code, done.signal, done.timed_out, done.oom) == (None, number, False, False)
    assert done.fault is not None
    assert done.fault.label == "policy"


async def test_processes_that_kill_all_they_can_end_only_themselves(calls: Calls) -> None:
    done = await ended(
        calls,
        """
        import os, signal
        for _ in range(5):
            if os.fork() == 0:
                signal.pause()
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            print("alone", flush=True)
        """,
    )
    assert (done.text, done.exit_code) == ("alone\n", 0)


async def test_a_fork_bomb_ends_at_its_time_limit(calls: Calls) -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    done = await ended(calls, bomb, timeout_s=0.5)
    assert done.timed_out
    assert done.duration_s < 5.0


async def test_a_shell_s_fork_bomb_ends(calls: Calls) -> None:
    done = await ended(calls, ":(){ :|:& };:\nsleep 100", language="shell", timeout_s=0.5)
    assert not done.ok


async def test_a_thread_bomb_is_an_error_of_its_own(calls: Calls) -> None:
    done = await ended(
        calls,
        """
        import os, threading
        event = threading.Event()
        try:
            for number in range(100_000):
                threading.Thread(target=event.wait, daemon=True).start()
        except RuntimeError:
            print(number < 1000, flush=True)
            os._exit(0)
        """,
    )
    assert (done.text, done.exit_code) == ("True\n", 0)


@pytest.mark.parametrize(
    "code",
    [
        "data = bytearray(1 << 30)",
        "data = []\nwhile True: data.append(bytearray(1 << 20))",
        "import os\nfor _ in range(8): os.fork()\ndata = bytearray(100 << 20)\nimport time; time.sleep(5)",
        "import os\nfor name in ('/tmp', '/dev/shm', '/var/tmp'):\n"
        "    fd = os.open(name + '/big', os.O_WRONLY | os.O_CREAT)\n"
        "    try:\n"
        "        while True: os.write(fd, bytes(1 << 20))\n"
        "    except OSError: pass\n",
        "import os, mmap\nfd = os.memfd_create('m')\nwhile True: os.write(fd, bytes(1 << 20))",
    ],
)
async def test_a_memory_bomb_is_told_as_one(calls: Calls, code: str) -> None:
    done = await ended(calls, code, memory="64MiB")
    assert done.oom
    assert not done.ok
    assert done.fault is not None
    assert (done.fault.label, done.fault.reason) == ("policy", "oom")


async def test_a_full_disk_is_an_error_of_the_program(calls: Calls) -> None:
    fill = "with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))"
    done = await ended(calls, fill, memory="64MiB")
    assert (done.exit_code, done.oom) == (1, False)
    assert b"No space left on device" in done.stderr


async def test_a_gigabyte_of_output_is_counted_and_not_kept(calls: Calls) -> None:
    flood = "import os\nblock = bytes(1 << 20)\nfor _ in range(1024):\n    os.write(1, block)"
    done = await ended(calls, flood, timeout_s=15.0)
    assert done.exit_code == 0, done.stderr
    assert (done.stdout_total, len(done.stdout), done.truncated) == (1 << 30, 64 * 1024, True)


async def test_output_after_the_first_process_is_not_waited_for(calls: Calls) -> None:
    done = await ended(
        calls,
        """
        import os
        print("first", flush=True)
        if os.fork() == 0:
            while True:
                os.write(2, bytes(4096))
        """,
    )
    assert (done.text, done.exit_code) == ("first\n", 0)
    assert done.duration_s < 5.0


async def test_closed_streams_hold_nothing_up(calls: Calls) -> None:
    done = await ended(
        calls,
        "import os, time\nfor fd in (0, 1, 2): os.close(fd)\ntime.sleep(0.2)\nos._exit(7)",
        stdin=b"x" * MIB,
    )
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"", b"")
    assert done.duration_s >= 0.2
    assert done.cpu_s < 0.15


async def test_input_that_nobody_reads_holds_nothing_up(calls: Calls) -> None:
    done = await ended(calls, "print('unread')", stdin=bytes(4 * MIB - 4096))
    assert (done.text, done.exit_code) == ("unread\n", 0)
    done = await ended(calls, "import time; time.sleep(0.3); print('unread')", stdin=bytes(4 * MIB - 4096))
    assert (done.text, done.cpu_s < 0.2) == ("unread\n", True)


async def test_all_of_a_large_input_comes(calls: Calls) -> None:
    data = bytes(range(256)) * (4 * MIB // 256 - 16)
    digest = "import hashlib, sys\nprint(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    done = await ended(calls, digest, stdin=data)
    assert done.text.strip() == hashlib.sha256(data).hexdigest()


async def test_ten_thousand_files_are_no_matter(calls: Calls) -> None:
    done = await ended(calls, "for number in range(10_000): open(f'{number}', 'w').write('x')\nprint('laid')")
    assert (done.text, done.stderr) == ("laid\n", b"")


async def test_a_folder_deeper_than_any_path_is_no_matter(calls: Calls) -> None:
    done = await ended(
        calls, "import os\nfor _ in range(2000): os.mkdir('d' * 200); os.chdir('d' * 200)\nprint('deep')"
    )
    assert done.text == "deep\n"


async def test_a_stopped_program_ends_at_its_time_limit(calls: Calls) -> None:
    done = await ended(calls, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", timeout_s=0.3)
    assert done.timed_out


async def test_one_that_ignores_all_signals_ends_at_its_time_limit(calls: Calls) -> None:
    done = await ended(
        calls,
        """
        import signal, time
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        print("deaf", flush=True)
        time.sleep(100)
        """,
        timeout_s=0.5,
    )
    assert (done.timed_out, done.text, done.duration_s < 3.0) == (True, "deaf\n", True)
