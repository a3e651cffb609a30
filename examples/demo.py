"""A yard at work: agents repair real packages and are judged by tests, while the node daemon is killed.

    sudo python examples/demo.py            (or: make demo)

It raises a yard of its own, builds an image with Python once, and makes tasks of three packages of PyPI: in
each, one line is changed so that some of the package's own tests fail. Three agents try every task several
times, 32 attempts at once: `oracle` knows the solution and must have 1.0, `nop` does nothing and must have
0.0, `search` edits near the tracebacks and must be between. Half way the edge is killed with SIGKILL.
Everything goes on. At the end the yard is taken down and the machine searched for anything left behind.

This file uses the public SDK, the rollout API and the `cloudyard` command, and nothing else of Cloudyard.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import anyio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import cloudyard
from cloudyard.rollout import agents, journal, runner, task
from cloudyard.rollout.making import source
from cloudyard.rollout.making.make import Order, make
from cloudyard.rollout.records import Attempt
from cloudyard.rollout.summary import Summary

PACKAGES = {  # whose suites take less than half a second of processor time, and the SHA-256 of their sources
    "unidiff==1.0.1": "d9425bc516390c54743a1045b2c1c97f02d245a913a241dd499f958adb2df998",
    "aniso8601==9.0.1": "72e3117667eedf66951bb2d93f4296a56b94b078a8a95905a052611fb3f1b973",
    "uritemplate==4.2.0": "480c2ed180878955863323eea31b0ede668795de182617fef9c6ca09e6ec9d0e",
}
AGENTS = ("oracle", "nop", "search")
TASKS, ATTEMPTS = 2, 8  # of each package; of each agent at each task
TASKS_QUICK, ATTEMPTS_QUICK = 1, 4
AT_ONCE = 32
SEED = 10  # of the tasks
CACHE = Path("/var/cache/cloudyard-demo")
IMAGE = "debian"
COMMAND_WAIT_S = 600.0  # the longest is the first build of the image
IDLE_SANDBOXES = 8  # whose memory is measured
ROUND_TRIPS = 100
GONE_WAIT_S = 15.0

console = Console()


class DemoError(Exception):
    """Why the demo cannot go on, as a sentence for its reader."""


@dataclass
class Figures:
    """What was measured on the way."""

    rollouts_s: float = 0.0
    back_s: float = 0.0
    """From the kill of the edge to the next one."""
    round_trip_ms: float = 0.0
    call_ms: float = 0.0
    memory_mib: float = 0.0


def main() -> int:
    """Run the demo; 0 when every reward is as it must be and nothing is left behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one task of each package, fewer attempts")
    parser.add_argument("--results", type=Path, default=Path("demo-results"), help="where the JSONL goes")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help=f"image and packages are kept here ({CACHE})"
    )
    args = parser.parse_args()
    if os.geteuid() != 0:
        console.print("The demo raises a yard, which needs root: run it with sudo.")
        return 1
    started = time.monotonic()
    out = args.results / time.strftime("%Y%m%d-%H%M%S")
    try:
        ensure_image(args.cache / "depot")
        with yard(args.cache / "depot") as (client_file, run_dir):
            figures = anyio.run(demo, args, client_file, run_dir, out)
    except (DemoError, cloudyard.CloudyardError) as error:
        console.print(f"[red]The demo failed:[/] {error}", highlight=False)
        return 1
    summary = Summary(journal.read(out).ended.values())
    show(summary, figures, total_s=time.monotonic() - started, out=out)
    wrong = list(complaints(summary, figures))
    for sentence in wrong:
        console.print(f"[red]{sentence}[/]", highlight=False)
    return 1 if wrong else 0


async def demo(args: argparse.Namespace, client_file: Path, run_dir: Path, out: Path) -> Figures:
    """Make the tasks, run the rollouts, measure."""
    count, attempts = (TASKS_QUICK, ATTEMPTS_QUICK) if args.quick else (TASKS, ATTEMPTS)
    figures = Figures()
    async with cloudyard.connect(client_file=client_file) as client:
        for requirement, digest in PACKAGES.items():
            with console.status(f"making tasks of {requirement}"):
                name, version = source.parse_requirement(requirement)
                package = source.fetch(name, version, cache=args.cache / "sources", expected_sha256=digest)
                order = Order(source=package, image=IMAGE, count=count, seed=SEED, out=out / "tasks")
                made = await make(client, order)
            console.print(
                f"{requirement}: {count} made of {made.tried} faults tried, {made.tests} tests each."
            )
        await roll_out(client, run_dir, out, attempts=attempts, figures=figures)
        with console.status("measuring"):
            await measure(client, figures)
    return figures


