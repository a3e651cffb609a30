"""Which processors each sandbox runs on: as many as it may use, where the least is promised to others. Knows
numbers, and no kernel.

A sandbox of one core on a machine of many would else be told by `nproc`, and by whatever starts a thread per
processor, that it has all of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection


class CpuPlan:
    """Spreads holders, named by numbers, over processors.

    Args:
        cpus: those that are there; none: nobody is put anywhere.
    """

    def __init__(self, cpus: Collection[int]) -> None:
        self._load = dict.fromkeys(cpus, 0.0)
        self._held: dict[int, tuple[list[int], float]] = {}

    @property
    def all(self) -> list[int]:
        """Every processor."""
        return list(self._load)

    def take(self, holder: int, cpu: float) -> list[int]:
        """The processors for a holder, who has no others from then on: `cpu` rounded up, at most all."""
        self.give_back(holder)
        count = min(max(1, math.ceil(cpu)), len(self._load))
        chosen = sorted(heapq.nsmallest(count, self._load, key=lambda each: (self._load[each], each)))
        self.note(holder, chosen, cpu)
        return chosen

    def note(self, holder: int, cpus: Collection[int], cpu: float) -> None:
        """A holder has these already."""
        known = [each for each in cpus if each in self._load]
        if not known:
            return
        part = cpu / len(known)
        for each in known:
            self._load[each] += part
        self._held[holder] = known, part

    def give_back(self, holder: int) -> None:
        """Forget a holder, if there is one of that number."""
        cpus, part = self._held.pop(holder, ([], 0.0))
        for each in cpus:
            self._load[each] -= part
        if not self._held:  # no dust from adding and taking away
            self._load = dict.fromkeys(self._load, 0.0)
