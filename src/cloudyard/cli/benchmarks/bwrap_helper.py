"""A program of its own: answers each line on stdin with the seconds that one `bwrap ... true` took.

It mounts an overlay of this machine's root over a tmpfs once, so it is to be started in a mount namespace of
its own. Knows only the standard library, so that it runs by its path.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

MOUNT_WAIT_S = 30.0
_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup")


def _serve(directory: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", str(directory)], check=True, timeout=MOUNT_WAIT_S)
    for name in ("upper", "work", "root"):
        (directory / name).mkdir()
    options = f"lowerdir=/,upperdir={directory}/upper,workdir={directory}/work"
    root = directory / "root"
    overlay = ["mount", "-t", "overlay", "-o", options, "none", str(root)]
    subprocess.run(overlay, check=True, timeout=MOUNT_WAIT_S)
    command = ["bwrap", "--bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for _ in sys.stdin:
        started = time.perf_counter()
        # Without a timeout: with one, subprocess polls for the end in growing steps.
        subprocess.run([*command, *_NAMESPACES, "/bin/true"], stdin=subprocess.DEVNULL, check=True)
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
