"""Whether tasks are sound: the oracle earns all, doing nothing does not, the solution is not lying about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from cloudyard.rollout import runner, task
from cloudyard.rollout.agents.base import Agent
from cloudyard.rollout.agents.nop import Nop
from cloudyard.rollout.agents.oracle import Oracle
from cloudyard.rollout.records import Attempt
from cloudyard.rollout.summary import Summary
from cloudyard.rollout.task import Task
from cloudyard.sdk.client import Yard

CONCURRENCY_DEFAULT = 8


class Checked(Struct, frozen=True, kw_only=True):
    """What was found of one task."""

    name: str
    oracle: float | None = None
    """Its reward; None if there was none."""
    nop: float | None = None
    absent: bool | None = None
    """Whether what must not be in the sandbox was absent; None where the task names nothing."""
    problem: str = ""
    """What is wrong with the task, as a sentence; empty if nothing is."""

    @property
    def sound(self) -> bool:
        return not self.problem


async def check(
    yard: Yard, paths: Sequence[str | Path], *, concurrency: int = CONCURRENCY_DEFAULT
) -> list[Checked]:
    """Try tasks, each once by the oracle and once by an agent that does nothing.

    Args:
        paths: tasks, or directories of tasks.
        concurrency: sandboxes at once.

    Raises:
        NotFound: a path names no task.
        YardUnavailable: the yard cannot be reached.
    """
    tasks, broken = task.find(paths)
    found = [Checked(name=one.name, problem=one.error) for one in broken]
    attempts: dict[tuple[str, str], Attempt] = {}

    def tell(ended: Attempt, _: Summary) -> None:
        attempts[ended.task, ended.agent] = ended

    agents: list[Agent] = [Oracle(), Nop()]
    images = {row.name for row in await yard.images()}
    ready = [one for one in tasks if one.image in images]
    if ready:
        with TemporaryDirectory(prefix="cloudyard-check-") as out:
            await runner.run(
                yard, ready, agents, out=Path(out), attempts=1, concurrency=concurrency, tell=tell
            )
    for one in tasks:
        if one.image not in images:
            problem = f"The yard has no image {one.image!r}; it has {', '.join(sorted(images)) or 'none'}."
            found.append(Checked(name=one.name, problem=problem))
        else:
            found.append(_judge(one, *(attempts[one.name, agent.name] for agent in agents)))
    return sorted(found, key=lambda checked: checked.name)


def _judge(one: Task, oracle: Attempt, nop: Attempt) -> Checked:
    most = one.reward_range[1]
    given_away = "gives away" in oracle.error
    if oracle.reward is None or nop.reward is None:
        problem = oracle.error or nop.error or "There was no reward."
    elif oracle.reward < most:
        problem = (
            f"The oracle has the reward {oracle.reward:g} and not {most:g}. {oracle.agent_error}".strip()
        )
    elif nop.reward >= most:
        problem = f"Doing nothing has the reward {nop.reward:g}."
    else:
        problem = ""
    return Checked(
        name=one.name,
        oracle=oracle.reward,
        nop=nop.reward,
        absent=not given_away if one.absent else None,
        problem=problem,
    )
