"""Control groups, version 2: one directory per slot in the one hierarchy."""

from __future__ import annotations

import errno
from collections.abc import Collection
from pathlib import Path

from cloudyard.edge.backends.base import Usage
from cloudyard.edge.host.cgroups import files
from cloudyard.edge.host.cgroups.limits import (
    CONTROLLERS,
    CPU_PERIOD_US,
    CPUSET,
    IDLE_PARENT,
    PARENT,
    Limits,
)

LEAF = "daemons"  # group that takes the processes of a group that is to have groups of ours below it
RECLAIM_ALL = "1T"
MOVE_TRIES = 16  # processes may be started while others are moved


class GroupV2:
    """A slot's group."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def make(self) -> None:
        files.make_directories([self._home])

    def entries(self) -> list[int]:
        return files.open_entries([self._home])

    def limit(self, limits: Limits) -> None:
        files.write(self._home / "memory.max", str(limits.memory_bytes))
        swap = self._home / "memory.swap.max"  # absent where swap is not accounted
        if swap.exists():
            files.write(swap, str(limits.swap_bytes))
        files.write(self._home / "cpu.max", f"{limits.cpu_quota_us} {CPU_PERIOD_US}")
        files.write(self._home / "pids.max", str(limits.pids))

    def set_weight(self, weight: int, /) -> None:
        files.write(self._home / "cpu.weight", str(weight))

    def set_cpus(self, cpus: Collection[int], /) -> None:
        files.write(self._home / "cpuset.cpus", files.number_ranges(cpus))

    def cpus(self) -> list[int]:
        return files.read_ranges(self._home / "cpuset.cpus")

    def pids(self) -> list[int]:
        return files.read_pids(self._home / "cgroup.procs")

    def set_frozen(self, frozen: bool, /) -> None:
        files.write(self._home / "cgroup.freeze", "1" if frozen else "0")

    def is_frozen(self) -> bool:
        return files.read_table(self._home / "cgroup.events").get("frozen", 0) == 1

    def usage(self) -> Usage:
        home = self._home
        current = files.read_number(home / "memory.current")
        peak = home / "memory.peak"  # Linux 5.19
        return Usage(
            memory_bytes=current,
            memory_peak_bytes=files.read_number(peak) if peak.exists() else current,
            cpu_s=files.read_table(home / "cpu.stat")["usage_usec"] / 1e6,
            oom_kills=self.oom_kills(),
            pids=files.read_number(home / "pids.current"),
            pids_refused=self.forks_refused(),
        )

    def oom_kills(self) -> int:
        return files.read_entry(f"{self._home}/memory.events", "oom_kill")

    def forks_refused(self) -> int:
        return files.read_entry(f"{self._home}/pids.events", "max")

    def remove(self) -> None:
        # As in version 1, by the file that Linux 5.19 brought. It tells by EAGAIN that it found less.
        files.write_if_there(self._home / "memory.reclaim", RECLAIM_ALL)
        files.remove_directory(self._home)


class CgroupsV2:
    """A yard's parent groups."""

    version = 2

    def __init__(self, root: Path, tag: str) -> None:
        """`root`: the hierarchy's root as it is seen here, or a subtree that was delegated to us. `tag`: the
        yard's name."""
        self._usual, self._idle = root / PARENT / tag, root / IDLE_PARENT / tag
        files.make_parents((self._usual, self._idle))
        for group in (root, self._usual.parent, self._usual, self._idle.parent, self._idle):
            enable(group)
        files.write(self._idle.parent / "cpu.idle", "1")
        self.cpus = files.read_ranges(self._usual / "cpuset.cpus.effective")
        self.limits_swap = (self._usual / "memory.swap.max").exists()

    def group(self, name: str, *, idle: bool = False) -> GroupV2:
        return GroupV2((self._idle if idle else self._usual) / name)

    def find(self, name: str) -> GroupV2:
        return self.group(name, idle=(self._idle / name).is_dir())

    def names(self) -> list[str]:
        homes = (self._usual, self._idle)
        return sorted({entry.name for home in homes for entry in home.iterdir() if entry.is_dir()})

    def close(self) -> None:
        files.remove_parents((self._usual, self._idle))


def enable(group: Path) -> None:
    """Let groups below this one have our controllers, and that of processors where it can be had.

    A group but the real root may not have both processes and controllers for groups below it, so its
    processes go to a leaf.
    """
    control = group / "cgroup.subtree_control"
    on = control.read_text().split()
    offered = files.read_words(group / "cgroup.controllers")
    names = (*CONTROLLERS, CPUSET) if CPUSET in offered else CONTROLLERS
    wanted = [name for name in names if name not in on]
    if not wanted:
        return
    order = " ".join(f"+{name}" for name in wanted)
    try:
        files.write(control, order)
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise
        _move_processes(group, group / LEAF)
        files.write(control, order)


def _move_processes(group: Path, leaf: Path) -> None:
    leaf.mkdir(exist_ok=True)
    for _ in range(MOVE_TRIES):
        pids = files.read_pids(group / "cgroup.procs")
        if not pids:
            return
        for pid in pids:
            try:
                files.write(leaf / "cgroup.procs", str(pid))
            except ProcessLookupError:
                continue  # it has ended
