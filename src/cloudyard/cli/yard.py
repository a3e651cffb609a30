"""`cloudyard up`, `down` and `doctor`: arguments and printing. What they do is in `assemble` and
`core/doctor`."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cloudyard.assemble import children, places, supervisor, yard
from cloudyard.assemble.config import (
    CPU_OVERCOMMIT,
    HOST_DEFAULT,
    MEMORY_OVERCOMMIT,
    PORT_DEFAULT,
    RUN_DEFAULT,
    STATE_DEFAULT,
    YardConfig,
    invoking_user,
    load_config,
    make_config,
)
from cloudyard.assemble.doctor import Report, examine, lacks
from cloudyard.core.doctor import Bound, Finding
from cloudyard.errors import Conflict, InvalidRequest, NotFound, Unsupported
from cloudyard.model import GIB

REMOVED_SHOWN = 20  # lines of what `down` had to remove by force
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def add_up_arguments(parser: ArgumentParser) -> None:
    """Declare what `up` takes."""
    _add_state(parser)
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help=f"sockets and notes of running processes ({RUN_DEFAULT})"
    )
    parser.add_argument(
        "--depot", type=Path, metavar="DIR", help="images and layers (depot in the state directory)"
    )
    parser.add_argument(
        "--url", default="", metavar="NATS", help="an external NATS instead of one of the yard's own"
    )
    parser.add_argument("--host", default=HOST_DEFAULT, help=f"where the gateway listens ({HOST_DEFAULT})")
    parser.add_argument("--port", type=int, default=PORT_DEFAULT, help=f"its port ({PORT_DEFAULT})")
    parser.add_argument(
        "--cpu-overcommit",
        type=float,
        default=CPU_OVERCOMMIT,
        metavar="X",
        help=f"cores promised to sandboxes for each there is ({CPU_OVERCOMMIT:g})",
    )
    parser.add_argument(
        "--memory-overcommit",
        type=float,
        default=MEMORY_OVERCOMMIT,
        metavar="X",
        help=f"memory promised to sandboxes for each byte there is ({MEMORY_OVERCOMMIT:g})",
    )
    parser.add_argument(
        "--disk-pool",
        default="",
        metavar="SIZE",
        help="of this machine's disk for those of sandboxes, such as 200GiB (all but a reserve; 0: no limit)",
    )
    parser.add_argument(
        "--foreground", action="store_true", help="stay, and end the yard's processes on Ctrl-C"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_up(args: Namespace) -> int:
    """Start the yard, or say that it runs."""
    yard.need_root("Starting a yard")
    config = make_config(
        state=args.state,
        run=args.run,
        depot=args.depot,
        host=args.host,
        port=args.port,
        nats_url=args.url,
        cpu_overcommit=args.cpu_overcommit,
        memory_overcommit=args.memory_overcommit,
        disk_pool=args.disk_pool,
    )
    with yard.translated(config.paths.state):
        places.refuse_foreign(config.paths)
    refuse_lacks(Path(config.state))
    owner = invoking_user(os.environ)
    if args.foreground:
        return _stay(config, owner)
    with _progress(quiet=args.json) as say:
        fresh = anyio.run(partial(yard.raise_yard, config, owner=owner, say=say))
    if args.json:
        print(json.dumps({"url": config.url, "client_file": str(config.paths.client), "started": fresh}))
    else:
        print(f"The yard is {'up' if fresh else 'up already'}: {config.url}")
        print(f"URL and token for clients on this machine: {config.paths.client}")
        if not any(config.paths.depot.glob("images/*.json")):
            print("It has no image yet. Build one with: cloudyard image build debian --package python3")
    return 0


def add_down_arguments(parser: ArgumentParser) -> None:
    """Declare what `down` takes."""
    _add_state(parser)
    parser.add_argument("--purge", action="store_true", help="remove its state, images and logs as well")


def run_down(args: Namespace) -> int:
    """Stop all sandboxes and the yard."""
    yard.need_root("Stopping a yard")
    try:
        config = load_config(args.state)
    except NotFound:
        print(f"There is no yard in {args.state}: nothing to stop.")
        if args.purge:
            places.forget(args.state)
        return 0
    except InvalidRequest as error:
        salvaged = places.salvage(args.state)
        if salvaged is None:
            raise
        config = salvaged
        print(error.message)
    with _progress(quiet=False) as say:
        removed = anyio.run(partial(yard.lower_yard, config, say=say, purge=args.purge))
    print(f"The yard in {config.state} is down.")
    for sentence in removed[:REMOVED_SHOWN]:
        print(f"  {sentence}")
    if len(removed) > REMOVED_SHOWN:
        print(f"  and {len(removed) - REMOVED_SHOWN} more")
    if args.purge:
        print("Its state, images and logs are removed.")
    return 0


def add_doctor_arguments(parser: ArgumentParser) -> None:
    """Declare what `doctor` takes."""
    _add_state(parser)
    parser.add_argument(
        "--for", type=int, dest="count", metavar="N", help="check every bound for N sandboxes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(args: Namespace) -> int:
    """Say what this machine offers and lacks. 1 when something is missing that sandboxes need, or when not as
    many as asked for fit."""
    if args.count is not None and args.count < 1:
        raise InvalidRequest(
            f"--for is {args.count}, which is no number of sandboxes.", code="bad_count", hint="At least 1."
        )
    count = args.count or 0
    with _progress(quiet=args.json) as say:
        report = anyio.run(partial(examine, args.state, count=count, say=say))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print_report(report, count)
    return 0 if report.good else 1


def _add_state(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--state",
        type=Path,
        default=STATE_DEFAULT,
        metavar="DIR",
        help=f"where the yard keeps everything ({STATE_DEFAULT})",
    )


def refuse_lacks(state: Path) -> None:
    """Refuse to start where no sandbox could.

    Raises:
        Unsupported: this machine lacks something that no sandbox can do without; lists all of it.
    """
    if missing := lacks(state):
        lines = "".join(f"\n  {finding.name}: {finding.text}. {finding.fix}" for finding in missing)
        raise Unsupported(
            f"This machine cannot run sandboxes yet:{lines}\n",
            code="machine_lacks",
            hint="cloudyard doctor says more.",
        )


def _stay(config: YardConfig, owner: tuple[int, int]) -> int:
    """Be the supervisor until a signal."""
    if supervisor.is_locked(config.paths.supervisor_lock):
        raise Conflict(
            f"The yard in {config.state} is running.",
            code="yard_running",
            hint="Stop it first with cloudyard down.",
        )
    settled = anyio.run(partial(_ready, config, owner))
    print(f"The gateway will be at {settled.url}; Ctrl-C ends the yard's processes, sandboxes go on.")
    anyio.run(supervisor.supervise, settled, children.plans(settled))
    return 0


async def _ready(config: YardConfig, owner: tuple[int, int]) -> YardConfig:
    with yard.taken(config, owner=owner):
        return await yard.make_ready(config, owner=owner)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows what is being done: a spinner on a terminal, lines elsewhere, on stderr."""
    console = Console(stderr=True, quiet=quiet)
    if console.is_terminal and not quiet:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda text: console.print(f"{text} ...", highlight=False)


