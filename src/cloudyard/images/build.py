"""Making images: a Debian root by mmdebstrap, or any tree of files, packed by mkfs.erofs into one layer.

A build is reproducible: the same packages give the same bytes, so the same layer. Files that the build itself
made are dated like the newest file of any package, and the file system carries no random id. Nothing is
compressed: a layer is mapped into the page cache as it is.

mmdebstrap runs in mount and pid namespaces of its own: what it mounts and starts ends with it, however that
comes about. It uses the package sources, proxies and keys that this machine's apt uses. This file knows tools
and directories, no yard.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from cloudyard.errors import CloudyardError, Forbidden, LimitExceeded, NotFound, Unsupported
from cloudyard.images.apt import (
    SUITE_DEFAULT,
    SUITE_HINT,
    apt_options,
    apt_sources,
    check_package,
    check_suite,
)
from cloudyard.images.depot import Depot, Work, check_image_name
from cloudyard.model import GIB, Image, ImageConfig

FREE_MIN_BYTES = 1 * GIB  # a minimal Debian with Python needs about 0.4 GiB while it is built
LAST_WORDS = 12  # lines of a failed tool that go into the error
KILL_GRACE_S = 5.0
_CLOCK_SLACK_S = 3600.0  # a tree's files may come from a machine whose clock is ahead
_NO_UUID = "00000000-0000-0000-0000-000000000000"
_STAGES = {  # what mmdebstrap says when it begins a stage, and how much of its usual time has passed by then
    "finding correct signed-by": (0.01, "checking keys"),
    "running apt-get update": (0.02, "reading package lists"),
    "downloading packages": (0.20, "downloading packages"),
    "extracting archives": (0.40, "extracting packages"),
    "installing essential": (0.50, "installing the base system"),
    "installing remaining": (0.65, "installing packages"),
    "cleaning package lists": (0.85, "cleaning"),
}

Progress = Callable[[float, str], None]
"""Called with the part that is done (0 to 1) and what is being done now."""


def silent(done: float, doing: str) -> None:
    """A Progress that shows nothing."""


def build_debian(
    depot: Depot | Path | str,
    name: str = "debian",
    *,
    packages: Sequence[str] = (),
    suite: str = SUITE_DEFAULT,
    progress: Progress = silent,
) -> Image:
    """Build an image of a minimal Debian with the packages named, in place of one of that name.

    Args:
        depot: where the image goes, or the path of that directory.
        name: name of the image.
        packages: Debian packages besides the minimal system.
        suite: Debian release, such as bookworm.
        progress: told how far it is.

    Raises:
        InvalidRequest: a bad image name, package name or release name; told before anything is built.
        Forbidden: this process is not root.
        Unsupported: mmdebstrap or mkfs.erofs is not installed.
        LimitExceeded: the disk is full.
        NotFound: there is no such package or release.
        CloudyardError: mmdebstrap or mkfs.erofs failed; its last lines are in the message.
    """
    depot = _depot(depot)
    check_image_name(name)
    check_suite(suite)
    for package in packages:
        check_package(package)
    _check_machine(depot)
    with depot.work_dir() as work:
        tree = work.path / "tree"
        started = time.time()
        _mmdebstrap(work, tree, packages=packages, suite=suite, progress=progress)
        _finish_tree(tree)
        progress(0.9, "packing the layer")
        return _pack(depot, work, tree, name, config=ImageConfig(), newest_s=_newest_before(tree, started))


def build_from_tree(
    depot: Depot | Path | str,
    name: str,
    tree: Path | str,
    *,
    config: ImageConfig | None = None,
    newest_s: int | None = None,
) -> Image:
    """Build an image from a directory. Owners, modes, extended attributes, links and devices are kept.

    Args:
        depot: where the image goes, or the path of that directory.
        name: name of the image.
        tree: the directory that becomes the root.
        config: environment, user, working directory and probe of the image.
        newest_s: files newer than this (seconds since 1970) get this date; None keeps every date.

    Raises:
        InvalidRequest: that is no image name.
        NotFound: `tree` is no directory.
        Unsupported: mkfs.erofs is not installed.
        LimitExceeded: the disk is full.
        CloudyardError: mkfs.erofs failed.
    """
    depot, tree = _depot(depot), Path(tree)
    check_image_name(name)
    if not os.path.isdir(tree):
        raise NotFound(
            f"Cannot build the image {name!r} from {tree}: that is no directory.", code="tree_not_found"
        )
    _need("mkfs.erofs", "erofs-utils")
    with depot.work_dir() as work:
        newest_s = newest_s if newest_s is not None else _newest_before(tree, time.time() + _CLOCK_SLACK_S)
        return _pack(depot, work, tree, name, config=config or ImageConfig(), newest_s=newest_s)


def _pack(depot: Depot, work: Work, tree: Path, name: str, *, config: ImageConfig, newest_s: int) -> Image:
    file = work.path / "layer.erofs"
    env = os.environ | {"SOURCE_DATE_EPOCH": str(newest_s)}  # later dates become this one
    _run(["mkfs.erofs", "--quiet", "-U", _NO_UUID, str(file), str(tree)], work, env=env)
    return depot.add_image(name, file, config=config)


def _depot(place: Depot | Path | str) -> Depot:
    return place if isinstance(place, Depot) else Depot(place)


def _mmdebstrap(work: Work, tree: Path, *, packages: Sequence[str], suite: str, progress: Progress) -> None:
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    command += ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"]
    for unwanted in ("doc", "man", "info", "locale"):
        command.append(f"--dpkgopt=path-exclude=/usr/share/{unwanted}/*")
    command.append("--dpkgopt=path-include=/usr/share/doc/*/copyright")
    command.append("--dpkgopt=force-unsafe-io")  # a build that a crash cuts off is made anew
    command += [f"--aptopt={option}" for option in apt_options()]
    if packages:
        command.append(f"--include={','.join(packages)}")
    command += [suite, str(tree), *map(str, apt_sources(suite, work.path))]

    def said(line: str) -> None:
        for start, (done, doing) in _STAGES.items():
            if line.startswith(f"I: {start}"):
                progress(done, doing)

    _run(command, work, said=said)


def _finish_tree(tree: Path) -> None:
    """Take out what belongs to the build or to this machine, and leave what a sandbox needs."""
    for path in (
        "etc/apt/apt.conf.d/99mmdebstrap",
        "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
        "etc/resolv.conf",
        "etc/hostname",
    ):
        (tree / path).unlink(missing_ok=True)
    for path in ("dev", "run", "tmp"):
        for entry in (tree / path).iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    (tree / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")


def _newest_before(tree: Path, started: float) -> int:
    """The date of the newest entry from before the build started: of one that came in a package."""
    newest = 0.0
    for directory, directories, files in os.walk(tree):
        for file in (*directories, *files):
            changed = os.lstat(os.path.join(directory, file)).st_mtime
            if newest < changed < started:
                newest = changed
    return int(newest)


def _check_machine(depot: Depot) -> None:
    if os.geteuid() != 0:
        raise Forbidden(
            "Building a Debian image needs root: packages set owners and run in a changed root.",
            code="needs_root",
            hint="Run it with sudo, or build it on a machine where you are root and copy the depot here.",
        )
    _need("mmdebstrap", "mmdebstrap")
    _need("mkfs.erofs", "erofs-utils")
    for program in ("unshare", "setpriv"):
        _need(program, "util-linux")
    there = next(path for path in (depot.path, *depot.path.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < FREE_MIN_BYTES:
        raise LimitExceeded(
            f"Cannot build in the depot {depot.path}: its disk has {free // 2**20} MiB free.",
            code="disk_full",
            hint=f"Free {FREE_MIN_BYTES // 2**20} MiB, or name a directory on another disk with --depot.",
        )


def _need(program: str, package: str) -> None:
    if shutil.which(program) is None:
        raise Unsupported(
            f"Building an image needs {program}, which is not installed.",
            code="missing_program",
            hint=f"Install it with: apt install {package}",
        )


def _run(
    command: Sequence[str],
    work: Work,
    *,
    env: dict[str, str] | None = None,
    said: Callable[[str], None] | None = None,
) -> None:
    """Run a tool to its end; kill it, and wait for that, when anything ends us first."""
    tool = command[command.index("--mount-proc") + 1] if "--mount-proc" in command else command[0]
    last: deque[str] = deque(maxlen=LAST_WORDS)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        text=True,
        errors="replace",
        pass_fds=[work.lock],
        start_new_session=True,  # Ctrl-C reaches us alone, and we end it
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                last.append(line.rstrip())
            if said is not None:
                said(line)
        code = process.wait()
    except BaseException:
        process.send_signal(signal.SIGKILL)  # unshare: its child and with it the whole pid namespace go too
        process.wait(KILL_GRACE_S)
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()
    if code != 0:
        raise _failure(tool, code, list(last))


def _failure(tool: str, code: int, last: list[str]) -> CloudyardError:
    text = "\n".join(last)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return LimitExceeded(
            f"{tool} ran out of disk space. Its last lines:\n{text}\n",
            code="disk_full",
            hint="Free space, or name a directory on another disk with --depot.",
        )
    if "Unable to locate package" in text or "has no installation candidate" in text:
        return NotFound(
            f"A package does not exist in this Debian release. {tool}'s last lines:\n{text}\n",
            code="package_not_found",
            hint="Look its name up with: apt-cache search WORD",
        )
    if "does not have a Release file" in text:
        return NotFound(
            f"The mirror does not have this Debian release. {tool}'s last lines:\n{text}\n",
            code="suite_not_found",
            hint=SUITE_HINT,
        )
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return CloudyardError(f"{tool} {how}. Its last lines:\n{text}\n", code="build_failed")
