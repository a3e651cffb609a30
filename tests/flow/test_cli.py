"""`cloudyard run` and `cloudyard shell` as programs of their own, against a whole yard.

Commands run on this machine, as this user: they touch nothing outside their test's directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from cloudyard import connect
from flow.chain import TOKEN, Chain, chain, real_edge
from support import REPOSITORY, wait_until

BOUND_S = 30.0


@asynccontextmanager
async def yard_at(directory: Path) -> AsyncIterator[Chain]:
    state = directory / "state"
    state.mkdir()
    async with chain(directory) as made, real_edge(made, state):
        yield made


def command_line(*words: str) -> list[str]:
    return [sys.executable, "-m", "cloudyard.cli", *words]


def environment(made: Chain) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "src"),
        "CLOUDYARD_URL": made.url,
        "CLOUDYARD_TOKEN": TOKEN,
        "TERM": "vt100",
    }


async def cloudyard(made: Chain, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    with anyio.fail_after(BOUND_S):
        return await anyio.run_process(command_line(*words), input=stdin, env=environment(made), check=False)


async def test_run_passes_bytes_and_the_exit_code_on(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as made:
        done = await cloudyard(made, "run", "printf 'out\\377\\n'; printf err >&2; exit 5")
        assert (done.returncode, done.stdout, done.stderr) == (5, b"out\xff\n", b"err")
        done = await cloudyard(made, "run", "--", "printf", "%s|", "a b", "$X")
        assert (done.returncode, done.stdout) == (0, b"a b|$X|")
        data = os.urandom(300_000)
        done = await cloudyard(made, "run", "--stdin", "cat", stdin=data)
        assert (done.returncode, done.stdout) == (0, data)
        done = await cloudyard(made, "run", "--timeout", "0.3", "echo before; sleep 60")
        assert (done.returncode, done.stdout) == (124, b"before\n")
        assert b"killed after its timeout" in done.stderr
        done = await cloudyard(made, "run", "kill -TERM $$")
        assert done.returncode == 128 + signal.SIGTERM
        done = await cloudyard(made, "run", "--", "/no/such/program", "x")
        assert done.returncode == 127
        assert b"could not be started" in done.stderr
        done = await cloudyard(made, "run", "--json", "printf '\\377'; exit 1")
        result = json.loads(done.stdout)
        assert (result["exit_code"], result["stdout_base64"], done.returncode) == (1, "/w==", 1)
        assert json.loads((await cloudyard(made, "ls", "--json")).stdout) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_to_run_kills_the_command_and_stops_the_sandbox(
    yard_dir: Path, number: signal.Signals
) -> None:
    mark = yard_dir / "pid"
    async with yard_at(yard_dir) as made, connect(made.url, TOKEN) as yard:
        words = command_line("run", f"echo $$ > {mark}; sleep 600")
        async with await anyio.open_process(words, env=environment(made)) as process:
            await wait_until(lambda: mark.exists() and bool(mark.read_text()), "the command runs")
            process.send_signal(number)
            with anyio.fail_after(BOUND_S):
                assert await process.wait() == 128 + number
        assert not Path(f"/proc/{int(mark.read_text())}").exists()
        assert await yard.list() == []


async def test_a_sandbox_does_not_outlive_a_killed_program_and_not_its_lease_while_it_lives(
    yard_dir: Path,
) -> None:
    mark = yard_dir / "pid"
    async with yard_at(yard_dir) as made, connect(made.url, TOKEN) as yard:
        words = command_line("run", "--lease", "1.5", f"echo $$ > {mark}; sleep 600")
        async with await anyio.open_process(words, env=environment(made)) as process:
            await wait_until(lambda: mark.exists() and bool(mark.read_text()), "the command runs")
            (info,) = await yard.list()
            with anyio.fail_after(BOUND_S):
                while ((await yard.list())[0].max_ttl_s or 0) < 3:  # it was renewed
                    await anyio.sleep(0.1)
            process.kill()
            with anyio.fail_after(BOUND_S):
                while await yard.list():
                    await anyio.sleep(0.1)
        assert (await (await yard.get(info.id)).info()).reason == "max_ttl"
        await wait_until(lambda: not Path(f"/proc/{int(mark.read_text())}").exists(), "the command is gone")


@pytest.mark.parametrize("option", ["--lease", "--max-ttl"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
async def test_a_lease_and_a_time_to_live_that_cannot_be_are_refused_by_name(
    yard_dir: Path, option: str, seconds: str
) -> None:
    async with yard_at(yard_dir) as made:
        done = await cloudyard(made, "run", option, seconds, "true")
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"{option} is {seconds} seconds, out of range".encode() in done.stderr


async def test_run_passes_on_more_than_an_answer_keeps(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as made:
        done = await cloudyard(made, "run", "seq 1 3000000 | head -c 20000000")
        expected = "".join(f"{n}\n" for n in range(1, 3_000_001)).encode()[:20_000_000]
        assert (done.returncode, done.stdout == expected) == (0, True)


async def test_run_ends_quietly_when_nobody_reads_its_output(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as made, connect(made.url, TOKEN) as yard:
        script = f"{{ {shlex.join(command_line('run', 'yes'))}; echo $? >&2; }} | head -n 1"
        with anyio.fail_after(BOUND_S):
            done = await anyio.run_process(["/bin/sh", "-c", script], env=environment(made))
        assert (done.stdout, done.stderr) == (b"y\n", b"141\n")
        assert await yard.list() == []


async def test_a_misspelt_word_is_answered_with_the_one_that_was_meant(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as made:
        done = await cloudyard(made, "run", "--imgae", "debian", "true")
        assert (done.returncode, b"did you mean --image?" in done.stderr) == (2, True)
        done = await cloudyard(made, "shel")
        assert (done.returncode, b"did you mean shell?" in done.stderr) == (2, True)


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, made: Chain, *words: str) -> None:
        self._control, inner = pty.openpty()
        self.resize(30, 90, tell=False)
        self._process = subprocess.Popen(
            command_line(*words),
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment(made),
            start_new_session=True,
        )
        os.close(inner)
        self.output = b""

    def resize(self, rows: int, cols: int, *, tell: bool = True) -> None:
        fcntl.ioctl(self._control, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        if tell:  # it is not the foreground job of the terminal, so the kernel does not
            self._process.send_signal(signal.SIGWINCH)

    def type(self, keys: bytes) -> None:
        os.write(self._control, keys)

    async def expect(self, text: bytes) -> None:
        """Return once the text is on the screen, and forget what came up to it."""
        with anyio.fail_after(BOUND_S):
            while text not in self.output:
                await anyio.wait_readable(self._control)
                self.output += os.read(self._control, 65536)
        self.output = self.output.partition(text)[2]

    async def hang_up(self) -> int:
        """Close the terminal, as one does with its window."""
        os.close(self._control)
        with anyio.fail_after(BOUND_S):
            return await anyio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)

    async def wait(self) -> int:
        with anyio.fail_after(BOUND_S):
            code = await anyio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        os.close(self._control)
        return code


async def test_a_shell_is_a_terminal_that_resizes_detaches_and_comes_back(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as made, connect(made.url, TOKEN) as yard:
        shell = Terminal(made, "shell")
        shell.type(b"stty size; echo at $((40 + 2)) $TERM\n")
        await shell.expect(b"30 90\r\n")
        await shell.expect(b"at 42 vt100\r\n")
        shell.resize(41, 101)
        shell.type(
            b"while [ \"$(stty size)\" != '41 101' ]; do sleep 0.05; done; echo resized to $(stty size)\n"
        )
        await shell.expect(b"resized to 41 101\r\n")
        shell.type(b"sleep 100\n")
        await shell.expect(b"sleep 100")
        shell.type(b"\x03echo after the inter''rupt\n")
        await shell.expect(b"after the interrupt\r\n")
        shell.type(b"\x1d")
        await shell.expect(b"Detached")
        assert await shell.wait() == 0

        info = (await yard.list())[0]
        (command,) = await (await yard.get(info.id)).commands()
        shell = Terminal(made, "shell", info.id, "--attach", str(command.command_id))
        await shell.expect(b"after the interrupt\r\n")  # what was on the screen
        shell.type(b"echo ba''ck; exit 9\n")
        await shell.expect(b"back\r\n")
        assert await shell.wait() == 9
        assert [listed.id for listed in await yard.list()] == [info.id]
        assert (await cloudyard(made, "stop", "--all")).stdout.decode() == f"{info.id}\n"


async def test_a_shell_that_ends_takes_its_sandbox_along(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as made, connect(made.url, TOKEN) as yard:
        shell = Terminal(made, "shell")
        shell.type(b"exit 3\n")
        assert await shell.wait() == 3
        assert await yard.list() == []


async def test_a_shell_whose_terminal_goes_takes_its_sandbox_along(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as made, connect(made.url, TOKEN) as yard:
        shell = Terminal(made, "shell")
        shell.type(b"echo he''re\n")
        await shell.expect(b"here\r\n")
        assert await shell.hang_up() == 128 + signal.SIGHUP
        assert await yard.list() == []


async def test_the_examples_run(yard_dir: Path) -> None:
    """Those that write no files: here commands see this machine's own."""
    async with yard_at(yard_dir) as made:
        for name, text in (("hello", "42\n"), ("many", "step 3")):
            command = [sys.executable, str(REPOSITORY / "examples" / f"{name}.py")]
            with anyio.fail_after(BOUND_S):
                done = await anyio.run_process(command, env=environment(made), stderr=None)
            assert text in done.stdout.decode()
