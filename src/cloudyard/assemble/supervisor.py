"""Keeps the three processes of a yard running, and leaves them alone when it dies.

Resource handling: each child is in a session of its own with its own log, so the death of the supervisor,
even by SIGKILL, changes nothing for it; the next supervisor finds it by its arguments and watches it like one
of its own. Only SIGTERM or SIGINT to the supervisor ends the children. Sandboxes are children of none of them
and are left alone in any case.

Error handling: a child that ends is started again, at once if it had run a while, else after a pause that
doubles.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from cloudyard.assemble import children
from cloudyard.assemble.children import ChildPlan
from cloudyard.assemble.config import YardConfig
from cloudyard.errors import Conflict, Unsupported

BACKOFF_FIRST_S = 0.1  # pause before the first restart of a child that had only just started
BACKOFF_MAX_S = 10.0
SETTLED_S = 2.0  # a child that ran so long is started again at once
LOG_BYTES_MAX = 8 * 1024 * 1024  # of one log; one older log of the same size is kept beside it
LOG_CHECK_S = 20.0


async def supervise(config: YardConfig, plans: list[ChildPlan]) -> None:
    """Run until SIGTERM or SIGINT; then end the children and return.

    Raises:
        Conflict: another supervisor keeps this yard.
    """
    with hold_lock(
        config.paths.supervisor_lock, code="yard_running", what=f"The yard in {config.state} is running"
    ):
        config.paths.children.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with anyio.create_task_group() as tasks:
            for plan in plans:
                tasks.start_soon(_keep, config, plan, name=plan.name)
            tasks.start_soon(_bound_logs, config)
            await _wait_stop_signal(tasks)
        await stop_children(config, plans)


async def stop_children(config: YardConfig, plans: list[ChildPlan]) -> None:
    """End those children that run: the edge and control first, NATS when nobody needs it any more."""
    for group in (
        [plan for plan in plans if plan.name != "nats"],
        [plan for plan in plans if plan.name == "nats"],
    ):
        async with anyio.create_task_group() as tasks:
            for plan in group:
                for process in children.find_by_arguments(plan.argv[1:]):
                    tasks.start_soon(children.stop, process)
        for plan in group:
            (config.paths.children / f"{plan.name}.json").unlink(missing_ok=True)


@contextmanager
def hold_lock(path: Path, *, code: str, what: str) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel gives back however this process ends.

    Raises:
        Conflict: someone else holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise Conflict(f"{what}: {path} is locked.", code=code) from exc
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether someone holds the lock now."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


async def _wait_stop_signal(tasks: TaskGroup) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            say(f"{signal.Signals(number).name}: ending the children")
            tasks.cancel_scope.cancel()
            return


async def _keep(config: YardConfig, plan: ChildPlan) -> None:
    """Have this child running, for ever."""
    starts, failures = 0, 0
    while True:
        process = children.find(plan)
        if process is None:
            try:
                process = children.spawn(plan)
            except Unsupported as exc:
                say(f"{exc} Next try in {BACKOFF_MAX_S:g} s")
                await anyio.sleep(BACKOFF_MAX_S)
                continue
            starts += 1
            say(f"{plan.name} started as process {process.pid}")
        else:
            say(f"{plan.name} runs already as process {process.pid}")
        children.write_note(config, plan, process, starts=starts)
        began = anyio.current_time()
        how = await children.wait_end(process)
        lived_s = anyio.current_time() - began
        failures = 0 if lived_s >= SETTLED_S else failures + 1
        pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (failures - 1)) if failures else 0.0
        say(f"{plan.name} {process.pid} ended after {lived_s:.1f} s: {how}; next start in {pause_s:g} s")
        await anyio.sleep(pause_s)


async def _bound_logs(config: YardConfig) -> None:
    """Keep each log within its bound. Writers append, so emptying the file in place is safe for them."""
    while True:
        for log in config.paths.logs.glob("*.log"):
            if log.stat().st_size > LOG_BYTES_MAX:
                data = log.read_bytes()[-LOG_BYTES_MAX:]
                log.with_suffix(".log.1").write_bytes(data)
                os.truncate(log, 0)
        await anyio.sleep(LOG_CHECK_S)


def say(text: str) -> None:
    """A line for the supervisor's log."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    print(f"{now} {text}", file=sys.stderr, flush=True)
