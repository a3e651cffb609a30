"""One try of one attempt: a sandbox of its own, from its making to the reward.

`scored`: the tests gave a reward. `unscored`: they gave none, or the agent or the task made testing
impossible. `void`: our side failed somewhere, so that the outcome says nothing, whatever it looks like. Knows
one attempt; how many there are, and whether a void one is made again, is the runner's business.
"""

from __future__ import annotations

import time
from contextlib import suppress

import anyio
from msgspec import Struct

from cloudyard.errors import CloudyardError, LimitExceeded, YardUnavailable
from cloudyard.rollout.acting import act
from cloudyard.rollout.agents.base import Agent, Context
from cloudyard.rollout.box import Box, Log, Record
from cloudyard.rollout.leases import LEASE_S, Leases
from cloudyard.rollout.prepare import prepare
from cloudyard.rollout.records import Attempt, AttemptKey, Cost, Status
from cloudyard.rollout.rewards import Reward
from cloudyard.rollout.task import Task
from cloudyard.rollout.verify import verify
from cloudyard.sdk.client import Yard
from cloudyard.sdk.sandbox import Sandbox

RUN_LABEL = "cloudyard.run"
ATTEMPT_LABEL = "cloudyard.attempt"
STOP_WITHIN_S = 30.0
_OF_THE_SANDBOX = ("link_failed",)  # a link of the tests, which the sandbox's own ln makes
NO_ROOM_PATIENCE_S = 60.0  # while no other attempt of this run holds a sandbox that it will give back
NO_ROOM_PAUSE_FIRST_S, NO_ROOM_PAUSE_MAX_S = 0.2, 5.0


class Plan(Struct, frozen=True, kw_only=True):
    """What is tried."""

    key: AttemptKey
    try_: int
    seed: int
    task: Task
    agent: Agent
    run_id: str


class _Failed(Exception):
    """The try has no reward."""

    def __init__(self, status: Status, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Trial:
    """A try under way."""

    def __init__(self, yard: Yard, plan: Plan, *, leases: Leases, record: Record) -> None:
        self._yard = yard
        self._plan = plan
        self._leases = leases
        self._log = Log(plan.key, plan.try_, record)
        self._agent_error = ""
        self._sandbox_id = ""
        self._sandbox_s = 0.0
        self._cpu_s = 0.0

    async def run(self) -> Attempt:
        """Make the try. What goes wrong is in the result; only a cancellation comes out."""
        plan = self._plan
        begin, begun = time.time(), anyio.current_time()
        reward: Reward | None = None
        status: Status = "scored"
        error = ""
        try:
            reward = await self._in_sandbox()
        except _Failed as failed:
            status, error = failed.status, str(failed)
        return Attempt(
            task=plan.key.task,
            agent=plan.key.agent,
            attempt=plan.key.attempt,
            try_=plan.try_,
            seed=plan.seed,
            sandbox=self._sandbox_id,
            begin=begin,
            end=time.time(),
            status=status,
            reward=reward.value if reward else None,
            parts=reward.parts if reward else {},
            error=error,
            agent_error=self._agent_error,
            fault={"void": "infra", "unscored": "policy"}.get(status, ""),
            cost=Cost(
                wall_s=anyio.current_time() - begun,
                sandbox_s=self._sandbox_s,
                cpu_s=self._cpu_s,
                actions=self._log.count,
            ),
        )

    async def _in_sandbox(self) -> Reward:
        task = self._plan.task
        sandbox = await self._create()
        self._sandbox_id = sandbox.id
        since = anyio.current_time()
        try:
            with self._leases.hold(sandbox):
                workdir = await self._prepare(sandbox)
                await self._act(sandbox, workdir)
                box = Box(sandbox, self._log, phase="verify", cwd=workdir, user=task.verifier_user)
                try:
                    reward = await verify(box, task)
                except CloudyardError as error:
                    raise self._failure(error) from error
                if self._log.infra:
                    raise _Failed("void", self._log.infra)
                return reward
        finally:
            await self._stop(sandbox)
            self._leases.tell_room()
            self._sandbox_s = anyio.current_time() - since

    async def _create(self) -> Sandbox:
        """A sandbox; where there is no room, as soon as there is.

        Without a create key: a cancelled create of an unnamed sandbox is undone by the SDK.
        """
        task, run_id = self._plan.task, self._plan.run_id
        waited_s, pause_s = 0.0, NO_ROOM_PAUSE_FIRST_S
        while True:
            try:
                return await self._yard.create(
                    task.image,
                    cpu=task.cpu,
                    memory=task.memory,
                    env=task.env,
                    max_ttl_s=LEASE_S,
                    labels={RUN_LABEL: run_id, ATTEMPT_LABEL: str(self._plan.key)[:128]},
                )
            except LimitExceeded as error:
                if not error.retry_safe or waited_s > NO_ROOM_PATIENCE_S:
                    raise _Failed("void", str(error)) from error
            except CloudyardError as error:
                raise _Failed("void", str(error)) from error
            waited_s = 0.0 if self._leases.held else waited_s + pause_s
            told = await self._leases.wait_for_room(within_s=pause_s)
            # The placer may hear of the room a moment later than we do.
            pause_s = NO_ROOM_PAUSE_FIRST_S if told else min(2 * pause_s, NO_ROOM_PAUSE_MAX_S)

    async def _prepare(self, sandbox: Sandbox) -> str:
        task = self._plan.task
        box = Box(sandbox, self._log, phase="setup", cwd="", user="0")  # where the image has it
        try:
            with anyio.fail_after(task.start_timeout_s):
                return await prepare(box, task)
        except CloudyardError as error:
            raise self._failure(error) from error
        except TimeoutError as error:
            sentence = f"The sandbox was not ready within {task.start_timeout_s:g} s."
            raise _Failed("void", sentence) from error

    async def _act(self, sandbox: Sandbox, workdir: str) -> None:
        """Let the agent act within its time. What it breaks with is noted, unless it is our fault."""
        plan, task = self._plan, self._plan.task
        box = Box(sandbox, self._log, cwd=workdir, user=task.agent_user)
        context = Context(
            task=task,
            instruction=task.instruction,
            workdir=workdir,
            attempt=plan.key.attempt,
            seed=plan.seed,
        )
        self._agent_error = await act(plan.agent, box, context, within_s=task.agent_timeout_s)
        if self._log.infra:
            raise _Failed("void", self._log.infra)

    def _failure(self, error: CloudyardError) -> _Failed:
        """Whose doing an error is that ends the try. Before and after the agent, what is not ours is the
        doing of the task or of what the agent left."""
        ours = error.code not in _OF_THE_SANDBOX and (
            error.fault == "infra"
            or isinstance(error, YardUnavailable)
            or error.code == "sandbox_not_found"
            or bool(self._log.infra)
        )
        return _Failed("void" if ours else "unscored", self._log.infra or str(error))

    async def _stop(self, sandbox: Sandbox) -> None:
        """Ask what it used, and give it back. If neither can be done now, its lease ends it."""
        with anyio.move_on_after(STOP_WITHIN_S, shield=True):
            with suppress(CloudyardError):
                self._cpu_s = (await sandbox.info()).cpu_used_s or 0.0
            with suppress(CloudyardError):
                await sandbox.stop()