def _print_report(report: Report, count: int) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in report.findings:
        table.add_row(*_finding_row(finding))
    console = Console()
    console.print(table)
    if report.bounds:
        console.print(f"\nFor {count:,} sandboxes:")
        bounds = Table("", "", "needs", "has", box=None, pad_edge=False)
        for bound in report.bounds:
            bounds.add_row(*_bound_row(bound))
        console.print(bounds)
        for bound in report.bounds:
            if bound.fix:
                print(f"{bound.name}: {bound.fix}")
    console.print(f"\n{report.verdict}", highlight=False)


def _finding_row(finding: Finding) -> tuple[str, str, str]:
    text = escape(finding.text) + (f"\n[bold]{escape(finding.fix)}[/bold]" if finding.fix else "")
    return f"[{_COLOURS[finding.level]}]{finding.level}[/]", finding.name, text


def _bound_row(bound: Bound) -> tuple[str, str, str, str]:
    mark = "[green]ok[/]" if bound.ok else "[red]low[/]"
    needs, has = bound.needs, bound.has
    if bound.unit == "bytes":
        return mark, bound.name, f"{needs / GIB:.1f} GiB", f"{has / GIB:.1f} GiB"
    return mark, bound.name, f"{needs:,}", f"{has:,} {bound.unit}"
