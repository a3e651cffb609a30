"""Whose doing an end is."""

from __future__ import annotations

import errno

import pytest

from cloudyard.edge.verdict import Ending, judge, judge_not_started


@pytest.mark.parametrize(
    ("end", "label", "reason", "oom"),
    [
        (Ending(exit_code=0), None, None, False),
        (Ending(exit_code=1), "policy", "exit", False),
        (Ending(signal=15), "policy", "signal", False),
        (Ending(signal=9, oom_kills=1), "policy", "oom", True),
        (Ending(exit_code=137, oom_kills=2), "policy", "oom", True),
        (Ending(exit_code=0, oom_kills=1), None, None, True),
        (Ending(exit_code=1, oom_kills=1), "policy", "exit", True),
        (Ending(signal=15, oom_kills=1), "policy", "signal", True),
        (Ending(signal=9), "policy", "signal", False),
        (Ending(exit_code=137), "policy", "exit", False),
        (Ending(signal=9, timed_out=1.0, killed="timeout", oom_kills=1), "policy", "timeout", True),
        (Ending(signal=9, killed="it was cancelled", oom_kills=1), "policy", "killed", True),
        (Ending(exit_code=0, killed="too late"), None, None, False),
        (Ending(lost="the guest is gone", timed_out=1.0), "infra", "lost", False),
        (Ending(exit_code=0, output_error="no space"), "infra", "output", False),
    ],
)
def test_an_end_is_judged_by_what_was_seen(end: Ending, label: str | None, reason: str | None, oom: bool):
    verdict = judge(end)
    fault = verdict.fault
    assert (fault.label if fault else None, fault.reason if fault else None) == (label, reason)
    assert verdict.oom is oom
    assert fault is None or fault.evidence


def test_a_kill_that_may_have_struck_another_command_says_so():
    for shared in (False, True):
        fault = judge(Ending(signal=9, oom_kills=1, shared=shared)).fault
        assert fault is not None
        assert ("other commands" in fault.evidence) is shared


def test_a_user_that_is_unknown_and_a_process_limit_are_said_in_words():
    user = judge_not_started("user", errno.ENOENT, "no user nosuch in /etc/passwd", forks_refused=0)
    assert user.error == "there is no user nosuch in the sandbox's /etc/passwd"
    fork = judge_not_started("fork", errno.EAGAIN, "the command's keeper", forks_refused=0)
    assert "`pids` limit" in fork.error


@pytest.mark.parametrize(
    ("what", "number", "refused", "code", "label", "reason"),
    [
        ("exec", errno.ENOENT, 0, 127, "policy", "not_started"),
        ("exec", errno.EACCES, 0, 126, "policy", "not_started"),
        ("exec", errno.E2BIG, 0, 126, "policy", "not_started"),
        ("exec", errno.ENOMEM, 0, None, "infra", "not_started"),
        ("cwd", errno.ENOENT, 0, 126, "policy", "not_started"),
        ("user", 0, 0, 126, "policy", "not_started"),
        ("fork", errno.EAGAIN, 0, None, "infra", "not_started"),
        ("fork", errno.EAGAIN, 3, None, "policy", "pids"),
        ("pipe", errno.EMFILE, 0, None, "infra", "not_started"),
        ("limit", 0, 0, None, "infra", "not_started"),
    ],
)
def test_what_never_ran_is_judged_by_the_call_that_failed(
    what: str, number: int, refused: int, code: int | None, label: str, reason: str
):
    why = judge_not_started(what, number, "/x", forks_refused=refused)
    assert (why.exit_code, why.fault.label, why.fault.reason) == (code, label, reason)
    assert "/x" in why.error
