"""Faults of a sandbox's life that users of other platforms reported, as behaviour of ours, in real yards.

Each docstring names the reports, with the numbers in them. Elsewhere are: what 500 sandboxes leave behind
among kills (infra#1568, forkd#299), in test_leaks.py; overcommit, and quota of what was cancelled
(CubeSandbox#1565, agent-sandbox#1735), in test_neighbours.py; a stock that overshoots (agent-sandbox#1266),
in tests/contract/test_container_stock.py; a create that takes longer than whoever asked waits
(cubeplex#136), by a clock that is moved by hand, in tests/flow/test_edge_life.py.

These do not apply yet: no sandbox can be paused (CubeSandbox#13; that it can be deleted in every state, as
#402, #985 and #1137 ask, is here), none goes on elsewhere when its node is lost (that this is said in bounded
time, as CubeSandbox#790 asks, is here), and no image comes from a registry (cubeplex#136).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pytest

import cloudyard
import support
from cloudyard import Completed, Sandbox
from cloudyard.assemble.edge_main import container_options
from cloudyard.edge.backends.container.options import STOCK_SIZE
from cloudyard.errors import (
    CloudyardError,
    LimitExceeded,
    NotFound,
    SandboxUnavailable,
    YardUnavailable,
)
from cloudyard.images.build import build_from_tree
from cloudyard.images.depot import Depot
from yards import TestYard, new_yard

pytestmark = [pytest.mark.live, pytest.mark.slow]

BOUND_S = 120.0
CPUS = len(os.sched_getaffinity(0))


@pytest.fixture
async def client(up: TestYard) -> AsyncIterator[cloudyard.Yard]:
    async with up.connect() as yard:
        yield yard


def guests(yard: TestYard) -> int:
    """How many sandboxes really run, by what the kernel says: processes that are PID 1 of one."""
    pids = support.yard_pids(container_options(yard.config).tag)
    return sum(support.comm(pid) == "guest" for pid in pids)


async def test_after_the_node_daemon_was_killed_list_and_processes_agree(yard: TestYard) -> None:
    """infra#2041, #2136: a restart emptied the list while the machines ran on. Here it happens in the middle
    of creates and of stops, and every sandbox is listed and answers, or is gone from both; and while nobody
    can tell, no list says that there is none."""
    with anyio.fail_after(BOUND_S):
        assert yard.up().returncode == 0
        async with yard.connect() as client:
            old = await client.create_many(8, "debian", memory="64MiB")
            for box in old:
                await box.start("sleep 1000")
            done: list[object] = []

            async def do(work: Callable[[], Awaitable[object]]) -> None:
                done.append(await work())

            async with anyio.create_task_group() as tasks:
                for box in old[:4]:
                    tasks.start_soon(do, box.stop)
                for _ in range(6):
                    tasks.start_soon(do, partial(client.create, "debian"))
                await support.wait_until(lambda: bool(done), "one of them is done")
                assert len(done) < 4 + 6
                os.kill(yard.pids()["edge"], signal.SIGKILL)
                assert {box.id for box in old[4:]} <= {info.id for info in await client.list()}
            listed = await client.list()
            assert {info.state for info in listed} == {"running"}
            assert len(listed) == 4 + 6
            assert {box.id for box in old[4:]} < {info.id for info in listed}
            for info in listed:
                box = await client.get(info.id)
                assert (await box.run("echo here")).stdout == b"here\n"
            sleeping = "cat /proc/[0-9]*/comm | grep -c sleep"
            assert [(await box.run(sleeping)).stdout for box in old[4:]] == [b"1\n"] * 4
            for info in listed:
                await client.stop(info.id)
            assert await client.list() == []
            await support.wait_until(lambda: guests(yard) <= STOCK_SIZE, "only those raised ahead run")


async def test_fifty_creates_at_once_all_succeed_and_are_told_apart(client: cloudyard.Yard) -> None:
    """OpenSandbox#1705: creates at the same time drew the same port of 120, and were answered with 500."""
    boxes: list[Sandbox] = []

    async def create() -> None:
        boxes.append(await client.create("debian", memory="64MiB"))

    with anyio.fail_after(BOUND_S):
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(create)
        said = {(await box.run("cat /proc/self/uid_map")).stdout for box in boxes}
        assert len({box.id for box in boxes}) == len(said) == 50
        async with anyio.create_task_group() as tasks:
            for box in boxes:
                tasks.start_soon(box.stop)


