"""Sessions: a shell whose state goes on from one command to the next, in bash and in a plain sh."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from cloudyard import Conflict, InvalidRequest, Sandbox, Session, blocking, connect
from flow.chain import TOKEN, chain, real_edge
from flow.edge_kit import alive, until

both = pytest.mark.parametrize("shell", ["bash", "sh"])


@pytest.fixture
async def box(yard_dir: Path) -> AsyncIterator[Sandbox]:
    """A sandbox. No session may leave a file."""
    async with box_in(yard_dir) as made:
        yield made
    assert not list(yard_dir.glob(".cloudyard-session-*"))


def here(directory: Path) -> dict[str, str]:
    """File operations see the test's own directory alone."""
    return {"TMPDIR": str(directory)}


@asynccontextmanager
async def box_in(directory: Path) -> AsyncIterator[Sandbox]:
    state = directory / "state"
    state.mkdir()
    async with (
        chain(directory) as made,
        real_edge(made, state),
        connect(made.url, TOKEN) as yard,
        yard.sandbox("debian", env={**here(directory), "A": "sandbox", "B": "sandbox"}) as box,
    ):
        yield box


async def said(session: Session, command: str) -> str:
    """What a command prints that has to go well."""
    done = await session.run(command, timeout_s=20)
    assert (done.exit_code, done.stderr, done.shell) == (0, b"", "kept"), done
    return done.stdout.decode()


@both
async def test_directory_and_variables_go_on_and_exit_codes_are_exact(box: Sandbox, shell: str) -> None:
    async with box.session(env={"B": "session"}, cwd="/", shell=shell) as session:
        assert await said(session, "pwd; echo $A $B") == "/\nsandbox session\n"
        await said(session, "cd /usr; export X='a  b\n$c'; plain=\"it's\"; unset A")
        assert await said(session, 'pwd; echo "$X|$plain|${A-unset}"') == "/usr\na  b\n$c|it's|unset\n"
        assert await said(session, "env | grep -c '^plain='; true") == "0\n"
        for code in (1, 42, 255):
            assert (await session.run(f"(exit {code})")).exit_code == code
        assert await said(session, "echo $?") == "255\n"
        assert (await session.run("no-such-program")).exit_code == 127
        every = await session.run("printf '\\000\\377\\n'; printf '\\001' >&2")
        assert (every.stdout, every.stderr) == (b"\0\xff\n", b"\1")


async def test_what_only_bash_has_goes_on_too(box: Sandbox) -> None:
    async with box.session() as session:
        await said(session, "f() { echo \"f $1\"; }; list=(1 'b c'); declare -A map=([k]='v w')")
        await said(session, "set -- p 'q r'")
        assert await said(session, 'f x; echo "${list[1]} ${map[k]} $# $2"') == "f x\nb c v w 2 q r\n"
        await said(session, "alias ll='echo aliased'; umask 027; shopt -s extglob; set -f")
        await said(session, "trap 'echo hup' HUP")
        assert await said(session, "ll; umask; echo *; kill -HUP $$") == "aliased\n0027\n*\nhup\n"
        await said(session, "set +f; g() { [[ $1 == @(a|b) ]] && echo ext; }; pushd / >/dev/null")
        await said(session, "g a; export -f f; popd >/dev/null; readonly fixed=1")
        assert await said(session, "bash -c 'f y'; echo $fixed") == "f y\n1\n"
        first, second = [await said(session, "echo $RANDOM $RANDOM $RANDOM") for _ in range(2)]
        assert first != second


@both
async def test_a_mistake_in_a_command_is_an_error_of_that_command_alone(box: Sandbox, shell: str) -> None:
    """cloudflare/sandbox#30: a heredoc hung and poisoned the reused shell session."""
    async with box.session(shell=shell) as session:
        await said(session, "x=1; cd /usr")
        for mistake in ("echo 'abc", 'echo "$(', "if true", "}", "cat <<EOF >/dev/null; )"):
            with anyio.fail_after(10):
                done = await session.run(mistake)
            assert done.exit_code != 0, mistake
            assert done.stderr, mistake
            assert done.shell == "kept"
            assert await said(session, "echo $x; pwd") == "1\n/usr\n"
        text = await said(session, "cat <<EOF\none $x\nEOF\ncat <<'EOF'\n$x\nEOF\n")
        assert text == "one 1\n$x\n"
        with anyio.fail_after(10):
            assert (await session.run("cat <<EOF\nnever closed")).stdout.rstrip() == b"never closed"
        assert await said(session, "echo ok") == "ok\n"


