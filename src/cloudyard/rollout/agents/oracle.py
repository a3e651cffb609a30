"""`oracle`: does what the task's own solution/solve.sh does. A task whose tests it fails is no task."""

from __future__ import annotations

from cloudyard.errors import InvalidRequest
from cloudyard.rollout.agents.base import Context
from cloudyard.rollout.box import Box
from cloudyard.rollout.scripts import start_of

SOLUTION = "/solution"


class Oracle:
    """Uploads solution/ and runs solve.sh in it, as Harbor's does."""

    name = "oracle"

    async def run(self, box: Box, context: Context) -> None:
        """Solve the task.

        Raises:
            InvalidRequest: the task has no solution, or its script fails.
        """
        script = context.task.solution / "solve.sh"
        if not script.is_file():
            raise InvalidRequest("The task has no solution/solve.sh.", code="task_without_solution")
        await box.upload(context.task.solution, SOLUTION)
        command = await start_of(box, script, f"{SOLUTION}/solve.sh")
        env = {"DEBIAN_FRONTEND": "noninteractive", **context.task.agent_env}
        done = await box.run(command, env=env)
        if not done.ok:
            end = done.error or f"with exit code {done.exit_code}" if done.signal is None else "by a signal"
            raise InvalidRequest(f"solution/solve.sh ended {end}.", code="solution_failed")
