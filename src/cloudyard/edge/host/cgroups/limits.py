"""What a group of processes may use, and in which units the kernel wants to hear it."""

from __future__ import annotations

from msgspec import Struct

CONTROLLERS = ("memory", "cpu", "pids")  # what limits need
CPUSET = "cpuset"  # used where it is there
PARENT = "cloudyard"  # in each hierarchy; in it one for each yard
# The parent of those that are to run in the time that all others leave. It is a sibling of whatever else is
# on the machine, our own daemons too: a group is idle beside its siblings only, and below PARENT it would
# still make them wait.
IDLE_PARENT = "cloudyard-best-effort"
SOCKET_PART = 8  # of the memory
CPU_PERIOD_US = 100_000
CPU_QUOTA_MIN_US = 1_000  # the kernel's own least
WEIGHT_DEFAULT = 100  # of a busy processor, as version 2 counts
SHARES_PER_WEIGHT = 10.24  # as version 1 counts


class Limits(Struct, frozen=True, kw_only=True):
    """What a group may use at most."""

    memory_bytes: int
    swap_bytes: int = 0
    """Beyond its memory."""
    cpu: float
    """Cores."""
    pids: int

    @property
    def socket_bytes(self) -> int:
        """What TCP connections may hold of what was sent and not yet read, where that is counted apart."""
        return self.memory_bytes // SOCKET_PART

    @property
    def cpu_quota_us(self) -> int:
        """Processor time in each CPU_PERIOD_US."""
        return max(CPU_QUOTA_MIN_US, round(self.cpu * CPU_PERIOD_US))
