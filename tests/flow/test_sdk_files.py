"""Files and directories of the SDK against an edge that lies, breaks, or whose files will not keep still."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import pytest

from cloudyard import (
    Conflict,
    InvalidRequest,
    LimitExceeded,
    NotFound,
)
from cloudyard.errors import CloudyardError
from cloudyard.model import (
    AnyOp,
    AnyResult,
    Done,
    FileChunk,
    FileInfo,
    FileKind,
    ListTree,
    ReadFile,
    Stat,
    TreeEntry,
    TreePart,
    UploadChunk,
    UploadCommit,
    WriteFile,
    WriteTree,
)
from cloudyard.sdk import local, trees
from flow.scripted_yard import box_of, scripted

DATA = bytes(range(256)) * 4096 * 3 + b"end"


async def test_pieces_of_an_upload_may_overtake_each_other(tmp_path: object) -> None:
    """The edge wants them in order: one that came too early is sent again after the piece before it."""
    held = bytearray()
    early = anyio.Event()

    async def disk(op: AnyOp, key: str) -> AnyResult:
        match op:
            case UploadChunk(offset=0) if not early.is_set():
                await early.wait()
            case UploadChunk(offset=offset) if offset > len(held):
                early.set()
                raise Conflict("A piece is missing before this one.", code="upload_gap")
        match op:
            case UploadChunk(offset=offset, data=data):
                held[offset : offset + len(data)] = data
                return Done(taken=len(held))
            case UploadCommit(size=size, sha256=digest):
                assert (size, digest) == (len(held), sha256(held).hexdigest())
                return FileInfo(path="/x", kind="file", size=size, mode=0o644, uid=0, gid=0, mtime_ns=0)
        raise AssertionError(op)

    async with scripted(disk) as (_, yard):
        info = await box_of(yard).write("/x", DATA)
    assert bytes(held) == DATA
    assert info.size == len(DATA)


async def test_a_file_that_changes_while_it_is_read_is_an_error() -> None:
    async def moving(op: AnyOp, key: str) -> AnyResult:
        assert isinstance(op, ReadFile)
        piece = DATA[op.offset : op.offset + op.max_bytes]
        return FileChunk(data=piece, offset=op.offset, size=len(DATA), mtime_ns=op.offset)

    async with scripted(moving) as (_, yard):
        with pytest.raises(Conflict, match="changed while it was read"):
            await box_of(yard).read("/x")


def entry(name: bytes, kind: FileKind = "file", **fields: Any) -> TreeEntry:
    """As an edge would send it."""
    if kind == "file":
        fields = {"data": b"x", "size": 1, "sha256": sha256(b"x").digest(), **fields}
    return TreeEntry(name=name, kind=kind, mode=0o755, **fields)


def tree(*entries: TreeEntry, more: bool = False) -> Callable[[AnyOp, str], Awaitable[AnyResult]]:
    """A yard with one directory, in which an edge that is not ours lists what it likes."""

    async def answer(op: AnyOp, key: str) -> AnyResult:
        match op:
            case Stat(path=path):
                return FileInfo(path=path, kind="directory", size=0, mode=0o755, uid=0, gid=0, mtime_ns=0)
            case ListTree():
                return TreePart(entries=list(entries), more=more)
            case ReadFile():
                return FileChunk(data=b"", offset=0, size=1 << 62, mtime_ns=0)
        raise AssertionError(op)

    return answer


@pytest.mark.parametrize("name", [b"..", b"../x", b"a/../../x", b"/etc/x", b"", b".", b"a//x", b"a\0", b"x/"])
async def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: bytes) -> None:
    async with scripted(tree(entry(name))) as (_, yard):
        with pytest.raises(CloudyardError, match="lists an entry"):
            await box_of(yard).download("/d", tmp_path / "got")
    assert [path.name for path in tmp_path.rglob("*")] == ["got"]


async def test_a_download_never_goes_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the same download, or of an earlier one, at whose place there is now a directory. Without the
    flag of the kernel's that sees to it, the same listing writes outside."""
    outside, got = tmp_path / "outside", tmp_path / "got"
    outside.mkdir()
    link = entry(b"a", "symlink", target=bytes(outside))
    async with scripted(tree(link, entry(b"a/f"))) as (_, yard):
        with pytest.raises(InvalidRequest, match="got/a/f on this machine failed: not a directory"):
            await box_of(yard).download("/d", got)
    assert (got / "a").is_symlink()
    async with scripted(tree(entry(b"a", "directory"), entry(b"a/f"))) as (_, yard):
        await box_of(yard).download("/d", got)
    assert list(outside.iterdir()) == []
    assert (got / "a" / "f").read_bytes() == b"x"
    monkeypatch.setattr(local, "_BELOW", local._BELOW & ~os.O_NOFOLLOW)
    async with scripted(tree(link, entry(b"a/f"))) as (_, yard):
        await box_of(yard).download("/d", tmp_path / "again")
    assert (outside / "f").read_bytes() == b"x"


