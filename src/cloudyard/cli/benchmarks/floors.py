"""What the bare machine needs for the same: a bubblewrap that runs `true`, and a subprocess that does.

The first runs in a helper process with a mount namespace of its own, in which an overlay root is mounted
once: what it mounts ends with it. Run as a program, this file is that helper: it answers each line with the
seconds of one run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

TRUE = "/bin/true"
FLOOR_WAIT_S = 30.0
_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup")


def subprocess_s() -> float:
    """Seconds of one `subprocess.run` of `true`, with its output captured."""
    started = time.perf_counter()
    subprocess.run([TRUE], capture_output=True, stdin=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


class BubblewrapFloor:
    """Runs `bwrap ... true` over an overlay of this machine's own root. Needs root and bubblewrap."""

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="cloudyard-floor-")
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", __name__]
        self._helper = subprocess.Popen(
            [*command, self._directory.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        self._helper.stdin.close()
        try:
            self._helper.wait(FLOOR_WAIT_S)
        except subprocess.TimeoutExpired:
            self._helper.kill()
            self._helper.wait()
        self._helper.stdout.close()
        self._directory.cleanup()

    def seconds(self) -> float:
        """Seconds of one run, from before its start to after its end."""
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        self._helper.stdin.write("run\n")
        return float(self._helper.stdout.readline())


def _serve(directory: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", str(directory)], check=True, timeout=FLOOR_WAIT_S)
    for name in ("upper", "work", "root"):
        (directory / name).mkdir()
    options = f"lowerdir=/,upperdir={directory}/upper,workdir={directory}/work"
    root = directory / "root"
    overlay = ["mount", "-t", "overlay", "-o", options, "none", str(root)]
    subprocess.run(overlay, check=True, timeout=FLOOR_WAIT_S)
    command = ["bwrap", "--bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for _ in sys.stdin:
        started = time.perf_counter()
        # Without a timeout: with one, subprocess polls for the end in growing steps.
        subprocess.run([*command, *_NAMESPACES, TRUE], stdin=subprocess.DEVNULL, check=True)
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
