"""What a machine's facts mean for a yard: findings with a remedy each, and the bounds for a number of
sandboxes.

Pure: `edge/host/probe.py` reads and tries, this file judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from cloudyard.model import GIB, KIB, MIB

Level = Literal["ok", "warn", "fail"]

KERNEL_MIN = (5, 12)  # the first with idmapped mounts; overlay takes them as layers since 5.19
KERNEL_OVERLAY_IDMAP = (5, 19)
BUBBLEWRAP_MIN = (0, 8)  # the first with --userns beside --info-fd as we use them; Debian 12's
UID_RANGE = 65_536  # ids of one sandbox
PIDS_IDLE = 2  # processes of a sandbox that runs no command: PID 1 and the keeper
PIDS_WORKING = 16  # processes that a sandbox at work is reckoned with
MEMORY_IDLE_BYTES = 1 * MIB  # host memory of a sandbox that runs no command
DESCRIPTORS_PER_SANDBOX = 4  # of the edge: guest, pidfd, record, output
DESCRIPTORS_BASE = 512
DISK_IDLE_BYTES = 64 * KIB  # an empty writable layer, a record
NAMESPACES_PER_SANDBOX = 2  # of a kind at most: its own, and one parked in the pool
SYSTEM_PIDS = 1_000  # left to the rest of the machine
SYSTEM_MEMORY_BYTES = 1 * GIB
DISK_LOW_BYTES = 2 * GIB
DISK_FULL_BYTES = 256 * MIB  # less is not enough to start with: logs and NATS alone may take as much
MEMORY_LOW_BYTES = 1 * GIB
FILE_BYTES = 256  # of kernel memory, for an open file
FILES_MAX_LIMIT = 2**63 - 1  # the kernel's own bound of file-max
PID_MAX_LIMIT = 4_194_304  # the kernel's own bound of pid_max, on 64 bits

SPREAD_FIX = "Spread the sandboxes over more machines."
UNTRIED = "not tried"  # how the reason begins of a trial that another finding kept from being made
OVERLAY_FIX = "modprobe overlay; or have the state directory on ext4, xfs, btrfs or tmpfs."
FILTER_FIX = "apt-get install -y libseccomp2; make setup; and a kernel with CONFIG_SECCOMP_FILTER."
PROGRAMS = {"bwrap": "bubblewrap", "mkfs.erofs": "erofs-utils", "mmdebstrap": "mmdebstrap"}


class CgroupFacts(Struct, frozen=True, kw_only=True):
    """Where sandboxes' limits are set. `version` 0: nowhere, and the reason says why."""

    version: int
    controllers: list[str]
    root: str = ""
    reason: str = ""
    """Why no group can be made, if so."""


class HostFacts(Struct, frozen=True, kw_only=True):
    """What was read and tried on one machine. A `..._reason` that is empty means that the trial went well."""

    kernel: str
    is_root: bool
    missing_programs: list[str] = []
    missing_binaries: list[str] = []
    bubblewrap: str = ""
    nats_server: str = ""
    erofs: Literal["direct", "loop", "none", "untried"] = "untried"
    erofs_reason: str = ""
    userns_reason: str = ""
    idmap_reason: str = ""
    overlay_reason: str = ""
    apparmor_restricts: bool = False
    filter_reason: str = ""
    libseccomp: str = ""
    """Its version; empty where there is none."""
    vulnerable: list[str] = []
    """Faults of the processor that nothing is done about, by the kernel's names for them."""
    cgroup: CgroupFacts
    core_pattern: str = ""
    pid_max: int = 0
    threads_max: int = 0
    pids_in_use: int = 0
    descriptors_hard: int = 0
    files_max: int = FILES_MAX_LIMIT
    """Open files of the whole machine."""
    inotify_instances: int = 0
    namespaces_max: int = 0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    disk_free_bytes: int = 0
    disk_where: str = ""
    disk_pool_reason: str = ""
    """Why disks of sandboxes could have no limit, if so."""
    uid_ranges: int = 0
    uid_overlaps: list[str] = []
    swap_total_bytes: int = 0
    lxcfs: str = ""
    kvm: Literal["usable", "present", "absent"] = "absent"


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the doctor's report. `fix` says what to do, where there is something to do."""

    name: str
    level: Level
    text: str
    fix: str = ""


