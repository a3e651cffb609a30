"""What this machine is and lets us do: reads the kernel's files and runs a few trials that leave nothing
behind.

Judges nothing: `core/doctor.py` does that. Knows the host and no other part of an edge.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from cloudyard.core.doctor import DISK_FULL_BYTES, PROGRAMS, UNTRIED, CgroupFacts, HostFacts
from cloudyard.edge.host import btrfs, cgroups
from cloudyard.edge.host.disk_pool import PROGRAMS as PATH_OF_PROGRAMS
from cloudyard.edge.host.lxcfs import FUSE
from cloudyard.edge.host.seccomp import libseccomp_version
from cloudyard.edge.host.slots import SLOTS_MAX, UID_END, UID_FIRST
from cloudyard.errors import CloudyardError

TRIAL_S = 20.0  # bound of all trials together
KVM_CREATE_VM = 0xAE01
BINARIES = ("guest", "launch")


def probe_host(state: Path, *, nats_server: str, binaries: Path, lxcfs: Path | None) -> HostFacts:
    """Read and try everything.

    Args:
        state: the state directory, or where it would be made; disk and layers are judged there.
        nats_server: path of that program, or nothing.
        binaries: directory in which the compiled guest and launcher are.
        lxcfs: path of that program, if there is one.
    """
    where = _existing(state)
    free = shutil.disk_usage(where).free
    if os.geteuid() != 0:
        trials = _failed(f"{UNTRIED}: needs root")
    elif free < DISK_FULL_BYTES:
        trials = _failed(f"{UNTRIED}: no space on the disk")
    else:
        trials = _trials(where)
    erofs = trials.pop("erofs", "untried")
    memory = _meminfo()
    return HostFacts(
        kernel=os.uname().release,
        is_root=os.geteuid() == 0,
        missing_programs=[name for name in PROGRAMS if shutil.which(name) is None],
        missing_binaries=[name for name in BINARIES if not os.access(binaries / name, os.X_OK)],
        bubblewrap=_bubblewrap(),
        nats_server=nats_server,
        erofs=erofs if erofs in ("direct", "loop", "none") else "untried",  # type: ignore[arg-type]
        erofs_reason=trials.get("erofs_reason", ""),
        userns_reason=trials.get("userns_reason", ""),
        idmap_reason=trials.get("idmap_reason", ""),
        overlay_reason=trials.get("overlay_reason", ""),
        filter_reason=trials.get("filter_reason", ""),
        libseccomp=libseccomp_version(),
        vulnerable=_vulnerable(),
        apparmor_restricts=_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1,
        cgroup=_cgroups(),
        core_pattern=_text("/proc/sys/kernel/core_pattern"),
        pid_max=_number("/proc/sys/kernel/pid_max"),
        threads_max=_number("/proc/sys/kernel/threads-max"),
        pids_in_use=sum(name.isdigit() for name in os.listdir("/proc")),
        descriptors_hard=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        files_max=_number("/proc/sys/fs/file-max"),
        inotify_instances=_number("/proc/sys/fs/inotify/max_user_instances"),
        namespaces_max=min(
            _number(f"/proc/sys/user/max_{kind}_namespaces")
            for kind in ("user", "mnt", "pid", "net", "ipc", "uts")
        ),
        memory_total_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", 0),
        disk_free_bytes=free,
        disk_where=str(where),
        disk_pool_reason=_disk_pool(),
        uid_ranges=SLOTS_MAX,
        uid_overlaps=_uid_overlaps(),
        swap_total_bytes=memory.get("SwapTotal", 0),
        lxcfs=str(lxcfs or "") if FUSE.exists() else "",
        kvm=_kvm(),
    )


def _disk_pool() -> str:
    """What is missing for a pool of sandboxes' disks."""
    if not btrfs.is_there():
        return "this kernel has no btrfs"
    if shutil.which("mkfs.btrfs", path=PATH_OF_PROGRAMS) is None:
        return "there is no mkfs.btrfs"
    return "" if os.path.exists("/dev/loop-control") else "there is no /dev/loop-control"


def _existing(path: Path) -> Path:
    while not path.is_dir():
        path = path.parent
    return path


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _number(path: str) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


def _meminfo() -> dict[str, int]:
    rows = (line.split() for line in _text("/proc/meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2}


def _bubblewrap() -> str:
    try:
        done = subprocess.run(
            ["bwrap", "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRIAL_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _failed(reason: str) -> dict[str, str]:
    names = ("erofs_reason", "userns_reason", "idmap_reason", "overlay_reason", "filter_reason")
    return {"erofs": "untried", **dict.fromkeys(names, reason)}


def _trials(where: Path) -> dict[str, str]:
    """The trials' reasons, from a process that is thrown away with everything it mounted."""
    with tempfile.TemporaryDirectory(prefix=".cloudyard-trial-", dir=where) as scratch:
        command = [sys.executable, "-m", "cloudyard.edge.host.trial", scratch]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TRIAL_S,
                cwd="/",
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return _failed(f"the trial had no end within {TRIAL_S:g} s")
    if done.returncode:
        return _failed(f"the trial ended with {done.stderr.strip().rpartition(chr(10))[2][:200]!r}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _cgroups() -> CgroupFacts:
    """The hierarchies that sandboxes would be put into, and whether a group can be made in each."""
    try:
        where = cgroups.choose(cgroups.mounted(_text("/proc/self/mountinfo")))
    except (CloudyardError, OSError) as exc:
        return CgroupFacts(version=0, controllers=[], reason=str(exc))
    if isinstance(where, Path):
        version, roots, controllers = 2, [where], _text(where / "cgroup.controllers").split()
    else:
        version, roots, controllers = 1, list(where.values()), sorted(where)
    reason = ""
    if os.geteuid() == 0:
        reason = next((failed for root in roots if (failed := _try_group(root))), "")
    at = str(roots[0] if version == 2 else os.path.commonpath(roots))
    return CgroupFacts(version=version, controllers=controllers, root=at, reason=reason)


def _try_group(root: Path) -> str:
    path = root / f"cloudyard-trial-{os.getpid()}"
    try:
        path.mkdir()
        path.rmdir()
    except OSError as exc:
        return f"making the group {path}: {exc.strerror}"
    return ""


def _vulnerable() -> list[str]:
    faults = Path("/sys/devices/system/cpu/vulnerabilities")
    paths = sorted(faults.iterdir()) if faults.is_dir() else []
    return [path.name for path in paths if _text(path).startswith("Vulnerable")]


def _uid_overlaps() -> list[str]:
    """Who else was given ids out of the sandboxes' ranges."""
    overlaps = []
    for path in ("/etc/subuid", "/etc/subgid"):
        for line in _text(path).splitlines():
            name, first, count = (*line.split(":"), "", "", "")[:3]
            if first.isdigit() and count.isdigit():
                low, high = int(first), int(first) + int(count)
                if low < UID_END and high > UID_FIRST:
                    overlaps.append(f"{path}: {name} has {low} to {high - 1}")
    return overlaps


def _kvm() -> Literal["usable", "present", "absent"]:
    try:
        descriptor = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return "absent"
    except OSError:
        return "present"
    try:
        os.close(fcntl.ioctl(descriptor, KVM_CREATE_VM, 0))
    except OSError:
        return "present"
    finally:
        os.close(descriptor)
    return "usable"
