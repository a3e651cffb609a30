"""Whole runs on a real yard: rewards, resuming after SIGKILL, restarts of the yard, what the user reads."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

import support
from cloudyard.errors import InvalidRequest, LimitExceeded
from cloudyard.rollout import agents, journal, runner
from cloudyard.rollout.attempt import RUN_LABEL
from cloudyard.rollout.records import Attempt
from cloudyard.rollout.summary import Summary
from cloudyard.rollout.task import find, load
from rollout_kit import GOAL, IMAGE, Seeds, Shell, Slow, make_task
from yards import COMMAND_S, TestYard

pytestmark = pytest.mark.live

ORACLE, NOP = agents.find("oracle"), agents.find("nop")


def environment(yard: TestYard) -> dict[str, str]:
    """For the command line: this yard, and the agents of the kit."""
    path = f"{support.REPOSITORY / 'src'}:{support.REPOSITORY / 'tests'}"
    return {**os.environ, "PYTHONPATH": path, "CLOUDYARD_CLIENT_FILE": str(yard.state / "client.json")}


def rollout(yard: TestYard, *words: str) -> subprocess.CompletedProcess[str]:
    """`cloudyard rollout` with these words."""
    return subprocess.run(
        [sys.executable, "-m", "cloudyard.cli", "rollout", *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S, env=environment(yard),
    )  # fmt: skip


async def test_the_oracle_solves_the_task_and_nop_does_not(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up().returncode == 0
    make_task(tmp_path / "tasks" / "one")
    python = '#!/usr/bin/env python3\nimport os\nopen("/logs/verifier/reward.json", "w").write(' + (
        f'\'{{"reward": %d, "seen": 3}}\' % os.path.exists("{GOAL}"))\n'
    )
    make_task(tmp_path / "tasks" / "two", test=python)
    tasks, _ = find([tmp_path / "tasks"])
    told: list[Attempt] = []

    def tell(attempt: Attempt, summary: Summary) -> None:
        told.append(attempt)
        assert summary.total.attempts == len(told)

    async with yard.connect() as client:
        summary = await runner.run(client, tasks, [ORACLE, NOP], out=tmp_path / "out", attempts=3, tell=tell)
        assert await client.list() == []
    assert [(row.task, row.agent, row.mean_reward, row.attempts) for row in summary.rows] == [
        ("one", "nop", 0.0, 3),
        ("one", "oracle", 1.0, 3),
        ("two", "nop", 0.0, 3),
        ("two", "oracle", 1.0, 3),
    ]
    assert all(attempt.cost.cpu_s > 0 and attempt.cost.sandbox_s > 0 for attempt in told)
    assert all(attempt.parts["seen"] == 3 for attempt in told if attempt.task == "two")
    assert len({attempt.sandbox for attempt in told}) == 12
    seen = journal.actions(tmp_path / "out", "one/oracle/0", try_=0)
    assert [action.number for action in seen] == list(range(len(seen)))
    assert {action.phase for action in seen} == {"setup", "agent", "verify"}


async def test_what_the_task_says_of_its_sandbox_holds(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up().returncode == 0
    toml = f"""
