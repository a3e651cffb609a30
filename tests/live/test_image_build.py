"""Building a Debian image for real: from this machine's package sources, with nothing left when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import support
from cloudyard.errors import LimitExceeded, NotFound
from cloudyard.images.build import build_debian
from cloudyard.images.depot import Depot

pytestmark = [pytest.mark.live, pytest.mark.slow]

MIB = 2**20
DISK_BYTES = 1200 * MIB  # enough for the check before a build
CLI = [sys.executable, "-m", "cloudyard.cli", "image", "build", "debian"]


@pytest.fixture
def depot(tmp_path: Path) -> Depot:
    return Depot(tmp_path / "depot")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], check=True, timeout=10)
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=10)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(support.REPOSITORY / "src")}


def assert_empty(depot: Depot) -> None:
    assert depot.names() == []
    assert list((depot.path / "tmp").iterdir()) == []
    assert not list(depot.path.rglob("*.erofs"))


def mounts_of(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(path) in line]


def test_a_debian_image_builds_and_holds_what_sandboxes_need(depot: Depot, tmp_path: Path) -> None:
    said: list[str] = []
    image = build_debian(depot, packages=["python3-minimal"], progress=lambda done, doing: said.append(doing))
    assert said[-1] == "packing the layer"
    assert depot.image("debian") == image
    root = tmp_path / "root"
    root.mkdir()
    layer = str(depot.layer_path(image.layers[0]))
    subprocess.run(["mount", "-t", "erofs", "-o", "loop,ro", layer, str(root)], check=True, timeout=10)
    try:
        assert (root / "usr/bin/python3").exists()
        assert (root / "etc/hosts").read_text().startswith("127.0.0.1 localhost\n")
        assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
        assert (root / "root").stat().st_uid == 0
        for directory in ("dev", "proc", "sys", "run", "var/lib/apt/lists/partial"):
            assert not list((root / directory).glob("*")), f"{directory} is not empty"
        for gone in ("etc/resolv.conf", "etc/hostname", "etc/apt/apt.conf.d/99mmdebstrap"):
            assert not os.path.lexists(root / gone)
        assert not list((root / "var/cache/apt/archives").glob("*.deb"))
    finally:
        subprocess.run(["umount", str(root)], check=True, timeout=10)
    assert list((depot.path / "tmp").iterdir()) == []


def test_an_unknown_package_is_named_with_the_tools_last_lines(depot: Depot) -> None:
    with pytest.raises(NotFound, match="no-such-package-here") as caught:
        build_debian(depot, packages=["no-such-package-here"])
    assert caught.value.code == "package_not_found"
    assert_empty(depot)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_leaves_nothing(depot: Depot, number: signal.Signals) -> None:
    build = subprocess.Popen(
        [*CLI, "--depot", str(depot.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert build.stderr is not None
    with build:
        while "extracting" not in (line := build.stderr.readline()):
            assert line, "the build ended before it was interrupted"
        build.send_signal(number)
        build.wait(20)
    if number == signal.SIGKILL:
        deadline = time.monotonic() + support.WAIT_S
        while _processes_in(depot.path):
            assert time.monotonic() < deadline, "mmdebstrap outlived its caller"
            time.sleep(0.05)
        with depot.locked(), depot.work_dir():
            depot._collect()
    assert _processes_in(depot.path) == []
    assert mounts_of(depot.path) == []
    assert_empty(depot)


def test_a_disk_that_fills_up_says_so_and_is_empty_again(small_disk: Path) -> None:
    depot = Depot(small_disk / "depot")

    def fill(done: float, doing: str) -> None:
        if doing == "extracting packages":
            disk = os.statvfs(small_disk)
            with (small_disk / "ballast").open("wb") as ballast:
                os.posix_fallocate(ballast.fileno(), 0, disk.f_bavail * disk.f_frsize - 20 * MIB)

    with pytest.raises(LimitExceeded) as caught:
        build_debian(depot, progress=fill)
    assert caught.value.code == "disk_full"
    assert_empty(depot)
    with (small_disk / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, DISK_BYTES - 100 * MIB)
    with pytest.raises(LimitExceeded, match="MiB free") as caught:
        build_debian(depot)
    assert caught.value.code == "disk_full"


def test_without_root_it_says_what_needs_root(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    program = (
        "import os, sys; from cloudyard.cli import main; os.setgid(65534); os.setuid(65534);"
        "sys.exit(main(['image', 'build', 'debian', '--depot', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import cloudyard.cli.images; {program}", str(tmp_path / "depot")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "needs root" in done.stderr
    assert "sudo" in done.stderr


def _processes_in(path: Path) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                line = (
                    Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if str(path) in line:
                found.append(line)
    return found
