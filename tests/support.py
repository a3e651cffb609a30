"""What tests share: waiting with a bound, where live tests may run, and a census that finds leaks.

Knows the kernel's files and the depot, and nothing else of Cloudyard.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from cloudyard.edge.host.cgroups import parent_names
from cloudyard.images.build import build_debian
from cloudyard.images.depot import Depot

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD_DIR = REPOSITORY / "build"  # git-ignored; what is costly to make and may be kept between runs
WAIT_S = 10.0  # bound of one wait for a condition
POLL_S = 0.01
LIVE_PROGRAMS = ("bwrap", "mkfs.erofs", "mmdebstrap")
TEST_IMAGE, TEST_PACKAGES = "debian", ("python3", "procps", "adduser")
COMPILER_IMAGE, COMPILER_PACKAGES = "compiler", ("python3", "gcc", "libc6-dev")


def must_work() -> bool:
    """Whether a live test that cannot run is a failure, as it is in CI."""
    return os.environ.get("CLOUDYARD_MUST_WORK") == "1"


def cannot_run(reason: str) -> None:
    """End this test: skipped with the reason, or failed where it must work."""
    if must_work():
        pytest.fail(f"{reason} (CLOUDYARD_MUST_WORK=1)", pytrace=False)
    pytest.skip(reason)


def debian_depot(image: str = TEST_IMAGE, packages: tuple[str, ...] = TEST_PACKAGES) -> Path:
    """The depot below BUILD_DIR, with the image in it. Held by a lock while it is built."""
    depot = Depot(BUILD_DIR / "depot")
    depot.path.mkdir(parents=True, exist_ok=True)
    with open(BUILD_DIR / "depot.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if image not in depot.names():
            build_debian(depot, image, packages=packages)
    return depot.path


def why_not_live() -> str:
    """What this machine lacks for live tests, or nothing."""
    if os.geteuid() != 0:
        return "needs root: mounts, user namespaces with a uid range, cgroups"
    missing = [name for name in LIVE_PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(missing)}: run scripts/setup" if missing else ""


async def wait_until(
    condition: Callable[[], bool | Awaitable[bool]], what: str, *, within_s: float = WAIT_S
) -> None:
    """Return once the condition holds; fail with `what` when it does not within the bound."""
    with anyio.move_on_after(within_s):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await anyio.sleep(POLL_S)
    pytest.fail(f"not within {within_s:g} s: {what}")


def wait_until_sync(condition: Callable[[], bool], what: str, *, within_s: float = WAIT_S) -> None:
    """The same for tests without an event loop."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s:g} s: {what}")
        time.sleep(POLL_S)


def new_token() -> str:
    """A word that names one test's yard and all that it makes on the host: `t`, then six letters or
    digits."""
    return "t" + secrets.token_hex(3)


@dataclass(frozen=True)
class Census:
    """Kernel objects on this host that carry a token in their name, path, arguments or cgroup."""

    processes: frozenset[str]
    cgroups: frozenset[str]
    mounts: frozenset[str]
    loops: frozenset[str]
    namespaces: frozenset[str]
    claims: frozenset[str]

    def beyond(self, before: Census) -> list[str]:
        """A line for each thing that is here now and was not before."""
        return [
            f"{kind}: {thing}"
            for kind in ("processes", "cgroups", "mounts", "loops", "namespaces", "claims")
            for thing in sorted(getattr(self, kind) - getattr(before, kind))
        ]


def yard_groups(tag: str) -> list[Path]:
    """The cgroups of the yard of this tag in each hierarchy that has them: in version 1 there are several."""
    root = Path("/sys/fs/cgroup")
    names = [name for parent in parent_names(tag) for name in (f"*/{parent}", parent)]
    return [group for name in names for group in root.glob(name)]


def yard_pids(tag: str) -> set[int]:
    """Host pids of all processes in the yard's cgroups, which come and go meanwhile."""
    found: set[int] = set()
    for group in yard_groups(tag):
        for root, _, _ in os.walk(group):  # which passes over what has gone
            found |= {int(pid) for pid in _read(f"{root}/cgroup.procs").split()}
    return found


def comm(pid: int) -> str:
    """The name that a process goes by; empty when it has ended."""
    return _read(f"/proc/{pid}/comm").strip()


def take_census(token: str) -> Census:
    """Count what carries the token. Other yards on the machine do not disturb it."""
    pids = dict(_processes(token))
    return Census(
        processes=frozenset(f"{pid} {line}" for pid, line in pids.items()),
        cgroups=frozenset(_cgroups(token)),
        mounts=frozenset(line for line in _read("/proc/self/mountinfo").splitlines() if token in line),
        loops=frozenset(_loops(token)),
        namespaces=frozenset(_namespaces(list(pids))),
        claims=frozenset(_claims(token)),
    )


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _processes(token: str) -> Iterator[tuple[int, str]]:
    """Processes that name the token in arguments, directory or cgroup; zombies too, but not this process, nor
    those that have ended as orphans, whom this process has got as subreaper and does not wait for."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        command = (
            _read(f"/proc/{entry}/cmdline").replace("\0", " ").strip() or _read(f"/proc/{entry}/comm").strip()
        )
        where = command, _link(f"/proc/{entry}/cwd"), _read(f"/proc/{entry}/cgroup")
        if any(token in text for text in where) and not _is_orphan_of_ours(entry):
            yield int(entry), command[:120]


def _is_orphan_of_ours(pid: str) -> bool:
    state, parent, *_ = _read(f"/proc/{pid}/stat").rpartition(")")[2].split() or ("", "")
    return state == "Z" and int(parent) == os.getpid()


def _cgroups(token: str) -> Iterator[str]:
    for root, names, _ in os.walk("/sys/fs/cgroup"):
        for name in names:
            if token in name:
                yield os.path.join(root, name)


def _loops(token: str) -> Iterator[str]:
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        if token in (path := _read(backing).strip()):
            yield f"{backing.parts[3]} {path}"


def _namespaces(pids: list[int]) -> Iterator[str]:
    """Namespaces of these processes that this process is not in."""
    for kind in ("net", "user", "mnt", "pid", "ipc", "uts", "cgroup"):
        own = _link(f"/proc/self/ns/{kind}")
        yield from {link for pid in pids if (link := _link(f"/proc/{pid}/ns/{kind}")) and link != own}


def _claims(token: str) -> Iterator[str]:
    """Files below /run/cloudyard* whose name or (small) content holds the token."""
    for top in Path("/run").glob("cloudyard*"):
        for path in (top, *top.rglob("*")) if top.is_dir() else (top,):
            small = path.is_file() and path.stat().st_size < 4096
            if token in str(path) or (small and re.search(re.escape(token), _read(path))):
                yield str(path)