[environment]
docker_image = "{IMAGE}"
workdir = "/app/x"
env = {{ ALL = "a" }}
[environment.healthcheck]
command = "[ -e /tmp/second ] || {{ touch /tmp/second; exit 1; }}"
interval_sec = 0.01
[agent]
user = "nobody"
[verifier]
env = {{ ONLY = "v" }}
[solution]
env = {{ MINE = "s" }}
"""
    test = 'n=$(cat seen); [ "$n" = "nobody a s unset /app/x data" -a "$ALL $ONLY $PWD" = "a v /app/x" ]' + (
        " && echo 1 > /logs/verifier/reward.txt\n"
    )
    solve = 'echo "$(id -un) $ALL $MINE ${ONLY:-unset} $PWD $(cat file)" > seen\n'
    directory = make_task(tmp_path / "t", toml=toml, test=test, solve=solve)
    (directory / "environment").mkdir(mode=0o777)
    (directory / "environment").chmod(0o777)
    (directory / "environment" / "file").write_text("data")
    (directory / "environment" / "seen").write_text("")
    (directory / "environment" / "seen").chmod(0o666)
    async with yard.connect() as client:
        await runner.run(client, [load(directory)], [ORACLE], out=tmp_path / "out", attempts=1)
    (attempt,) = journal.read(tmp_path / "out").ended.values()
    assert (attempt.status, attempt.reward, attempt.agent_error) == ("scored", 1.0, ""), attempt


async def test_rewards_that_are_none_are_a_sentence_each_and_are_not_tried_again(
    yard: TestYard, tmp_path: Path
) -> None:
    assert yard.up().returncode == 0
    to = "/logs/verifier/reward"
    scripts = {
        "nan": (f"echo nan > {to}.txt", "finite"),
        "text": (f"echo passed > {to}.txt", "no number"),
        "empty": (f": > {to}.txt", "is empty"),
        "huge": (f"head -c 100000000 /dev/zero > {to}.txt", "is 100000000 bytes long"),
        "list": (f"echo '[1]' > {to}.json; echo 1 > {to}.txt", "no object"),
        "link": (f"ln -s /etc/hostname {to}.txt", "is a symlink"),
        "pipe": (f"mkfifo {to}.txt", "is a other and no file"),
        "directory": (f"mkdir {to}.txt", "is a directory and no file"),
        "none": ("echo oh no >&2; exit 3", "exit code 3, and wrote last: 'oh no'"),
        "killed": ("kill -9 $$", "signal 9"),
        "hangs": ("sleep 1000", "ran out of their 1 s"),
        "gone": ("rm -rf /logs", "there is no /logs/verifier/reward.txt"),
        "high": (f"echo 2 > {to}.txt", "not between 0 and 1"),
    }
    for name, (script, _) in scripts.items():
        make_task(tmp_path / "tasks" / name, test=script, verifier_s=1 if name == "hangs" else 20)
    make_task(
        tmp_path / "tasks" / "later", test=f"(while :; do echo 1 > {to}.txt; done) & echo 0 > {to}.json"
    )
    tasks, _ = find([tmp_path / "tasks"])
    async with yard.connect() as client:
        with pytest.raises(InvalidRequest):
            await runner.run(client, tasks, [NOP], out=tmp_path / "out", attempts=0)
        await runner.run(client, tasks, [NOP], out=tmp_path / "out", attempts=1)
    ended = {key.task: attempt for key, attempt in journal.read(tmp_path / "out").ended.items()}
    assert ended.pop("later").error.endswith("no object of numbers. tests/test.sh writes one number to "
        "/logs/verifier/reward.txt, or {\"reward\": number} to reward.json.")  # fmt: skip
    assert {name: attempt.status for name, attempt in ended.items()} == dict.fromkeys(scripts, "unscored")
    assert {attempt.try_ for attempt in ended.values()} == {0}
    assert [name for name, (_, said) in scripts.items() if said not in ended[name].error] == []


async def test_a_task_that_gives_itself_away_is_not_tried(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up().returncode == 0
    toml = (
        f'[environment]\ndocker_image = "{IMAGE}"\nworkdir = "/"\n[metadata.cloudyard]\nabsent = ["hidden"]\n'
    )
    at_root = make_task(tmp_path / "tasks" / "at-root", toml=toml)
    (at_root / "environment").mkdir()
    (at_root / "environment" / "note").write_text("it is hidden here")
    for name, text in {"content": "return a + b", "name": "fault-17", "clean": "return a"}.items():
        toml = f'[environment]\ndocker_image = "{IMAGE}"\n[metadata.cloudyard]\n' + (
            'absent = ["return a + b", "fault-17"]\n'
        )
        directory = make_task(tmp_path / "tasks" / name, toml=toml)
        (directory / "environment" / "sub").mkdir(parents=True)
        file = "fault-17.txt" if name == "name" else "code.py"
        (directory / "environment" / "sub" / file).write_text(text)
    tasks, _ = find([tmp_path / "tasks"])
    async with yard.connect() as client:
        await runner.run(client, tasks, [ORACLE], out=tmp_path / "out", attempts=1)
    ended = {key.task: attempt for key, attempt in journal.read(tmp_path / "out").ended.items()}
    assert (ended["clean"].status, ended["clean"].reward) == ("scored", 1.0)
    for name, file in {"content": "sub/code.py", "name": "sub/fault-17.txt", "at-root": "/note"}.items():
        assert ended[name].status == "unscored"
        assert file in ended[name].error
        assert all(a.phase == "setup" for a in journal.actions(tmp_path / "out", f"{name}/oracle/0", try_=0))


async def test_the_same_seed_twice_gives_the_same_seeds(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up().returncode == 0
    tasks = [load(make_task(tmp_path / name)) for name in ("one", "two")]
    seen = []
    async with yard.connect() as client:
        for out, seed in (("a", 5), ("b", 5), ("c", 6)):
            first, second = Seeds("first"), Seeds("second")
            await runner.run(client, tasks, [first, second], out=tmp_path / out, attempts=4, seed=seed)
            assert first.seen == second.seen
            seen.append(first.seen)
    assert seen[0] == seen[1]
    assert not set(seen[0].values()) & set(seen[2].values())
    assert len(set(seen[0].values())) == 8


async def test_a_run_that_was_killed_again_and_again_is_finished_as_if_it_never_was(
    yard: TestYard, tmp_path: Path
) -> None:
    """SIGKILL at random moments; in the end every attempt has one result and no sandbox is left."""
    assert yard.up().returncode == 0
    for name in ("one", "two"):
        make_task(tmp_path / "tasks" / name)
    out = tmp_path / "out"
    words = [sys.executable, "-m", "cloudyard.cli", "rollout", "run", str(tmp_path / "tasks"), "--json"]
    words += ["--out", str(out), "--agent", "rollout_kit:Slow", "--agent", "nop", "-k", "12", "-n", "6"]
    chance = random.Random(int.from_bytes(os.urandom(4)))
    for kills_left in reversed(range(6)):
        before = _ended(out)
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(yard),
        )  # fmt: skip
        if kills_left:
            _wait_for_one_more(process, out, before)
            time.sleep(chance.uniform(0, 0.2))
            process.kill()
        printed, err = process.communicate(timeout=COMMAND_S)
        if process.returncode != -signal.SIGKILL:
            break
    assert process.returncode == 0, err
    report = json.loads(printed)
    assert [(row["task"], row["agent"], row["scored"], row["mean_reward"]) for row in report["rows"]] == [
        ("one", "nop", 12, 0.0),
        ("one", "slow", 12, 1.0),
        ("two", "nop", 12, 0.0),
        ("two", "slow", 12, 1.0),
    ]
    lines = [json.loads(line) for line in (out / journal.FILE).read_bytes().splitlines()]
    ends = [(line["task"], line["agent"], line["attempt"]) for line in lines if line["type"] == "attempt"]
    assert len(ends) == len(set(ends)) == 48  # nothing that had ended was done again
    assert sum(line["type"] == "resumed" for line in lines) >= 2
    async with yard.connect() as client:
        assert await client.list() == []


def _ended(out: Path) -> int:
    path = out / journal.FILE
    return path.read_bytes().count(b'{"type":"attempt"') if path.exists() else 0


def _wait_for_one_more(process: subprocess.Popen[str], out: Path, before: int) -> None:
    support.wait_until_sync(
        lambda: process.poll() is not None or _ended(out) > before, "an attempt has ended", within_s=30
    )


async def test_sandboxes_of_a_killed_runner_are_stopped_first_when_the_run_is_taken_up(
    yard: TestYard, tmp_path: Path
) -> None:
    assert yard.up().returncode == 0
    task = load(make_task(tmp_path / "t"))
    async with yard.connect() as client:
        await runner.run(client, [task], [NOP], out=tmp_path / "out", attempts=1)
        run_id = journal.read(tmp_path / "out").run.id
        left = await client.create(IMAGE, labels={RUN_LABEL: run_id})
        other = await client.create(IMAGE, labels={RUN_LABEL: "another"})
        await runner.run(client, [task], [NOP], out=tmp_path / "out", attempts=1)
        assert (await left.info()).state == "stopped"
        assert (await other.info()).state == "running"
        await other.stop()


async def test_another_configuration_on_the_same_directory_is_refused_in_a_sentence(
    yard: TestYard, tmp_path: Path
) -> None:
    assert yard.up().returncode == 0
    directory = make_task(tmp_path / "t")
    out = tmp_path / "out"
    async with yard.connect() as client:
        await runner.run(client, [load(directory)], [NOP], out=out, attempts=1)
        other = load(make_task(tmp_path / "other"))
        for tasks, chosen, options, said in (
            ([load(directory)], [NOP], {"attempts": 1, "seed": 1}, "its seed is 0"),
            ([load(directory)], [NOP], {"attempts": 2}, "it makes 1 attempts"),
            ([load(directory)], [ORACLE], {"attempts": 1}, "its agents are nop"),
            ([other], [NOP], {"attempts": 1}, "tasks other, t are not in both"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                await runner.run(client, tasks, chosen, out=out, **options)  # type: ignore[arg-type]
        (directory / "tests" / "expected").write_text("changed")
        with pytest.raises(InvalidRequest, match="files of the task t have changed"):
            await runner.run(client, [load(directory)], [NOP], out=out, attempts=1)


@pytest.mark.parametrize("part", ["edge", "control"])
async def test_a_part_of_the_yard_killed_in_the_middle_makes_nothing_void(
    yard: TestYard, tmp_path: Path, part: str
) -> None:
    assert yard.up().returncode == 0
    task = load(make_task(tmp_path / "t"))
    kills = 0

    def tell(attempt: Attempt, summary: Summary) -> None:
        nonlocal kills
        if summary.total.attempts in (5, 20):
            os.kill(yard.pids()[part], signal.SIGKILL)
            kills += 1

    async with yard.connect() as client:
        summary = await runner.run(
            client, [task], [Slow(), NOP], out=tmp_path / "out", attempts=16, concurrency=8, tell=tell
        )
        assert await client.list() == []
    assert kills == 2
    assert (summary.total.void, summary.total.scored) == (0, 32), summary.rows
    assert summary.total.reward_sum == 16


async def test_two_hundred_trivial_attempts_leave_nothing_and_none_is_void(
    yard: TestYard, tmp_path: Path
) -> None:
    assert yard.up().returncode == 0
    task = load(make_task(tmp_path / "t"))
    async with yard.connect() as client:
        summary = await runner.run(client, [task], [NOP], out=tmp_path / "out", attempts=200)
        assert await client.list() == []
    assert (summary.total.scored, summary.total.void, summary.total.tries) == (200, 0, 0)


async def test_more_at_once_than_the_yard_has_room_for_wait_for_room(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up("--cpu-overcommit", "1").returncode == 0
    toml = f'[environment]\ndocker_image = "{IMAGE}"\ncpus = {os.cpu_count()}\n'
    task = load(make_task(tmp_path / "t", toml=toml))
    async with yard.connect() as client:
        summary = await runner.run(client, [task], [NOP], out=tmp_path / "out", attempts=6, concurrency=6)
    assert (summary.total.scored, summary.total.void) == (6, 0), summary.total.errors


async def test_a_full_disk_stops_the_run_in_a_sentence_and_room_lets_it_go_on(
    yard: TestYard, tmp_path: Path
) -> None:
    assert yard.up().returncode == 0
    task = load(make_task(tmp_path / "t"))
    out = tmp_path / "out"
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(out)]
    subprocess.run(mount, check=True)
    try:
        async with yard.connect() as client:
            with pytest.raises(LimitExceeded, match="no space left"):
                await runner.run(client, [task], [NOP], out=out, attempts=40, concurrency=2)
            assert await client.list() == []
            before = len(journal.read(out).ended)
            subprocess.run(["mount", "-o", "remount,size=4m", str(out)], check=True)
            summary = await runner.run(client, [task], [NOP], out=out, attempts=40, concurrency=2)
        assert 0 < before < 40
        assert (summary.total.scored, summary.total.void) == (40, 0)
    finally:
        subprocess.run(["umount", str(out)], check=True)


async def test_a_cancelled_run_stops_its_sandboxes(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up().returncode == 0
    task = load(make_task(tmp_path / "t"))
    async with yard.connect() as client:
        async with anyio.create_task_group() as tasks:

            async def work() -> None:
                sleeper = Shell("sleeps", "sleep 1000", timeout_s=None)
                await runner.run(client, [task], [sleeper], out=tmp_path / "out", attempts=4)

            tasks.start_soon(work)

            async def all_sleep() -> bool:
                return sum([info.commands for info in await client.list()]) == 4

            await support.wait_until(all_sleep, "all attempts are under way", within_s=30)
            tasks.cancel_scope.cancel()
        assert await client.list() == []
    assert journal.read(tmp_path / "out").ended == {}


# --- the command line
# -------------------------------------------------------------------------------------------------------


def test_the_command_line_prints_a_table_the_story_of_an_attempt_and_json(
    yard: TestYard, tmp_path: Path
) -> None:
    assert yard.up().returncode == 0
    make_task(tmp_path / "tasks" / "one", solve="printf 'wo\\033[31mrd\\n'; exit 4\n")
    make_task(tmp_path / "tasks" / "nothing", test=None)
    make_task(tmp_path / "tasks" / "tagged", image="debian:12")
    out = str(tmp_path / "out")
    command = ("run", str(tmp_path / "tasks"), "--agent", "oracle", "--agent", "nop", "-k", "2", "--out", out)
    done = rollout(yard, *command)
    assert done.returncode == 1, done.stderr
    for words in ("oracle", "4 of 4 attempts, 0.0% void", "tests/test.sh does not exist", "has no image "
                  "'debian:12'; it has debian", "solution/solve.sh ended with exit code 4"):  # fmt: skip
        assert words in done.stdout, words
    story = rollout(yard, "show", out, "--attempt", "one/oracle/1")
    assert story.returncode == 0
    assert "solve.sh" in story.stdout
    assert "wo\\x1b[31mrd" in story.stdout
    assert "\x1b" not in story.stdout
    shown = json.loads(rollout(yard, "show", out, "--json").stdout)
    assert (shown["total"]["scored"], shown["expected"], len(shown["run"]["broken"])) == (4, 4, 2)
    one = json.loads(rollout(yard, "show", out, "--attempt", "one/nop/0", "--json").stdout)
    assert (one["attempt"]["reward"], one["actions"][0]["phase"]) == (0.0, "setup")
    missing = rollout(yard, "show", out, "--attempt", "one/nop/7")
    assert (missing.returncode, "TASK/AGENT/NUMBER" in missing.stderr) == (1, True)


def test_wrong_requests_are_a_sentence_and_exit_code_2_or_1(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up().returncode == 0
    task = str(make_task(tmp_path / "t"))
    untested = str(make_task(tmp_path / "untested", test=None))
    out = ("--out", str(tmp_path / "out"))
    for words, code, said in (
        (("run", task, "--agent", "oracel", *out), 1, "Did you mean oracle?"),
        (("run", task, "--agent", "no.such:Agent", *out), 1, "ModuleNotFoundError"),
        (("run", task, "--agent", "rollout_kit:IMAGE", *out), 2, "is no agent"),
        (("run", str(tmp_path), "--agent", "nop", "-n", "0", *out), 2, "concurrency is 0"),
        (("run", untested, "--agent", "nop", *out), 2, "tests/test.sh does not exist"),
        (("run", str(tmp_path / "nowhere"), "--agent", "nop", *out), 1, "no such directory"),
        (("run", task, "--agent", "nop", "--env", "NOT_SET_ANYWHERE", *out), 2, "is not set here"),
        (("show", str(tmp_path / "nowhere")), 1, "holds no run"),
    ):
        done = rollout(yard, *words)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
        assert not (tmp_path / "out" / journal.FILE).exists()


def test_an_agent_that_blocks_the_event_loop_is_interrupted_and_the_others_go_on(
    yard: TestYard, tmp_path: Path
) -> None:
    assert yard.up().returncode == 0
    task = str(make_task(tmp_path / "t"))
    out = str(tmp_path / "out")
    done = rollout(
        yard, "run", task, "--agent", "rollout_kit:Blocks", "--agent", "oracle", "-k", "1", "--out", out
    )
    assert done.returncode == 0, done.stderr
    assert "AgentBlocked: it kept all other attempts waiting" in done.stdout
    ended = {key.agent: attempt.reward for key, attempt in journal.read(Path(out)).ended.items()}
    assert ended == {"blocks": 0.0, "oracle": 1.0}
