"""Control groups, version 1: one directory per slot in each of several hierarchies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from msgspec import Struct

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


class Parents(Struct, frozen=True, kw_only=True):
    """What all groups of one kind share: there are thousands of them."""

    homes: Mapping[str, Path]
    """For each controller the directory that groups are made in. Those that are mounted together share
    one."""
    cpus: str = ""
    mems: str = ""
    """Processors and memory nodes that are there; empty without the controller for them."""


class GroupV1:
    """A slot's group: for each controller its directory."""

    __slots__ = ("_name", "_parents")

    def __init__(self, parents: Parents, name: str) -> None:
        self._parents = parents
        self._name = name

    def _at(self, controller: str) -> Path:
        return self._parents.homes[controller] / self._name

    @property
    def _homes(self) -> list[Path]:
        return [parent / self._name for parent in dict.fromkeys(self._parents.homes.values())]

    def make(self) -> None:
        files.make_directories(self._homes)
        if self._parents.cpus:
            _open_cpuset(self._at(CPUSET), cpus=self._parents.cpus, mems=self._parents.mems)

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

    def set_cpus(self, cpus: Collection[int], /) -> None:
        files.write(self._at(CPUSET) / "cpuset.cpus", files.number_ranges(cpus))

    def cpus(self) -> list[int]:
        return files.read_ranges(self._at(CPUSET) / "cpuset.cpus") if self._parents.cpus else []

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
        parent = self._parents.homes["memory"]
        return files.read_entry(f"{parent}/{self._name}/memory.oom_control", "oom_kill")

    def forks_refused(self) -> int:
        return files.read_entry(f"{self._parents.homes['pids']}/{self._name}/pids.events", "max")

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
        idle_top = roots["cpu"] / IDLE_PARENT
        # Only what shares the processor's hierarchy is elsewhere for those that are to run last.
        idle_homes = {
            name: idle_top / tag if roots[name] == roots["cpu"] else at for name, at in homes.items()
        }
        self._homes = list(dict.fromkeys((*homes.values(), *idle_homes.values())))
        files.make_parents(self._homes)
        files.write(idle_top / "cpu.idle", "1")  # not before: another yard may have removed it until now
        cpus, mems = "", ""
        if CPUSET in homes:
            root = roots[CPUSET]
            cpus = (root / "cpuset.effective_cpus").read_text().strip()
            mems = (root / "cpuset.effective_mems").read_text().strip()
            for home in (root / PARENT, homes[CPUSET]):
                _open_cpuset(home, cpus=cpus, mems=mems)
            self.cpus = files.read_ranges(root / "cpuset.effective_cpus")
        else:
            self.cpus = []
        self.limits_swap = (homes["memory"] / "memory.memsw.limit_in_bytes").exists()
        self._usual = Parents(homes=homes, cpus=cpus, mems=mems)
        self._idle = Parents(homes=idle_homes, cpus=cpus, mems=mems)

    def group(self, name: str, *, idle: bool = False) -> GroupV1:
        return GroupV1(self._idle if idle else self._usual, name)

    def find(self, name: str) -> GroupV1:
        return self.group(name, idle=(self._idle.homes["cpu"] / name).is_dir())

    def names(self) -> list[str]:
        return sorted({entry.name for home in self._homes for entry in home.iterdir() if entry.is_dir()})

    def close(self) -> None:
        files.remove_parents(self._homes)


def _open_cpuset(home: Path, *, cpus: str, mems: str) -> None:
    """Let processes into a group of processors, which is new or has the same.

    Balancing is off before it has any: the kernel would else compute the scheduler's domains anew with each
    group that comes, changes or goes. The root's balancing, which is on, covers all of them.
    """
    for name, value in (("sched_load_balance", "0"), ("mems", mems), ("cpus", cpus)):
        files.write(home / f"cpuset.{name}", value)
