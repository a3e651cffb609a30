"""Agents that misbehave, on a real yard: the verdict is the tests' alone, and the batch goes on."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import pytest

from cloudyard.rollout import acting, journal, runner
from cloudyard.rollout.agents import Agent, Context
from cloudyard.rollout.box import Box
from cloudyard.rollout.records import Attempt
from cloudyard.rollout.task import load
from rollout_kit import GOAL, Hangs, Raises, Shell, Stubborn, make_task
from yards import TestYard

pytestmark = pytest.mark.live

VERDICT = "/logs/verifier/reward.txt"


class Lingers:
    """An agent that leaves something on the client's side, which goes on acting through the box."""

    name = "lingers"

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self.refused = ""

    async def run(self, box: Box, context: Context) -> None:
        self._tasks.start_soon(self._go_on, box)

    async def _go_on(self, box: Box) -> None:
        try:
            while True:
                await box.write(GOAL, b"")
                await box.write(VERDICT, b"1\n")
                await box.remove(GOAL)
        except Exception as error:  # noqa: BLE001 - whatever stops it
            self.refused = str(error)


class Patient:
    """Gives itself short times, again and again, as an agent that polls does."""

    name = "patient"

    async def run(self, box: Box, context: Context) -> None:
        for _ in range(2 * acting.CANCELS_MAX):
            with anyio.move_on_after(0.001):
                await anyio.sleep_forever()
        await box.run(f"touch {GOAL}")


async def attempts_of(
    yard: TestYard, agents: list[Agent], where: Path, **options: float
) -> dict[str, Attempt]:
    """One attempt of each agent at the same task, which none of them solves."""
    task = load(make_task(where / "task", **options))  # type: ignore[arg-type]
    async with yard.connect() as client:
        await runner.run(client, [task], agents, out=where / "out", attempts=1, concurrency=8)
        assert await client.list() == []
    ended = journal.read(where / "out").ended
    assert len(ended) == len(agents)
    return {key.agent: attempt for key, attempt in ended.items()}


