"""Files inside another root: what a path means there, what is refused, and that nothing reaches the host."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from cloudyard.edge.host import files as files_module, inroot
from cloudyard.edge.host.files import NOBODY, RootFiles
from cloudyard.edge.host.uploads import UPLOADS_DIR
from cloudyard.errors import (
    CloudyardError,
    Conflict,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    SandboxUnavailable,
)
from cloudyard.model import CHUNK_BYTES_MAX, LIST_DIR_MAX, MIB

pytestmark = pytest.mark.live

BASE = 1_000_000_000  # uid on the host that is 0 inside
SECRET = b"secret of the host"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.mkdir()
    (path / "secret").write_bytes(SECRET)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    for directory in ("etc", "root", "tmp"):
        (path / directory).mkdir(parents=True)
    (path / "etc/passwd").write_bytes(b"the sandbox's own\n")
    for file in (path, *path.rglob("*")):
        os.chown(file, BASE, BASE)
    return path


@pytest.fixture
def files(root: Path) -> Iterator[RootFiles]:
    before = len(os.listdir("/proc/self/fd"))
    yield RootFiles(lambda: os.open(root, os.O_PATH | os.O_DIRECTORY), BASE)
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor was left open"


async def write(files: RootFiles, path: str, data: bytes, mode: int | None = None) -> None:
    await files.write(path, data, mode=mode, parents=True)


async def read(files: RootFiles, path: str) -> bytes:
    return (await files.read(path, 0, CHUNK_BYTES_MAX)).data


@pytest.mark.parametrize("link", ["/etc/passwd", "../../../../../../etc/passwd", "/../../etc/../etc/passwd"])
async def test_a_link_leads_to_the_sandboxs_file_and_never_to_the_hosts(
    files: RootFiles, root: Path, link: str
) -> None:
    (root / "root/pw").symlink_to(link)
    assert await read(files, "/root/pw") == b"the sandbox's own\n"
    await write(files, "/root/pw", b"changed\n")
    assert (root / "etc/passwd").read_bytes() == b"changed\n"
    assert (root / "root/pw").is_symlink()


async def test_a_link_to_a_directory_is_followed_inside(files: RootFiles, root: Path, outside: Path) -> None:
    (root / "way").symlink_to(outside)
    with pytest.raises(NotFound):
        await read(files, "/way/secret")
    with pytest.raises(NotFound):
        await files.write("/way/fresh", b"x", mode=None, parents=False)
    with pytest.raises(NotFound):
        await files.list_dir("/way")
    assert [file.name for file in outside.iterdir()] == ["secret"]


async def test_swapping_links_under_way_never_reaches_the_host(
    files: RootFiles, root: Path, outside: Path
) -> None:
    (root / "real").mkdir()
    (root / "real/secret").write_bytes(b"inside")
    (root / "link").symlink_to(outside)
    stopping = threading.Event()

    def swap() -> None:
        while not stopping.is_set():
            for source, target in (("real", "spare"), ("link", "real"), ("real", "link"), ("spare", "real")):
                os.rename(root / source, root / target)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            for attempt in (
                lambda: read(files, "/real/secret"),
                lambda: files.write("/real/secret", b"inside", mode=None, parents=False),
                lambda: files.write("/real/made", b"inside", mode=None, parents=False),
                lambda: files.remove("/real/made", recursive=True, missing_ok=True),
                lambda: files.list_dir("/real"),
            ):
                try:
                    assert await attempt() != SECRET
                except (NotFound, Conflict):
                    continue
    finally:
        stopping.set()
        thread.join()
    assert [file.name for file in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == SECRET


async def test_a_fifo_a_socket_and_a_device_are_refused_at_once(files: RootFiles, root: Path) -> None:
    os.mkfifo(root / "fifo")
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(root)  # a socket's path must be short
        try:
            listener.bind("sock")
        finally:
            os.chdir(here)
    with anyio.fail_after(5):
        for path, what in (("/fifo", "a FIFO"), ("/null", "a device"), ("/sock", "a socket")):
            with pytest.raises(Conflict, match=f"{path}: it is {what}") as caught:
                await read(files, path)
            assert caught.value.code == "not_a_regular_file"
            with pytest.raises(Conflict, match=what):
                await write(files, path, b"x")
            await files.upload_chunk("u1", 0, b"abc")
            with pytest.raises(Conflict, match=what):
                await files.upload_commit(
                    "u1", path, size=3, sha256=hashlib.sha256(b"abc").hexdigest(), mode=None, parents=True
                )
            assert (await files.stat(path, follow=True)).kind == "other"
    assert not (root / UPLOADS_DIR).exists()


async def test_directories_are_no_files_and_files_no_directories(files: RootFiles) -> None:
    for path in ("/etc", "/", "/etc/", "/etc/.", "/root/.."):
        with pytest.raises(Conflict, match="directory"):
            await write(files, path, b"x")
    with pytest.raises(Conflict) as caught:
        await read(files, "/etc")
    assert caught.value.code == "is_a_directory"
    for attempt in (
        files.list_dir("/etc/passwd"),
        read(files, "/etc/passwd/x"),
        write(files, "/etc/passwd/x", b""),
    ):
        with pytest.raises(Conflict, match="Not a directory") as caught:
            await attempt
        assert caught.value.code == "not_a_directory"


async def test_a_new_file_belongs_to_the_sandboxs_root(files: RootFiles, root: Path) -> None:
    info = await files.write("/a/b/c", b"data", mode=None, parents=True)
    assert (info.uid, info.gid, info.mode, info.size, info.kind) == (0, 0, 0o644, 4, "file")
    for path in ("a", "a/b", "a/b/c"):
        facts = (root / path).stat()
        assert (facts.st_uid, facts.st_gid) == (BASE, BASE)
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o755
    assert (await files.write("/run.sh", b"", mode=0o4750, parents=False)).mode == 0o4750
    with pytest.raises(NotFound):
        await files.write("/x/y", b"", mode=None, parents=False)


async def test_replacing_keeps_owner_and_mode_and_leaves_no_temporary_file(
    files: RootFiles, root: Path
) -> None:
    (root / "tmp/file").write_bytes(b"old")
    os.chown(root / "tmp/file", BASE + 1000, BASE + 100)
    (root / "tmp/file").chmod(0o640)
    reader = (root / "tmp/file").open("rb")
    info = await files.write("/tmp/file", b"new", mode=None, parents=True)
    assert (info.uid, info.gid, info.mode) == (1000, 100, 0o640)
    assert (await files.write("/tmp/file", b"new", mode=0o600, parents=True)).mode == 0o600
    assert (root / "tmp/file").read_bytes() == b"new"
    with reader:
        assert reader.read() == b"old", "who has the file open sees it whole"
    assert [file.name for file in (root / "tmp").iterdir()] == ["file"]


async def test_an_owner_from_outside_the_range_shows_as_nobody(files: RootFiles, root: Path) -> None:
    (root / "alien").write_bytes(b"")
    os.chown(root / "alien", 0, 0)
    info = await files.stat("/alien", follow=True)
    assert (info.uid, info.gid) == (NOBODY, NOBODY)
    assert (await files.write("/alien", b"x", mode=None, parents=False)).uid == 0


async def test_reading_gives_size_offset_and_what_is_past_the_end(files: RootFiles) -> None:
    await write(files, "/f", b"0123456789")
    piece = await files.read("/f", 4, 3)
    assert (piece.data, piece.offset, piece.size) == (b"456", 4, 10)
    assert (await files.read("/f", 99, 3)).data == b""
    with pytest.raises(InvalidRequest):
        await files.read("/f", -1, 3)
    big = os.urandom(CHUNK_BYTES_MAX)
    await write(files, "/big", big)
    assert await read(files, "/big") == big


async def test_links_are_described_or_followed(files: RootFiles, root: Path) -> None:
    (root / "link").symlink_to("etc/passwd")
    (root / "loop").symlink_to("loop")
    (root / "dangling").symlink_to("/tmp/made")
    link = await files.stat("/link", follow=False)
    assert (link.kind, link.target) == ("symlink", "etc/passwd")
    assert (await files.stat("/link", follow=True)).kind == "file"
    for attempt in (files.stat("/loop", follow=True), read(files, "/loop"), write(files, "/loop", b"")):
        with pytest.raises(Conflict) as caught:
            await attempt
        assert caught.value.code == "too_many_links"
    await write(files, "/dangling", b"through")
    assert (root / "tmp/made").read_bytes() == b"through"


async def test_a_file_that_is_cut_off_and_grows_while_it_is_read_never_comes_short_of_its_size(
    files: RootFiles, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece says how large the file was for the very read. Short of that, it would be taken for a fault of
    the yard's."""
    path = root / "tmp/f"
    path.write_bytes(bytes(100_000))
    read_at = files_module._read_at

    def in_between(*arguments: int) -> bytes:
        os.truncate(path, 10)
        data = read_at(*arguments)
        path.write_bytes(bytes(100_000))
        return data

    monkeypatch.setattr(files_module, "_read_at", in_between)
    piece = await files.read("/tmp/f", 0, CHUNK_BYTES_MAX)
    assert (len(piece.data), piece.size) == (10, 10)


