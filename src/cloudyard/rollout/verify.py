"""After the agent: its processes are killed, places for tests and rewards are made anew, the tests run, and
what they left is read.

Everything but the tests themselves is done from outside, by the yard's file operations: the agent may have
replaced every program in the sandbox, and made any path a link. After the tests all processes are killed once
more, so that nothing is left that could write while the reward is read.
"""

from __future__ import annotations

from cloudyard.errors import CloudyardError, InvalidRequest, LimitExceeded, NotFound
from cloudyard.rollout.box import Box
from cloudyard.rollout.rewards import REWARD_BYTES_MAX, REWARD_JSON, REWARD_TEXT, Reward, parse
from cloudyard.rollout.scripts import start_of
from cloudyard.rollout.task import Task
from cloudyard.sdk.process import Completed

LOGS, VERIFIER, TESTS = "/logs", "/logs/verifier", "/tests"
REMOVE_TRIES = 10  # of a tree so large that one call does not finish it
OPEN_TO_ALL = 0o777  # tests may run as any user
_TAIL_CHARS = 200  # of what failed tests wrote last, for the sentence that says so


async def verify(box: Box, task: Task) -> Reward:
    """Run the tests on what the agent left in the sandbox of the box.

    Raises:
        InvalidRequest: they gave no reward, for the reason in the sentence.
        CloudyardError: the agent left a sandbox that cannot be tested, or the yard failed.
    """
    await box.kill_all()
    await _make_anew(box)
    await box.upload(task.tests, TESTS)
    ended = await _run_tests(box, task)
    await box.kill_all()
    name, data = await _reward_file(box, ended)
    return parse(name, data, within=task.reward_range)


async def _make_anew(box: Box) -> None:
    """Empty directories for tests and their verdict, whatever the agent made of those paths."""
    try:
        if (await box.stat(LOGS, follow=False)).kind != "directory":
            await _remove(box, LOGS)
    except NotFound as error:
        if error.code == "sandbox_not_found":
            raise
    await _remove(box, VERIFIER)
    await _remove(box, TESTS)
    await box.mkdir(VERIFIER, mode=OPEN_TO_ALL)


async def _remove(box: Box, path: str) -> None:
    for tries_left in reversed(range(REMOVE_TRIES)):
        try:
            return await box.remove(path, recursive=True, missing_ok=True)
        except LimitExceeded as error:
            if error.code != "remove_unfinished" or not tries_left:
                raise


async def _run_tests(box: Box, task: Task) -> Completed:
    command = await start_of(box, task.tests / "test.sh", f"{TESTS}/test.sh")

    async def start() -> Completed:
        return await box.run(
            command, timeout_s=task.verifier_timeout_s, env=task.verifier_env, user=task.verifier_user
        )

    ended = await start()
    if ended.error:  # the agent may have removed the working directory, which is for the tests to judge
        await box.mkdir(box.cwd)
        ended = await start()
    if ended.timed_out:
        raise InvalidRequest(
            f"The tests gave no reward: they ran out of their {task.verifier_timeout_s:g} s.",
            code="tests_timed_out",
            fault="policy",
        )
    return ended


async def _reward_file(box: Box, ended: Completed) -> tuple[str, bytes]:
    """Name and bytes of the file that holds the reward.

    Raises:
        InvalidRequest: there is none, or it is no plain file of a fair size.
    """
    try:
        entries = {entry.path.rsplit("/", 1)[-1]: entry for entry in await box.listdir(VERIFIER)}
    except CloudyardError as error:
        if error.fault == "infra" or error.code == "sandbox_not_found":
            raise
        entries = {}
    name = next((name for name in (REWARD_JSON, REWARD_TEXT) if name in entries), "")
    if not name:
        raise _no_reward(ended)
    entry = entries[name]
    if entry.kind != "file":
        raise InvalidRequest(
            f"The tests left no reward: {name} is a {entry.kind} and no file.",
            code="bad_reward",
            fault="policy",
        )
    if entry.size > REWARD_BYTES_MAX:
        raise InvalidRequest(
            f"The tests left no reward: {name} is {entry.size} bytes long.", code="bad_reward", fault="policy"
        )
    return name, await box.read(entry.path)


def _no_reward(ended: Completed) -> InvalidRequest:
    if ended.error:
        return InvalidRequest(
            f"The tests could not be started in what the agent left: {ended.error}.",
            code="tests_not_started",
            fault="policy",
        )
    how = f"signal {ended.signal}" if ended.exit_code is None else f"exit code {ended.exit_code}"
    last = (ended.stderr or ended.stdout).decode(errors="replace").strip()[-_TAIL_CHARS:]
    said = f", and wrote last: {last!r}" if last else ""
    oom = ", after the sandbox had run out of memory" if ended.oom else ""
    return InvalidRequest(
        f"The tests left no reward: there is no {VERIFIER}/{REWARD_TEXT}. tests/test.sh ended with "
        f"{how}{oom}{said}.",
        code="no_reward",
        hint="It writes one number to that file, whatever happens.",
        fault="policy",
    )
