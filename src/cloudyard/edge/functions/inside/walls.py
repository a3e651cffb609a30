"""What the edge gives a worker to stand around its calls: a filter of system calls, as in every sandbox, and
names in /proc that are to show nothing."""

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from cloudyard.edge.functions.inside.base import MS_BIND, Fields, check, libc, mount

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
STEP_BYTES = 8  # of one instruction of a filter


class Walls:
    """As they came with the worker's first frame."""

    def __init__(self, fields: Fields) -> None:
        self.filter = fields.get(b"filter", [b""])[0]
        self.files = [name.decode() for name in fields.get(b"hidden_file", [])]
        self.folders = [name.decode() for name in fields.get(b"hidden_folder", [])]

    def hide(self, mount_proc: Callable[[], None]) -> None:
        """Mount /proc, and hide in it what the worker's own hides, by the same empty file and folder."""
        hidden = []
        for names in (self.files, self.folders):
            hidden.append(os.open(f"/proc/{names[0]}", os.O_PATH) if names else -1)
        mount_proc()
        for fd, names in zip(hidden, (self.files, self.folders)):  # noqa: B905 (Python 3.9)
            for name in names:
                mount(f"/proc/self/fd/{fd}", f"/proc/{name}", "", MS_BIND, "")
            if names:
                os.close(fd)

    def close(self) -> None:
        """Have this process, and all it starts, keep to the filter from now on."""
        if not self.filter:
            return
        steps = ctypes.create_string_buffer(self.filter, len(self.filter))
        whole = struct.pack("HP", len(self.filter) // STEP_BYTES, ctypes.addressof(steps))
        check(
            libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, whole, 0, 0), "take on the filter of system calls"
        )
