"""Control groups: how a version is chosen, version 2 on a tree of plain files, both on the real kernel."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from cloudyard.edge.host.cgroups import (
    WEIGHT_DEFAULT,
    Limits,
    choose,
    freeze,
    mounted,
    open_cgroups,
    parent_names,
    remove,
)
from cloudyard.edge.host.cgroups.files import read_table
from cloudyard.edge.host.cgroups.v2 import CgroupsV2, GroupV2, enable
from cloudyard.errors import Unsupported
from cloudyard.model import MIB
from support import wait_until, wait_until_sync

pytestmark = pytest.mark.live

LIMITS = Limits(memory_bytes=64 * MIB, cpu=1.5, pids=20)
V1 = """\
31 25 0:27 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
33 31 0:29 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
34 31 0:30 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
35 31 0:31 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
"""


def test_controllers_mounted_together_share_a_directory() -> None:
    found = choose(mounted(V1))
    assert isinstance(found, dict)
    assert found["cpu"] == found["cpuacct"] == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert found["memory"] == Path("/sys/fs/cgroup/memory")


def test_version_2_is_used_where_it_has_all_controllers(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    line = f"40 25 0:40 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert choose(mounted(V1 + line)) == tmp_path


def test_an_empty_version_2_beside_version_1_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("\n")
    line = f"40 25 0:40 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert isinstance(choose(mounted(line + V1)), dict)


def test_a_missing_controller_is_named() -> None:
    with pytest.raises(Unsupported, match="pids"):
        choose(mounted("\n".join(line for line in V1.splitlines() if "pids" not in line)))


def plain_tree(root: Path, *groups: str) -> None:
    """Groups of version 2 as plain files."""
    for group in ("", *groups):
        home = root / group
        home.mkdir(parents=True, exist_ok=True)
        for name in ("cgroup.subtree_control", "cgroup.procs", "cgroup.freeze", "cpu.idle"):
            (home / name).write_text("")


def test_version_2_enables_controllers_down_to_the_parent(tmp_path: Path) -> None:
    usual, idle = parent_names("yard")
    groups = ("", "cloudyard", usual, "cloudyard-best-effort", idle)
    plain_tree(tmp_path, *groups)
    CgroupsV2(tmp_path, "yard")
    for group in groups:
        assert (tmp_path / group / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    assert (tmp_path / "cloudyard-best-effort/cpu.idle").read_text() == "1"
    assert (tmp_path / usual / "cpu.idle").read_text() == ""


def test_version_2_enables_only_what_is_not_yet(tmp_path: Path) -> None:
    plain_tree(tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    enable(tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text().startswith("+cpu")


def test_version_2_writes_limits_and_reads_counters(tmp_path: Path) -> None:
    for name in ("memory.max", "memory.swap.max", "cpu.max", "pids.max"):
        (tmp_path / name).write_text("")
    GroupV2(tmp_path).limit(LIMITS)
    assert (tmp_path / "memory.max").read_text() == str(64 * MIB)
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    assert (tmp_path / "cpu.max").read_text() == "150000 100000"
    assert (tmp_path / "pids.max").read_text() == "20"
    (tmp_path / "cpu.weight").write_text("")
    GroupV2(tmp_path).set_weight(250)
    assert (tmp_path / "cpu.weight").read_text() == "250"
    GroupV2(tmp_path).limit(replace(LIMITS, swap_bytes=MIB))
    assert (tmp_path / "memory.swap.max").read_text() == str(MIB)

    texts = {
        "memory.current": "1000\n",
        "memory.peak": "3000\n",
        "memory.events": "low 0\noom 2\noom_kill 1\n",
        "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
        "pids.current": "3\n",
        "pids.events": "max 7\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    usage = GroupV2(tmp_path).usage()
    assert (usage.memory_bytes, usage.memory_peak_bytes, usage.oom_kills) == (1000, 3000, 1)
    assert (usage.cpu_s, usage.pids, usage.pids_refused) == (2.5, 3, 7)


def test_version_2_without_a_peak_gives_what_is_used_now(tmp_path: Path) -> None:
    texts = {"memory.current": "1000", "memory.events": "", "cpu.stat": "usage_usec 0", "pids.current": "0"}
    for name, text in {**texts, "pids.events": "max 0"}.items():
        (tmp_path / name).write_text(text)
    assert GroupV2(tmp_path).usage().memory_peak_bytes == 1000


async def test_a_group_of_this_kernel_holds_limits_freezes_and_goes(token: str, leaks: None) -> None:
    groups = open_cgroups(token)
    group = groups.group("0")
    group.make()
    group.limit(LIMITS)
    group.limit(
        Limits(memory_bytes=128 * MIB, cpu=1.0, pids=30)
    )  # either way past the limit on memory and swap
    group.limit(LIMITS)
    group.set_weight(WEIGHT_DEFAULT)
    assert groups.names() == ["0"]
    with in_group(group.entries()) as sleeper:
        await wait_until(lambda: group.pids() == [sleeper.pid], "it is in")
        await freeze(group)
        assert group.is_frozen()
        sleeper.kill()
        group.set_frozen(False)
    assert group.usage().pids == 0
    remove(group)
    remove(group)
    assert groups.names() == []
    groups.close()


def test_groups_that_run_last_are_below_one_idle_parent_at_the_root(token: str, leaks: None) -> None:
    groups = open_cgroups(token)
    group = groups.group("0", idle=True)
    group.make()
    group.limit(LIMITS)
    (idle,) = Path("/sys/fs/cgroup").glob("**/cloudyard-best-effort/cpu.idle")  # below nothing else of ours
    assert idle.read_text().strip() == "1"
    assert (idle.parent / token / "0").is_dir()
    assert groups.names() == ["0"]
    with in_group(groups.find("0").entries()) as sleeper:
        wait_until_sync(lambda: f"best-effort/{token}/0" in where(sleeper.pid), "it is in")
        sleeper.kill()
    remove(groups.find("0"))
    assert groups.names() == []
    groups.close()


def test_swap_and_memory_are_limited_together_in_version_1(token: str, leaks: None) -> None:
    groups = open_cgroups(token)
    if groups.version != 1 or not groups.limits_swap:
        pytest.skip("no such limit here")
    group = groups.group("0")
    group.make()
    for swap in (32 * MIB, 0, 128 * MIB):
        group.limit(replace(LIMITS, swap_bytes=swap))
        both = Path(f"/sys/fs/cgroup/memory/{parent_names(token)[0]}/0/memory.memsw.limit_in_bytes")
        assert int(both.read_text()) == LIMITS.memory_bytes + swap
    remove(group)
    groups.close()


def test_nothing_stays_charged_to_a_group_that_was_removed(token: str, leaks: None, tmp_path: Path) -> None:
    groups = open_cgroups(token)
    if groups.version != 1:
        groups.close()
        pytest.skip("a parent of version 2 does not tell what its removed groups hold")
    group = groups.group("0")
    group.make()
    entries = group.entries()
    join = "".join(f"echo 0 >&{fd}; " for fd in entries)
    write = (
        f"head -c {1 * MIB} /dev/zero > {tmp_path}/file; sync {tmp_path}/file"  # it stays in the page cache
    )
    subprocess.run(["bash", "-c", join + write], pass_fds=entries, stdin=subprocess.DEVNULL, check=True)
    for fd in entries:
        os.close(fd)
    where = choose(mounted(Path("/proc/self/mountinfo").read_text()))
    assert isinstance(where, dict)
    parent = where["memory"] / "cloudyard" / token
    assert read_table(parent / "memory.stat")["total_cache"] >= 1 * MIB
    remove(group)
    left = read_table(parent / "memory.stat")["total_cache"]
    groups.close()
    assert left < 1 * MIB // 8  # the kernel may be at work on a page or two


async def test_a_version_2_group_freezes_and_goes_even_without_controllers(token: str, leaks: None) -> None:
    unified = next(
        (mount.at for mount in mounted(Path("/proc/self/mountinfo").read_text()) if mount.version == 2), None
    )
    if unified is None:
        pytest.skip("no cgroup2 is mounted")
    home = unified / token
    group = GroupV2(home)
    group.make()
    with in_group(group.entries()) as sleeper:
        await wait_until(lambda: group.pids() == [sleeper.pid], "it is in")
        await freeze(group)
        sleeper.kill()
        await wait_until(lambda: sleeper.poll() is not None, "version 2 kills what is frozen")
        group.set_frozen(False)
    remove(group)


def in_group(entries: list[int]) -> subprocess.Popen[bytes]:
    """A process that sleeps in the group."""
    join = "".join(f"echo 0 >&{fd}; " for fd in entries) + "exec sleep 60"
    return subprocess.Popen(["bash", "-c", join], pass_fds=entries, stdin=subprocess.DEVNULL)


def where(pid: int) -> str:
    """The groups of a process."""
    return Path(f"/proc/{pid}/cgroup").read_text()