async def test_one_that_is_used_as_its_idle_time_ends_lives_on_for_all_of_it(client: cloudyard.Yard) -> None:
    """CubeSandbox PR#1702: an idle time ended right after a connect, in 500 of them at the last moment."""
    ttl_s = 1.0
    used_at: dict[str, float] = {}

    async def use_at_the_end(number: int) -> None:
        box = await client.create("debian", memory="64MiB", idle_ttl_s=ttl_s)
        await anyio.sleep(ttl_s * (0.9 + 0.15 * number / 100))
        asked_at = time.time()
        try:
            if number % 2:
                assert (await box.keep_alive()).state == "running"
            else:
                done = await box.run("true")
                if done.fault is not None:  # it had begun, and was cut off
                    assert done.fault.reason == "expired"
                    return
        except SandboxUnavailable as error:
            if error.code != "sandbox_expired":
                raise
        else:
            used_at[box.id] = asked_at

    async def all_ended() -> bool:
        return not await client.list()

    with anyio.fail_after(BOUND_S):
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(use_at_the_end, number)
        assert 0 < len(used_at) < 100  # some came in time, and some too late
        await support.wait_until(all_ended, "all have ended")
        ended = {info.id: info for info in await client.list(stopped=True)}
        for identity, at in used_at.items():
            assert ended[identity].reason == "idle_ttl"
            assert (ended[identity].stopped_at or 0) - at > 0.99 * ttl_s


