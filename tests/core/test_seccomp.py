"""What the filters of system calls allow and refuse, by an interpreter of the kernel's programs."""

from __future__ import annotations

import os
from errno import errorcode

import pyseccomp
import pytest

from bpf_kit import AARCH64, ARM, I386, X86_64, answer
from cloudyard.edge.host.seccomp import NEWER, Filters, build_filters
from cloudyard.edge.host.seccomp.newer import NEWEST_JUDGED, newer_calls
from cloudyard.edge.host.seccomp.policy import rules
from cloudyard.errors import Unsupported

on_x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
X32 = 0x4000_0000
ABOVE_32_BITS = 1 << 32  # set in an argument of which the kernel takes the low half
UNIX, INET, INET6, NETLINK, ALG, VSOCK, XDP = 1, 2, 10, 16, 38, 40, 44
NEW_USERS, NEW_MOUNTS, NEW_NETWORK, SIGCHLD = 0x1000_0000, 0x2_0000, 0x4000_0000, 17
TIOCSTI, TCGETS, FICLONE = 0x5412, 0x5401, 0x4004_9409


@pytest.fixture(scope="module")
def filters() -> Filters:
    return build_filters()


def said(program: bytes, call: str, *arguments: int) -> str:
    return answer(program, pyseccomp.resolve_syscall(pyseccomp.Arch.X86_64, call), *arguments)


def said_to_32_bits(program: bytes, call: str, *arguments: int) -> str:
    number = pyseccomp.resolve_syscall(pyseccomp.Arch.X86, call)
    return answer(program, number, *arguments, arch=I386)


@on_x86_64
@pytest.mark.parametrize("call", sorted({name for rule in rules("sandbox") for name in rule.calls.split()}))
def test_every_call_of_the_policy_is_refused_as_it_says(filters: Filters, call: str) -> None:
    for rule in rules("sandbox"):
        if call not in rule.calls.split() or pyseccomp.resolve_syscall(pyseccomp.Arch.X86_64, call) < 0:
            continue
        arguments = [0] * 6
        for test in rule.when:
            arguments[test.argument] = test.value + (test.how == "above")
        expected = errorcode[rule.error] if rule.error else "done"
        assert said(filters["sandbox"], call, *arguments) == expected


@on_x86_64
@pytest.mark.parametrize("call", ["read", "execve", "ptrace", "clone", "unshare", "prctl", "chroot"])
def test_what_is_not_named_is_allowed(filters: Filters, call: str) -> None:
    assert all(said(filters[name], call) == "allowed" for name in filters)


@on_x86_64
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((UNIX,), "allowed"),
        ((INET, 1, 6), "allowed"),
        ((INET6, 2, 17), "allowed"),
        ((NETLINK, 3, 0), "allowed"),
        ((NETLINK, 3, 12), "EPROTONOSUPPORT"),
        ((NETLINK, 3, 16), "EPROTONOSUPPORT"),
        ((INET, 1, 132), "EPROTONOSUPPORT"),
        ((INET6, 1, ABOVE_32_BITS | 132), "EPROTONOSUPPORT"),
        ((ALG,), "EAFNOSUPPORT"),
        ((VSOCK,), "EAFNOSUPPORT"),
        ((XDP,), "EAFNOSUPPORT"),
        ((ABOVE_32_BITS | ALG,), "EAFNOSUPPORT"),
        ((9,), "EAFNOSUPPORT"),
    ],
)
def test_sockets_are_of_the_families_that_programs_use(
    filters: Filters, arguments: tuple[int, ...], expected: str
) -> None:
    assert said(filters["sandbox"], "socket", *arguments) == expected
    assert said(filters["sandbox"], "socketpair", *arguments) == expected


