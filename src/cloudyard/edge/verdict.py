"""Whose doing an end is that is no plain success. Pure: what was seen goes in, the fault and its evidence
come out.
"""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

from cloudyard.edge.backends.base import DiskUse
from cloudyard.errors import CloudyardError, InvalidRequest
from cloudyard.model import MIB, Fault, LimitName, StartError

SIGKILL = 9
SHELL_SAW_SIGKILL = 128 + SIGKILL  # how a shell reports that its child was killed so
NO_USER = re.compile(r"no (.*) in (/etc/[a-z]+)", re.DOTALL)  # how the guest says so
DISK_SLACK_BYTES = 1 * MIB  # below a disk's limit: the kernel refuses what does not fit whole
POOL_FULL_BYTES = (
    16 * MIB
)  # free for all sandboxes together; with less, a failure is not to be put down to one
POLICY_WHATS = frozenset({"exec", "cwd", "user"})  # of NOT_STARTED: what the caller named; the rest is ours
NAMES: dict[tuple[str, int], StartError] = {
    ("exec", errno.ENOENT): "program_not_found",
    ("exec", errno.ENOTDIR): "program_not_found",
    ("exec", errno.EACCES): "not_executable",
    ("exec", errno.EISDIR): "is_a_directory",
    ("exec", errno.ENOEXEC): "not_a_program",
    ("exec", errno.E2BIG): "too_many_arguments",
    ("cwd", errno.ENOENT): "directory_not_found",
    ("cwd", errno.EACCES): "directory_forbidden",
    ("cwd", errno.ENOTDIR): "not_a_directory",
    ("user", errno.ENOENT): "user_not_found",
    ("user", errno.EPERM): "user_refused",
}
OUR_ERRNOS = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EIO})


class Bounds(NamedTuple):
    """Limits of the sandbox that evidence names; 0 where they are not known."""

    memory_bytes: int = 0
    pids: int = 0


class Ending(NamedTuple):
    """What was seen of a command's end."""

    exit_code: int | None = None
    signal: int | None = None
    timed_out: float | None = None
    """The timeout in seconds, where it struck."""
    silent: float | None = None
    """The bound of silence in seconds, where it struck."""
    killed: str = ""
    """Why we killed it, or somebody through us; empty when nobody did."""
    expired: bool = False
    """It was killed because the sandbox's time to live had ended."""
    lost: str = ""
    """Why its end is not known."""
    oom_kills: int = 0
    """By how much the sandbox's counter of out-of-memory kills grew while it ran."""
    shared: bool = False
    """Other commands of the sandbox ran at the same time: a kill may have struck one of theirs."""
    forks_refused: int = 0
    """By how much the sandbox's counter of forks over its process limit grew while it ran."""
    disk: DiskUse | None = None
    """How full the sandbox's disk is, where it ended badly."""
    output_cut: bool = False
    """It wrote more than was to be kept."""
    output_error: str = ""
    """Why output is missing that should be there."""
    limits: Bounds = Bounds()


class Verdict(NamedTuple):
    """The fault, if any, and the limits that were seen to be hit while the command ran."""

    fault: Fault | None
    limits_hit: list[LimitName]


def judge(end: Ending) -> Verdict:
    """The verdict on a command that ran."""
    seen: list[tuple[LimitName, bool]] = [
        ("oom", end.oom_kills > 0),
        ("pids", end.forks_refused > 0),
        ("disk", _disk_is_full(end.disk)),
        ("output", end.output_cut),
    ]
    return Verdict(_fault(end), [name for name, hit in seen if hit])


