"""What the doctor makes of a machine's facts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cloudyard.core.doctor import (
    CgroupFacts,
    HostFacts,
    bounds,
    judge,
    verdict,
    version_of,
)
from cloudyard.model import GIB, MIB

GOOD = HostFacts(
    kernel="6.18.44-fc",
    is_root=True,
    bubblewrap="bubblewrap 0.8.0",
    nats_server="/usr/bin/nats-server",
    erofs="direct",
    libseccomp="2.5.4",
    cgroup=CgroupFacts(version=2, controllers=["cpu", "memory", "pids", "cpuset"], root="/sys/fs/cgroup"),
    core_pattern="core",
    pid_max=4_194_304,
    threads_max=500_000,
    descriptors_hard=1_000_000,
    namespaces_max=100_000,
    memory_total_bytes=24 * GIB,
    memory_available_bytes=20 * GIB,
    disk_free_bytes=100 * GIB,
    disk_where="/var/lib",
    uid_ranges=4094,
)


def worst(facts: HostFacts, name: str) -> str:
    return {finding.name: finding.level for finding in judge(facts)}[name]


def test_a_good_machine_has_no_finding_to_mend() -> None:
    assert [finding for finding in judge(GOOD) if finding.level != "ok"] == []


@pytest.mark.parametrize(
    ("change", "name", "level"),
    [
        ({"is_root": False}, "root", "fail"),
        ({"kernel": "5.10.0-28-amd64"}, "kernel", "fail"),
        ({"missing_programs": ["bwrap"]}, "programs", "fail"),
        ({"missing_programs": ["mmdebstrap"]}, "programs", "warn"),
        ({"missing_binaries": ["guest"]}, "guest", "fail"),
        ({"bubblewrap": "bubblewrap 0.4.1"}, "bubblewrap", "fail"),
        ({"nats_server": ""}, "nats-server", "warn"),
        ({"erofs": "loop", "erofs_reason": "old kernel"}, "erofs", "ok"),
        ({"erofs": "none", "erofs_reason": "no such device"}, "erofs", "fail"),
        ({"erofs": "untried", "erofs_reason": "no mkfs.erofs"}, "erofs", "warn"),
        ({"userns_reason": "EPERM"}, "user namespaces", "fail"),
        ({"overlay_reason": "EINVAL"}, "overlay", "fail"),
        ({"cgroup": CgroupFacts(version=0, controllers=[], reason="no memory")}, "cgroups", "fail"),
        ({"cgroup": CgroupFacts(version=1, controllers=["cpu"], reason="EROFS")}, "cgroups", "fail"),
        ({"cgroup": CgroupFacts(version=2, controllers=["cpu", "memory", "pids"])}, "cgroups", "warn"),
        ({"core_pattern": "|/usr/lib/systemd/systemd-coredump %P"}, "core dumps", "warn"),
        ({"filter_reason": "Loading libseccomp failed"}, "system-call filter", "fail"),
        ({"vulnerable": ["meltdown"]}, "processor", "warn"),
        ({"files_max": 2_400_000}, "open files", "warn"),
        ({"memory_available_bytes": 1}, "memory", "warn"),
        ({"disk_free_bytes": GIB}, "disk", "warn"),
        ({"disk_free_bytes": 256 * MIB}, "disk", "warn"),
        ({"disk_free_bytes": 255 * MIB}, "disk", "fail"),
        ({"disk_pool_reason": "this kernel has no btrfs"}, "disk limits", "warn"),
        ({"overlay_reason": "not tried: needs root"}, "overlay", "warn"),
        ({"uid_overlaps": ["/etc/subuid: me has 2000000000 to 2000065535"]}, "uid ranges", "fail"),
    ],
)
def test_each_lack_is_named_with_a_remedy(change: dict[str, object], name: str, level: str) -> None:
    facts = replace(GOOD, **change)
    assert worst(facts, name) == level
    if level == "fail":
        assert all(finding.fix for finding in judge(facts) if finding.level == "fail")


def test_missing_programs_give_one_apt_line() -> None:
    facts = replace(GOOD, missing_programs=["bwrap", "mkfs.erofs"])
    assert "apt-get install -y bubblewrap erofs-utils" in [finding.fix for finding in judge(facts)]


def test_a_good_machine_holds_3200_sandboxes() -> None:
    assert [bound for bound in bounds(GOOD, 3200) if not bound.ok] == []


def test_a_small_pid_max_is_named_with_its_sysctl_line() -> None:
    low = [bound for bound in bounds(replace(GOOD, pid_max=32_768), 3200) if not bound.ok]
    assert [(bound.name, bound.fix) for bound in low] == [
        ("kernel.pid_max", "sysctl -w kernel.pid_max=65536")
    ]


def test_more_sandboxes_than_uid_ranges_are_refused() -> None:
    assert "uid ranges" in [bound.name for bound in bounds(GOOD, 4095) if not bound.ok]


def test_no_sysctl_is_advised_that_the_kernel_would_refuse() -> None:
    fixes = [bound.fix for bound in bounds(replace(GOOD, pid_max=32_768), 100_000_000)]
    assert not [fix for fix in fixes if "sysctl" in fix]
    (advised,) = [
        bound.fix for bound in bounds(replace(GOOD, pid_max=32_768), 4000, pids_each=1000) if not bound.ok
    ][:1]
    assert advised == "sysctl -w kernel.pid_max=4194304"


@pytest.mark.parametrize(
    ("change", "count", "said"),
    [
        ({}, 0, "Sandboxes run here."),
        ({}, 3200, "Sandboxes run here."),
        ({"pid_max": 32_768}, 3200, "3,200 do not fit until this is raised: kernel.pid_max."),
        ({}, 5000, "5,000 are too many for one machine: it has ids for 4,094."),
        ({"is_root": False}, 3200, "Something that sandboxes need is missing."),
    ],
)
def test_the_verdict_says_whether_so_many_fit(change: dict[str, object], count: int, said: str) -> None:
    facts = replace(GOOD, **change)
    rows = bounds(facts, count) if count else []
    assert verdict(judge(facts), rows, count, uid_ranges=facts.uid_ranges).endswith(said)


@pytest.mark.parametrize(
    ("text", "version"),
    [("6.18.44-fc-v669", (6, 18)), ("bubblewrap 0.8.0", (0, 8)), ("6.1-rc3", (6, 1)), ("", (0, 0))],
)
def test_versions_are_read_from_text(text: str, version: tuple[int, int]) -> None:
    assert version_of(text) == version
