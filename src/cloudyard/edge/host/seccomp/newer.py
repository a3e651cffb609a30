"""The second filter: calls that libseccomp 2.5 does not know, by number.

Since Linux 5.1 a new call has the same number on every architecture, so the filter needs no table of them. It
allows numbers that were judged, and answers for all beyond the newest of these that there is no such call:
nothing that a later kernel brings is open to sandboxes before somebody has looked at it.
"""

from __future__ import annotations

import struct
from errno import ENOSYS

from cloudyard.errors import Unsupported

NEWEST_JUDGED = 469  # of Linux 6.17
REFUSED = {
    450: "set_mempolicy_home_node",
    457: "statmount",
    458: "listmount",
    459: "lsm_get_self_attr",
    460: "lsm_set_self_attr",
    461: "lsm_list_modules",
    467: "open_tree_attr",
    469: "file_setattr",
}
ARCHITECTURES = {  # that a machine runs programs of, as the kernel numbers them for filters
    "x86_64": (0xC000003E, 0x40000003),  # and i386
    "aarch64": (0xC00000B7, 0x40000028),  # and 32-bit ARM
    "riscv64": (0xC00000F3,),
}

# Instructions of a filter, and what they work on.
LOAD, IF_EQUAL, IF_ABOVE, RETURN = 0x20, 0x15, 0x25, 0x06
AT_NUMBER, AT_ARCHITECTURE = 0, 4
ALLOW, REFUSE = 0x7FFF_0000, 0x0005_0000 | ENOSYS


def newer_calls(machine: str) -> bytes:
    """The filter for this machine, as the kernel takes it.

    Args:
        machine: as uname says.

    Raises:
        Unsupported: its numbers are not known.
    """
    if machine not in ARCHITECTURES:
        raise Unsupported(
            f"There is no filter of system calls for machines of kind {machine}.",
            code="no_seccomp_filter",
            hint=f"Sandboxes are made on {', '.join(ARCHITECTURES)}.",
        )
    architectures = ARCHITECTURES[machine]
    steps = [(LOAD, 0, 0, AT_ARCHITECTURE)]  # each: what to do, steps to skip if so and if not, with what
    steps += [(IF_EQUAL, len(architectures) - at, 0, known) for at, known in enumerate(architectures)]
    steps += [(RETURN, 0, 0, REFUSE), (LOAD, 0, 0, AT_NUMBER)]
    left = len(REFUSED) + 1  # steps from here to the one that allows
    steps.append((IF_ABOVE, left, 0, NEWEST_JUDGED))
    steps += [(IF_EQUAL, left - 1 - at, 0, number) for at, number in enumerate(REFUSED)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
