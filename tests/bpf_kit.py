"""What the kernel would make of a filter of system calls: an interpreter of its programs."""

from __future__ import annotations

import struct
from errno import errorcode

X86_64, I386, AARCH64, ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028
STEP = struct.Struct("=HBBI")
CALL = struct.Struct("=iIQ6Q")
ALLOW, ERRNO = 0x7FFF_0000, 0x0005_0000


def answer(program: bytes, number: int, *arguments: int, arch: int = X86_64) -> str:
    """What the filter says of a call: `allowed`, the name of an error, or `done` where it is skipped."""
    given = CALL.pack(number, arch, 0, *(*arguments, *[0] * (6 - len(arguments))))
    steps = [STEP.unpack_from(program, at) for at in range(0, len(program), STEP.size)]
    accumulator = at = 0
    while True:
        what, if_so, if_not, operand = steps[at]
        at += 1
        match what:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", given, operand)
            case 0x54:
                accumulator &= operand
            case 0x05:
                at += operand
            case 0x15:
                at += if_so if accumulator == operand else if_not
            case 0x25:
                at += if_so if accumulator > operand else if_not
            case 0x35:
                at += if_so if accumulator >= operand else if_not
            case 0x45:
                at += if_so if accumulator & operand else if_not
            case 0x06:
                return _said(operand)
            case _:
                raise AssertionError(f"an instruction {what:#x} that filters of ours have not")


def _said(value: int) -> str:
    if value == ALLOW:
        return "allowed"
    assert value & 0xFFFF_0000 == ERRNO, hex(value)
    return errorcode[value & 0xFFFF] if value & 0xFFFF else "done"
