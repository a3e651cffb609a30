"""A yard at work: 32 sandboxes run a real project's own tests while the node daemon is killed under them.

    sudo python examples/demo.py            (or: make demo)

It raises a yard of its own, builds an image with Python once, fetches the source distribution of a package
from PyPI and checks its hash. Each sandbox unpacks it and runs the package's test suite; in half of them one
line of it is broken first, so half of the rewards must be 1.0 and half 0.0. Half way the edge is
killed with SIGKILL. Everything goes on. At the end the yard is taken down and the machine searched for
anything left behind.

This file uses the public SDK and the `cloudyard` command, and nothing else of Cloudyard.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urljoin

import anyio
import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import cloudyard

SANDBOXES, SANDBOXES_QUICK = 32, 8
PACKAGE, FILE = "idna", "idna-3.11.tar.gz"
SHA256 = "795dafcc9c04ed0c1fb032c2aa73654d8e8c5023a7df64a53f39190ada629902"
INDEX_DEFAULT = "https://pypi.org/simple"
TESTS = "cd /root/idna-3.11 && python3 -m unittest discover -q -s tests -t ."
BREAK = "cd /root/idna-3.11 && sed -i 's/if len(label) == 0:/if len(label) < 0:/' idna/core.py"
CACHE = Path("/var/cache/cloudyard-demo")
IMAGE = "debian"
TEST_TIMEOUT_S = 100.0
COMMAND_WAIT_S = 600.0  # the longest is the first build of the image
FETCH_WAIT_S = 60.0
ROUND_TRIPS = 100
GONE_WAIT_S = 15.0

console = Console()


class DemoError(Exception):
    """Why the demo cannot go on, as a sentence for its reader."""


@dataclass
class Rollout:
    """What became of one sandbox. A reward of None is void: our side failed, and nothing is said of the
    package."""

    number: int
    broken: bool
    sandbox: str = ""
    reward: float | None = None
    tests: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0
    through_the_kill: bool = False

    @property
    def expected(self) -> float:
        return 0.0 if self.broken else 1.0


@dataclass
class Report:
    """Figures of the whole run."""

    rollouts: list[Rollout]
    create_s: float = 0.0
    run_s: float = 0.0
    memory_mib: float | None = None
    round_trip_ms: float = 0.0
    killed: int = 0
    running_at_kill: int = 0
    back_s: float = 0.0
    half_way: anyio.Event = field(default_factory=anyio.Event)
    steps: list[dict[str, Any]] = field(default_factory=list)


def main() -> int:
    """Run the demo; 0 when every reward is as expected and nothing is left behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help=f"{SANDBOXES_QUICK} sandboxes instead of {SANDBOXES}"
    )
    parser.add_argument("--results", type=Path, default=Path("demo-results"), help="where the JSONL goes")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help=f"image and download are kept here ({CACHE})"
    )
    args = parser.parse_args()
    if os.geteuid() != 0:
        console.print("The demo raises a yard, which needs root: run it with sudo.")
        return 1
    count = SANDBOXES_QUICK if args.quick else SANDBOXES
    started = time.monotonic()
    try:
        args.cache.mkdir(parents=True, exist_ok=True)
        archive = fetch(args.cache)
        depot = args.cache / "depot"
        ensure_image(depot)
        with yard(depot) as (client_file, run_dir):
            report = anyio.run(roll_out, client_file, run_dir, archive, count)
    except (DemoError, cloudyard.CloudyardError, httpx.HTTPError) as error:
        console.print(f"[red]The demo failed:[/] {error}", highlight=False)
        return 1
    path = write_results(args.results, report)
    show(report, time.monotonic() - started, path)
    wrong = [rollout for rollout in report.rollouts if rollout.reward != rollout.expected]
    if not report.back_s:
        console.print("[red]The edge was not killed, or did not come back.[/]")
    return 0 if report.back_s and not wrong else 1


def fetch(cache: Path) -> Path:
    """The package's source distribution, from the index that pip uses, with its hash checked."""
    path = cache / FILE
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256:
        return path
    with httpx.Client(follow_redirects=True, timeout=FETCH_WAIT_S) as client:
        page = client.get(
            f"{pip_index()}/{PACKAGE}/",
            headers={"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.1"},
        ).raise_for_status()
        if "json" in page.headers.get("content-type", ""):
            links = {entry["filename"]: entry["url"] for entry in page.json()["files"]}
        else:
            links = {
                url.partition("#")[0].rpartition("/")[2]: url
                for url in re.findall(r'href="([^"]+)"', page.text)
            }
        if FILE not in links:
            raise DemoError(f"{pip_index()} has no {FILE}.")
        data = client.get(urljoin(str(page.url), links[FILE])).raise_for_status().content
    if (digest := hashlib.sha256(data).hexdigest()) != SHA256:
        raise DemoError(f"{FILE} has the SHA-256 {digest} and not {SHA256}.")
    path.write_bytes(data)
    return path


