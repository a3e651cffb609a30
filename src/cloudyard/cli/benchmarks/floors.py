"""What the bare machine needs for the same: a bubblewrap that runs `true`, and a subprocess that does.

The first is timed by a helper process (`bwrap_helper`) in a mount namespace of its own: what it mounts ends
with it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from cloudyard.errors import Unsupported

TRUE = "/bin/true"
FLOOR_WAIT_S = 30.0
_HELPER = Path(__file__).with_name("bwrap_helper.py")


def subprocess_s() -> float:
    """Seconds of one `subprocess.run` of `true`, with its output captured."""
    started = time.perf_counter()
    subprocess.run([TRUE], capture_output=True, stdin=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


class BubblewrapFloor:
    """Runs `bwrap ... true` over an overlay of this machine's own root. Needs root and bubblewrap."""

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="cloudyard-floor-")
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, str(_HELPER)]
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
        """Seconds of one run, from before its start to after its end.

        Raises:
            Unsupported: it cannot run here.
        """
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        try:
            self._helper.stdin.write("run\n")
            answer = self._helper.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise Unsupported(
                "bubblewrap over an overlay of this machine's root does not run here.",
                code="no_floor",
                hint="What it said is above; cloudyard doctor says what this machine lacks.",
            )
        return float(answer)