async def test_an_entry_that_comes_again_is_refused_and_a_listing_without_end_ends(tmp_path: Path) -> None:
    """A name twice could be a directory first and a link then; a part that repeats itself would never end."""
    async with scripted(tree(entry(b"a", "directory"), entry(b"a", "symlink", target=b"/"))) as (_, yard):
        with pytest.raises(CloudyardError, match="lists an entry b'a'"):
            await box_of(yard).download("/d", tmp_path)
    for entries in ((entry(b"a"), entry(b"b")), ()):
        async with scripted(tree(*entries, more=True)) as (_, yard):
            with anyio.fail_after(5), pytest.raises(CloudyardError, match="lists an entry"):
                await box_of(yard).download("/d", tmp_path / "got")


async def test_what_is_larger_than_allowed_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    """A sparse file claims any size."""
    huge = entry(b"f", data=None, size=1 << 62)
    async with scripted(tree(huge)) as (_, yard):
        with pytest.raises(LimitExceeded, match="max_bytes is 68719476736") as caught:
            await box_of(yard).download("/d", tmp_path)
        with pytest.raises(LimitExceeded, match="max_bytes is 1073741824"):
            await box_of(yard).read("/f")
    assert caught.value.code == "too_large"
    assert list(tmp_path.iterdir()) == []


async def test_a_file_that_vanishes_after_it_was_listed_is_not_there(tmp_path: Path) -> None:
    listed = tree(entry(b"a"), entry(b"gone", data=None, size=7))

    async def answer(op: AnyOp, key: str) -> AnyResult:
        if isinstance(op, ReadFile):
            raise NotFound("There is no /d/gone.", code="file_not_found")
        return await listed(op, key)

    async with scripted(answer) as (_, yard):
        done = await box_of(yard).download("/d", tmp_path)
    assert (done.files, done.bytes) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


async def test_a_file_whose_first_name_vanishes_comes_by_another(tmp_path: Path) -> None:
    names = [b"a", b"b", b"c", b"d"]
    listed = tree(*[entry(name, data=None, size=1, shared="1:2") for name in names])

    async def answer(op: AnyOp, key: str) -> AnyResult:
        if isinstance(op, ReadFile):
            if op.below in (b"a", b"b"):
                raise NotFound("It is gone.", code="file_not_found")
            return FileChunk(data=b"x", offset=0, size=1, sha256=sha256(b"x").digest())
        return await listed(op, key)

    async with scripted(answer) as (_, yard):
        done = await box_of(yard).download("/d", tmp_path)
    assert (done.files, done.links, done.bytes) == (1, 1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]
    assert (tmp_path / "c").samefile(tmp_path / "d")


@pytest.mark.parametrize("changes", [1, trees.FETCH_TRIES])
async def test_a_file_that_changes_while_its_directory_is_read_is_read_again(
    tmp_path: Path, changes: int
) -> None:
    """Until it stays as it is for once; one that never does is an error that names it."""
    reads = 0
    listed = tree(entry(b"log", data=None, size=len(DATA)))

    async def answer(op: AnyOp, key: str) -> AnyResult:
        nonlocal reads
        if not isinstance(op, ReadFile):
            return await listed(op, key)
        reads += op.offset == 0
        piece = DATA[op.offset : op.offset + op.max_bytes]
        moves = op.offset if reads <= changes else 0
        digest = sha256(piece).digest()
        return FileChunk(data=piece, offset=op.offset, size=len(DATA), mtime_ns=moves, sha256=digest)

    async with scripted(answer) as (_, yard):
        if changes < trees.FETCH_TRIES:
            done = await box_of(yard).download("/d", tmp_path)
            assert (done.files, done.bytes) == (1, len(DATA))
            assert (tmp_path / "log").read_bytes() == DATA
        else:
            with pytest.raises(Conflict, match=r"/d/log in .* changed while it was read") as caught:
                await box_of(yard).download("/d", tmp_path)
            assert caught.value.code == "file_changed"
            assert list(tmp_path.iterdir()) == []
    assert reads == min(changes + 1, trees.FETCH_TRIES)


