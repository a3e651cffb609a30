"""Control groups behind one small interface: version 1 in `v1`, version 2 in `v2`.

A yard has one parent group, `cloudyard/TAG`, at the root of each hierarchy, and in it one group per slot; and
a second one, `cloudyard-best-effort/TAG`, for the slots that get processor time that nobody else wants. They
are not below the edge's own group: a sandbox outlives the edge that made it, and the next edge may be started
from another group. Knows files of the kernel, and nothing of sandboxes.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import anyio
from msgspec import Struct

from cloudyard.edge.backends.base import Usage
from cloudyard.edge.host.cgroups.limits import (
    CONTROLLERS,
    CPUSET,
    IDLE_PARENT,
    PARENT,
    WEIGHT_DEFAULT,
    Limits,
)
from cloudyard.edge.host.cgroups.v1 import CgroupsV1
from cloudyard.edge.host.cgroups.v2 import CgroupsV2
from cloudyard.errors import CloudyardError, LimitExceeded, SandboxUnavailable, Unsupported

__all__ = [
    "WEIGHT_DEFAULT",
    "Cgroups",
    "Group",
    "Limits",
    "freeze",
    "open_cgroups",
    "parent_names",
    "refused",
    "remove",
]

FREEZE_WAIT_S = 5.0
REMOVE_WAIT_S = 5.0
POLL_S = 0.002
_V1_CONTROLLERS = (*CONTROLLERS, "cpuacct", "freezer")
_V1_OPTIONAL = (CPUSET,)


class Group(Protocol):
    """The group of one slot, in every hierarchy that it takes. Methods raise OSError with the file and the
    reason."""

    def make(self) -> None:
        """Make it; it must not be there."""

    def entries(self) -> list[int]:
        """Its cgroup.procs files, opened for writing: a process that writes 0 to each is in. The caller
        closes them."""

    def limit(self, limits: Limits) -> None:
        """Set its limits."""

    def set_weight(self, weight: int, /) -> None:
        """Set its share of a busy processor, 1 to 10,000, beside others of WEIGHT_DEFAULT."""

    def set_cpus(self, cpus: Collection[int], /) -> None:
        """Let it run on these processors alone. Only where `Cgroups.cpus` has some."""

    def cpus(self) -> list[int]:
        """What it may run on; none where there is no controller for it, or no group."""

    def pids(self) -> list[int]:
        """Processes in it; none when it is not there."""

    def set_frozen(self, frozen: bool, /) -> None:
        """Ask that its processes stop, or go on."""

    def is_frozen(self) -> bool:
        """Whether all of them have stopped."""

    def usage(self) -> Usage:
        """Its counters."""

    def oom_kills(self) -> int:
        """Processes of it that the kernel has killed for memory."""

    def forks_refused(self) -> int:
        """Forks in it that its limit of processes refused."""

    def remove(self) -> None:
        """Remove it, if it is there. EBUSY while a process is in it."""


class Cgroups(Protocol):
    """The parent groups of a yard."""

    @property
    def version(self) -> int:
        """1 or 2."""

    @property
    def cpus(self) -> list[int]:
        """Processors that groups may run on; none where there is no controller for it."""

    @property
    def limits_swap(self) -> bool:
        """Whether the kernel counts swap."""

    def group(self, name: str, *, idle: bool = False) -> Group:
        """The group of that name, there or not: among the usual ones, or those that run last."""

    def find(self, name: str) -> Group:
        """The group of that name, wherever it is."""

    def names(self) -> list[str]:
        """Groups that are there, whole or in part."""

    def close(self) -> None:
        """Remove the parents, if nothing is in them."""


def parent_names(tag: str) -> tuple[str, str]:
    """The paths of a yard's parent groups, below the root of each hierarchy that they are in."""
    return f"{PARENT}/{tag}", f"{IDLE_PARENT}/{tag}"