async def test_what_an_agent_does_to_the_verdict_counts_for_nothing(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up().returncode == 0
    writer = f"while :; do echo 1 > {VERDICT}; touch {GOAL}.x; ln -sf /etc/passwd /tests/expected; done"
    cheats = [
        Shell("plants", f"echo 1 > {VERDICT}; echo '{{\"reward\": 1}}' > /logs/verifier/reward.json"),
        Shell("background", f"setsid nohup sh -c '{writer}' >/dev/null 2>&1 &"),
        Shell("respawns", f"(trap '' TERM HUP INT; ( ({writer}) & ) & ) & (setsid sh -c '{writer}' &)"),
        Shell("links-logs", "rm -rf /logs; mkdir /tmp/l; ln -s /tmp/l /logs"),
        Shell("links-verifier", f"rm -rf /logs/verifier; ln -s /root /logs/verifier; echo 1 > {VERDICT}"),
        Shell("links-tests", "mkdir /tmp/t; echo 'echo 1 >/logs/verifier/reward.txt' > /tmp/t/test.sh",
              "ln -s /tmp/t /tests"),
        Shell("files-for-directories", "rm -rf /logs; echo 1 > /logs; echo 1 > /tests"),
        Shell("own-tests", "mkdir /tests; echo 'echo 1 >/logs/verifier/reward.txt' > /tests/test.sh",
              "echo 'exit 0' > /tests/sitecustomize.py; chmod 000 /tests /logs/verifier"),
        Shell("no-workdir", "rm -rf /root"),
        Shell("no-logs", "rm -rf /logs"),
    ]  # fmt: skip
    async with anyio.create_task_group() as tasks:
        lingers = Lingers(tasks)
        ended = await attempts_of(yard, [*cheats, lingers], tmp_path)
    assert "time is over" in lingers.refused
    told = {name: (attempt.status, attempt.reward, attempt.error) for name, attempt in ended.items()}
    assert told == dict.fromkeys(ended, ("scored", 0.0, ""))


async def test_an_agent_that_breaks_is_told_in_a_sentence_and_what_it_left_is_judged(
    yard: TestYard, tmp_path: Path
) -> None:
    assert yard.up().returncode == 0
    stubborn = Stubborn()
    broken: list[Agent] = [
        Raises("raises", ValueError("no\nidea")),
        Raises("exits", SystemExit(3)),
        Raises("cancels", anyio.get_cancelled_exc_class()()),
        Raises("groups", BaseExceptionGroup("", [OSError("deep down")])),
        Hangs(),
        stubborn,
        Shell("sleeps", "sleep 1000", timeout_s=None),
        Shell("solves", f"touch {GOAL}"),
        Patient(),
    ]
    ended = await attempts_of(yard, broken, tmp_path, agent_s=2)
    stubborn.enough = True
    acting.let_go.clear()
    assert {name: attempt.agent_error for name, attempt in ended.items()} == {
        "raises": "The agent raised ValueError: no idea",
        "exits": "The agent raised SystemExit: 3",
        "cancels": "The agent raised CancelledError",
        "groups": "The agent raised OSError: deep down",
        "hangs": "The agent ran out of its 2 s.",
        "stubborn": "The agent ran out of its 2 s.",
        "sleeps": "The agent ran out of its 2 s.",
        "solves": "",
        "patient": "",
    }
    assert {name for name, attempt in ended.items() if attempt.reward == 1.0} == {"solves", "patient"}
    assert {attempt.error for attempt in ended.values()} == {""}
    assert {attempt.status for attempt in ended.values()} == {"scored"}


async def test_floods_stop_no_batch(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up().returncode == 0
    floods: list[Agent] = [
        Shell("output", "head -c 300000000 /dev/zero; head -c 300000000 /dev/zero >&2"),
        Shell("forks", "f() { f | f & }; f; sleep 5"),
        Shell("files", "mkdir -p /tests/a /logs/verifier/b; i=0; while [ $i -lt 20000 ]; do"
              " : > /tests/a/$i; : > /logs/verifier/b/$i; i=$((i+1)); done"),
        Shell("deep", "mkdir /tests; cd /tests; i=0;"
              " while [ $i -lt 3000 ]; do mkdir d; cd d; i=$((i+1)); done"),
        Shell("kills", "kill -9 -1", "for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done; sleep 1"),
        Shell("memory", "python3 -c 'x = bytearray(4 << 30); print(len(x))'"),
        Shell("shm", "head -c 1000000000 /dev/zero > /dev/shm/full"),
        Shell("solves", f"touch {GOAL}"),
    ]  # fmt: skip
    ended = await attempts_of(yard, floods, tmp_path, verifier_s=20)
    told = {name: (attempt.status, attempt.error) for name, attempt in ended.items()}
    assert told == dict.fromkeys(ended, ("scored", ""))
    assert {name for name, attempt in ended.items() if attempt.reward == 1.0} == {"solves"}
    lines = (tmp_path / "out" / journal.FILE).read_bytes().splitlines()
    assert max(map(len, lines)) < 1 << 20
    flood = next(a for a in journal.actions(tmp_path / "out", "task/output/0", try_=0) if a.phase == "agent")
    assert (flood.stdout_bytes, flood.stderr_bytes) == (300_000_000, 300_000_000)
    assert re.search(r"\d+ bytes left out", flood.stdout)


async def test_an_agent_that_destroys_the_sandbox_gets_no_reward_and_no_other_attempt(
    yard: TestYard, tmp_path: Path
) -> None:
    assert yard.up().returncode == 0
    ended = await attempts_of(yard, [Shell("destroys", "rm -rf --no-preserve-root / 2>/dev/null")], tmp_path)
    attempt = ended["destroys"]
    assert (attempt.status, attempt.fault, attempt.try_) == ("unscored", "policy", 0)
    assert attempt.error
