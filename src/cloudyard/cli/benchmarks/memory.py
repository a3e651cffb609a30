"""Memory of this machine and of a yard's daemons, as /proc tells."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import anyio

SETTLE_MAX_S = 20.0
SETTLE_STEP_S = 0.5
SETTLED_MB = 1.0  # memory is settled when it moves less than this in a step, three times in a row
DAEMONS = re.compile(rb"cloudyard\.assemble\0(?:supervisor|control|edge)|nats-server")


async def settled_mb() -> float:
    """MemAvailable in MB, once it has stopped moving or SETTLE_MAX_S have passed."""
    last = available_mb()
    still = 0
    with anyio.move_on_after(SETTLE_MAX_S):
        while still < 3:
            await anyio.sleep(SETTLE_STEP_S)
            now = available_mb()
            still = still + 1 if abs(now - last) < SETTLED_MB else 0
            last = now
    return last


def available_mb() -> float:
    """Memory that this machine could give to a new program, in MB."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(match[1]) * 1024 / 1e6 if match else 0.0


def daemons_mb(state: Path) -> float:
    """Memory of the daemons of the yard with this state directory, in MB; 0 where they are not on this
    machine."""
    total = 0
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                command = (path / "cmdline").read_bytes()
                if os.fsencode(state) in command and DAEMONS.search(command):
                    total += _anonymous(path)
    return total / 1e6


def own_mb() -> float:
    """Memory of this process, in MB."""
    return _anonymous(Path("/proc/self")) / 1e6


def _anonymous(process: Path) -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", (process / "status").read_text())
    return int(match[1]) * 1024 if match else 0
