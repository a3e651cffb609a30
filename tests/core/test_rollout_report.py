"""The table of a run, as it is read on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from cloudyard.cli.rollout_report import NUMBERS, Report
from cloudyard.rollout.records import FORMAT, Attempt, Cost, Run, TaskLine
from cloudyard.rollout.summary import Summary

TASKS = ("hello", "unidiff-0.7.5-s7-01")


def report(task: str) -> Report:
    run = Run(
        format=FORMAT, id="r", begin=0, seed=0, attempts=4, agents=("oracle", "nop"),
        tasks=(TaskLine(name=task, digest="", path=task, image="debian"),),
    )  # fmt: skip
    cost = Cost(wall_s=123.456, cpu_s=12.3456, actions=1234)
    attempts = [
        Attempt(
            task=task,
            agent=agent,
            attempt=0,
            try_=0,
            seed=0,
            begin=0,
            end=0,
            status="scored",
            reward=1.0,
            cost=cost,
        )
        for agent in run.agents
    ]
    return Report(run=run, summary=Summary(attempts), expected=8)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("width", [80, 132])
def test_every_number_and_its_heading_are_whole_at_80_columns(task: str, width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    report(task).print(console, Path("out"))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    headings = {word for name in NUMBERS for word in name.split()}
    assert headings <= {word for line in lines[:2] for word in line.split()}
    oracle = next(line for line in lines if "oracle" in line)
    assert oracle.split()[-8:] == ["1", "1.000", "0", "0", "0", "12.35", "123.46", "1234.0"]
    assert oracle.split()[0] == task
    assert max(map(len, lines)) <= width