async def roll_out(
    client: cloudyard.Yard, run_dir: Path, out: Path, *, attempts: int, figures: Figures
) -> None:
    """All attempts, with the edge killed in the middle."""
    tasks, _ = task.find([out / "tasks"])
    total = len(tasks) * len(AGENTS) * attempts
    half_way = anyio.Event()
    columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("", total=total)

        def tell(_: Attempt, summary: Summary) -> None:
            bars.update(bar, completed=summary.total.attempts)
            if summary.total.attempts >= total // 2:
                half_way.set()

        async with anyio.create_task_group() as killer:
            killer.start_soon(kill_edge, run_dir, half_way, figures)
            started = time.monotonic()
            chosen = [agents.find(name) for name in AGENTS]
            await runner.run(
                client, tasks, chosen, out=out, attempts=attempts, concurrency=AT_ONCE, tell=tell
            )
            figures.rollouts_s = time.monotonic() - started


async def kill_edge(run_dir: Path, half_way: anyio.Event, figures: Figures) -> None:
    """Kill the edge half way, and see it come back."""
    await half_way.wait()
    pid = edge_pid(run_dir)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    console.print(f"kill -9 {pid}: the edge is dead, half way through the attempts.")
    with anyio.move_on_after(GONE_WAIT_S):
        while edge_pid(run_dir) in (0, pid):  # noqa: ASYNC110 (a file tells nobody that it has changed)
            await anyio.sleep(0.01)
        figures.back_s = time.monotonic() - started
        console.print(f"A new edge, {edge_pid(run_dir)}, was started {figures.back_s:.2f} s later.")


def edge_pid(run_dir: Path) -> int:
    """The pid of the edge, as the supervisor notes it; 0 while there is none."""
    try:
        return int(json.loads((run_dir / "children/edge.json").read_bytes())["pid"])
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


async def measure(client: cloudyard.Yard, figures: Figures) -> None:
    """What a sandbox takes, an exec and a call, now that the yard is at rest."""
    boxes = await client.create_many(IDLE_SANDBOXES, IMAGE, memory="256MiB", max_ttl_s=600)
    used = [(await box.info()).memory_used_bytes or 0 for box in boxes]
    figures.memory_mib = mean(used) / 2**20
    figures.round_trip_ms = await median_ms(lambda: boxes[0].run(["/bin/true"]))
    figures.call_ms = await median_ms(lambda: client.call("print(6 * 7)", image=IMAGE))
    for box in boxes:
        await box.stop()


async def median_ms(what: Callable[[], Awaitable[Any]]) -> float:
    """Median of many round trips, the first of which does not count."""
    times = []
    for _ in range(ROUND_TRIPS + 1):
        started = time.perf_counter()
        await what()
        times.append(time.perf_counter() - started)
    return median(times[1:]) * 1000


def show(summary: Summary, figures: Figures, *, total_s: float, out: Path) -> None:
    """Print a row for each task and agent, and the figures."""
    table = Table("task", "agent", "mean reward", "attempts", "void", "CPU s", "s", box=None, pad_edge=False)
    for row in (*summary.rows, *summary.by_agent()):
        reward = "none" if row.mean_reward is None else f"{row.mean_reward:.3f}"
        seconds = [f"{value / max(1, row.attempts):.2f}" for value in (row.cpu_s, row.wall_s)]
        table.add_row(row.task or "all", row.agent, reward, str(row.attempts), str(row.void), *seconds)
    console.print(table)
    total = summary.total
    facts = {
        "attempts": f"{total.attempts / figures.rollouts_s:.1f} a second, {AT_ONCE} at once, with the kill",
        "void": f"{total.void}; made again on the way: {total.tries}",
        "exec round trip": f"{figures.round_trip_ms:.2f} ms (median of {ROUND_TRIPS})",
        "call of Python, warm": f"{figures.call_ms:.2f} ms (median of {ROUND_TRIPS})",
        "memory a sandbox": f"{figures.memory_mib:.2f} MiB charged by the kernel, before its work",
        "every action": str(out / journal.FILE),
        "all in all": f"{total_s:.0f} s",
    }
    grid = Table(box=None, show_header=False)
    for name, value in facts.items():
        grid.add_row(name, value)
    console.print(grid, highlight=False)


