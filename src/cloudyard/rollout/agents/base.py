"""What an agent is: something with a name that acts on a box until it is done.

An agent sees the sandbox only through the box, and of the task only what its context says.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from msgspec import Struct

from cloudyard.rollout.box import Box
from cloudyard.rollout.task import Task


class Context(Struct, frozen=True, kw_only=True):
    """What an agent is told about one attempt."""

    task: Task
    instruction: str
    workdir: str
    """Where commands of the box start; absolute."""
    attempt: int
    """Number of this attempt at the task, from 0."""
    seed: int
    """For all randomness: the same for the same run seed, task and attempt number."""


@runtime_checkable
class Agent(Protocol):
    """One object serves all attempts of a run, many at a time: it keeps what belongs to an attempt in local
    variables of `run`."""

    name: str
    """Stands in results; one line, unique in a run."""

    async def run(self, box: Box, context: Context) -> None:
        """Act until the task is done, or given up. The tests run when it returns.

        It is cancelled when the task's time for agents is over. An exception is noted with the attempt, and
        the tests run all the same, on what it left.
        """
