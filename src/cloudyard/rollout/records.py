"""What a rollout leaves behind: one struct for each kind of line in its JSONL. Data only; schemas only grow.

Times named `begin` and `end` are seconds since 1970, durations end in `_s`, sizes in `_bytes`.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

FORMAT = 1  # grows when a reader of the older format would misread a newer file

Status = Literal["scored", "void", "unscored"]
Phase = Literal["setup", "agent", "verify"]


class Line(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """One line of the JSONL; `type` says which."""


class AttemptKey(Struct, frozen=True, order=True):
    """Which attempt: of which agent at which task, counted from 0."""

    task: str
    agent: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.task}/{self.agent}/{self.attempt}"


class TaskLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task of the run."""

    name: str
    digest: str
    path: str
    image: str
    warnings: tuple[str, ...] = ()


class BrokenLine(Struct, frozen=True, kw_only=True):
    """A directory that was named as a task and could not be run."""

    name: str
    path: str
    error: str


class Run(Line, tag="run", frozen=True, kw_only=True):
    """The first line: what is run."""

    format: int
    """FORMAT of whoever wrote it."""
    id: str
    """Unique; the sandboxes of the run carry it in the label `cloudyard.run`."""
    begin: float
    seed: int
    attempts: int
    """Of each agent at each task."""
    agents: tuple[str, ...]
    tasks: tuple[TaskLine, ...]
    broken: tuple[BrokenLine, ...] = ()
    cloudyard: str = ""
    """Version that ran it."""


class Resumed(Line, tag="resumed", frozen=True, kw_only=True):
    """The run was taken up again after its runner had ended, or was killed."""

    begin: float
    session: int
    """How often that was: 1 the first time."""
    stopped: int = 0
    """Sandboxes that the runner before had left."""


class Action(Line, tag="action", frozen=True, kw_only=True):
    """One thing that was done in a sandbox, by the agent or by the runner for it."""

    task: str
    agent: str
    attempt: int
    try_: int = field(name="try")
    number: int
    """Of this try, from 0."""
    phase: Phase
    op: str
    arguments: dict[str, Any] = {}
    """Long ones are cut, and say so."""
    begin: float
    end: float
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    stdout: str = ""
    """As text, its middle left out where it is long; `stdout_bytes` is what was really written."""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    cpu_s: float = 0.0
    error: str = ""
    """Why it could not be done. A command that failed is no error."""
    fault: str = ""
    """`policy` or `infra`, where the yard told whose doing the result was."""


class Cost(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one try took."""

    wall_s: float = 0.0
    sandbox_s: float = 0.0
    """From the sandbox being there to its end."""
    cpu_s: float = 0.0
    """Processor time of all that ran in the sandbox."""
    actions: int = 0


class Attempt(Line, tag="attempt", frozen=True, kw_only=True):
    """How a try of an attempt ended. The last such line of an attempt is the one that counts."""

    task: str
    agent: str
    attempt: int
    try_: int = field(name="try")
    """Counts up when a void attempt is made again, also by a resumed run."""
    seed: int
    sandbox: str = ""
    begin: float
    end: float
    status: Status
    reward: float | None = None
    """Set if and only if the status is `scored`."""
    parts: dict[str, float] = {}
    """All that reward.json held, where there was one."""
    error: str = ""
    """A sentence: why there is no reward."""
    agent_error: str = ""
    """A sentence: what the agent broke with. The tests judged what it left all the same."""
    fault: str = ""
    """Of a void attempt `infra`; of an unscored one `policy`."""
    cost: Cost = Cost()

    @property
    def key(self) -> AttemptKey:
        """Which attempt it was."""
        return AttemptKey(self.task, self.agent, self.attempt)


AnyLine = Run | Resumed | Action | Attempt
