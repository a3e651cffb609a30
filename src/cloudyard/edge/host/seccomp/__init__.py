"""Filters of system calls: `policy` says what, libseccomp makes programs for the kernel of it, once in an
edge's life. Knows libseccomp, and nobody else does."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from cloudyard.edge.host.seccomp.newer import newer_calls
from cloudyard.edge.host.seccomp.policy import Profile, Rule, rules
from cloudyard.errors import Unsupported

__all__ = ["NEWER", "Filters", "Profile", "build_filters", "libseccomp_version"]

NEWER = "newer"
PROFILES: tuple[Profile, ...] = ("sandbox", "user_namespaces", "worker")
UNKNOWN_CALL = -1  # libseccomp's number for a name that it does not know
LOW_HALF = 0xFFFF_FFFF

Filters = Mapping[str, bytes]
"""Programs for the kernel: one for each profile, and NEWER."""


@cache
def build_filters() -> Filters:
    """Every filter, for this machine. Takes some tens of milliseconds, once in the life of a process.

    Raises:
        Unsupported: there is no libseccomp, or it is too old, or knows nothing of this machine.
    """
    library = _library()
    filters: dict[str, bytes] = {NEWER: newer_calls(os.uname().machine)}
    for profile in PROFILES:
        filters[profile] = _program(library, rules(profile))
    return MappingProxyType(filters)


def libseccomp_version() -> str:
    """Its version; empty where it cannot be loaded."""
    try:
        _library()
    except Unsupported:
        return ""
    version = ctypes.CDLL("libseccomp.so.2").seccomp_version
    version.restype = ctypes.POINTER(ctypes.c_uint * 3)
    return ".".join(map(str, version().contents))


def _library() -> Any:
    """The binding; importing it finds the library."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as exc:
        raise Unsupported(
            f"Loading libseccomp failed: {exc}.",
            code="no_libseccomp",
            hint="apt-get install -y libseccomp2, and pip install 'cloudyard[node]'.",
        ) from exc
    return pyseccomp


def _program(library: Any, wanted: tuple[Rule, ...]) -> bytes:
    made = library.SyscallFilter(library.ALLOW)
    # Programs of architectures that are not named, x32 among them, find no calls at all. Those that are named
    # have to be so before the first rule: to one that comes later no rule applies.
    made.set_attr(library.Attr.ACT_BADARCH, library.ERRNO(errno.ENOSYS))
    native = library.system_arch()
    for arch in {library.Arch.X86_64: [library.Arch.X86], library.Arch.AARCH64: [library.Arch.ARM]}.get(
        native, []
    ):
        made.add_arch(arch)
    for rule in wanted:
        tests = [_test(library, *test) for test in rule.when]
        for call in rule.calls.split():
            if library.resolve_syscall(native, call) == UNKNOWN_CALL:
                raise Unsupported(
                    f"This libseccomp does not know the system call {call}.",
                    code="old_libseccomp",
                    hint="Cloudyard needs libseccomp 2.5.2 or later, as Debian 12 has it.",
                )
            made.add_rule(library.ERRNO(rule.error), call, *tests)
    return _exported(made)


def _test(library: Any, argument: int, how: str, value: int) -> Any:
    match how:
        case "is":
            return library.Arg(argument, library.EQ, value)
        case "above":
            return library.Arg(argument, library.GT, value)
        case "has":
            return library.Arg(argument, library.MASKED_EQ, value, value)
        case _:
            return library.Arg(argument, library.MASKED_EQ, LOW_HALF, value)


def _exported(made: Any) -> bytes:
    with open(os.memfd_create("filter", os.MFD_CLOEXEC), "r+b", buffering=0) as file:
        made.export_bpf(file)
        file.seek(0)
        return file.readall()
