"""Tasks in a directory of the test's own, and agents that misbehave. For tests of rollouts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import anyio

from cloudyard.rollout.agents import Context
from cloudyard.rollout.box import Box

IMAGE = "debian"  # of the depot that live tests have
GOAL = "/root/done"  # a task of ours is solved when this file exists
TEST_SCRIPT = f"""\
cat /tests/expected >/dev/null || exit 9
if [ -e {GOAL} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def make_task(
    directory: Path,
    *,
    toml: str = "",
    image: str = IMAGE,
    test: str | None = TEST_SCRIPT,
    solve: str | None = f"touch {GOAL}\n",
    agent_s: float = 30,
    verifier_s: float = 30,
) -> Path:
    """A task whose goal is a file, or with another test script."""
    for name in ("tests", "solution"):
        (directory / name).mkdir(parents=True)
    head = f'[environment]\ndocker_image = "{image}"\n' if image else ""
    timeouts = f"[agent]\ntimeout_sec = {agent_s}\n[verifier]\ntimeout_sec = {verifier_s}\n"
    (directory / "task.toml").write_text(toml or f"{head}{timeouts}")
    (directory / "instruction.md").write_text(f"Make the file {GOAL}.\n")
    (directory / "tests" / "expected").write_text("a file that belongs to the tests\n")
    if test is not None:
        (directory / "tests" / "test.sh").write_text(test)
    if solve is not None:
        (directory / "solution" / "solve.sh").write_text(solve)
    return directory


class Shell:
    """An agent that runs lines of shell, one after the other, and looks at nothing."""

    def __init__(self, name: str, *lines: str, timeout_s: float | None = 10) -> None:
        self.name = name
        self._lines = lines
        self._timeout_s = timeout_s

    async def run(self, box: Box, context: Context) -> None:
        for line in self._lines:
            await box.run(line, timeout_s=self._timeout_s)


class Raises:
    """An agent that raises what it was given."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.name = name
        self._error = error

    async def run(self, box: Box, context: Context) -> None:
        await box.run("true")
        raise self._error


class Hangs:
    """An agent that waits for ever."""

    name = "hangs"

    async def run(self, box: Box, context: Context) -> None:
        await anyio.sleep_forever()


class Stubborn:
    """An agent that does not stop when it is told to."""

    name = "stubborn"

    def __init__(self) -> None:
        self.enough = False

    async def run(self, box: Box, context: Context) -> None:
        while not self.enough:
            with suppress(BaseException):
                await box.run("sleep 60")


class Seeds:
    """An agent that leaves its seed where the tests find it."""

    def __init__(self, name: str = "seeds") -> None:
        self.name = name
        self.seen: dict[tuple[str, int], int] = {}

    async def run(self, box: Box, context: Context) -> None:
        self.seen[context.task.name, context.attempt] = context.seed
        await box.write("seed", str(context.seed).encode())


class Blocks:
    """An agent that does not give way to others: `cloudyard rollout run --agent rollout_kit:Blocks`."""

    name = "blocks"

    async def run(self, box: Box, context: Context) -> None:
        while True:
            pass


class Slow:
    """An agent that takes a few steps and then solves the task: `--agent rollout_kit:Slow`."""

    name = "slow"

    async def run(self, box: Box, context: Context) -> None:
        for _ in range(3):
            await box.run("sleep 0.1")
        await box.write(GOAL, b"")
