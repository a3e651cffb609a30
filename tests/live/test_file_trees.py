"""Trees inside another root: what is listed and written, in which order, and that nothing leads out."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloudyard.edge.host import trees
from cloudyard.edge.host.files import RootFiles
from cloudyard.errors import CloudyardError, Conflict, InvalidRequest, LimitExceeded, NotFound
from cloudyard.model import (
    TREE_INLINE_BYTES_MAX,
    TREE_PART_ENTRIES_MAX,
    FileKind,
    TreeEntry,
    check_entries,
)
from live.test_files import BASE, SECRET, files, mounted, outside, root

__all__ = ["files", "mounted", "outside", "root"]  # fixtures
pytestmark = pytest.mark.live

AT_FDCWD, RENAME_EXCHANGE = -100, 2
renameat2 = ctypes.CDLL(None, use_errno=True).renameat2


async def listed(files: RootFiles, path: str) -> list[TreeEntry]:
    """All parts of a tree."""
    found: list[TreeEntry] = []
    while True:
        part = await files.list_tree(path, found[-1].name if found else b"")
        found += part.entries
        if not part.more:
            return found


def file(name: bytes, data: bytes = b"x", mode: int = 0o644) -> TreeEntry:
    return TreeEntry(name=name, kind="file", data=data, mode=mode)


def link(name: bytes, target: str | Path) -> TreeEntry:
    return TreeEntry(name=name, kind="symlink", target=os.fsencode(target))


def directory(name: bytes, mode: int = 0o755) -> TreeEntry:
    return TreeEntry(name=name, kind="directory", mode=mode)


@contextmanager
def meanwhile(act: object) -> Iterator[None]:
    """Something done over and over in a thread of its own, as a process inside might."""
    stopping = threading.Event()

    def again() -> None:
        while not stopping.is_set():
            act()  # type: ignore[operator]

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


async def test_a_tree_of_odd_entries_is_listed_in_order_with_what_each_is(
    files: RootFiles, root: Path
) -> None:
    top = root / "d"
    (top / "a").mkdir(parents=True)
    (top / "a.b").write_bytes(b"after what is in a")
    (top / "a/in").write_bytes(b"in a")
    os.link(top / "a/in", top / "again")
    os.mkfifo(top / "fifo")
    os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (top / "out").symlink_to("/etc/passwd")
    (top / ("n" * 255)).write_bytes(b"")
    os.close(os.open(os.fsencode(top) + b"/\xff", os.O_CREAT | os.O_WRONLY))
    (top / "su").write_bytes(b"")
    (top / "su").chmod(0o4755)
    (top / "big").write_bytes(bytes(TREE_INLINE_BYTES_MAX + 1))
    entries = await listed(files, "/d")
    assert [(entry.name, entry.kind) for entry in entries] == [
        (b"a", "directory"),
        (b"a/in", "file"),
        (b"a.b", "file"),
        (b"again", "file"),
        (b"big", "file"),
        (b"fifo", "other"),
        (b"n" * 255, "file"),
        (b"null", "other"),
        (b"out", "symlink"),
        (b"su", "file"),
        (b"\xff", "file"),
    ]
    by_name = {entry.name: entry for entry in entries}
    assert by_name[b"a/in"].data == b"in a"
    assert by_name[b"a/in"].sha256 == hashlib.sha256(b"in a").digest()
    assert by_name[b"a/in"].shared == by_name[b"again"].shared != ""
    assert (by_name[b"big"].data, by_name[b"big"].size) == (None, TREE_INLINE_BYTES_MAX + 1)
    assert by_name[b"out"].target == b"/etc/passwd"
    assert by_name[b"su"].mode == 0o4755
    piece = await files.read("/d", 0, 10, below=b"\xff")
    assert (piece.data, piece.size) == (b"", 0)


async def test_parts_of_a_large_tree_join_without_a_gap(files: RootFiles, root: Path) -> None:
    names = {b"%03d/%03d" % (n // 100, n % 100) for n in range(TREE_PART_ENTRIES_MAX + 900)}
    for name in names:
        path = root / "d" / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name * 30)
    entries = await listed(files, "/d")
    found = [entry.name for entry in entries if entry.kind == "file"]
    assert found == sorted(names)
    assert all(entry.data == entry.name * 30 for entry in entries if entry.kind == "file")
    assert len((await files.list_tree("/d", b"")).entries) < len(entries)
    after = await files.list_tree("/d", b"030/no such name")  # removed meanwhile
    assert after.entries[0].name == b"031"


async def test_what_a_walk_holds_in_memory_is_bounded(
    files: RootFiles, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox could have as many names in each of a thousand levels as one directory may have."""
    monkeypatch.setattr(trees, "TREE_DIR_MAX", 50)
    here = root / "d"
    for _ in range(6):
        here.mkdir()
        for number in range(40):
            (here / f"{number:02}").touch()
        here = here / "00x"
    entries = await listed(files, "/d")
    assert len(entries) == 6 * 40 + 5
    assert [entry.name.split(b"/") for entry in entries] == sorted(e.name.split(b"/") for e in entries)
    for number in range(20):
        (root / f"d/more{number}").touch()
    with pytest.raises(LimitExceeded, match="/d: it has more than 50 entries"):
        await listed(files, "/d")