class Bound(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One limit of the machine against what a number of sandboxes needs."""

    name: str
    needs: int
    has: int
    unit: str
    ok: bool
    fix: str = ""


def version_of(text: str) -> tuple[int, int]:
    """Major and minor from text such as `6.18.44-fc` or `bubblewrap 0.8.0`; (0, 0) when there is none."""
    for word in text.split():
        numbers = word.split("-")[0].split(".")
        if len(numbers) >= 2 and numbers[0].isdigit() and numbers[1].isdigit():
            return int(numbers[0]), int(numbers[1])
    return 0, 0


def judge(facts: HostFacts) -> list[Finding]:
    """Every finding, in the order in which one would mend them."""
    return [
        _root(facts),
        _kernel(facts),
        *_programs(facts),
        _trial(
            "user namespaces", facts.userns_reason, "a namespace with 65,536 ids was made", _userns_fix(facts)
        ),
        _erofs(facts),
        _trial(
            "idmapped layers", facts.idmap_reason, "a layer was mounted with shifted ids", "Needs Linux 5.19."
        ),
        _trial("overlay", facts.overlay_reason, "a writable root over a layer was mounted", OVERLAY_FIX),
        _cgroups(facts),
        _trial(
            "system-call filter",
            facts.filter_reason,
            f"libseccomp {facts.libseccomp} made the filters, and the kernel kept to them",
            FILTER_FIX,
        ),
        _core_pattern(facts),
        _processor(facts),
        _open_files(facts),
        _memory(facts),
        _disk(facts),
        _disk_limits(facts),
        _uids(facts),
        _options(facts),
        _kvm(facts),
    ]


def bounds(facts: HostFacts, count: int, *, pids_each: int = PIDS_WORKING) -> list[Bound]:
    """What `count` sandboxes need of each bounded thing, and what this machine has of it."""
    pids = count * pids_each + SYSTEM_PIDS
    pid_max = min(_power_of_two(pids), PID_MAX_LIMIT)
    beyond = pids > PID_MAX_LIMIT or count > facts.uid_ranges
    descriptors = count * DESCRIPTORS_PER_SANDBOX + DESCRIPTORS_BASE
    spaces = count * NAMESPACES_PER_SANDBOX + SYSTEM_PIDS
    memory = count * MEMORY_IDLE_BYTES + SYSTEM_MEMORY_BYTES
    rows = [
        ("kernel.pid_max", pids, facts.pid_max, "pids", f"sysctl -w kernel.pid_max={pid_max}"),
        ("kernel.threads-max", pids, facts.threads_max, "threads", f"sysctl -w kernel.threads-max={pid_max}"),
        ("memory", memory, facts.memory_available_bytes, "bytes", "Idle sandboxes alone need that much."),
        ("uid ranges", count, facts.uid_ranges, "ranges", SPREAD_FIX),
        (
            "file descriptors",
            descriptors,
            facts.descriptors_hard,
            "descriptors",
            f"ulimit -Hn {descriptors} before cloudyard up.",
        ),
        (
            "namespaces",
            spaces,
            facts.namespaces_max,
            "of each kind",
            " ".join(
                [
                    "sysctl -w",
                    *(f"user.max_{kind}_namespaces={spaces}" for kind in ("user", "mnt", "pid", "net")),
                ]
            ),
        ),
        (
            "disk",
            count * DISK_IDLE_BYTES,
            facts.disk_free_bytes,
            "bytes",
            f"Free space in {facts.disk_where}.",
        ),
    ]
    return [
        Bound(
            name=name,
            needs=needs,
            has=has,
            unit=unit,
            ok=has >= needs,
            fix="" if has >= needs else SPREAD_FIX if beyond else fix,
        )
        for name, needs, has, unit, fix in rows
    ]


def verdict(findings: Sequence[Finding], low: Sequence[Bound], count: int, *, uid_ranges: int) -> str:
    """The closing sentence: whether sandboxes run here, and whether so many do.

    Args:
        findings: all of them.
        low: the bounds, if any were computed.
        count: for how many sandboxes they were.
        uid_ranges: that this machine has.
    """
    if any(finding.level == "fail" for finding in findings):
        return "Something that sandboxes need is missing."
    names = [bound.name for bound in low if not bound.ok]
    if not names:
        return "Sandboxes run here."
    if count > uid_ranges:
        return (
            f"Sandboxes run here, but {count:,} are too many for one machine: it has ids for {uid_ranges:,}."
        )
    return f"Sandboxes run here, but {count:,} do not fit until this is raised: {', '.join(names)}."


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _root(facts: HostFacts) -> Finding:
    if facts.is_root:
        return Finding(name="root", level="ok", text="running as root")
    return Finding(
        name="root",
        level="fail",
        text="not root: mounts, uid ranges and cgroups need it, so most trials were left out",
        fix="Run it with sudo.",
    )


def _kernel(facts: HostFacts) -> Finding:
    version = version_of(facts.kernel)
    if version >= KERNEL_OVERLAY_IDMAP:
        return Finding(name="kernel", level="ok", text=f"Linux {facts.kernel}")
    return Finding(
        name="kernel",
        level="fail",
        text=f"Linux {facts.kernel} has no overlay over idmapped layers",
        fix="Needs Linux 5.19 or later: Debian 12, Ubuntu 22.10 or their like.",
    )


def _programs(facts: HostFacts) -> list[Finding]:
    findings = []
    if facts.missing_programs:
        packages = " ".join(PROGRAMS.get(name, name) for name in facts.missing_programs)
        needed = "bwrap" in facts.missing_programs
        findings.append(
            Finding(
                name="programs",
                level="fail" if needed else "warn",
                text=f"missing: {', '.join(facts.missing_programs)}"
                + ("" if needed else " (only building images needs it)"),
                fix=f"apt-get install -y {packages}",
            )
        )
    if facts.bubblewrap:
        old = version_of(facts.bubblewrap) < BUBBLEWRAP_MIN
        findings.append(
            Finding(
                name="bubblewrap",
                level="fail" if old else "ok",
                text=facts.bubblewrap,
                fix="Needs 0.8 or later, as in Debian 12." if old else "",
            )
        )
    if facts.missing_binaries:
        findings.append(
            Finding(
                name="guest",
                level="fail",
                text=f"the compiled {' and '.join(facts.missing_binaries)} is not installed",
                fix="make setup, in the source tree.",
            )
        )
    found = bool(facts.nats_server)
    findings.append(
        Finding(
            name="nats-server",
            level="ok" if found else "warn",
            text=facts.nats_server or "not installed",
            fix="" if found else "pip install 'cloudyard[node]', or cloudyard up --url nats://...",
        )
    )
    return findings


def _trial(name: str, reason: str, good: str, fix: str) -> Finding:
    if not reason:
        return Finding(name=name, level="ok", text=good)
    if reason.startswith(UNTRIED):
        return Finding(name=name, level="warn", text=reason)
    return Finding(name=name, level="fail", text=reason, fix=fix)


def _userns_fix(facts: HostFacts) -> str:
    if facts.apparmor_restricts:
        return "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    return f"sysctl -w user.max_user_namespaces={UID_RANGE}; and in a chroot the kernel allows none."


def _erofs(facts: HostFacts) -> Finding:
    match facts.erofs:
        case "direct":
            return Finding(name="erofs", level="ok", text="layers are mounted straight from their files")
        case "loop":
            return Finding(
                name="erofs",
                level="ok",
                text=f"layers are mounted through one loop device each ({facts.erofs_reason})",
            )
        case "untried":
            return Finding(name="erofs", level="warn", text=facts.erofs_reason)
        case "none":
            return Finding(
                name="erofs", level="fail", text=facts.erofs_reason, fix="modprobe erofs; modprobe loop"
            )


def _cgroups(facts: HostFacts) -> Finding:
    group = facts.cgroup
    if group.version == 0:
        return Finding(
            name="cgroups", level="fail", text=group.reason, fix="Boot with systemd, or mount cgroup2."
        )
    text = f"version {group.version} at {group.root}: {', '.join(group.controllers)}"
    if not group.reason:
        return Finding(name="cgroups", level="ok", text=text)
    return Finding(
        name="cgroups",
        level="fail",
        text=f"{text}; {group.reason}",
        fix="In a container, give it a writable cgroup tree (--privileged --cgroupns=private).",
    )


def _core_pattern(facts: HostFacts) -> Finding:
    if not facts.core_pattern.startswith("|"):
        return Finding(name="core dumps", level="ok", text=f"core_pattern is {facts.core_pattern!r}")
    program = (facts.core_pattern[1:].split() or ["a program"])[0]
    return Finding(
        name="core dumps",
        level="warn",
        text=f"core_pattern is a pipe: a crash in a sandbox runs {program} as host root",
        fix="sysctl -w kernel.core_pattern=core",
    )


def _processor(facts: HostFacts) -> Finding:
    if not facts.vulnerable:
        return Finding(name="processor", level="ok", text="no fault of it is left open, says the kernel")
    return Finding(
        name="processor",
        level="warn",
        text=f"open to {', '.join(facts.vulnerable)}: code inside may come to read memory of others",
        fix="Update microcode and kernel, and give mitigations=auto; or run only code there that may do so.",
    )


def _open_files(facts: HostFacts) -> Finding:
    text = f"fs.file-max is {facts.files_max:,}"
    if facts.files_max * FILE_BYTES >= facts.memory_total_bytes:
        return Finding(name="open files", level="ok", text=text)
    return Finding(
        name="open files",
        level="warn",
        text=f"{text}: a sandbox with much memory can use it up for all others",
        fix=f"sysctl -w fs.file-max={FILES_MAX_LIMIT}",
    )


def _memory(facts: HostFacts) -> Finding:
    low = facts.memory_available_bytes < MEMORY_LOW_BYTES
    text = f"{facts.memory_available_bytes / GIB:.1f} of {facts.memory_total_bytes / GIB:.1f} GiB available"
    return Finding(
        name="memory",
        level="warn" if low else "ok",
        text=text,
        fix="Little is left for sandboxes." if low else "",
    )


def _disk(facts: HostFacts) -> Finding:
    free = facts.disk_free_bytes
    text = f"{free / MIB:,.0f} MiB free in {facts.disk_where}"
    if free >= DISK_LOW_BYTES:
        return Finding(name="disk", level="ok", text=text)
    fix = "Images and writable layers live there: free some, or give another place with --state."
    level: Level = "warn"
    if free < DISK_FULL_BYTES:
        level, text = "fail", f"only {text}, and a yard needs {DISK_FULL_BYTES // MIB} MiB to start"
    return Finding(name="disk", level=level, text=text, fix=fix)


def _uids(facts: HostFacts) -> Finding:
    if not facts.uid_overlaps:
        return Finding(
            name="uid ranges", level="ok", text="nobody else on this machine uses the sandboxes' ids"
        )
    return Finding(
        name="uid ranges",
        level="fail",
        text="the sandboxes' ids overlap " + "; ".join(facts.uid_overlaps),
        fix="Move that range, so that nobody shares ids with a sandbox.",
    )


def _options(facts: HostFacts) -> Finding:
    """What sandboxes may ask for beyond what all have."""
    swap = f"{facts.swap_total_bytes / GIB:.1f} GiB of swap" if facts.swap_total_bytes else "no swap"
    lxcfs = "lxcfs" if facts.lxcfs else "no lxcfs (it takes /dev/fuse)"
    here = bool(facts.swap_total_bytes and facts.lxcfs)
    refused = "" if here else ": a sandbox that asks for what is missing is refused"
    return Finding(name="options", level="ok", text=f"{swap} and {lxcfs}{refused}")


def _kvm(facts: HostFacts) -> Finding:
    texts = {
        "usable": "/dev/kvm makes virtual machines",
        "present": "/dev/kvm is there, but makes no virtual machine",
        "absent": "none: only virtual machines would need it",
    }
    return Finding(name="kvm", level="ok", text=texts[facts.kvm])


def _disk_limits(facts: HostFacts) -> Finding:
    if not facts.disk_pool_reason:
        return Finding(name="disk limits", level="ok", text="disks of sandboxes are in a btrfs pool")
    return Finding(
        name="disk limits",
        level="warn",
        text=f"a sandbox could fill the disk of this machine: {facts.disk_pool_reason}",
        fix="apt-get install -y btrfs-progs; and a kernel that has btrfs and loop devices.",
    )