def _fault(end: Ending) -> Fault | None:
    if end.lost:
        return Fault(label="infra", reason="lost", evidence=end.lost)
    if end.output_error:
        return Fault(label="infra", reason="output", evidence=end.output_error)
    if end.timed_out is not None:
        evidence = f"it still ran after timeout_s = {end.timed_out:g}, and was killed with its whole tree"
        return Fault(label="policy", reason="timeout", evidence=evidence)
    if end.silent is not None:
        evidence = (
            f"it wrote nothing for no_output_timeout_s = {end.silent:g}, and was killed with its whole tree"
        )
        return Fault(label="policy", reason="no_output", evidence=evidence)
    if end.killed and end.exit_code != 0:  # else it came to its own good end first
        return Fault(label="policy", reason="expired" if end.expired else "killed", evidence=end.killed)
    if end.signal is None and not end.exit_code:
        return None  # a process of it may have been killed for memory: it made do
    if end.disk is not None and end.disk.free_bytes < POOL_FULL_BYTES and not _disk_is_full(end.disk):
        evidence = f"{end.disk.free_bytes} bytes were left on the disk that all sandboxes of the node share"
        return Fault(label="infra", reason="disk", evidence=evidence)
    died = end.signal == SIGKILL or end.exit_code == SHELL_SAW_SIGKILL
    reason = "oom" if died and end.oom_kills > 0 else "exit" if end.signal is None else "signal"
    evidence = f"signal {end.signal}" if end.signal is not None else f"exit code {end.exit_code}"
    return Fault(label="policy", reason=reason, evidence=evidence + _what_was_refused(end))


def _what_was_refused(end: Ending) -> str:
    """What the kernel's counters say of the time in which it ran."""
    said = ""
    if end.oom_kills > 0:
        limit = f", with a limit of {end.limits.memory_bytes} bytes" if end.limits.memory_bytes else ""
        said += f"; the memory cgroup's oom_kill counter grew by {end.oom_kills} while it ran{limit}"
    if end.forks_refused > 0:
        limit = f", of {end.limits.pids} processes," if end.limits.pids else ""
        said += f"; the sandbox's limit{limit} refused {end.forks_refused} forks while it ran"
    if end.disk is not None and _disk_is_full(end.disk):
        said += f"; its disk held {end.disk.used_bytes} bytes of the {end.disk.limit_bytes} that it may"
    if said and end.shared:
        said += "; other commands ran at the same time, and it may have been one of theirs"
    return said


def _disk_is_full(disk: DiskUse | None) -> bool:
    """Whether so little is left below the limit that a write of a usual size is refused."""
    if disk is None or not disk.limit_bytes:
        return False
    return disk.limit_bytes - disk.used_bytes < min(DISK_SLACK_BYTES, disk.limit_bytes // 16)


class NotStarted(NamedTuple):
    """Why a command never ran."""

    exit_code: int | None
    fault: Fault
    error: str
    name: StartError


def error_of_start(why: NotStarted) -> CloudyardError:
    """It, for whoever waits for a start."""
    kind = InvalidRequest if why.fault.label == "policy" else CloudyardError
    message = f"The command could not be started: {why.error}."
    return kind(message, code=why.name, hint=why.fault.evidence, fault=why.fault.label)


def judge_not_started(what: str, number: int, text: str, *, forks_refused: int) -> NotStarted:
    """The verdict on a command that never ran, from the guest's frame.

    Args:
        what: the call that failed, as docs/guest-protocol.md names it.
        number: its errno.
        text: its object.
        forks_refused: by how much the counter of forks over the process limit grew.
    """
    reason = os.strerror(number) if number else "refused"
    error = f"{what} {text}: {reason}".replace("  ", " ")
    if what == "user" and (unknown := NO_USER.fullmatch(text)):
        error = f"there is no {unknown[1]} in the sandbox's {unknown[2]}"
    evidence = f"the guest's {what} failed with {errno.errorcode.get(number, number)}"
    if what == "fork" and number == errno.EAGAIN:
        error += ". The sandbox's `pids` limit is the likely bound"
    if what == "fork" and forks_refused > 0:
        evidence += f", and the process limit refused {forks_refused} forks"
        return NotStarted(None, Fault(label="policy", reason="pids", evidence=evidence), error, "not_started")
    if what in POLICY_WHATS and number not in OUR_ERRNOS:
        code = 127 if what == "exec" and number == errno.ENOENT else 126
        fault = Fault(label="policy", reason="not_started", evidence=evidence)
        return NotStarted(code, fault, error, NAMES.get((what, number), "not_started"))
    fault = Fault(label="infra", reason="not_started", evidence=evidence)
    return NotStarted(None, fault, error, "not_started")
