"""Starting and watching processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from cloudyard.edge.host.processes import Process, Watcher, ended_within, kill_all, spawn, start_time
from cloudyard.edge.host.syscalls import become_subreaper

WAIT_S = 10.0
FREE_FROM = 30  # of numbers that bash leaves alone
BASH_OWN = {"10", "11", "251", "255"}  # where bash keeps copies while it redirects
LIBC_SIGNALS = 0b11 << 31  # two that glibc keeps to itself


@pytest.fixture
async def watcher() -> AsyncIterator[Watcher]:
    watcher = Watcher()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watcher.run)
        yield watcher
        tasks.cancel_scope.cancel()
    watcher.close()


async def finished(process: Process) -> None:
    assert await ended_within(process, WAIT_S)


async def test_descriptors_arrive_under_the_numbers_asked_for_and_no_others(watcher: Watcher) -> None:
    """Also where numbers here and there overlap, as they do for 3 and 4 crossed."""
    pipes = [os.pipe() for _ in range(2)]
    low, high = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FREE_FROM) for _, end in pipes)
    script = f"echo a >&{high}; echo b >&{low}; ls /proc/self/fd >&{high}"
    process = watcher.watch(spawn(["/bin/bash", "-c", script], {low: high, high: low}))
    await finished(process)
    for fd in (low, high, pipes[0][1], pipes[1][1]):
        os.close(fd)
    first, second = (os.read(pipe[0], 4096).decode().split() for pipe in pipes)
    for pipe in pipes:
        os.close(pipe[0])
    assert second == ["b"]
    assert first[0] == "a"
    assert set(first[1:]) <= {"0", "1", "2", "3", str(low), str(high), *BASH_OWN}


async def test_a_child_has_default_signals_and_an_empty_environment(watcher: Watcher) -> None:
    out, end = os.pipe()
    script = "grep -E 'SigIgn|SigBlk' /proc/self/status; env"
    process = watcher.watch(spawn(["/bin/sh", "-c", script], {1: end}))
    os.close(end)
    await finished(process)
    lines = os.read(out, 4096).decode().splitlines()
    os.close(out)
    masks = [int(line.split()[1], 16) & ~LIBC_SIGNALS for line in lines[:2]]
    assert masks == [0, 0]
    assert all(line.startswith(("PWD=", "_=", "SHLVL=", "OLDPWD=")) for line in lines[2:])


async def test_a_child_that_ends_is_reaped_and_seen(watcher: Watcher) -> None:
    pid = spawn(["/bin/true"], {})
    process = watcher.watch(pid)
    await finished(process)
    assert not Path(f"/proc/{pid}").exists()
    process.kill()


async def test_a_process_of_somebody_else_is_watched_too(watcher: Watcher) -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        process = watcher.watch(int(parent.stdout.readline()))
        process.kill()
        await finished(process)


async def test_kill_all_ends_all(watcher: Watcher) -> None:
    pids = [spawn(["/bin/sleep", "60"], {}) for _ in range(5)]
    called = []
    with anyio.fail_after(WAIT_S):
        await kill_all([*pids, 2**22], watcher, then=lambda: called.append(True))
    assert called == [True]
    assert all(start_time(pid) is None for pid in pids)


async def test_a_forgotten_process_lives_on(watcher: Watcher) -> None:
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as child:
        process = watcher.watch(child.pid)
        watcher.forget(process)
        watcher.forget(process)
        process.kill()
        assert child.poll() is None
        child.kill()


async def test_a_child_of_a_child_that_ends_first_is_reaped_when_it_becomes_ours(watcher: Watcher) -> None:
    become_subreaper()
    out, end = os.pipe()
    parent = watcher.watch(spawn(["/bin/sh", "-c", "sleep 60 & echo $!; exec sleep 60"], {1: end}))
    os.close(end)
    child = watcher.watch(int(os.read(out, 100)))
    os.close(out)
    child.kill()
    await finished(child)
    parent.kill()
    await finished(parent)
    assert not Path(f"/proc/{child.pid}").exists()


def test_the_start_time_of_a_process_that_is_not_there_is_none() -> None:
    assert start_time(2**22) is None
    assert start_time(os.getpid()) is not None
