"""What of /proc shows nothing in a sandbox: what tells about the machine, or works on all of it.

Files that only the machine's root may open are not here: root inside is another user. Not here either is what
programs need to run well and cannot have of their own: processors, memory, load and uptime.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import NamedTuple

MASKED = (
    "cmdline",  # what the machine was started with, often addresses and sometimes secrets
    "config.gz",
    "modules",
    "kallsyms",
    "iomem",
    "ioports",
    "mtrr",
    "interrupts",
    "softirqs",
    "irq",
    "bus",
    "acpi",
    "driver",
    "asound",
    "scsi",
    "partitions",
    "diskstats",
    "mdstat",
    "swaps",
    "fs",  # file systems of the machine, by device
    "locks",  # on files of everybody, by number
    "keys",
    "key-users",
    "pressure",  # each open for writing may ask the kernel to watch all of the machine
    "schedstat",
    "sched_debug",
    "latency_stats",
    "timer_list",
    "timer_stats",
    "slabinfo",
    "vmallocinfo",
    "1/oom_score_adj",  # by which whoever is out of memory could have the guest killed first
    "1/oom_adj",
    "1/task/1/oom_score_adj",
    "1/task/1/oom_adj",
)


class Masks(NamedTuple):
    """Names in /proc that this machine's kernel has and everybody may open."""

    files: tuple[str, ...]
    folders: tuple[str, ...]


def masks_here(proc: Path = Path("/proc")) -> Masks:
    """What there is to mask on this machine."""
    files, folders = [], []
    for name in MASKED:
        try:
            mode = (proc / name).lstat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(mode):
            folders.append(name)
        elif mode & (stat.S_IROTH | stat.S_IWOTH):
            files.append(name)
    return Masks(tuple(files), tuple(folders))
