"""No kernel keys in cells: a key may be readable for everyone in its user namespace, and lives as long as
that, so that one call could leave something for the next."""

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudyard.edge.functions.inside.base import Failed, check, libc

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, AND, IF_EQUAL, IF_AT_LEAST, IF_OVER, RETURN = 0x20, 0x54, 0x15, 0x35, 0x25, 0x06
AT_NUMBER, AT_ARCHITECTURE = 0, 4  # in what a filter is given
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # EPERM
NOT_X32 = 0xBFFFFFFF
MACHINES = {  # the architectures whose system calls a machine takes, each with the number of its add_key
    "x86_64": {0xC000003E: 248, 0x40000003: 286},
    "aarch64": {0xC00000B7: 217, 0x40000028: 309},
    "riscv64": {0xC00000F3: 217},
}


def forbid_keys() -> None:
    """Make add_key, request_key and keyctl, whose numbers follow each other everywhere, fail from now on."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise Failed(f"forbid kernel keys: the numbers of their system calls on {machine} are not known")
    program = [(LOAD, 0, 0, AT_ARCHITECTURE)]  # each step: what to do, jumps if so and if not, operand
    for architecture, first in MACHINES[machine].items():
        program += [
            (IF_EQUAL, 0, 6, architecture),
            (LOAD, 0, 0, AT_NUMBER),
            (AND, 0, 0, NOT_X32),
            (IF_AT_LEAST, 0, 2, first),
            (IF_OVER, 1, 0, first + 2),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        ]
    program.append((RETURN, 0, 0, REFUSE))
    steps = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    whole = struct.pack("HP", len(program), ctypes.addressof(steps))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, whole, 0, 0), "forbid kernel keys")
