"""Whose doing an end is."""

from __future__ import annotations

import errno

import pytest

from cloudyard.edge.backends.base import DiskUse
from cloudyard.edge.verdict import Bounds, Ending, judge, judge_not_started
from cloudyard.model import GIB, MIB

ALL = ["oom", "pids", "output"]


@pytest.mark.parametrize(
    ("end", "label", "reason", "hit"),
    [
        (Ending(exit_code=0), None, None, []),
        (Ending(exit_code=1), "policy", "exit", []),
        (Ending(signal=15), "policy", "signal", []),
        (Ending(signal=9, oom_kills=1), "policy", "oom", ["oom"]),
        (Ending(exit_code=137, oom_kills=2), "policy", "oom", ["oom"]),
        (Ending(exit_code=0, oom_kills=1), None, None, ["oom"]),
        (Ending(exit_code=1, oom_kills=1), "policy", "exit", ["oom"]),
        (Ending(signal=15, oom_kills=1), "policy", "signal", ["oom"]),
        (Ending(signal=9), "policy", "signal", []),
        (Ending(exit_code=137), "policy", "exit", []),
        (Ending(signal=9, timed_out=1.0, killed="timeout", oom_kills=1), "policy", "timeout", ["oom"]),
        (Ending(signal=9, killed="it was cancelled", oom_kills=1), "policy", "killed", ["oom"]),
        (Ending(killed="its time has come", expired=True), "policy", "expired", []),
        (Ending(exit_code=0, killed="too late"), None, None, []),
        (Ending(signal=9, silent=1.0, killed="silence"), "policy", "no_output", []),
        (Ending(exit_code=254, forks_refused=3), "policy", "exit", ["pids"]),
        (Ending(exit_code=0, output_cut=True), None, None, ["output"]),
        (Ending(signal=9, oom_kills=1, forks_refused=1, output_cut=True), "policy", "oom", ALL),
        (Ending(lost="the guest is gone", timed_out=1.0), "infra", "lost", []),
        (Ending(exit_code=0, output_error="no space"), "infra", "output", []),
    ],
)
def test_an_end_is_judged_by_what_was_seen(
    end: Ending, label: str | None, reason: str | None, hit: list[str]
):
    verdict = judge(end)
    fault = verdict.fault
    assert (fault.label if fault else None, fault.reason if fault else None) == (label, reason)
    assert verdict.limits_hit == hit
    assert fault is None or fault.evidence


def test_a_kill_that_may_have_struck_another_command_says_so():
    for shared in (False, True):
        fault = judge(Ending(signal=9, oom_kills=1, shared=shared)).fault
        assert fault is not None
        assert ("other commands" in fault.evidence) is shared


def test_evidence_names_the_limit_that_was_hit():
    limits = Bounds(memory_bytes=1000, pids=20)
    fault = judge(Ending(signal=9, oom_kills=1, forks_refused=2, limits=limits)).fault
    assert fault is not None
    assert "1000 bytes" in fault.evidence
    assert "20 processes" in fault.evidence


@pytest.mark.parametrize(
    ("used", "limit", "free", "label", "reason", "hit"),
    [
        (100 * MIB, 100 * MIB, 4 * GIB, "policy", "exit", ["disk"]),
        (99.5 * MIB, 100 * MIB, 4 * GIB, "policy", "exit", ["disk"]),
        (98 * MIB, 100 * MIB, 4 * GIB, "policy", "exit", []),
        (3 * MIB, 4 * MIB, 4 * GIB, "policy", "exit", []),  # of a small one, a MiB is much
        (98 * MIB, 100 * MIB, 15 * MIB, "infra", "disk", []),
        (100 * MIB, 100 * MIB, 15 * MIB, "policy", "exit", ["disk"]),
        (0, 0, 15 * MIB, "infra", "disk", []),  # nothing is bounded, and the machine is full
        (0, 0, 4 * GIB, "policy", "exit", []),
    ],
)
def test_a_full_disk_of_its_own_is_told_from_one_that_all_share(
    used: float, limit: int, free: int, label: str, reason: str, hit: list[str]
):
    disk = DiskUse(used_bytes=int(used), limit_bytes=limit, free_bytes=free)
    verdict = judge(Ending(exit_code=1, disk=disk))
    assert verdict.fault is not None
    assert (verdict.fault.label, verdict.fault.reason, verdict.limits_hit) == (label, reason, hit)
    assert (f"{int(used)} bytes of the {limit}" in verdict.fault.evidence) == bool(hit)


def test_a_user_that_is_unknown_and_a_process_limit_are_said_in_words():
    user = judge_not_started("user", errno.ENOENT, "no user nosuch in /etc/passwd", forks_refused=0)
    assert user.error == "there is no user nosuch in the sandbox's /etc/passwd"
    fork = judge_not_started("fork", errno.EAGAIN, "the command's keeper", forks_refused=0)
    assert "`pids` limit" in fork.error


@pytest.mark.parametrize(
    ("what", "number", "refused", "code", "label", "reason", "name"),
    [
        ("exec", errno.ENOENT, 0, 127, "policy", "not_started", "program_not_found"),
        ("exec", errno.EACCES, 0, 126, "policy", "not_started", "not_executable"),
        ("exec", errno.E2BIG, 0, 126, "policy", "not_started", "too_many_arguments"),
        ("exec", errno.ENOMEM, 0, None, "infra", "not_started", "not_started"),
        ("exec", errno.EISDIR, 0, 126, "policy", "not_started", "is_a_directory"),
        ("user", errno.ENOENT, 0, 126, "policy", "not_started", "user_not_found"),
        ("cwd", errno.ENOENT, 0, 126, "policy", "not_started", "directory_not_found"),
        ("user", 0, 0, 126, "policy", "not_started", "not_started"),
        ("fork", errno.EAGAIN, 0, None, "infra", "not_started", "not_started"),
        ("fork", errno.EAGAIN, 3, None, "policy", "pids", "not_started"),
        ("pipe", errno.EMFILE, 0, None, "infra", "not_started", "not_started"),
        ("limit", 0, 0, None, "infra", "not_started", "not_started"),
    ],
)
def test_what_never_ran_is_judged_by_the_call_that_failed(
    what: str, number: int, refused: int, code: int | None, label: str, reason: str, name: str
):
    why = judge_not_started(what, number, "/x", forks_refused=refused)
    assert (why.exit_code, why.fault.label, why.fault.reason, why.name) == (code, label, reason, name)
    assert "/x" in why.error