async def test_a_listing_is_sorted_complete_and_bounded(files: RootFiles, root: Path) -> None:
    (root / "d").mkdir()
    for number in range(LIST_DIR_MAX):
        os.close(os.open(root / f"d/{number:05}", os.O_CREAT | os.O_WRONLY, 0o600))
    listing = await files.list_dir("/d")
    assert len(listing.entries) == LIST_DIR_MAX
    assert listing.entries[7].path == "/d/00007"
    (root / "d/last").write_bytes(b"")
    with pytest.raises(LimitExceeded, match="more than 20000 entries"):
        await files.list_dir("/d")


async def test_a_name_that_is_not_utf8_is_shown_escaped(files: RootFiles, root: Path) -> None:
    os.close(os.open(os.fsencode(root / "tmp") + b"/\xff\xc3\xa9", os.O_CREAT | os.O_WRONLY))
    assert [entry.path for entry in (await files.list_dir("/tmp")).entries] == ["/tmp/\\xffé"]


async def test_remove_takes_links_for_links_and_trees_only_if_told(
    files: RootFiles, root: Path, outside: Path
) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "d/link").symlink_to(outside)
    (root / "d/e/file").write_bytes(b"")
    with pytest.raises(Conflict) as caught:
        await files.remove("/d", recursive=False, missing_ok=False)
    assert caught.value.code == "directory_not_empty"
    await files.remove("/d/link", recursive=True, missing_ok=False)
    assert (outside / "secret").exists()
    (root / "d/link").symlink_to(outside)
    await files.remove("/d", recursive=True, missing_ok=False)
    assert not (root / "d").exists()
    assert (outside / "secret").exists()
    with pytest.raises(NotFound):
        await files.remove("/d", recursive=True, missing_ok=False)
    await files.remove("/d", recursive=True, missing_ok=True)
    for path in ("/", "/etc/..", "/."):
        with pytest.raises(Conflict):
            await files.remove(path, recursive=True, missing_ok=False)