async def test_a_path_longer_than_any_can_be_is_an_error_and_no_hang(files: RootFiles, root: Path) -> None:
    here = os.open(root, os.O_PATH | os.O_DIRECTORY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=here)
        below = os.open("d" * 250, os.O_PATH | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(LimitExceeded, match="more than 4095 bytes") as caught:
        await listed(files, "/")
    assert caught.value.code == "name_too_long"


async def test_a_mount_of_the_kernels_is_named_and_not_entered(mounted: RootFiles) -> None:
    entries = {entry.name: entry for entry in await listed(mounted, "/")}
    assert entries[b"proc"].kind == "other"
    assert not any(name.startswith(b"proc/") for name in entries)
    assert entries[b"small"].kind == "directory"
    assert entries[b"lower/deep/file"].data == b"of the image"


async def test_a_tree_is_written_with_modes_links_and_the_sandboxs_owner(
    files: RootFiles, root: Path
) -> None:
    entries = [
        directory(b"a", 0o1777),
        file(b"a/run", b"#!/bin/sh\n", 0o755),
        file(b"b/c/d", b"parents are made"),
        file(b"\xff", b"any bytes"),
        link(b"out", "/etc/shadow"),
        TreeEntry(name=b"again", kind="file", same_as=b"a/run"),
    ]
    for _ in range(2):  # what is there is replaced
        await files.write_tree("/d", entries)
        top = root / "d"
        assert stat.S_IMODE((top / "a").stat().st_mode) == 0o1777
        assert (top / "a/run").stat().st_mode & 0o777 == 0o755
        assert os.path.samefile(top / "a/run", top / "again")
        assert os.readlink(top / "out") == "/etc/shadow"
        assert Path(os.fsdecode(bytes(top) + b"/\xff")).read_bytes() == b"any bytes"
        every = list(top.rglob("*"))
        assert len(every) == 8
        assert {(path.lstat().st_uid, path.lstat().st_gid) for path in every} == {(BASE, BASE)}


async def test_a_tree_written_through_a_link_stays_inside(
    files: RootFiles, root: Path, outside: Path
) -> None:
    (root / "d").mkdir()
    (root / "d/way").symlink_to(outside)
    (root / "d/etc").symlink_to("/etc")
    (root / "d/file").symlink_to(outside / "secret")
    await files.write_tree("/d", [file(b"etc/passwd", b"in the sandbox's own"), directory(b"etc/new")])
    assert (root / "etc/passwd").read_bytes() == b"in the sandbox's own"
    assert (root / "etc/new").is_dir()
    for entry in (file(b"way/secret"), link(b"way/l", "/"), directory(b"way/made"), directory(b"way/a/b")):
        with pytest.raises(NotFound):  # a link to nowhere: inside there is no such directory
            await files.write_tree("/d", [entry])
    await files.write_tree("/d", [file(b"file", b"made inside")])
    assert (outside / "secret").read_bytes() == SECRET
    assert [path.name for path in outside.iterdir()] == ["secret"]


@pytest.mark.parametrize("name", [b"..", b"../x", b"a/../../x", b"/etc/x", b"", b".", b"a//x", b"a\0", b"x/"])
def test_a_name_that_leads_elsewhere_is_refused(name: bytes) -> None:
    for kind in ("file", "directory", "symlink"):
        with pytest.raises(InvalidRequest):
            check_entries([TreeEntry(name=name, kind=kind, data=b"", target=b"x")])
    with pytest.raises(InvalidRequest):
        check_entries([TreeEntry(name=b"x", kind="file", same_as=name)] if name else [file(name)])


@pytest.mark.parametrize(
    ("kind", "fields"), [("other", {}), ("file", {}), ("symlink", {}), ("symlink", {"target": b"a\0"})]
)
def test_an_entry_that_cannot_be_written_is_refused(kind: FileKind, fields: dict[str, bytes]) -> None:
    with pytest.raises(InvalidRequest, match="b'x' of kind"):
        check_entries([TreeEntry(name=b"x", kind=kind, **fields)])


async def test_the_entry_that_failed_is_named_and_what_was_there_stays(files: RootFiles, root: Path) -> None:
    (root / "d/taken").mkdir(parents=True)
    for entry in (
        file(b"taken"),
        link(b"taken", "/"),
        file(b"n" * 256),
        TreeEntry(name=b"x", kind="file", same_as=b"y"),
    ):
        with pytest.raises((Conflict, InvalidRequest, NotFound), match=r"Cannot (write|link) /d/"):
            await files.write_tree("/d", [file(b"first"), entry])
    assert sorted(path.name for path in (root / "d").iterdir()) == ["first", "taken"]
    with pytest.raises(CloudyardError, match=r"Cannot write /d/\\xff/x"):
        await files.write_tree("/d", [file(b"\xff"), file(b"\xff/x")])


async def test_a_mount_point_is_not_replaced_by_a_link(mounted: RootFiles) -> None:
    for entry in (link(b"bound", "/"), TreeEntry(name=b"bound", kind="file", same_as=b"passwd")):
        with pytest.raises(Conflict) as caught:
            await mounted.write_tree("/etc", [entry])
        assert caught.value.code == "is_a_mount_point"
    assert (await mounted.read("/etc/bound", 0, 100)).data == SECRET


async def test_swapping_directories_for_links_meanwhile_never_leads_out(
    files: RootFiles, root: Path, outside: Path
) -> None:
    """A process inside exchanges a directory and a link to the host's, as fast as it can, while trees are
    listed and written, large files committed and trees removed."""
    (root / "d/real").mkdir(parents=True)
    (root / "d/real/secret").write_bytes(b"inside")
    (root / "link").symlink_to(outside)

    def swap() -> None:
        if renameat2(AT_FDCWD, bytes(root / "d/real"), AT_FDCWD, bytes(root / "link"), RENAME_EXCHANGE) != 0:
            raise OSError(ctypes.get_errno(), "renameat2")

    reached = 0
    digest = hashlib.sha256(b"inside").hexdigest()
    with meanwhile(swap):
        for number in range(1500):
            for entry in await listed(files, "/d"):
                assert entry.data != SECRET
                reached += entry.data == b"inside"
            try:
                match number % 4:
                    case 0:
                        await files.write_tree("/d", [file(b"real/secret", b"inside"), file(b"real/n/new")])
                    case 1:
                        await files.write_tree("/d/real", [link(b"l", "/"), directory(b"made")])
                    case 2:
                        await files.upload_chunk("u", 0, b"inside")
                        await files.upload_commit(
                            "u", "/d", below=b"real/secret", size=6, sha256=digest, mode=None, parents=True
                        )
                    case _:
                        await files.remove("/d/real/n", recursive=True, missing_ok=True)
            except (NotFound, Conflict):
                continue
    assert reached > 0
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == SECRET
