"""Control groups, version 1: one directory per slot in each of several hierarchies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cloudyard.edge.backends.base import Usage
from cloudyard.edge.host.cgroups import files
from cloudyard.edge.host.cgroups.limits import (
    CPU_PERIOD_US,
    CPUSET,
    IDLE_PARENT,
    PARENT,
    SHARES_PER_WEIGHT,
    Limits,
)


class GroupV1:
    """A slot's group: for each controller its directory. Controllers that are mounted together share one.

    It holds the parents, which all groups share: there are thousands of groups.
    """

    __slots__ = ("_name", "_parents")

    def __init__(self, parents: Mapping[str, Path], name: str) -> None:
        self._parents = parents
        self._name = name

    def _at(self, controller: str) -> Path:
        return self._parents[controller] / self._name

    @property
    def _homes(self) -> list[Path]:
        return [parent / self._name for parent in dict.fromkeys(self._parents.values())]

    def make(self) -> None:
        files.make_directories(self._homes)
        if CPUSET in self._parents:
            _open_cpuset(self._at(CPUSET))

    def entries(self) -> list[int]:
        return files.open_entries(self._homes)

    def limit(self, limits: Limits) -> None:
        memory = self._at("memory")
        steps = [(memory / "memory.limit_in_bytes", limits.memory_bytes)]
        both = (
            memory / "memory.memsw.limit_in_bytes"
        )  # memory and swap together; absent where swap is not accounted
        if both.exists():
            # The first may never be over the second, whichever way the limit moves.
            together = limits.memory_bytes + limits.swap_bytes
            raising = files.read_number(both) < together
            steps.insert(0 if raising else 1, (both, together))
        for path, value in steps:
            files.write(path, str(value))
        # What connections hold is counted apart here, and not at all without a limit of its own.
        files.write_if_there(memory / "memory.kmem.tcp.limit_in_bytes", str(limits.socket_bytes))
        cpu = self._at("cpu")
        files.write(cpu / "cpu.cfs_period_us", str(CPU_PERIOD_US))
        files.write(cpu / "cpu.cfs_quota_us", str(limits.cpu_quota_us))
        files.write(self._at("pids") / "pids.max", str(limits.pids))

    def set_weight(self, weight: int, /) -> None:
        files.write(self._at("cpu") / "cpu.shares", str(round(weight * SHARES_PER_WEIGHT)))

    def pids(self) -> list[int]:
        return files.read_pids(self._homes[0] / "cgroup.procs")  # the one that is joined first

    def set_frozen(self, frozen: bool, /) -> None:
        files.write(self._at("freezer") / "freezer.state", "FROZEN" if frozen else "THAWED")

    def is_frozen(self) -> bool:
        return (self._at("freezer") / "freezer.state").read_text().strip() == "FROZEN"

    def usage(self) -> Usage:
        memory, pids = self._at("memory"), self._at("pids")
        return Usage(
            memory_bytes=files.read_number(memory / "memory.usage_in_bytes"),
            memory_peak_bytes=files.read_number(memory / "memory.max_usage_in_bytes"),
            cpu_s=files.read_number(self._at("cpuacct") / "cpuacct.usage") / 1e9,
            oom_kills=self.oom_kills(),
            pids=files.read_number(pids / "pids.current"),
            pids_refused=self.forks_refused(),
        )

    def oom_kills(self) -> int:
        parent = self._parents["memory"]
        return files.read_entry(f"{parent}/{self._name}/memory.oom_control", "oom_kill")

    def forks_refused(self) -> int:
        return files.read_entry(f"{self._parents['pids']}/{self._name}/pids.events", "max")

    def remove(self) -> None:
        # A removed group lives on in the kernel, with 150 KB where there once were 1,000 sandboxes, for as
        # long as a page of the page cache is charged to it, such as the file system's own of a directory.
        files.write_if_there(self._at("memory") / "memory.force_empty", "0")
        for home in self._homes:
            files.remove_directory(home)


class CgroupsV1:
    """A yard's parent groups in each hierarchy."""

    version = 1

    def __init__(self, roots: Mapping[str, Path], tag: str) -> None:
        """`roots`: where each controller's hierarchy is mounted. `tag`: the yard's name."""
        homes = {controller: root / PARENT / tag for controller, root in roots.items()}
        # Those that are to run last are elsewhere among groups of processor time, and of processors: lxcfs
        # takes a group's path in the one hierarchy for its path in the other.
        last = {roots[name] for name in ("cpu", CPUSET) if name in roots}
        idle_homes = {
            name: root / IDLE_PARENT / tag if root in last else homes[name] for name, root in roots.items()
        }
        self._homes = list(dict.fromkeys((*homes.values(), *idle_homes.values())))
        files.make_parents(self._homes)
        # Not before: until it has a group of ours in it another yard may remove it.
        files.write(idle_homes["cpu"].parent / "cpu.idle", "1")
        for home in {mapping[CPUSET] for mapping in (homes, idle_homes) if CPUSET in mapping}:
            _open_cpuset(home.parent)
            _open_cpuset(home)
        self.limits_swap = (homes["memory"] / "memory.memsw.limit_in_bytes").exists()
        self._usual, self._idle = homes, idle_homes

    def group(self, name: str, *, idle: bool = False) -> GroupV1:
        return GroupV1(self._idle if idle else self._usual, name)

    def find(self, name: str) -> GroupV1:
        return self.group(name, idle=(self._idle["cpu"] / name).is_dir())

    def names(self) -> list[str]:
        return sorted({entry.name for home in self._homes for entry in home.iterdir() if entry.is_dir()})

    def close(self) -> None:
        files.remove_parents(self._homes)


def _open_cpuset(home: Path) -> None:
    """Let processes into a group of processors, by giving it all that its parent has.

    Balancing is off before it has any: the kernel would else compute the scheduler's domains anew with each
    group that comes or goes. The root's balancing, which is on, covers all of them.
    """
    files.write(home / "cpuset.sched_load_balance", "0")
    for name in ("mems", "cpus"):
        files.write(home / f"cpuset.{name}", (home.parent / f"cpuset.effective_{name}").read_text())