def open_cgroups(tag: str, subtree: Path | None = None) -> Cgroups:
    """The parent groups of the yard with this tag, made where they are missing.

    Args:
        tag: names the yard on this machine.
        subtree: directory of a version 2 group that was delegated to us; the root of what is mounted if left
            out.

    Raises:
        Unsupported: a controller is missing, or the kernel refuses.
    """
    try:
        if subtree is not None:
            return CgroupsV2(subtree, tag)
        where = choose(mounted(Path("/proc/self/mountinfo").read_text()))
        return CgroupsV2(where, tag) if isinstance(where, Path) else CgroupsV1(where, tag)
    except OSError as exc:
        raise refused(exc, "Making the yard's parent cgroup") from exc


class Mount(Struct, frozen=True, kw_only=True):
    """A mounted hierarchy."""

    version: int
    at: Path
    controllers: frozenset[str]


def mounted(mountinfo: str) -> list[Mount]:
    """The hierarchies in a text like /proc/self/mountinfo, with what each offers."""
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        at = Path(left.split(" ")[4])
        kind, *_, options = right.split(" ")
        if kind == "cgroup":
            found.append(Mount(version=1, at=at, controllers=frozenset(options.split(","))))
        elif kind == "cgroup2":
            offered = (at / "cgroup.controllers").read_text().split()
            found.append(Mount(version=2, at=at, controllers=frozenset(offered)))
    return found


def choose(mounts: Sequence[Mount]) -> Path | dict[str, Path]:
    """The root of version 2 where that has all we need, else for each controller the root of its version 1
    hierarchy.

    Raises:
        Unsupported: neither has; says which controller is missing.
    """
    for mount in mounts:
        if mount.version == 2 and mount.controllers.issuperset(CONTROLLERS):
            return mount.at
    first = [mount for mount in mounts if mount.version == 1]
    wanted = (*_V1_CONTROLLERS, *_V1_OPTIONAL)
    found = {name: mount.at for name in wanted for mount in first if name in mount.controllers}
    missing = [name for name in _V1_CONTROLLERS if name not in found]
    if missing:
        raise Unsupported(
            f"Limits of sandboxes need the cgroup controllers {', '.join(missing)}, which are not here.",
            code="cgroups_missing",
            fault="infra",
            hint="Mount cgroup2 at /sys/fs/cgroup, or run the edge where it can write the host's cgroups.",
        )
    return found


async def freeze(group: Group) -> None:
    """Stop every process of a group.

    Raises:
        SandboxUnavailable: the kernel did not stop them all within FREEZE_WAIT_S; they go on.
    """
    group.set_frozen(True)
    with anyio.move_on_after(FREEZE_WAIT_S):
        while not group.is_frozen():  # noqa: ASYNC110 - the kernel tells of it in no other way
            await anyio.sleep(POLL_S)
        return
    group.set_frozen(False)
    raise SandboxUnavailable(
        f"Freezing the sandbox failed: the kernel had not stopped all of it after {FREEZE_WAIT_S:g} s.",
        code="freeze_failed",
        hint="A process of it may wait for a disk or a network file system; try again.",
        retry_safe=True,
    )


def remove(group: Group) -> None:
    """Remove a group whose processes are about to be gone. Blocks: for a thread.

    Raises:
        OSError: EBUSY when one is still there after REMOVE_WAIT_S; or another reason of the kernel's.
    """
    deadline = time.monotonic() + REMOVE_WAIT_S
    while True:
        try:
            return group.remove()
        except OSError as exc:
            if exc.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def refused(exc: OSError, what: str) -> CloudyardError:
    """Our error for the kernel's refusal to make or limit a group."""
    message = f"{what} failed at {exc.filename or 'an unnamed file'}: {exc.strerror}."
    match exc.errno:
        case errno.ENOSPC | errno.EAGAIN:
            return LimitExceeded(
                message,
                code="too_many_cgroups",
                fault="infra",
                hint="Stop sandboxes that are no longer needed.",
            )
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return Unsupported(
                message,
                code="cgroups_refused",
                fault="infra",
                hint="An edge must be root and see the host's cgroups.",
            )
        case _:
            return Unsupported(message, code="cgroups_failed", fault="infra")