async def fails_for_want_of_a_node(ask: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(YardUnavailable) as caught, anyio.fail_after(30):
        await ask()
    assert caught.value.fault == "infra"


async def test_a_node_that_answers_no_more_is_said_to_be_away_and_all_goes_on_when_it_is_back(
    yard: TestYard,
) -> None:
    """CubeSandbox#790: after its node was lost a sandbox answered 503 for ever, and whoever asked waited."""
    with anyio.fail_after(BOUND_S):
        assert yard.up().returncode == 0
        async with yard.connect() as client:
            box = await client.create("debian", memory="64MiB")
            process = await box.start("sleep 2; echo done")
            edge = yard.pids()["edge"]
            os.kill(edge, signal.SIGSTOP)
            try:
                async with anyio.create_task_group() as tasks:
                    asked = (
                        box.info,
                        box.stop,
                        client.list,
                        partial(box.run, "true"),
                        partial(client.create, "debian"),
                    )
                    for ask in asked:
                        tasks.start_soon(fails_for_want_of_a_node, ask)
            finally:
                os.kill(edge, signal.SIGCONT)

            async def back() -> bool:
                with suppress(YardUnavailable):
                    return (await box.info()).state == "running"
                return False

            await support.wait_until(back, "the edge answers again", within_s=30)
            assert (await process.wait()).stdout == b"done\n"
            assert (await box.run("echo here")).stdout == b"here\n"
            assert len(await client.list()) == 1


async def test_a_sandbox_can_be_removed_in_every_state(client: cloudyard.Yard) -> None:
    """daytona#2236: one that was stuck in its start could not be removed; CubeSandbox#402: nor one whose
    stored state was not the real one."""
    with anyio.fail_after(BOUND_S):
        box = await client.create("debian", memory="64MiB")
        await box.stop()
        await box.stop()  # stopped
        await client.stop(box.id)

        box = await client.create("debian", memory="64MiB")
        await box.start("trap '' TERM; while :; do :; done")
        async with anyio.create_task_group() as tasks:  # stopping, with what does not want to end
            for _ in range(3):
                tasks.start_soon(box.stop)

        for number in range(8):  # creating, and somebody else stops it
            await stop_while_it_is_made(client, f"box-{number}")
        for delay_s in (0.0, 0.001, 0.003, 0.01, 0.03):  # creating, and nobody waits any more
            with anyio.move_on_after(delay_s):
                async with client.sandbox("debian", memory="64MiB"):
                    await anyio.sleep_forever()
        await support.wait_until(lambda: none_left(client), "none is left of creates that were given up")

        with pytest.raises(NotFound):
            await client.stop("sb-e1-000000000000")


async def stop_while_it_is_made(client: cloudyard.Yard, hostname: str) -> None:
    """A host name that nobody had: so it is not one of those raised ahead, which takes no time to make."""
    ended: list[object] = []

    async def create() -> None:
        try:
            made = await client.create("debian", memory="64MiB", hostname=hostname)
        except SandboxUnavailable as error:
            assert error.code in ("sandbox_stopping", "sandbox_stopped")  # noqa: PT017 - else it was made first
        else:
            ended.append(await made.stop())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(create)
        while not (infos := await client.list()):
            await anyio.sleep(0)
        await client.stop(infos[0].id)
    assert await client.list() == []


async def none_left(client: cloudyard.Yard) -> bool:
    return not await client.list()


async def test_one_whose_first_process_is_gone_says_so_and_can_be_removed(
    up: TestYard, client: cloudyard.Yard
) -> None:
    """CubeSandbox#985, #1137: what is stored of it and what is there disagree."""
    tag = container_options(up.config).tag
    with anyio.fail_after(BOUND_S):
        box = await client.create("debian", memory="64MiB")
        results: list[Completed] = []

        async def sleep() -> None:
            results.append(await box.run("sleep 1000"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleep)
            await support.wait_until(lambda: len(parents_of(tag, "sleep")) == 1, "its command runs")
            os.kill(parents_of(tag, "sleep").pop(), signal.SIGKILL)
        (done,) = results
        assert done.fault is not None
        assert (done.fault.label, done.fault.reason) == ("infra", "lost")
        with pytest.raises(SandboxUnavailable) as caught:
            await box.run("true")
        assert (caught.value.code, caught.value.fault) == ("sandbox_failed", "infra")
        await box.stop()
        assert await client.list() == []


def parents_of(tag: str, name: str) -> set[int]:
    """The PID 1 of sandboxes in which a process of that name runs."""
    found = set()
    for pid in support.yard_pids(tag):
        if support.comm(pid) == name:
            at = pid
            while support.comm(at) != "guest":
                at = int(Path(f"/proc/{at}/stat").read_text().rsplit(")", 1)[1].split()[1])
            found.add(at)
    return found


async def test_creates_that_failed_hold_no_room(yard: TestYard, tmp_path: Path) -> None:
    """daytona#5142: sandboxes whose start failed kept their share of the quota. Twenty times, with room for
    two."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "no-shell").write_text("nothing can run here")
    images = tmp_path / "depot"
    shutil.copytree(yard.depot, images)
    build_from_tree(Depot(images), "broken", tmp_path / "tree")
    with anyio.fail_after(BOUND_S), new_yard(yard.directory / "other", images) as small:
        small.directory.mkdir(mode=0o700)
        done = await anyio.to_thread.run_sync(small.up, "--cpu-overcommit", str(2 / CPUS))
        assert done.returncode == 0, done.stderr
        async with small.connect() as client:
            for _ in range(20):
                with pytest.raises(CloudyardError) as failed:
                    await client.create("broken", cpu=1, memory="64MiB")
                assert "broken" in str(failed.value) or failed.value.code == "no_shell", failed.value
            held = await client.create_many(2, "debian", cpu=1, memory="64MiB")
            with pytest.raises(LimitExceeded):
                await client.create("debian", cpu=1, memory="64MiB")
            for box in held:
                await box.stop()


async def test_the_end_of_its_time_is_an_error_of_its_own_and_can_be_put_off(client: cloudyard.Yard) -> None:
    """rllm#677, verifiers#1676: a box's life began before installing, agent and verifier, and its end looked
    like a kill (exit 137)."""
    with anyio.fail_after(BOUND_S):
        short = await client.create("debian", memory="64MiB", max_ttl_s=3)
        done = await short.run("echo begun; sleep 60")
        assert (done.stdout, done.exit_code, done.signal) == (b"begun\n", None, None)
        assert done.fault is not None
        assert (done.fault.label, done.fault.reason) == ("policy", "expired")
        with pytest.raises(SandboxUnavailable) as caught:
            await short.run("true")
        assert caught.value.code == "sandbox_expired"
        assert caught.value.fault == "policy"
        assert "max_ttl_s" in caught.value.message
        kept = await client.create("debian", memory="64MiB", max_ttl_s=3)
        for beat in range(4):
            await kept.keep_alive(max_ttl_s=beat + 4)
            assert (await kept.run("sleep 1")).ok
        await kept.stop()


async def test_what_a_killed_program_had_made_ends_with_its_lease(
    up: TestYard, client: cloudyard.Yard
) -> None:
    """verifiers#2605: a trainer that was killed with SIGKILL left its boxes behind."""
    words = ["run", "--image", "debian", "--memory", "64MiB", "--lease", "2", "echo ready; sleep 1000"]
    with anyio.fail_after(BOUND_S):
        trainer = subprocess.Popen(
            [sys.executable, "-m", "cloudyard.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "CLOUDYARD_CLIENT_FILE": str(up.state / "client.json")},
        )
        with trainer:
            try:
                assert trainer.stdout is not None
                assert await anyio.to_thread.run_sync(trainer.stdout.readline) == b"ready\n"
                (made,) = await client.list()

                async def renewed() -> bool:
                    return ((await client.list())[0].max_ttl_s or 0) > (made.max_ttl_s or 0)

                await support.wait_until(renewed, "its lease is renewed while it lives")
            finally:
                trainer.kill()
        await support.wait_until(lambda: none_left(client), "its sandbox is gone", within_s=30)
        (ended,) = [info for info in await client.list(stopped=True) if info.id == made.id]
        assert (ended.state, ended.reason) == ("stopped", "max_ttl")