async def test_a_tree_deeper_than_any_path_is_removed(files: RootFiles, root: Path) -> None:
    here = os.open(root, os.O_PATH | os.O_DIRECTORY)
    for _ in range(3000):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_PATH | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    await files.remove("/deep", recursive=True, missing_ok=False)
    assert not (root / "deep").exists()


async def test_removing_a_large_tree_stops_in_time_and_goes_on(
    files: RootFiles, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "d").mkdir()
    (root / "d/file").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr("cloudyard.edge.host.removal.REMOVE_MAX_S", -1.0)
        with pytest.raises(LimitExceeded) as caught:
            await files.remove("/d", recursive=True, missing_ok=False)
    assert caught.value.retry_safe
    await files.remove("/d", recursive=True, missing_ok=False)


async def test_directories_are_made_with_their_mode(files: RootFiles, root: Path) -> None:
    info = await files.make_dir("/a/b", mode=0o1777, parents=True, exist_ok=False)
    assert (info.kind, info.mode, info.uid) == ("directory", 0o1777, 0)
    assert (await files.make_dir("/a/b", mode=0o700, parents=True, exist_ok=True)).mode == 0o1777
    assert (await files.make_dir("/", mode=0o700, parents=True, exist_ok=True)).kind == "directory"
    with pytest.raises(Conflict) as caught:
        await files.make_dir("/a/b", mode=0o700, parents=True, exist_ok=False)
    assert caught.value.code == "exists"
    with pytest.raises(NotFound):
        await files.make_dir("/x/y", mode=0o700, parents=False, exist_ok=False)
    with pytest.raises(Conflict):
        await files.make_dir("/etc/passwd", mode=0o700, parents=False, exist_ok=True)


async def test_bad_paths_are_refused_with_the_reason(files: RootFiles) -> None:
    for path in ("relative", "/nul\0", "/" + "x" * 5000):
        with pytest.raises(InvalidRequest):
            await files.stat(path, follow=True)
    with pytest.raises(InvalidRequest, match="File name too long") as caught:
        await write(files, "/" + "x" * 300, b"")
    assert caught.value.code == "name_too_long"
    with pytest.raises(NotFound, match=r"Cannot read /none: No such file or directory"):
        await read(files, "/none")


async def test_a_sandbox_that_is_gone_is_said_to_be(root: Path) -> None:
    files = RootFiles(lambda: os.open("/proc/0/root", os.O_PATH | os.O_DIRECTORY), BASE)
    with pytest.raises(SandboxUnavailable):
        await files.stat("/", follow=True)


