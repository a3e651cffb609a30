"""How a run is shown: a table by task and agent, and the story of one attempt.

What is printed was written by agents and their sandboxes: nothing of it reaches the terminal as a control
sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cloudyard.rollout.journal import Past
from cloudyard.rollout.records import Action, Attempt, BrokenLine, Phase, Run
from cloudyard.rollout.summary import Row, Summary

SENTENCES_MAX = 20  # below the table; the JSONL has all
NUMBERS = (
    "\ntried",
    "mean\nreward",
    "\nvoid",
    "no\nreward",
    "agent\nbroke",
    "cpu\ns",
    "wall\ns",
    "\nactions",
)
OUTPUT_LINES_MAX = 30  # of one stream of one action in a story


class Report(Struct, frozen=True, kw_only=True):
    """A run and what came of it so far."""

    run: Run
    summary: Summary
    expected: int
    """Attempts of the whole run."""

    @classmethod
    def of(cls, past: Past) -> Report:
        """The report of what a journal says."""
        run = past.run
        expected = len(run.tasks) * len(run.agents) * run.attempts
        return cls(run=run, summary=Summary(past.ended.values()), expected=expected)

    @property
    def all_scored(self) -> bool:
        """Every attempt of the run has ended with a reward, and every directory was a task."""
        return self.summary.total.scored == self.expected and not self.run.broken

    def to_json(self) -> str:
        """One JSON object."""
        return msgspec.json.encode(
            {
                "run": self.run,
                "expected": self.expected,
                "rows": [_row_json(row) for row in self.summary.rows],
                "agents": [_row_json(row) for row in self.summary.by_agent()],
                "total": _row_json(self.summary.total),
            }
        ).decode()

    def print(self, console: Console, out: Path) -> None:
        """A table, then a sentence for each thing that is not as it should be."""
        console.print(self._table())
        total = self.summary.total
        console.print(
            f"{total.attempts} of {self.expected} attempts, {total.void_rate:.1%} void; "
            f"seed {self.run.seed}; every action is in {out}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        for sentence in self._sentences():
            console.print(Text(plain(sentence)), soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, collapse_padding=True)
        for name in ("\ntask", "\nagent"):
            table.add_column(name, overflow="fold")
        for name in NUMBERS:  # these stay whole on a narrow terminal, and names are folded
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.summary.rows:
            table.add_row(*map(plain, _cells(row)))
        if len(self.run.tasks) > 1:
            table.add_section()
            for row in self.summary.by_agent():
                table.add_row(*map(plain, ("all", *_cells(row)[1:])))
        return table

    def _sentences(self) -> Iterator[str]:
        found = list(self._all_sentences())
        yield from found[:SENTENCES_MAX]
        if len(found) > SENTENCES_MAX:
            yield f"{len(found) - SENTENCES_MAX} more sentences are in the JSON."

    def _all_sentences(self) -> Iterator[str]:
        yield from map(_broken, self.run.broken)
        for row in self.summary.rows:
            for sentence, count in row.errors.items():
                yield f"{row.task}, {row.agent}, {count} of {row.attempts}: {sentence}"
        for task in self.run.tasks:
            for warning in task.warnings:
                yield f"{task.name}: {warning}"


def _broken(task: BrokenLine) -> str:
    return f"{task.path} was not run: {task.error}"


def _cells(row: Row) -> tuple[str, ...]:
    each = max(1, row.attempts)
    return (
        row.task,
        row.agent,
        str(row.attempts),
        "-" if row.mean_reward is None else f"{row.mean_reward:.3f}",
        str(row.void),
        str(row.unscored),
        str(row.agent_errors),
        f"{row.cpu_s / each:.2f}",
        f"{row.wall_s / each:.2f}",
        f"{row.actions / each:.1f}",
    )


def _row_json(row: Row) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(row)
    return data | {"mean_reward": row.mean_reward, "void_rate": row.void_rate}


# --- story
# ------------------------------------------------------------------------------------------------------

_PHASES: dict[Phase, str] = {
    "setup": "The sandbox is set up.",
    "agent": "The agent acts.",
    "verify": "The agent's processes are killed, and the tests run.",
}


def story_json(attempt: Attempt | None, actions: Iterable[Action]) -> str:
    """One JSON object: how the attempt ended, if it has, and its actions."""
    return msgspec.json.encode({"attempt": attempt, "actions": list(actions)}).decode()


def print_story(console: Console, name: str, attempt: Attempt | None, actions: Iterable[Action]) -> None:
    """Actions in their order, each with when it began, how it ended and what it printed."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(plain(text), style=style), soft_wrap=True)

    phase: Phase | None = None
    first: float | None = None
    for action in actions:
        first = action.begin if first is None else first
        if action.phase != phase:
            phase = action.phase
            say(_PHASES[phase], "bold")
        say(f"{action.begin - first:9.3f} s  {action.op} {_arguments(action)}  {_end(action)}")
        for stream in (action.stdout, action.stderr):
            for line in _first_lines(stream):
                say(f"               | {line}", "dim")
    if attempt is None:
        say(f"{name} has not ended.", "bold")
        return
    for sentence in filter(None, (attempt.agent_error, attempt.error)):
        say(sentence)
    reward = "" if attempt.reward is None else f", reward {attempt.reward:g}"
    say(
        f"{name}, try {attempt.try_}, in {attempt.sandbox or 'no sandbox'}: {attempt.status}{reward}; "
        f"{attempt.cost.wall_s:.2f} s, {attempt.cost.cpu_s:.2f} s of a processor, "
        f"{attempt.cost.actions} actions, seed {attempt.seed}",
        "bold",
    )


def _arguments(action: Action) -> str:
    words = []
    for name, value in action.arguments.items():
        if name == "data":
            continue
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        text = " ".join(text.split())
        text = text if len(text) <= 200 else f"{text[:200]}..."
        words.append(text if name in ("command", "path") else f"{name}={text}")
    return " ".join(words)


def _end(action: Action) -> str:
    took = f"in {action.end - action.begin:.3f} s"
    if action.error:
        return f"failed {took}: {action.error}"
    if action.timed_out:
        return f"ran out of time {took}"
    if action.signal is not None:
        return f"ended by signal {action.signal} {took}"
    return f"exit code {action.exit_code} {took}" if action.exit_code is not None else took


def _first_lines(text: str) -> list[str]:
    lines = text.splitlines()
    if len(lines) <= OUTPUT_LINES_MAX:
        return lines
    return [*lines[:OUTPUT_LINES_MAX], f"[{len(lines) - OUTPUT_LINES_MAX} lines more; --json has them]"]


def plain(text: str) -> str:
    """Text that no terminal acts upon: control characters are written out."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text.expandtabs())
