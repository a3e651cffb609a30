"""`cloudyard rollout`: let agents try tasks and look at what came of it. Arguments, progress and exit codes;
what is printed at the end is laid out in `rollout_report`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cloudyard.cli import EXIT_FAILED
from cloudyard.cli.lease import until_told_to_end
from cloudyard.cli.rollout_report import Report, print_story, story_json
from cloudyard.errors import InvalidRequest, NotFound
from cloudyard.rollout import agents, journal, runner, task
from cloudyard.rollout.records import Attempt
from cloudyard.rollout.summary import Summary
from cloudyard.sdk.client import connect

SEED_DEFAULT = 0
EXIT_CODES = (
    "Exit codes: 0 every attempt has a reward; 1 some are void or have none, or a directory was no task; "
    "2 the request is wrong and nothing ran; 130 interrupted. The same command takes a run up again."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare `run` and `show`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser(
        "run", help="let agents try tasks", description=f"Let agents try tasks. {EXIT_CODES}"
    )
    run.add_argument(
        "path", nargs="+", type=Path, metavar="PATH", help="a task's directory, or a directory of tasks"
    )
    run.add_argument(
        "--agent",
        action="append",
        required=True,
        metavar="NAME",
        help=f"{', '.join(agents.BUILT_IN)}, or package.module:Name; may be repeated",
    )
    run.add_argument(
        "-k",
        "--attempts",
        type=int,
        metavar="K",
        default=runner.ATTEMPTS_DEFAULT,
        help=f"of each agent at each task ({runner.ATTEMPTS_DEFAULT})",
    )
    run.add_argument(
        "-n",
        "--concurrency",
        type=int,
        metavar="N",
        default=runner.CONCURRENCY_DEFAULT,
        help=f"attempts, and so sandboxes, at once ({runner.CONCURRENCY_DEFAULT})",
    )
    run.add_argument(
        "--seed",
        type=int,
        metavar="S",
        default=SEED_DEFAULT,
        help=f"attempts' seeds derive from it ({SEED_DEFAULT})",
    )
    run.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="where the run is written to; one run each"
    )
    run.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a value that tasks may ask for as ${NAME}: this one, or your own NAME; may be repeated",
    )
    run.add_argument("--json", action="store_true", help="print JSON at the end")
    show = actions.add_parser(
        "show", help="show what came of a run", description="Show what came of a run so far."
    )
    show.add_argument("out", type=Path, metavar="DIR", help="what was given to --out")
    show.add_argument(
        "--attempt", metavar="ID", default="", help="all that was done in one attempt: TASK/AGENT/NUMBER"
    )
    show.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    """Do what was asked."""
    if args.action == "run":
        return anyio.run(until_told_to_end, lambda: _run(args))
    return _show(args)


async def _run(args: Namespace) -> int:
    sys.path.insert(0, os.getcwd())  # where an agent's own module usually is
    chosen = [agents.find(name) for name in dict.fromkeys(args.agent)]
    tasks, broken = task.find(args.path)
    console = Console(stderr=True)
    total = len(tasks) * len(chosen) * args.attempts
    async with connect() as yard:
        with _progress(console, total) as tell:
            await runner.run(
                yard,
                tasks,
                chosen,
                out=args.out,
                attempts=args.attempts,
                concurrency=args.concurrency,
                seed=args.seed,
                env=_env(args.env),
                broken=broken,
                tell=tell,
            )
    report = Report.of(journal.read(args.out))
    _print(report, args.out, as_json=args.json)
    return 0 if report.all_scored else EXIT_FAILED


def _show(args: Namespace) -> int:
    past = journal.read(args.out)
    if not args.attempt:
        _print(Report.of(past), args.out, as_json=args.json)
        return 0
    ended = {str(key): attempt for key, attempt in past.ended.items()}
    begun = {str(key): number - 1 for key, number in past.next_try.items()}
    if args.attempt not in begun:
        some = ", ".join(list(begun)[:3]) or "none yet"
        raise NotFound(
            f"The run has no attempt {args.attempt!r}.",
            code="attempt_not_found",
            hint=f"An attempt is TASK/AGENT/NUMBER, such as {some}.",
        )
    actions = journal.actions(args.out, args.attempt, try_=begun[args.attempt])
    last: Attempt | None = ended.get(args.attempt)
    if last is not None and last.try_ != begun[args.attempt]:
        last = None  # it is being made again
    if args.json:
        print(story_json(last, actions))
    else:
        print_story(Console(), args.attempt, last, actions)
    return 0


def _print(report: Report, out: Path, *, as_json: bool) -> None:
    if as_json:
        print(report.to_json())
    else:
        report.print(Console(), out)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Attempt, Summary], None]]:
    """A bar with the mean reward so far and the number of voids, where there is a terminal."""
    columns = (
        TextColumn("attempts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", total=total)

        def tell(_: Attempt, summary: Summary) -> None:
            sums = summary.total
            mean = "none yet" if sums.mean_reward is None else f"{sums.mean_reward:.3f}"
            bars.update(bar, completed=sums.attempts, description=f"mean reward {mean}, {sums.void} void")

        yield tell


def _env(entries: list[str]) -> dict[str, str]:
    """Values for tasks: those written out, and those of this program's environment that were named."""
    env: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals and name not in os.environ:
            raise InvalidRequest(
                f"--env {name} is not set here.", code="bad_env", hint="Write --env NAME=VALUE."
            )
        env[name] = value if equals else os.environ[name]
    return env