@pytest.mark.parametrize("number", sorted(set(errno.errorcode) & set(inroot._BY_ERRNO)))
def test_each_refusal_of_the_kernel_has_its_error(number: int) -> None:
    with pytest.raises(CloudyardError, match="Cannot try /x") as caught, inroot.explained("try", "/x"):
        raise OSError(number, os.strerror(number))
    assert os.strerror(number) in str(caught.value)
    assert caught.value.status != 500


MOUNTS = """
set -e
mount --make-rprivate /
mount -t overlay -o lowerdir=$0,upperdir=$2/upper,workdir=$2/work none $0
mount -t proc none $0/proc
mount -t tmpfs -o size=1m,mode=755 none $0/small
mount --bind $1/secret $0/etc/bound
mount -t tmpfs -o ro none $0/sealed
echo ready
cat
"""


@pytest.fixture
def mounted(root: Path, outside: Path, tmp_path: Path) -> Iterator[RootFiles]:
    """An overlay root with mounts in a mount namespace of its own, as a sandbox's is."""
    for directory in ("proc", "small", "sealed", "d/proc"):
        (root / directory).mkdir(parents=True)
    (root / "lower/deep/er").mkdir(parents=True)
    (root / "lower/deep/file").write_bytes(b"of the image")
    (root / "etc/bound").write_bytes(b"under the mount")
    for directory in ("disk/upper", "disk/work"):
        (tmp_path / directory).mkdir(parents=True)
    os.chown(outside / "secret", BASE, BASE)
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", MOUNTS, str(root), str(outside), str(tmp_path / "disk")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        inside = f"/proc/{holder.pid}/root{root}"
        yield RootFiles(lambda: os.open(inside, os.O_PATH | os.O_DIRECTORY), BASE)
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait(10)


async def test_files_of_the_kernel_are_refused(mounted: RootFiles) -> None:
    for attempt in (
        read(mounted, "/proc/version"),
        write(mounted, "/proc/sys/kernel/hostname", b"x"),
        mounted.list_dir("/proc"),
        mounted.make_dir("/proc/x", mode=0o700, parents=True, exist_ok=True),
        mounted.remove("/proc/version", recursive=True, missing_ok=False),
    ):
        with pytest.raises(Forbidden) as caught:
            await attempt
        assert caught.value.code == "kernel_file"
    for path in ("/proc/self/root/etc/passwd", "/proc/1/cwd/x"):
        with pytest.raises(CloudyardError):
            await read(mounted, path)
    assert (await mounted.stat("/proc", follow=True)).kind == "directory"


async def test_mount_points_are_neither_removed_nor_detached(mounted: RootFiles) -> None:
    for path in ("/etc", "/proc", "/small", "/etc/bound"):
        with pytest.raises(Conflict) as caught:
            await mounted.remove(path, recursive=True, missing_ok=False)
        assert caught.value.code == "is_a_mount_point"
    assert await read(mounted, "/etc/bound") == SECRET


async def test_a_file_that_is_a_mount_point_is_written_in_place(mounted: RootFiles, outside: Path) -> None:
    inode = (outside / "secret").stat().st_ino
    await write(mounted, "/etc/bound", b"new")
    assert (outside / "secret").read_bytes() == b"new"
    data = b"by upload"
    await mounted.upload_chunk("u", 0, data)
    digest = hashlib.sha256(data).hexdigest()
    await mounted.upload_commit("u", "/etc/bound", size=len(data), sha256=digest, mode=None, parents=False)
    assert (outside / "secret").read_bytes() == data
    assert (outside / "secret").stat().st_ino == inode


async def test_a_tree_of_the_image_and_of_the_sandbox_is_removed_whole(
    mounted: RootFiles, root: Path
) -> None:
    await write(mounted, "/lower/deep/er/new", b"of the sandbox")
    await mounted.remove("/lower/deep/file", recursive=False, missing_ok=False)
    await mounted.remove("/lower", recursive=True, missing_ok=False)
    with pytest.raises(NotFound):
        await mounted.stat("/lower", follow=False)
    assert (root / "lower/deep/file").read_bytes() == b"of the image"


async def test_a_full_disk_and_a_read_only_one_say_so_and_keep_what_was_there(mounted: RootFiles) -> None:
    await write(mounted, "/small/f", b"old")
    with pytest.raises(LimitExceeded, match="No space left on device") as caught:
        await write(mounted, "/small/f", bytes(2 * MIB))
    assert caught.value.code == "disk_full"
    assert await read(mounted, "/small/f") == b"old"
    assert len((await mounted.list_dir("/small")).entries) == 1
    with pytest.raises(Forbidden, match="Read-only file system") as denied:
        await write(mounted, "/sealed/f", b"")
    assert denied.value.code == "read_only"
