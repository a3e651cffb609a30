"""`cloudyard tasks`: make tasks of a package, and check any tasks. Needs a yard that has the image."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

import anyio
from anyio.to_thread import run_sync
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cloudyard.cli import EXIT_FAILED
from cloudyard.cli.lease import until_told_to_end
from cloudyard.rollout.making import source
from cloudyard.rollout.making.check import CONCURRENCY_DEFAULT, Checked, check
from cloudyard.rollout.making.make import Made, Order, Progress, make
from cloudyard.sdk.client import connect

COUNT_DEFAULT = 20
SEED_DEFAULT = 0
IMAGE_DEFAULT = "debian"
CACHE_DEFAULT = Path("~/.cache/cloudyard/sources")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare `make` and `check`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    making = actions.add_parser(
        "make",
        help="make tasks of a package",
        description="Make tasks of a package: in each, one line of it is changed so that its own tests fail. "
        "Its code runs only in sandboxes. The same arguments make the same tasks, byte by byte.",
    )
    making.add_argument(
        "--from",
        required=True,
        dest="requirement",
        metavar="PACKAGE==VERSION",
        help="a package of the index that pip is configured with",
    )
    making.add_argument(
        "-n", "--count", type=int, default=COUNT_DEFAULT, metavar="N", help=f"how many ({COUNT_DEFAULT})"
    )
    making.add_argument(
        "--seed", type=int, default=SEED_DEFAULT, metavar="S", help=f"another makes others ({SEED_DEFAULT})"
    )
    making.add_argument(
        "--image",
        default=IMAGE_DEFAULT,
        metavar="NAME",
        help=f"an image of the yard with python3, and python3-pytest if its tests need it ({IMAGE_DEFAULT})",
    )
    making.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the tasks go")
    making.add_argument(
        "--test-command", default="", metavar="CMD", help="how its tests run, if that is not found out right"
    )
    making.add_argument(
        "--sha256",
        default="",
        metavar="HASH",
        help="of the source distribution, if not the index is to say it",
    )
    making.add_argument(
        "--cache",
        type=Path,
        default=CACHE_DEFAULT,
        metavar="DIR",
        help=f"where source distributions are kept ({CACHE_DEFAULT})",
    )
    checking = actions.add_parser(
        "check",
        help="check tasks",
        description="Check tasks: the oracle must earn all, doing nothing must not, and the solution must "
        "not be in the sandbox. Exit code 1 if a task is not sound.",
    )
    checking.add_argument(
        "path", nargs="+", type=Path, metavar="PATH", help="a task's directory, or a directory of tasks"
    )
    checking.add_argument(
        "--concurrency",
        type=int,
        default=CONCURRENCY_DEFAULT,
        metavar="N",
        help=f"sandboxes at once ({CONCURRENCY_DEFAULT})",
    )
    for action in (making, checking):
        action.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    """Do what was asked."""
    chosen = _make if args.action == "make" else _check
    return anyio.run(until_told_to_end, lambda: chosen(args))


async def _make(args: Namespace) -> int:
    console = Console(stderr=True)
    name, version = source.parse_requirement(args.requirement)
    cache = Path(os.path.expanduser(args.cache))
    fetch = partial(source.fetch, name, version, cache=cache, expected_sha256=args.sha256)
    order = Order(
        source=await run_sync(fetch),
        image=args.image,
        out=args.out,
        count=args.count,
        seed=args.seed,
        test_command=args.test_command,
    )
    async with connect() as yard:
        with console.status("connecting") as status:

            def tell(progress: Progress) -> None:
                count = f": {progress.kept} of {args.count} kept, {progress.tried} tried"
                status.update(escape(f"{progress.doing}{count if progress.tried else ''}"))

            made = await make(yard, order, tell=tell)
    _print_made(made, args)
    return 0


def _print_made(made: Made, args: Namespace) -> None:
    if args.json:
        row = {"command": made.command, "tests": made.tests, "tried": made.tried}
        print(json.dumps({"tasks": [str(path) for path in made.tasks], **row}, indent=2))
        return
    print(
        f"{len(made.tasks)} tasks are in {args.out}; {made.tried} faults were tried. "
        f"Of the package's own {made.tests} tests, run by `{made.command}`, some fail in each."
    )


async def _check(args: Namespace) -> int:
    async with connect() as yard:
        with Console(stderr=True).status("checking"):
            found = await check(yard, args.path, concurrency=args.concurrency)
    if args.json:
        rows = [
            {
                "task": one.name,
                "sound": one.sound,
                "oracle": one.oracle,
                "nop": one.nop,
                "absent": one.absent,
                "problem": one.problem,
            }
            for one in found
        ]
        print(json.dumps(rows, indent=2))
    else:
        _print_checked(found)
    return 0 if all(one.sound for one in found) else EXIT_FAILED


def _print_checked(found: list[Checked]) -> None:
    table = Table("task", "oracle", "nop", "solution absent", "", box=None, pad_edge=False)
    for one in found:
        absent = {True: "yes", False: "[red]no[/]", None: ""}[one.absent]
        verdict = "[green]sound[/]" if one.sound else f"[red]{escape(one.problem)}[/]"
        table.add_row(escape(one.name), _shown(one.oracle), _shown(one.nop), absent, verdict)
    Console().print(table)
    sound = sum(one.sound for one in found)
    print(f"{sound} of {len(found)} tasks are sound.")


def _shown(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
