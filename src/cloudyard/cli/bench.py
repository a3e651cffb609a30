"""`cloudyard bench`: measure a yard through the SDK, beside floors of the bare machine. Arguments and
printing."""

from __future__ import annotations

import os
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from cloudyard.cli.benchmarks.floors import BubblewrapFloor
from cloudyard.cli.benchmarks.measures import GROUPS, MEASURES, measure
from cloudyard.cli.benchmarks.report import Metric, Report
from cloudyard.cli.benchmarks.samples import QUICK, Bench, Plan
from cloudyard.cli.benchmarks.yard import own_yard
from cloudyard.cli.images import local_depot
from cloudyard.cli.yard import refuse_lacks
from cloudyard.errors import Forbidden, InvalidRequest, NotFound, YardUnavailable
from cloudyard.images.build import build_debian
from cloudyard.images.depot import BUILD_HINT, Depot
from cloudyard.sdk.client import connect
from cloudyard.sdk.config import local_client_file

SECONDS_MIN = 1.0
SECONDS_MAX = 3600.0
IMAGE_DEFAULT = "debian"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare what `bench` takes."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--only", choices=sorted({*MEASURES, *GROUPS}), metavar="NAME", default="", help="one metric"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=f"length of a rate's measurement, {SECONDS_MIN:g} to {SECONDS_MAX:g} (60)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples and sandboxes")
    parser.add_argument("--image", default="", help=f"image of the sandboxes ({IMAGE_DEFAULT})")
    parser.add_argument(
        "--depot",
        type=Path,
        metavar="DIR",
        help="images of a yard raised for this run (this machine's; if it has none, one is built)",
    )


def run(args: Namespace) -> int:
    """Measure, in the yard that runs here or in one raised for it."""
    console = Console(stderr=True, quiet=args.json and not os.isatty(2))
    plan = QUICK if args.quick else Plan()
    if args.seconds is not None:
        if not SECONDS_MIN <= args.seconds <= SECONDS_MAX:  # nan neither
            raise InvalidRequest(
                f"A rate cannot be measured for {args.seconds:g} s.",
                code="bad_seconds",
                hint=f"Give --seconds a number from {SECONDS_MIN:g} to {SECONDS_MAX:g}.",
            )
        plan = replace(plan, seconds=args.seconds)
    load = [round(value, 2) for value in os.getloadavg()]
    with ExitStack() as stack:
        client_file = None if anyio.run(_yard_answers) else stack.enter_context(_raised(args, console))
        floor = stack.enter_context(BubblewrapFloor()) if _has_floor() else None
        work = partial(_measure, args, plan, floor, client_file, console)
        report = Report(load=load, metrics=anyio.run(work))
    if args.json:
        print(report.to_json())
        return 0
    out = Console()
    out.print(report.to_table(), highlight=False)
    for metric in report.metrics:
        if metric.note:
            out.print(f"{metric.name}: {metric.note}", highlight=False, markup=False)
    out.print(
        f"load average at the start: {' '.join(map(str, load))}, {os.cpu_count()} CPUs", highlight=False
    )
    return 0


async def _yard_answers() -> bool:
    try:
        async with connect():
            return True
    except YardUnavailable:
        return False


@contextmanager
def _raised(args: Namespace, console: Console) -> Iterator[Path]:
    """A yard for this run, with an image to make sandboxes from."""
    if os.geteuid() != 0:
        raise Forbidden(
            "No yard runs here, and raising one for the benchmark needs root.",
            code="needs_root",
            hint="Run it with sudo, or name a yard: set CLOUDYARD_URL and CLOUDYARD_TOKEN.",
        )
    depot: Path | None = args.depot
    if depot is None and Depot(local_depot()).names():
        depot = local_depot()

    def fill(place: Path) -> None:
        if not Depot(place).names() and not args.image:
            kept = "is kept" if depot else "goes after this run"
            refuse_lacks(place.parent)  # before the minute, not after it
            console.print(
                f"Building the image {IMAGE_DEFAULT} in {place}, which takes about a minute; it {kept} ..."
            )
            build_debian(place, IMAGE_DEFAULT, packages=["python3"])
        console.print("Raising a yard for this run ...")

    with own_yard(depot, fill) as client_file:
        yield client_file


def _has_floor() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, ("bwrap", "unshare")))


async def _measure(
    args: Namespace, plan: Plan, floor: BubblewrapFloor | None, client_file: Path | None, console: Console
) -> list[Metric]:
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("connecting", total=1.0)
        shown = ""

        def tell(doing: str, done: float) -> None:
            nonlocal shown
            if doing != shown:
                bars.reset(bar, description=doing)
                shown = doing
            bars.update(bar, completed=done)

        async with (
            connect(client_file=client_file) as yard,
            connect(client_file=client_file, transport="http") as http_yard,
        ):
            there = [row.name for row in await yard.images()]
            image = args.image or (IMAGE_DEFAULT if IMAGE_DEFAULT in there else next(iter(there), ""))
            if image not in there:
                raise NotFound(
                    f"The yard has no image {image!r} (images there: {', '.join(there) or 'none'}).",
                    code="image_not_found",
                    hint=BUILD_HINT,
                )
            bench = Bench(
                yard=yard,
                http_yard=http_yard,
                image=image,
                plan=plan,
                floor=floor,
                state=(client_file or local_client_file()).parent,
                tell=tell,
            )
            return await measure(bench, args.only)
