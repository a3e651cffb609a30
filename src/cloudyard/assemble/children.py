"""One process of the yard: what it runs, how it is found again, started, watched and stopped.

A child is found by its exact arguments in /proc, not by a file that says what its pid was: there is then no
moment between its start and a note of it at which a kill would lose it. The note below RUN/children is for
people and other programs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec
from msgspec import Struct

from cloudyard.assemble.config import YardConfig, server_environment, write_private
from cloudyard.errors import Unsupported
from cloudyard.fabric import find_nats_server

STOP_GRACE_S = 8.0  # from SIGTERM to SIGKILL
KILL_WAIT_S = 30.0  # for the kernel to take a killed process away, which may wait for a disk
START_TIME_FIELD = 22  # of /proc/PID/stat, see proc(5)


class ChildNote(Struct, frozen=True, kw_only=True):
    """What RUN/children/NAME.json says."""

    name: str
    pid: int
    pid_start: int
    starts: int
    """How often this supervisor has started it."""


@dataclass(frozen=True)
class ChildPlan:
    """A process to keep running. `argv[1:]` is unique to it on this machine."""

    name: str
    argv: tuple[str, ...]
    log: Path


@dataclass(frozen=True)
class Running:
    """A process that runs: `pid_start` tells it from a later one of the same pid."""

    pid: int
    pid_start: int
    ours: bool = False
    """Whether it is a child of this process, whose exit status must be taken."""


def plans(config: YardConfig) -> list[ChildPlan]:
    """The children of a yard's supervisor, in the order in which they start."""
    paths = config.paths
    chosen: list[ChildPlan] = []
    if not config.nats_url:
        argv = (str(find_nats_server()), "-c", str(paths.nats_config))
        chosen.append(ChildPlan("nats", argv, paths.logs / "nats.log"))
    for role in ("control", "edge"):
        chosen.append(
            ChildPlan(role, (sys.executable, *role_arguments(role, config)), paths.logs / f"{role}.log")
        )
    return chosen


def role_arguments(role: str, config: YardConfig) -> tuple[str, ...]:
    """How Python is called to be one of our processes."""
    return ("-m", "cloudyard.assemble", role, "--state", config.state)


def find(plan: ChildPlan) -> Running | None:
    """The process of this plan, if it runs: same arguments, run by us, no zombie."""
    for found in find_by_arguments(plan.argv[1:]):
        return found
    return None


def find_by_arguments(arguments: tuple[str, ...]) -> list[Running]:
    """Processes of this user on this machine that were called with exactly these arguments, whatever the
    program's path."""
    wanted = b"".join(part.encode() + b"\0" for part in arguments)
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.stat(f"/proc/{entry}").st_uid != os.geteuid():
                continue
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue  # it ended while we looked
        if command.partition(b"\0")[2] == wanted and (start := start_time(int(entry))):
            found.append(Running(int(entry), start))
    return found


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return 0 if state in "ZX" else int(rest[START_TIME_FIELD - 4])


def is_alive(process: Running) -> bool:
    """Whether it still is that very process."""
    return start_time(process.pid) == process.pid_start


def spawn(plan: ChildPlan) -> Running:
    """Start the process in a session of its own, its output added to its log.

    Raises:
        Unsupported: the program cannot be run.
    """
    with open(plan.log, "ab") as log:
        try:
            child = subprocess.Popen(
                plan.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=server_environment(),
                start_new_session=True,
                umask=0o077,
            )
        except OSError as exc:
            raise Unsupported(f"{plan.name} could not be started: {plan.argv[0]}: {exc.strerror}.") from exc
    child.returncode = 0  # it is watched and reaped through its pidfd, by whoever keeps it
    return Running(child.pid, start_time(child.pid), ours=True)


async def wait_end(process: Running) -> str:
    """Return once the process has ended, with what is known of how."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return _reap(process)
    try:
        if process.ours or is_alive(process):
            await anyio.wait_readable(descriptor)
    finally:
        os.close(descriptor)
    return _reap(process)


def _reap(process: Running) -> str:
    if not process.ours:
        return "ended"
    try:
        _, status = os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


async def stop(process: Running) -> None:
    """End the process: asked first, killed after a grace. Bounded, and runs to its end when cancelled."""
    with anyio.CancelScope(shield=True):
        for number, bound_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, KILL_WAIT_S)):
            if not _send(process, number):
                break
            with anyio.move_on_after(bound_s):
                await wait_end(process)
                break


def _send(process: Running, number: signal.Signals) -> bool:
    """Signal that very process, never a later one of the same pid. False when it is gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def write_note(config: YardConfig, plan: ChildPlan, process: Running, *, starts: int) -> None:
    """Say in RUN/children who the process is."""
    note = ChildNote(name=plan.name, pid=process.pid, pid_start=process.pid_start, starts=starts)
    write_private(config.paths.children / f"{plan.name}.json", msgspec.json.encode(note))


def read_notes(config: YardConfig) -> dict[str, ChildNote]:
    """What RUN/children says, by name."""
    notes = {}
    for path in config.paths.children.glob("*.json"):
        try:
            note = msgspec.json.decode(path.read_bytes(), type=ChildNote)
        except (OSError, msgspec.MsgspecError):
            continue  # replaced or removed while we looked
        notes[note.name] = note
    return notes
