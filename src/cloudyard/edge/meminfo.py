"""What the kernel says of this machine's memory."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int:
    """Memory that can be had without swapping; 0 where the kernel does not say."""
    return _line("MemAvailable")


def swap_total_bytes() -> int:
    """Swap that is there, free or not."""
    return _line("SwapTotal")


def _line(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