async def test_a_command_that_reads_stdin_finds_it_empty(box: Sandbox) -> None:
    async with box.session() as session:
        with anyio.fail_after(10):
            assert await said(session, "cat; read line; echo $?; readlink /proc/$$/fd/0") == "1\n/dev/null\n"
            assert await said(session, "echo next") == "next\n"


async def test_what_hangs_is_killed_with_its_tree_and_the_session_goes_on_as_before(box: Sandbox) -> None:
    async with box.session() as session:
        await said(session, "cd /usr; kept=1")
        hang = "cd /; kept=2; echo before; setsid sh -c 'echo $$; exec sleep 1000' & wait"
        with anyio.fail_after(10):
            done = await session.run(hang, timeout_s=0.5)
        assert (done.timed_out, done.shell) == (True, "restored")
        assert done.fault is not None
        assert done.fault.reason == "timeout"
        before, child = done.stdout.split()
        assert before == b"before"
        assert not alive(int(child))
        assert await said(session, "pwd; echo $kept") == "/usr\n1\n"
        with anyio.fail_after(10):
            silent = await session.run("while :; do :; done", no_output_timeout_s=0.3)
        assert silent.fault is not None
        assert (silent.fault.reason, silent.shell) == ("no_output", "restored")
        killed = await session.run("kept=3; kill -9 $$")
        assert (killed.signal, killed.shell) == (9, "restored")
        assert await said(session, "echo $kept") == "1\n"


async def test_a_cancelled_run_is_killed_and_the_session_goes_on_as_before(box: Sandbox) -> None:
    mark = f"/tmp/cy-mark-{os.getpid()}"
    async with box.session() as session:
        await said(session, "kept=1")
        with anyio.move_on_after(0.5):
            await session.run(f"kept=2; echo $$ > {mark}; sleep 1000")
        pid = int(await said(session, f"cat {mark}; rm {mark}"))
        await until(lambda: not alive(pid))
        assert await said(session, "echo $kept") == "1\n"


@both
async def test_exit_ends_the_shell_and_the_next_run_starts_afresh(box: Sandbox, shell: str) -> None:
    async with box.session(cwd="/", shell=shell) as session:
        for ending, code in (("exit 7", 7), ("set -e; false; echo no", 1), ("exec sh -c 'exit 3'", 3)):
            await said(session, "cd /usr; x=1")
            done = await session.run(ending)
            assert (done.exit_code, done.shell, done.stdout) == (code, "fresh", b"")
            assert await said(session, "pwd; echo ${x-none}") == "/\nnone\n"
        await said(session, "trap 'echo bye' EXIT")
        assert await said(session, "echo in") == "in\n"
        assert (await session.run("exit")).stdout == b"bye\n"


async def test_background_processes_live_on_and_never_speak_in_a_later_run(box: Sandbox) -> None:
    async with box.session() as session:
        done = await session.run("(while :; do echo noise; echo noise >&2; sleep 0.02; done) & pid=$!")
        assert done.shell == "kept"
        assert await said(session, "sleep 0.1; kill -0 $pid && echo lives") == "lives\n"
        with anyio.fail_after(10):
            await session.run("sleep 1000", timeout_s=0.2)
        assert await said(session, "kill -0 $pid && echo lives; kill $pid") == "lives\n"


@both
async def test_a_directory_that_is_gone_leads_nowhere_else(box: Sandbox, shell: str, tmp_path: Path) -> None:
    async with box.session(shell=shell) as session:
        await said(session, f"mkdir -p {tmp_path}/a/b && cd {tmp_path}/a/b && rm -r {tmp_path}/a")
        done = await session.run("echo x > here; ls; echo $PWD; cd ../..; pwd")
        assert done.stdout.split() == [f"{tmp_path}/a/b".encode(), str(tmp_path).encode()]
        assert not list(tmp_path.iterdir())
        assert await said(session, "pwd") == f"{tmp_path}\n"


