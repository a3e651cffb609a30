"""Which system calls a sandbox is refused, and with what. Data, to be read from top to bottom.

All that is not named here is allowed: a sandbox is for every program there is. What is named is of one of
three kinds: it is for whoever runs a machine and not for whoever uses one, it reaches parts of the kernel
that almost nobody needs and that have often been broken, or it works on what sandboxes share. Errors are
those that programs take for "this machine has none of it".

Calls that came to Linux after libseccomp 2.5 was made are judged in `newer`.
"""

from __future__ import annotations

from errno import EAFNOSUPPORT, ENOSYS, EOPNOTSUPP, EPERM, EPROTONOSUPPORT
from typing import Literal, NamedTuple

DONE = 0  # the call says that it worked, and has done nothing

Profile = Literal["sandbox", "user_namespaces", "worker"]
"""`user_namespaces`: programs may make user namespaces, and others in them. `worker`: its root makes cells
for calls, in each of which the profile `sandbox` is put on top."""


class Test(NamedTuple):
    """What is asked of an argument, all of its 64 bits."""

    argument: int
    how: Literal["is", "above", "has", "low_half_is"]
    value: int


class Rule(NamedTuple):
    """Calls that are refused if all tests of their arguments hold."""

    calls: str
    error: int = EPERM
    when: tuple[Test, ...] = ()


MACHINE = (
    Rule("reboot kexec_load kexec_file_load swapon swapoff acct quotactl quotactl_fd vhangup"),
    Rule("init_module finit_module delete_module create_module query_module get_kernel_syms"),
    Rule("settimeofday stime clock_settime clock_settime64 clock_adjtime clock_adjtime64 adjtimex"),
    Rule("iopl ioperm vm86 vm86old"),  # the processor's ports, and modes of the past
    Rule("syslog lookup_dcookie"),  # what the kernel says of the machine
    Rule("fanotify_init"),  # whole file systems at once
    Rule("sync", DONE),  # of every disk of the machine; what is inside outlives no crash of it anyway
)

SELDOM_NEEDED = (
    Rule("bpf perf_event_open userfaultfd kcmp process_madvise"),
    Rule("io_uring_setup io_uring_enter io_uring_register", ENOSYS),
    Rule("modify_ldt"),
    Rule("set_mempolicy get_mempolicy mbind move_pages migrate_pages"),  # NUMA: memory is not theirs to place
    Rule("uselib ustat sysfs _sysctl nfsservctl afs_syscall getpmsg putpmsg tuxcall vserver", ENOSYS),
)

SHARED = (
    Rule("add_key request_key keyctl"),  # keys belong to uids and outlive processes
    Rule("name_to_handle_at open_by_handle_at"),  # files by number, past every directory
)

MOUNTS = (
    Rule("mount mount_setattr"),
    Rule("umount umount2 pivot_root move_mount open_tree fsopen fsconfig fsmount fspick"),
)

IOCTL_REQUEST, IOCTLS = (
    1,
    {  # the kernel takes 32 bits of the request
        0x5412: EPERM,  # TIOCSTI: types into a terminal
        0x541C: EPERM,  # TIOCLINUX: the same on a console
        0x5423: EPERM,  # TIOCSETD: line disciplines, each a driver
        0x40049409: EOPNOTSUPP,  # FICLONE, and the next two: blocks of a file shared with another
        0x4020940D: EOPNOTSUPP,  # FICLONERANGE
        0xC0189436: EOPNOTSUPP,  # FIDEDUPERANGE
        0xC0C0586D: EOPNOTSUPP,  # XFS_IOC_SWAPEXT: swaps the blocks of two files; has shut file systems down
        0xC028660F: EOPNOTSUPP,  # EXT4_IOC_MOVE_EXT: the same
        0x6611: EOPNOTSUPP,  # EXT4_IOC_SWAP_BOOT
        0x401C5820: EOPNOTSUPP,  # FS_IOC_FSSETXATTR: projects of quotas
    },
)
DEVICES = tuple(
    Rule("ioctl", error, (Test(IOCTL_REQUEST, "low_half_is", request),)) for request, error in IOCTLS.items()
)

UNIX, INET, INET6, NETLINK, PACKET = 1, 2, 10, 16, 17
FAMILIES = {UNIX, INET, INET6, NETLINK, PACKET}
NETLINK_PROTOCOLS = {0, 4, 15}  # routes, sockets, devices that come and go
INET_REFUSED = (33, 115, 132, 136)  # DCCP, L2TP, SCTP, UDP-Lite


def _sockets() -> tuple[Rule, ...]:
    """Families and protocols. Tests by size also catch bits that the kernel would not look at."""
    rules = [
        ((Test(0, "above", max(FAMILIES)),), EAFNOSUPPORT),
        *(
            ((Test(0, "is", family),), EAFNOSUPPORT)
            for family in range(1, max(FAMILIES))
            if family not in FAMILIES
        ),
        ((Test(0, "is", NETLINK), Test(2, "above", max(NETLINK_PROTOCOLS))), EPROTONOSUPPORT),
        *(
            ((Test(0, "is", NETLINK), Test(2, "is", protocol)), EPROTONOSUPPORT)
            for protocol in range(max(NETLINK_PROTOCOLS))
            if protocol not in NETLINK_PROTOCOLS
        ),
        *(
            ((Test(0, "is", family), Test(2, "low_half_is", protocol)), EPROTONOSUPPORT)
            for family in (INET, INET6)
            for protocol in INET_REFUSED
        ),
    ]
    return tuple(Rule("socket socketpair", error, when) for when, error in rules)


NEW_MOUNTS, NEW_IPC, NEW_PIDS, NEW_USERS = 0x0002_0000, 0x0800_0000, 0x2000_0000, 0x1000_0000
NEW_TIME, NEW_CGROUP, NEW_NAMES, NEW_NETWORK = 0x80, 0x0200_0000, 0x0400_0000, 0x4000_0000
NAMESPACES = (NEW_MOUNTS, NEW_IPC, NEW_PIDS, NEW_USERS, NEW_TIME, NEW_CGROUP, NEW_NAMES, NEW_NETWORK)
CELL_NAMESPACES = (NEW_MOUNTS, NEW_IPC, NEW_PIDS)
SIGNAL_BITS = 0xFF  # of clone's flags: no namespaces


def _namespaces(refused: tuple[int, ...]) -> tuple[Rule, ...]:
    flags = [Rule("unshare", EPERM, (Test(0, "has", flag),)) for flag in refused]
    flags += [Rule("clone", EPERM, (Test(0, "has", flag),)) for flag in refused if flag > SIGNAL_BITS]
    # A filter cannot see clone3's flags, which lie in memory. Every libc goes on with clone.
    return (*flags, Rule("clone3", ENOSYS))


def rules(profile: Profile) -> tuple[Rule, ...]:
    """All rules of a profile."""
    common = (*MACHINE, *SELDOM_NEEDED, *SHARED, *DEVICES, *_sockets())
    match profile:
        case "sandbox":
            return (*common, *MOUNTS, Rule("setns"), *_namespaces(NAMESPACES))
        case "user_namespaces":
            return (*common, *MOUNTS, Rule("setns"), *_namespaces(()))
        case "worker":
            others = tuple(flag for flag in NAMESPACES if flag not in CELL_NAMESPACES)
            return (*common, *MOUNTS[1:], *_namespaces(others))
