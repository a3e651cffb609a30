"""Runs tasks by agents by attempts, so many at a time, each in a sandbox of its own; takes up a run that was
stopped anyhow. The Python API of rollouts is `run`.

    tasks, broken = find(["tasks/"])
    async with cloudyard.connect() as yard:
        summary = await run(yard, tasks, [agents.find("oracle")], out="out", broken=broken)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from time import time
from uuid import uuid4

import anyio
from msgspec.structs import replace

import cloudyard
from cloudyard.errors import CloudyardError, InvalidRequest
from cloudyard.rollout.acting import interrupting, turning
from cloudyard.rollout.agents.base import Agent
from cloudyard.rollout.attempt import RUN_LABEL, Plan, Trial
from cloudyard.rollout.journal import Journal, Past, open_journal
from cloudyard.rollout.leases import Leases
from cloudyard.rollout.records import FORMAT, Attempt, AttemptKey, BrokenLine, Resumed, Run, TaskLine
from cloudyard.rollout.summary import Summary
from cloudyard.rollout.task import BrokenTask, Task, filled_in
from cloudyard.sdk.client import Yard
from cloudyard.sdk.tasks import plain_task_group

ATTEMPTS_DEFAULT, ATTEMPTS_MAX = 8, 100_000
CONCURRENCY_DEFAULT, CONCURRENCY_MAX = 32, 4096
TRIES_MAX = 3  # of an attempt that is void, in one session
TRY_AGAIN_FIRST_S = 0.5  # pause before a void attempt is made again; doubled each time
STOPS_IN_FLIGHT = 32

Tell = Callable[[Attempt, Summary], None]
"""Called with each attempt that has ended, and with what came of the run so far."""


def seed_of(seed: int, task: str, attempt: int) -> int:
    """The seed of an attempt: the same for every agent, and on every machine. 63 bits."""
    return int.from_bytes(sha256(f"{seed}\0{task}\0{attempt}".encode()).digest()[:8]) >> 1


async def run(
    yard: Yard,
    tasks: Sequence[Task],
    agents: Sequence[Agent],
    *,
    out: str | Path,
    attempts: int = ATTEMPTS_DEFAULT,
    concurrency: int = CONCURRENCY_DEFAULT,
    seed: int = 0,
    env: Mapping[str, str] | None = None,
    broken: Sequence[BrokenTask] = (),
    tell: Tell | None = None,
) -> Summary:
    """Let every agent try every task. What `out` holds of the same run already is not done again.

    Args:
        out: directory of the JSONL; it holds one run.
        attempts: of each agent at each task.
        concurrency: how many are under way at once, each with a sandbox.
        seed: attempts' own seeds derive from it.
        env: values for `${NAME}` in the env of tasks.
        broken: directories that are no task, to be told with the results.
        tell: called when an attempt has ended.

    Returns:
        What came of all attempts, those of earlier sessions included.

    Raises:
        InvalidRequest: nothing can be run, a number is out of range, or `out` holds another run.
        Conflict: `out` is in use.
        LimitExceeded: the disk is full. What was written is kept.
        YardUnavailable: the yard does not answer at the beginning.
    """
    _check_range("attempts", attempts, ATTEMPTS_MAX)
    _check_range("concurrency", concurrency, CONCURRENCY_MAX)
    ready, refused = await _runnable(yard, tasks, env or {})
    broken = [*broken, *refused]
    if not ready or not agents:
        reason = broken[0].error if broken else "none was named."
        raise InvalidRequest(f"There is no task to run: {reason}" if agents else "There is no agent to run.")
    _check_names(agents)
    wanted = Run(
        format=FORMAT,
        id=uuid4().hex[:12],
        begin=time(),
        seed=seed,
        attempts=attempts,
        agents=tuple(agent.name for agent in agents),
        tasks=tuple(
            TaskLine(
                name=task.name,
                digest=task.digest,
                path=str(task.path),
                image=task.image,
                warnings=task.warnings,
            )
            for task in ready
        ),
        broken=tuple(BrokenLine(name=b.name, path=str(b.path), error=b.error) for b in broken),
        cloudyard=cloudyard.__version__,
    )
    journal, past = open_journal(Path(out))
    with journal:
        if past is None:
            journal.write(wanted)
            past = Past(run=wanted)
        else:
            _check_same(past.run, wanted, Path(out))
            stopped = await _stop_left(yard, past.run.id)
            journal.write(Resumed(begin=time(), session=past.sessions + 1, stopped=stopped))
        return await _Runner(yard, journal, past, tasks=ready, agents=agents, tell=tell).run(concurrency)


class _Runner:
    """A run under way."""

    def __init__(
        self,
        yard: Yard,
        journal: Journal,
        past: Past,
        *,
        tasks: Sequence[Task],
        agents: Sequence[Agent],
        tell: Tell | None,
    ) -> None:
        self._yard = yard
        self._journal = journal
        self._past = past
        self._tasks = tasks
        self._agents = agents
        self._tell = tell
        self._leases = Leases()
        done = [attempt for attempt in past.ended.values() if attempt.status != "void"]
        self._done = {attempt.key for attempt in done}
        self._summary = Summary(done)

    async def run(self, concurrency: int) -> Summary:
        waiting = self._waiting()
        with interrupting():
            async with plain_task_group() as beside:
                beside.start_soon(self._leases.renew)
                beside.start_soon(turning)
                async with plain_task_group() as workers:
                    for _ in range(concurrency):
                        workers.start_soon(self._worker, waiting)
                beside.cancel_scope.cancel()
        return self._summary

    def _waiting(self) -> Iterator[Plan]:
        """What is left to do: first attempts of all tasks and agents first, so that all are seen early."""
        run = self._past.run
        for attempt in range(run.attempts):
            for task in self._tasks:
                for agent in self._agents:
                    key = AttemptKey(task.name, agent.name, attempt)
                    if key not in self._done:
                        yield Plan(
                            key=key,
                            try_=self._past.next_try.get(key, 0),
                            seed=seed_of(run.seed, task.name, attempt),
                            task=task,
                            agent=agent,
                            run_id=run.id,
                        )

    async def _worker(self, waiting: Iterator[Plan]) -> None:
        for plan in waiting:
            ended = await self._attempt(plan)
            self._summary.add(ended)
            if self._tell is not None:
                self._tell(ended, self._summary)

    async def _attempt(self, plan: Plan) -> Attempt:
        """Make an attempt, again where it is void. Each try has its line, and the last one counts."""
        pause_s = TRY_AGAIN_FIRST_S
        for tries_left in reversed(range(TRIES_MAX)):
            trial = Trial(self._yard, plan, leases=self._leases, record=self._journal.write)
            ended = await trial.run()
            self._journal.write(ended)
            if ended.status != "void" or not tries_left:
                return ended
            await anyio.sleep(pause_s)
            pause_s *= 2
            plan = replace(plan, try_=plan.try_ + 1)
        raise AssertionError("the last try returns")


async def _runnable(
    yard: Yard, tasks: Sequence[Task], env: Mapping[str, str]
) -> tuple[list[Task], list[BrokenTask]]:
    """The tasks that this yard can run, their env filled in, and the others with the reason."""
    images = sorted(row.name for row in await yard.images())
    ready: list[Task] = []
    refused: list[BrokenTask] = []
    for task in tasks:
        try:
            if task.image not in images:
                raise InvalidRequest(
                    f"The yard has no image {task.image!r}; it has {', '.join(images) or 'none'}.",
                    code="image_not_found",
                    hint="Name one of these in task.toml, [environment] docker_image, or build it with "
                    "`cloudyard image build`.",
                )
            ready.append(filled_in(task, env))
        except InvalidRequest as error:
            refused.append(BrokenTask(name=task.name, path=task.path, error=str(error)))
    return ready, refused


async def _stop_left(yard: Yard, run_id: str) -> int:
    """Stop the sandboxes that an earlier session of the run has left, and say how many there were."""
    left = [info.id for info in await yard.list() if info.labels.get(RUN_LABEL) == run_id]
    slots = anyio.Semaphore(STOPS_IN_FLIGHT)

    async def stop(sandbox: str) -> None:
        async with slots:
            with suppress(CloudyardError):  # its lease ends it
                await yard.stop(sandbox)

    async with plain_task_group() as tasks:
        for sandbox in left:
            tasks.start_soon(stop, sandbox)
    return len(left)


def _check_range(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise InvalidRequest(f"{name} is {value}.", code="out_of_range", hint=f"Between 1 and {most}.")


def _check_names(agents: Sequence[Agent]) -> None:
    names = [agent.name for agent in agents]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"Two agents are named {twice!r}.", code="agent_twice")


def _check_same(there: Run, wanted: Run, out: Path) -> None:
    """Whether what a directory holds is the run that is wanted now.

    Raises:
        InvalidRequest: it is another, and the sentence says in what.
    """
    before, now = ({task.name: task.digest for task in run.tasks} for run in (there, wanted))
    if before.keys() != now.keys():
        other = f"tasks {', '.join(sorted(before.keys() ^ now.keys())[:5])} are not in both"
    elif before != now:
        changed = sorted(name for name in before if before[name] != now[name])
        other = f"files of the task {changed[0]} have changed since"
    elif there.agents != wanted.agents:
        other = f"its agents are {', '.join(there.agents)}"
    elif there.attempts != wanted.attempts:
        other = f"it makes {there.attempts} attempts"
    elif there.seed != wanted.seed:
        other = f"its seed is {there.seed}"
    else:
        return
    raise InvalidRequest(
        f"{out} holds another run: {other}.",
        code="other_run",
        hint="Name another --out, or give the options of the run that is there.",
    )
