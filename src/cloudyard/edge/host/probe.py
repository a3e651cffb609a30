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

from cloudyard.core.doctor import PROGRAMS, CgroupFacts, HostFacts

TRIAL_S = 20.0  # bound of all trials together
KVM_CREATE_VM = 0xAE01
SANDBOX_UIDS = (2_000_027_648, 2_268_329_984)  # first and one past the last id of the sandboxes' ranges
CONTROLLERS = ("cpu", "memory", "pids", "freezer", "cpuacct", "cpuset")
CGROUP_ROOT = Path("/sys/fs/cgroup")
BINARIES = ("cloudyard-guest", "cloudyard-launch")


def probe_host(state: Path, *, nats_server: str, binaries: Path) -> HostFacts:
    """Read and try everything.

    Args:
        state: the state directory, or where it would be made; disk and layers are judged there.
        nats_server: path of that program, or nothing.
        binaries: directory in which the compiled guest and launcher are.
    """
    where = _existing(state)
    trials = _trials(where) if os.geteuid() == 0 else _untried("needs root")
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
        apparmor_restricts=_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1,
        cgroup=_cgroups(),
        core_pattern=_text("/proc/sys/kernel/core_pattern"),
        pid_max=_number("/proc/sys/kernel/pid_max"),
        threads_max=_number("/proc/sys/kernel/threads-max"),
        pids_in_use=sum(name.isdigit() for name in os.listdir("/proc")),
        descriptors_hard=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        inotify_instances=_number("/proc/sys/fs/inotify/max_user_instances"),
        namespaces_max=min(
            _number(f"/proc/sys/user/max_{kind}_namespaces")
            for kind in ("user", "mnt", "pid", "net", "ipc", "uts")
        ),
        memory_total_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", 0),
        disk_free_bytes=shutil.disk_usage(where).free,
        disk_where=str(where),
        uid_overlaps=_uid_overlaps(),
        kvm=_kvm(),
    )


def _existing(path: Path) -> Path:
    while not path.exists():
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


def _untried(reason: str) -> dict[str, str]:
    names = ("erofs_reason", "userns_reason", "idmap_reason", "overlay_reason")
    return {"erofs": "untried", **dict.fromkeys(names, f"not tried: {reason}")}


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
            return _untried(f"no end within {TRIAL_S:g} s")
    if done.returncode:
        return _untried(done.stderr.strip().rpartition("\n")[2][:200])
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _cgroups() -> CgroupFacts:
    """The version that is used: 2 where it has the controllers, else 1. Tries to make a group."""
    unified = next(
        (root for root in (CGROUP_ROOT, CGROUP_ROOT / "unified") if _text(root / "cgroup.procs")), None
    )
    offered = _text(unified / "cgroup.controllers").split() if unified else []
    if unified and {"memory", "pids"} <= set(offered):
        version, roots, controllers = 2, [unified], [name for name in CONTROLLERS if name in offered]
        controllers.append("freezer")  # part of version 2 itself
    else:
        controllers = [name for name in CONTROLLERS if (CGROUP_ROOT / name / "tasks").exists()]
        version, roots = (1, [CGROUP_ROOT / name for name in controllers]) if controllers else (0, [])
    reason = ""
    if os.geteuid() == 0:
        for root in roots:
            reason = reason or _try_group(root)
    where = str(roots[0] if version == 2 else CGROUP_ROOT)
    return CgroupFacts(version=version, controllers=controllers, root=where, reason=reason)


def _try_group(root: Path) -> str:
    path = root / f"cloudyard-trial-{os.getpid()}"
    try:
        path.mkdir()
        path.rmdir()
    except OSError as exc:
        return f"mkdir {path}: {exc.strerror}"
    return ""


def _uid_overlaps() -> list[str]:
    """Who else was given ids out of the sandboxes' ranges."""
    overlaps = []
    for path in ("/etc/subuid", "/etc/subgid"):
        for line in _text(path).splitlines():
            name, first, count = (*line.split(":"), "", "", "")[:3]
            if first.isdigit() and count.isdigit():
                low, high = int(first), int(first) + int(count)
                if low < SANDBOX_UIDS[1] and high > SANDBOX_UIDS[0]:
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