async def test_files_that_grow_after_they_were_listed_stay_within_what_is_allowed(tmp_path: Path) -> None:
    """Each by itself would: a sandbox could show many small ones, and swap them for large ones."""
    listed = tree(*[entry(b"%02d" % number, data=None, size=1) for number in range(20)])

    async def answer(op: AnyOp, key: str) -> AnyResult:
        if isinstance(op, ReadFile):
            return FileChunk(data=b"x" * 100, offset=0, size=100, sha256=sha256(b"x" * 100).digest())
        return await listed(op, key)

    async with scripted(answer) as (_, yard):
        with pytest.raises(LimitExceeded, match="max_bytes is 1500"):
            await box_of(yard).download("/d", tmp_path / "some", max_bytes=1500)
        done = await box_of(yard).download("/d", tmp_path / "all", max_bytes=2000)
    assert sum(path.stat().st_size for path in (tmp_path / "some").iterdir()) <= 1500
    assert (done.files, done.bytes) == (20, 2000)


async def test_what_a_download_remembers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files with several names the names are kept until the end: a million of 4 KB would be 4 GB."""
    monkeypatch.setattr(trees, "SHARED_NAMES_BYTES_MAX", 1000)
    links = [entry(b"%0100d" % number, shared="1:2") for number in range(11)]
    async with scripted(tree(*links[:10])) as (_, yard):
        assert (await box_of(yard).download("/d", tmp_path)).links == 9
    async with scripted(tree(*links)) as (_, yard):
        with pytest.raises(LimitExceeded, match="files with several names") as caught:
            await box_of(yard).download("/d", tmp_path)
    assert caught.value.code == "too_many_entries"


async def test_all_that_is_sent_carries_its_hash(tmp_path: Path) -> None:
    """Small files in their message, large ones at the end: the edge checks it before a file gets its name."""
    (tmp_path / "small").write_bytes(b"small")
    (tmp_path / "large").write_bytes(DATA)
    sent: dict[str, bytes] = {}

    async def answer(op: AnyOp, key: str) -> AnyResult:
        made = FileInfo(path="/d", kind="file", size=1, mode=0o755, uid=0, gid=0, mtime_ns=0)
        match op:
            case WriteFile(path=path, sha256=digest):
                sent[path] = digest
            case UploadCommit(below=below, sha256=whole):
                sent[below.decode()] = bytes.fromhex(whole)
            case WriteTree(entries=entries):
                sent.update((entry.name.decode(), entry.sha256) for entry in entries)
                return Done()
            case UploadChunk():
                return Done()
        return made

    async with scripted(answer) as (_, yard):
        await box_of(yard).write("/file", b"file")
        await box_of(yard).upload(tmp_path, "/d")
    digests = {"/file": b"file", "small": b"small", "large": DATA}
    assert sent == {name: sha256(data).digest() for name, data in digests.items()}


async def test_what_vanishes_here_while_its_directory_is_uploaded_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a download. Before, after and between the looks that are taken at it."""
    for name in ("early", "kept", "late", "linked"):
        (tmp_path / name).write_bytes(DATA)
    os.link(tmp_path / "linked", tmp_path / "other name")
    os.makedirs(tmp_path / "emptied" / "below")
    sent: set[bytes] = set()
    look, open_regular = Path.lstat, local.open_regular

    def vanishing(path: Path) -> os.stat_result:
        if path.name == "early":
            path.unlink()
        if path.name == "emptied":
            facts = look(path)
            (path / "below").rmdir()
            path.rmdir()
            return facts
        return look(path)

    def gone(path: Path) -> Any:
        if path.name in ("late", "linked"):
            path.unlink()
        return open_regular(path)

    async def answer(op: AnyOp, key: str) -> AnyResult:
        match op:
            case UploadCommit(below=below):
                sent.add(below)
            case WriteTree(entries=entries):
                sent.update(entry.name for entry in entries)
                return Done()
            case UploadChunk():
                return Done()
        return FileInfo(path="/d", kind="file", size=1, mode=0o755, uid=0, gid=0, mtime_ns=0)

    monkeypatch.setattr(Path, "lstat", vanishing)
    monkeypatch.setattr(local, "open_regular", gone)
    async with scripted(answer) as (_, yard):
        done = await box_of(yard).upload(tmp_path, "/d")
    assert sent == {b"emptied", b"kept", b"other name"}
    assert (done.files, done.directories, done.links) == (2, 1, 0)


async def test_bytes_that_are_not_those_read_in_the_sandbox_are_an_error(tmp_path: Path) -> None:
    """Each piece comes with the SHA-256 that was made where it was read."""
    digest = sha256(b"y").digest()
    async with scripted(tree(entry(b"f", sha256=digest))) as (_, yard):
        with pytest.raises(CloudyardError, match="SHA-256"):
            await box_of(yard).download("/d", tmp_path)
    assert list(tmp_path.iterdir()) == []

    async def damaged(op: AnyOp, key: str) -> AnyResult:
        return FileChunk(data=b"x", offset=0, size=1, sha256=digest)

    async with scripted(damaged) as (_, yard):
        with pytest.raises(CloudyardError, match="SHA-256"):
            await box_of(yard).read("/f")