@on_x86_64
def test_a_32_bit_program_has_no_way_around_by_calls_of_its_own(filters: Filters) -> None:
    sandbox = filters["sandbox"]
    assert answer(sandbox, 102, 1, arch=I386) == "EAFNOSUPPORT"  # socketcall, whose arguments lie in memory
    assert answer(sandbox, 359, ALG, arch=I386) == "EAFNOSUPPORT"
    assert answer(sandbox, 359, UNIX, arch=I386) == "allowed"
    assert said_to_32_bits(sandbox, "add_key") == "EPERM"
    assert said_to_32_bits(sandbox, "clone", NEW_USERS) == "EPERM"
    assert said_to_32_bits(sandbox, "clock_settime64") == "EPERM"
    assert said_to_32_bits(sandbox, "getpid") == "allowed"


@on_x86_64
def test_architectures_that_nobody_named_have_no_calls_at_all(filters: Filters) -> None:
    for program in filters.values():
        assert answer(program, 39 | X32) == "ENOSYS"
        assert answer(program, 1, arch=ARM) == "ENOSYS"


@on_x86_64
@pytest.mark.parametrize("request_", [TIOCSTI, ABOVE_32_BITS | TIOCSTI])
def test_a_terminal_cannot_be_typed_into(filters: Filters, request_: int) -> None:
    assert said(filters["sandbox"], "ioctl", 0, request_) == "EPERM"
    assert said(filters["sandbox"], "ioctl", 0, TCGETS) == "allowed"
    assert said(filters["sandbox"], "ioctl", 0, FICLONE) == "ENOTSUP"


@on_x86_64
@pytest.mark.parametrize(
    ("profile", "flags", "expected"),
    [
        ("sandbox", NEW_USERS, "EPERM"),
        ("sandbox", NEW_MOUNTS | SIGCHLD, "EPERM"),
        ("sandbox", SIGCHLD, "allowed"),
        ("user_namespaces", NEW_USERS | NEW_NETWORK, "allowed"),
        ("worker", NEW_MOUNTS, "allowed"),
        ("worker", NEW_MOUNTS | NEW_USERS, "EPERM"),
        ("worker", NEW_NETWORK, "EPERM"),
    ],
)
def test_namespaces_are_made_by_whom_the_profile_lets(
    filters: Filters, profile: str, flags: int, expected: str
) -> None:
    assert said(filters[profile], "clone", flags) == expected
    assert said(filters[profile], "unshare", flags) == expected
    assert said(filters[profile], "clone3") == "ENOSYS"


@on_x86_64
@pytest.mark.parametrize(
    ("profile", "mount", "umount", "setns"),
    [
        ("sandbox", "EPERM", "EPERM", "EPERM"),
        ("user_namespaces", "EPERM", "EPERM", "EPERM"),
        ("worker", "allowed", "EPERM", "allowed"),
    ],
)
def test_only_a_worker_mounts(filters: Filters, profile: str, mount: str, umount: str, setns: str) -> None:
    found = [said(filters[profile], call) for call in ("mount", "umount2", "setns")]
    assert found == [mount, umount, setns]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "allowed"),
        (449, "allowed"),
        (452, "allowed"),  # fchmodat2
        (457, "ENOSYS"),  # statmount
        (462, "allowed"),  # mseal
        (467, "ENOSYS"),  # open_tree_attr
        (NEWEST_JUDGED, "ENOSYS"),
        (NEWEST_JUDGED + 1, "ENOSYS"),
        (-1, "ENOSYS"),
    ],
)
@pytest.mark.parametrize(
    ("machine", "arch"), [("x86_64", X86_64), ("x86_64", I386), ("aarch64", AARCH64), ("aarch64", ARM)]
)
def test_calls_that_nobody_has_judged_are_none(number: int, expected: str, machine: str, arch: int) -> None:
    assert answer(newer_calls(machine), number, arch=arch) == expected


def test_newer_calls_of_another_architecture_are_none() -> None:
    assert answer(newer_calls("riscv64"), 0, arch=X86_64) == "ENOSYS"
    assert answer(newer_calls("x86_64"), X32 | 1) == "ENOSYS"


def test_a_machine_of_another_kind_says_so() -> None:
    with pytest.raises(Unsupported, match="mips"):
        newer_calls("mips")


def test_all_filters_are_small(filters: Filters) -> None:
    assert {NEWER, "sandbox", "user_namespaces", "worker"} == set(filters)
    assert all(len(program) < 8 * 512 for program in filters.values())
