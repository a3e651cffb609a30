"""All sites of a yard on this machine: those of this backend, and those that an earlier one left."""

from __future__ import annotations

import os
from pathlib import Path

from anyio import CapacityLimiter, create_task_group, to_thread
from anyio.abc import TaskGroup

from cloudyard.edge.backends.container.options import ContainerOptions
from cloudyard.edge.backends.container.site import Site
from cloudyard.edge.host.cgroups import Cgroups
from cloudyard.edge.host.cpus import CpuPlan
from cloudyard.edge.host.disks import Disks
from cloudyard.edge.host.processes import Watcher
from cloudyard.edge.host.slots import Slots
from cloudyard.edge.host.trash import discard
from cloudyard.errors import CloudyardError
from cloudyard.model import CpuClass

REMOVED_AT_ONCE = 4  # threads that take sites down
SWEPT_AT_ONCE = 16  # sites
DISCARD_SLICE_S = 0.5


class Sites:
    """Gives sites out and removes them.

    Args:
        options: where sites are.
        slots: numbers for them, opened.
        groups: the yard's parent cgroups.
        disks: the yard's disks.
        watcher: sees the ends of processes; it must run.
        behind: where disks too large for a stop to wait for are removed.
    """

    def __init__(
        self,
        options: ContainerOptions,
        *,
        slots: Slots,
        groups: Cgroups,
        disks: Disks,
        watcher: Watcher,
        behind: TaskGroup,
    ) -> None:
        self._options = options
        self._slots = slots
        self._groups = groups
        self._disks = disks
        self._watcher = watcher
        self._behind = behind
        self._threads = CapacityLimiter(REMOVED_AT_ONCE)
        self._discarding = CapacityLimiter(1)
        ours = os.sched_getaffinity(0)
        self._cpus = CpuPlan([cpu for cpu in groups.cpus if cpu in ours])
        self._left = (
            self._on_this_machine()
        )  # what nobody here answers for: an earlier edge's, or not removed
        slots.keep(self._left)

    def take(self, cpu_class: CpuClass) -> Site:
        """A site with nothing on it, for a sandbox of that class. Raises LimitExceeded when the machine has
        no slot left."""
        slot = self._slots.take()
        group = self._groups.group(str(slot), idle=cpu_class == "best_effort")
        return Site(slot, self._options, group, self._disks)

    def pin(self, site: Site, cpu: float) -> None:
        """Let a sandbox run on as many processors as it has cores, and see no others. Raises OSError."""
        if self._cpus.all:
            site.group.set_cpus(self._cpus.take(site.slot, cpu))

    def adopted(self, slot: int) -> Site:
        """The site of an instance that an earlier edge made."""
        self._left.discard(slot)
        self._slots.keep({slot})
        site = self._at(slot)
        cpus = site.group.cpus()
        self._cpus.note(slot, cpus, float(len(cpus)))
        return site

    async def remove(self, site: Site) -> None:
        """Take a site down and give its slot back.

        Raises:
            CloudyardError: something stays. It may be tried again, and the next sweep does.
        """
        try:
            rest = await site.remove(self._watcher, self._threads)
        except CloudyardError:
            self._left.add(site.slot)
            raise
        self._left.discard(site.slot)
        self._cpus.give_back(site.slot)
        self._slots.give_back(site.slot)
        if rest is not None:
            self._behind.start_soon(self._discard, rest)

    async def remove_if_left(self, slot: int) -> None:
        """Take down what an earlier edge left in a slot, if it did."""
        if slot in self._left:
            await self.remove(self._at(slot))

    async def sweep(self, keep: set[int]) -> list[str]:
        """Take down all that nobody answers for, but the slots to keep. Gives a sentence for each."""
        done: list[str] = []
        turns = CapacityLimiter(SWEPT_AT_ONCE)

        async def one(slot: int) -> None:
            async with turns:
                try:
                    await self.remove_if_left(slot)
                except CloudyardError as exc:
                    done.append(f"could not remove what was left of slot {slot}: {exc}")
                else:
                    done.append(f"removed what was left of slot {slot}")

        async with create_task_group() as tasks:
            for slot in self._left - keep:
                tasks.start_soon(one, slot)
        for path in self._disks.left():
            self._behind.start_soon(self._discard, path)
            done.append(f"removing the disk {path.name}")
        return done

    def _at(self, slot: int) -> Site:
        return Site(slot, self._options, self._groups.find(str(slot)), self._disks)

    def _on_this_machine(self) -> set[int]:
        """Slots of which something is there."""
        names = [*self._groups.names(), *self._disks.names()]
        names += [name.removesuffix(".sock") for name in os.listdir(self._options.guests)]
        return {int(name) for name in names if name.isdigit()}

    async def _discard(self, path: Path) -> None:
        """Remove a large disk, a slice at a time, behind everything else."""
        while not await to_thread.run_sync(discard, path, DISCARD_SLICE_S, limiter=self._discarding):
            pass