async def test_runs_wait_for_each_other_and_waiting_does_not_count(box: Sandbox) -> None:
    async with box.session() as session:
        await said(session, "n=0")
        codes: list[int | None] = []

        async def count() -> None:
            codes.append((await session.run("m=$n; sleep 0.05; n=$((m + 1))", timeout_s=1)).exit_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(25):
                tasks.start_soon(count)
        assert codes == [0] * 25
        assert await said(session, "echo $n") == "25\n"


async def test_two_sessions_of_a_sandbox_know_nothing_of_each_other(box: Sandbox) -> None:
    async with box.session() as one, box.session() as other:
        await said(one, "x=one; cd /usr")
        await said(other, "x=other; cd /")
        assert await said(one, "echo $x; pwd") == "one\n/usr\n"
        assert await said(other, "echo $x; pwd") == "other\n/\n"


async def test_commands_and_state_may_be_large(box: Sandbox) -> None:
    async with box.session() as session:
        await said(session, f"big='{'x' * 900_000}'")
        assert await said(session, "echo ${#big}") == "900000\n"
        large = "x=1; big=$(head -c 5000000 /dev/zero | tr '\\0' x); echo made #"
        over = await session.run(large.ljust(200_000, "#"))
        assert (over.stdout, over.exit_code, over.shell) == (b"made\n", 0, "restored")
        assert await said(session, "echo ${x-none} ${#big}; big=") == "none 900000\n"


async def test_a_command_is_not_in_the_list_of_processes(box: Sandbox) -> None:
    """Or `pkill -f server.py` would kill the shell that runs it."""
    async with box.session() as session:
        assert await said(session, "grep -c no-such-marker /proc/$$/cmdline; true") == "0\n"


async def test_hooks_of_the_user_do_not_catch_the_session_itself(box: Sandbox) -> None:
    async with box.session() as session:
        names = ("echo", "printf", "declare", "eval", "trap", "exit", "cd", "set", "shopt", "umask")
        hooks = "".join(f'{name}() {{ builtin {name} "$@"; builtin echo hooked; }}\n' for name in names)
        assert (await session.run(hooks)).stdout == b""
        assert (await session.run("x=1; builtin cd /usr")).stdout == b""
        assert (await session.run("builtin echo $x $PWD")).stdout == b"1 /usr\n"
        await session.run("builtin unset -f " + " ".join(names))
        await said(session, "IFS=,; set -Cfu; set -o posix; shopt -s nocasematch")
        assert await said(session, "builtin echo $x; list='a,b'; printf '%s;' $list") == "1\na;b;"
        traced = await session.run("set -x")
        assert (traced.stderr, traced.exit_code) == (b"", 0)
        lines = (await session.run("echo traced")).stderr.decode().splitlines()
        assert [line.lstrip("+ ") for line in lines] == ["echo traced"]


@pytest.mark.parametrize(
    ("how", "code", "said_of_it"),
    [
        ({"user": "nosuch"}, "user_not_found", "no user nosuch"),
        ({"cwd": "/no/such"}, "directory_not_found", "/no/such: No such file or directory"),
    ],
)
async def test_what_is_wrong_with_a_session_is_said_when_it_is_opened(
    box: Sandbox, how: dict[str, str], code: str, said_of_it: str
) -> None:
    with pytest.raises(InvalidRequest, match=said_of_it) as caught:
        await box.session(**how)  # type: ignore[arg-type]
    assert caught.value.code == code
    with pytest.raises(InvalidRequest, match="shell"):
        box.session(shell="fish")  # type: ignore[arg-type]
    async with box.session() as session:
        for command in (" ", "a\0b", "\udcff"):
            with pytest.raises(InvalidRequest):
                await session.run(command)
        assert await said(session, "echo fine") == "fine\n"


async def test_a_session_that_is_closed_says_so(box: Sandbox) -> None:
    session = await box.session()
    await said(session, "true")
    await session.close()
    await session.close()
    with pytest.raises(Conflict) as caught:
        await session.run("true")
    assert caught.value.code == "session_closed"


async def test_the_blocking_facade_has_sessions(yard_dir: Path) -> None:
    state = yard_dir / "state"
    state.mkdir()
    async with chain(yard_dir) as made, real_edge(made, state):

        def use() -> None:
            with blocking.connect(made.url, TOKEN) as yard, yard.sandbox("debian") as box:
                with box.session(cwd="/", env=here(yard_dir)) as session:
                    session.run("cd /usr; x=5")
                    began = time.monotonic()
                    assert session.run("sleep 100", timeout_s=0.2).shell == "restored"
                    assert time.monotonic() - began < 10
                    assert session.run("pwd; echo $x").text == "/usr\n5\n"
                with pytest.raises(Conflict):
                    session.run("true")

        await anyio.to_thread.run_sync(use)
