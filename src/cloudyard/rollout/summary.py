"""What came of a run: mean reward, voids and cost, by task and agent. Sums only, so that it stays small."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from cloudyard.rollout.records import Attempt


class Row(Struct, kw_only=True):
    """Attempts of one agent at one task; or of several, added up."""

    task: str = ""
    agent: str = ""
    attempts: int = 0
    """That have ended."""
    scored: int = 0
    void: int = 0
    unscored: int = 0
    agent_errors: int = 0
    tries: int = 0
    """Beyond the first of each attempt: voids that were made again."""
    reward_sum: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    sandbox_s: float = 0.0
    actions: int = 0
    errors: dict[str, int] = {}
    """Sentences that say why attempts have no reward or an agent broke, and how often; the first few."""

    @property
    def mean_reward(self) -> float | None:
        """Of the scored ones; None if there are none. A void attempt is no zero."""
        return self.reward_sum / self.scored if self.scored else None

    @property
    def void_rate(self) -> float:
        """Share of the attempts that are void, 0 to 1."""
        return self.void / self.attempts if self.attempts else 0.0

    def add(self, attempt: Attempt) -> None:
        """Count an attempt that has ended."""
        self.attempts += 1
        match attempt.status:
            case "scored":
                self.scored += 1
                self.reward_sum += attempt.reward or 0.0
            case "void":
                self.void += 1
            case "unscored":
                self.unscored += 1
        self.agent_errors += bool(attempt.agent_error)
        self.tries += attempt.try_
        self.cpu_s += attempt.cost.cpu_s
        self.wall_s += attempt.cost.wall_s
        self.sandbox_s += attempt.cost.sandbox_s
        self.actions += attempt.cost.actions
        for sentence in filter(None, (attempt.error, attempt.agent_error)):
            if sentence in self.errors or len(self.errors) < ERRORS_MAX:
                self.errors[sentence] = self.errors.get(sentence, 0) + 1


ERRORS_MAX = 8  # different sentences kept of a row


class Summary:
    """The rows of a run, and their sum."""

    def __init__(self, attempts: Iterable[Attempt] = ()) -> None:
        self.total = Row()
        self._rows: dict[tuple[str, str], Row] = {}
        for attempt in attempts:
            self.add(attempt)

    @property
    def rows(self) -> list[Row]:
        """By task, then by agent, each in the order of their names."""
        return [self._rows[key] for key in sorted(self._rows)]

    def by_agent(self) -> list[Row]:
        """A row for each agent, over all tasks."""
        sums: dict[str, Row] = {}
        for row in self.rows:
            into = sums.setdefault(row.agent, Row(agent=row.agent))
            for name in _SUMMED:
                setattr(into, name, getattr(into, name) + getattr(row, name))
        return [sums[name] for name in sorted(sums)]

    def add(self, attempt: Attempt) -> None:
        """Count an attempt that has ended."""
        key = attempt.task, attempt.agent
        self._rows.setdefault(key, Row(task=attempt.task, agent=attempt.agent)).add(attempt)
        self.total.add(attempt)


_SUMMED = (
    "attempts",
    "scored",
    "void",
    "unscored",
    "agent_errors",
    "tries",
    "reward_sum",
    "cpu_s",
    "wall_s",
    "sandbox_s",
    "actions",
)