def complaints(summary: Summary, figures: Figures) -> Iterator[str]:
    """A sentence for each thing that is not as it must be."""
    for row in summary.rows:
        must = {"oracle": 1.0, "nop": 0.0}.get(row.agent, row.mean_reward)
        if row.scored != row.attempts or row.mean_reward != must:
            yield f"{row.agent} at {row.task}: {row.scored} of {row.attempts} scored, mean {row.mean_reward}."
        yield from row.errors
    found = {row.agent: row.mean_reward for row in summary.by_agent()}
    if not 0.0 < (found["search"] or 0.0) < 1.0:
        yield f"The mean reward of search is {found['search']}, and should lie between 0 and 1."
    if not figures.back_s:
        yield "The edge was not killed, or did not come back."


def ensure_image(depot: Path) -> None:
    """Build the image unless an earlier run did."""
    listed = json.loads(cloudyard_command("image", "ls", "--json", "--depot", str(depot)))
    if IMAGE not in {image["name"] for image in listed}:
        console.print("Building an image of Debian with Python (once) ...")
        build = ("image", "build", "debian", "--package", "python3", "--name", IMAGE, "--depot", str(depot))
        cloudyard_command(*build, show=True)


@contextmanager
def yard(depot: Path) -> Iterator[tuple[Path, Path]]:
    """A yard of the demo's own, with its client file and run directory; taken down and searched for at the
    end."""
    token = f"demo-{secrets.token_hex(4)}"
    state, run_dir = Path(f"/var/tmp/cloudyard-{token}"), Path(f"/run/cloudyard-{token}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = ("--state", str(state), "--run", str(run_dir), "--depot", str(depot), "--port", str(port))
    try:
        raised = json.loads(cloudyard_command("up", *places, "--json"))
        console.print(f"The demo's yard is up at {raised['url']}.", highlight=False)
        yield Path(raised["client_file"]), run_dir
    finally:
        cloudyard_command("down", "--state", str(state), "--purge")
        shutil.rmtree(state, ignore_errors=True)
    if left := wait_gone(token):
        raise DemoError("After `cloudyard down` this is left behind:\n" + "\n".join(left))
    console.print("The yard is down: no process, cgroup, mount or file of it is left.")


def cloudyard_command(*words: str, show: bool = False) -> str:
    """Run `cloudyard` and give what it prints. Its errors are sentences and pass through as they are."""
    done = subprocess.run(
        [sys.executable, "-m", "cloudyard.cli", *words],
        stdin=subprocess.DEVNULL,
        stdout=None if show else subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
        timeout=COMMAND_WAIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise DemoError(f"`cloudyard {' '.join(words)}` failed. {(done.stderr or '').strip()}")
    return done.stdout or ""


def wait_gone(token: str) -> list[str]:
    """What still carries the demo's token after a bounded wait: processes, mounts, cgroups, files."""
    deadline = time.monotonic() + GONE_WAIT_S
    while (left := carrying(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def carrying(token: str) -> list[str]:
    """Processes, mounts, cgroups and files on this machine that carry the token."""
    found = [
        f"mount {line.split()[4]}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if token in line
    ]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                about = (entry / "cmdline").read_bytes() + (entry / "cgroup").read_bytes()
            except OSError:
                continue
            if token.encode() in about:
                found.append(f"process {entry.name}")
    for top in ("/sys/fs/cgroup", "/run", "/var/tmp"):
        for directory, names, _ in os.walk(top):
            found += [f"directory {directory}/{name}" for name in names if token in name]
            if top != "/sys/fs/cgroup":
                names.clear()
    return found


if __name__ == "__main__":
    sys.exit(main())