def pip_index() -> str:
    """The package index that pip is configured with."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=FETCH_WAIT_S,
        check=False,
    )
    return (os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or INDEX_DEFAULT).rstrip("/")


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
    up = (
        "up",
        "--state",
        str(state),
        "--run",
        str(run_dir),
        "--depot",
        str(depot),
        "--port",
        str(port),
        "--json",
    )
    try:
        raised = json.loads(cloudyard_command(*up))
        console.print(f"The demo's yard is up at {raised['url']}.", highlight=False)
        yield Path(raised["client_file"]), run_dir
    finally:
        cloudyard_command("down", "--state", str(state), "--purge")
        shutil.rmtree(state, ignore_errors=True)
    if left := wait_gone(token):
        raise DemoError("After `cloudyard down` this is left behind:\n" + "\n".join(left))
    console.print("The yard is down: no process, cgroup, mount or file of it is left.")


async def roll_out(client_file: Path, run_dir: Path, archive: Path, count: int) -> Report:
    """All rollouts at once, with the edge killed in the middle."""
    report = Report([Rollout(number, broken=number % 2 == 1) for number in range(count)])
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with cloudyard.connect(client_file=client_file) as client:
        with console.status(f"creating {count} sandboxes"):
            started = time.monotonic()
            boxes = await client.create_many(count, IMAGE, cpu=1, memory="256MiB", max_ttl_s=600)
            report.create_s = time.monotonic() - started
        used = [bytes_ for box in boxes if (bytes_ := (await box.info()).memory_used_bytes) is not None]
        report.memory_mib = sum(used) / len(used) / 2**20 if used else None
        console.print(f"{count} sandboxes created in {report.create_s:.2f} s.")
        with Progress(*columns, console=console) as bars:
            bar = bars.add_task("test suites", total=count)
            started = time.monotonic()
            async with anyio.create_task_group() as killer:
                killer.start_soon(kill_edge, run_dir, report, bars)
                async with anyio.create_task_group() as tasks:
                    for rollout, box in zip(report.rollouts, boxes, strict=True):
                        tasks.start_soon(one, rollout, box, archive, report, bars, bar)
                report.run_s = time.monotonic() - started
                if not report.killed:
                    killer.cancel_scope.cancel()
        trips = []
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            await boxes[0].run(["/bin/true"])
            trips.append(time.perf_counter() - started)
        report.round_trip_ms = median(trips) * 1000
        with console.status("stopping the sandboxes"):
            async with anyio.create_task_group() as tasks:
                for box in boxes:
                    tasks.start_soon(box.stop)
    return report


async def one(
    rollout: Rollout, box: cloudyard.Sandbox, archive: Path, report: Report, bars: Progress, bar: TaskID
) -> None:
    """One sandbox: upload, unpack, break it in every second one, run the tests, give the reward."""
    rollout.sandbox = box.id
    started = time.monotonic()
    kills = report.killed
    try:
        await box.upload(archive, f"/root/{FILE}")
        await step(report, rollout, box, "unpack", f"cd /root && tar xzf {FILE}")
        if rollout.broken:
            await step(report, rollout, box, "break", BREAK)
        done = await step(report, rollout, box, "test", TESTS)
        if done.fault is None or done.fault.label == "policy":
            rollout.reward = 1.0 if done.ok else 0.0
        rollout.tests = summary(done.stderr.decode(errors="replace"))
        rollout.cpu_s = done.cpu_s
    except (cloudyard.CloudyardError, DemoError) as error:
        rollout.tests = str(error)
    rollout.seconds = time.monotonic() - started
    rollout.through_the_kill = report.killed > kills
    bars.advance(bar)


async def step(
    report: Report, rollout: Rollout, box: cloudyard.Sandbox, name: str, command: str
) -> cloudyard.Completed:
    """Run one command and keep its result for the JSONL."""
    done = await box.run(command, timeout_s=TEST_TIMEOUT_S, env={"PYTHONDONTWRITEBYTECODE": "1"})
    report.steps.append(
        {
            "rollout": rollout.number,
            "sandbox": box.id,
            "step": done.step,
            "name": name,
            "command": command,
            "exit_code": done.exit_code,
            "signal": done.signal,
            "timed_out": done.timed_out,
            "fault": done.fault and {"label": done.fault.label, "reason": done.fault.reason},
            "duration_s": round(done.duration_s, 4),
            "stalled_s": round(done.stalled_s, 4),
            "cpu_s": round(done.cpu_s, 4),
            "peak_memory_bytes": done.peak_memory_bytes,
            "replayed": done.replayed,
            "stdout": done.stdout.decode(errors="replace")[-2000:],
            "stderr": done.stderr.decode(errors="replace")[-2000:],
        }
    )
    if len(report.steps) >= len(report.rollouts):  # of two or three steps in each
        report.half_way.set()
    if name != "test" and not done.ok:
        raise DemoError(f"{name} ended with {done.exit_code}: {done.stderr.decode(errors='replace')[-200:]}")
    return done


async def kill_edge(run_dir: Path, report: Report, bars: Progress) -> None:
    """Kill the edge half way, and see it come back."""
    await report.half_way.wait()
    pid = edge_pid(run_dir)
    report.running_at_kill = sum(1 for rollout in report.rollouts if not rollout.seconds)
    os.kill(pid, signal.SIGKILL)
    report.killed += 1
    started = time.monotonic()
    bars.console.print(f"kill -9 {pid}: the edge is dead, {report.running_at_kill} rollouts are under way.")
    with anyio.move_on_after(GONE_WAIT_S):
        while edge_pid(run_dir) in (0, pid):  # noqa: ASYNC110 (a file tells nobody that it has changed)
            await anyio.sleep(0.01)
        report.back_s = time.monotonic() - started
        bars.console.print(f"A new edge, {edge_pid(run_dir)}, was started {report.back_s:.2f} s later.")


def edge_pid(run_dir: Path) -> int:
    """The pid of the edge, as the supervisor notes it; 0 while there is none."""
    try:
        return int(json.loads((run_dir / "children/edge.json").read_bytes())["pid"])
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def show(report: Report, total_s: float, path: Path) -> None:
    """Print a row for each sandbox, and the figures."""
    table = Table("", box=None, pad_edge=False)
    for title in ("sandbox", "package", "tests", "reward", "s", "CPU s", "kill -9"):
        table.add_column(title, no_wrap=True)
    for rollout in report.rollouts:
        right = rollout.reward == rollout.expected
        table.add_row(
            str(rollout.number),
            rollout.sandbox,
            "broken" if rollout.broken else "whole",
            rollout.tests,
            f"[{'green' if right else 'red'}]{'void' if rollout.reward is None else rollout.reward}[/]",
            f"{rollout.seconds:.2f}",
            f"{rollout.cpu_s:.2f}",
            "yes" if rollout.through_the_kill else "",
        )
    console.print(table)
    count = len(report.rollouts)
    good = sum(1 for rollout in report.rollouts if rollout.reward == rollout.expected)
    facts: Mapping[str, str] = {
        "rewards as expected": f"{good} of {count}",
        "sandboxes created": f"{count / report.create_s:.0f} a second",
        "rollouts finished": f"{count / report.run_s:.1f} a second, with the edge killed in the middle",
        "exec round trip": f"{report.round_trip_ms:.2f} ms (median of {ROUND_TRIPS})",
        "memory a sandbox": "not told by the yard"
        if report.memory_mib is None
        else f"{report.memory_mib:.2f} MiB charged by the kernel, before its work",
        "results": str(path),
        "all in all": f"{total_s:.0f} s",
    }
    figures = Table(box=None, show_header=False)
    for name, value in facts.items():
        figures.add_row(name, value)
    console.print(figures, highlight=False)


def write_results(directory: Path, report: Report) -> Path:
    """Write every step, then every reward, as JSON lines."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / time.strftime("%Y%m%d-%H%M%S.jsonl")
    rewards = [
        {
            "rollout": rollout.number,
            "sandbox": rollout.sandbox,
            "broken": rollout.broken,
            "reward": rollout.reward,
            "through_the_kill": rollout.through_the_kill,
        }
        for rollout in report.rollouts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in (*report.steps, *rewards)))
    return path


def summary(output: str) -> str:
    """The last words of unittest in short, such as `6366, OK` or `6366, errors=91`."""
    ran = re.search(r"Ran (\d+) tests?", output)
    verdict = re.search(r"^(OK|FAILED \((.*)\))", output, re.MULTILINE)
    return f"{ran[1]}, {verdict[2] or verdict[1]}" if ran and verdict else output.strip()[-30:]


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
