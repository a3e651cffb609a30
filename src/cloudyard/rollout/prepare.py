"""Before the agent: what the task puts into the sandbox, and that it is as the task says.

The sandbox is fresh and nobody has acted in it, so its own tools can be trusted here. After the agent they
cannot: see `verify`.
"""

from __future__ import annotations

import anyio

from cloudyard.errors import InvalidRequest
from cloudyard.rollout.box import Box
from cloudyard.rollout.bundle import bring
from cloudyard.rollout.harbor import Healthcheck
from cloudyard.rollout.task import Task
from cloudyard.sdk.process import Completed

PREPARE_COMMAND_S = 60.0
SEARCH_S = 60.0

# Prints the working directory. $1: the one that the task asks for, or nothing.
_PREPARE = """
(umask 0 && mkdir -p /logs/agent /logs/verifier /logs/artifacts) || exit
if [ -n "$1" ]; then mkdir -p -- "$1" && cd -- "$1" || exit; fi
pwd
"""
# Prints where one of the texts stands: in a file's content, in a path, in the environment. $1: the texts, one
# on a line; the rest are places.
_SEARCH = """
texts="$1"
shift
set -- "$@" /tmp /var/tmp /dev/shm /root /home /opt /srv /mnt /run /logs /tests /solution
grep -rlaFs -e "$texts" -- "$@"
find "$@" 2>/dev/null | grep -F -e "$texts"
env | grep -F -e "$texts"
exit 0
"""


async def prepare(box: Box, task: Task) -> str:
    """Make the log directories, bring environment/ and wait for the sandbox to be healthy.

    Returns:
        The working directory.

    Raises:
        InvalidRequest: the task cannot be set up in this image, or is broken.
        CloudyardError: the yard failed.
    """
    done = await box.run(["/bin/sh", "-c", _PREPARE, "sh", task.workdir], timeout_s=PREPARE_COMMAND_S)
    workdir = done.text.rstrip("\n")
    if not done.ok or not workdir.startswith("/"):
        raise InvalidRequest(f"The sandbox could not be set up: {_reason(done)}.", code="setup_failed")
    if (environment := task.environment) is not None:
        await bring(box, environment, workdir, digest=task.digest)
    if task.healthcheck is not None:
        await _wait_healthy(box, task.healthcheck, workdir)
    if task.absent:
        await _check_absent(box, task, workdir)
    return workdir


async def _wait_healthy(box: Box, check: Healthcheck, workdir: str) -> None:
    """As Docker does it: failures in the start period do not count, then `retries` in a row do."""
    started = anyio.current_time()
    failures = 0
    while True:
        done = await box.run(check.command, timeout_s=check.timeout_sec, cwd=workdir)
        if done.ok:
            return
        starting = anyio.current_time() - started < check.start_period_sec
        failures += 0 if starting else 1
        if failures >= max(1, check.retries):
            end = "ran out of time" if done.timed_out else f"ended with exit code {done.exit_code}"
            raise InvalidRequest(
                f"The sandbox never became healthy: the healthcheck {check.command!r} {end} "
                f"{failures} times.",
                code="unhealthy",
            )
        await anyio.sleep(check.start_interval_sec if starting else check.interval_sec)


async def _check_absent(box: Box, task: Task, workdir: str) -> None:
    """Search what the task put into the sandbox, and where people keep things, for texts that would give its
    solution away.

    Raises:
        InvalidRequest: one of them is there.
    """
    places = [workdir]
    if workdir == "/":  # the image is not the task's
        places = [f"/{entry.name}" for entry in task.environment.iterdir()] if task.environment else []
    search = ["/bin/sh", "-c", _SEARCH, "sh", "\n".join(task.absent), *places]
    done = await box.run(search, cwd="/", timeout_s=SEARCH_S)
    if not done.ok:
        raise InvalidRequest(f"The sandbox could not be searched: {_reason(done)}.", code="setup_failed")
    if found := done.text.splitlines():
        raise InvalidRequest(
            f"The task is broken: {found[0][:200]} in the sandbox gives away what the agent must find.",
            code="task_given_away",
            hint="Make the task anew; [metadata.cloudyard] absent in task.toml lists what was searched for.",
        )


def _reason(done: Completed) -> str:
    return done.error or done.stderr.decode(errors="replace").strip() or f"exit code {done.exit_code}"
