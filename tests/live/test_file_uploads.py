"""Uploads into another root: in pieces, in any order, checked, and put in their place in one move."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import anyio
import pytest

from cloudyard.edge.host.files import RootFiles
from cloudyard.edge.host.uploads import UPLOADS_DIR
from cloudyard.errors import CloudyardError, Conflict, InvalidRequest
from cloudyard.model import CHUNK_BYTES_MAX, MIB, TreeEntry
from live.test_files import BASE, SECRET, files, mounted, outside, read, root, write

__all__ = ["files", "mounted", "outside", "root"]  # fixtures
pytestmark = pytest.mark.live


async def test_a_64_mib_upload_arrives_whole(files: RootFiles, root: Path) -> None:
    data = os.urandom(64 * MIB)
    for offset in range(0, len(data), CHUNK_BYTES_MAX):
        held = await files.upload_chunk("big", offset, data[offset : offset + CHUNK_BYTES_MAX])
        assert held == offset + CHUNK_BYTES_MAX
    assert stat.S_IMODE((root / UPLOADS_DIR).stat().st_mode) == 0o700
    digest = hashlib.sha256(data).hexdigest()
    info = await files.upload_commit("big", "/a/big", size=len(data), sha256=digest, mode=0o600, parents=True)
    assert (info.size, info.uid, info.mode) == (len(data), 0, 0o600)
    assert (root / "a/big").read_bytes() == data
    assert not (root / UPLOADS_DIR).exists()


async def test_pieces_of_an_upload_may_overtake_each_other_and_come_twice(
    files: RootFiles, root: Path
) -> None:
    async with anyio.create_task_group() as group:
        for offset, data in ((6, b"678"), (3, b"345"), (0, b"012"), (3, b"345")):
            group.start_soon(files.upload_chunk, "u", offset, data)
    digest = hashlib.sha256(b"012345678").hexdigest()
    await files.upload_commit("u", "/f", size=9, sha256=digest, mode=None, parents=False)
    assert (root / "f").read_bytes() == b"012345678"


async def test_a_gap_a_wrong_size_and_a_wrong_hash_are_refused_and_dropped(
    files: RootFiles, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudyard.edge.host.files.GAP_WAIT_S", 0.05)
    await files.upload_chunk("u", 0, b"abc")
    with pytest.raises(Conflict, match="holds 3 bytes; bytes at 9 would leave a gap"):
        await files.upload_chunk("u", 9, b"x")
    digest = hashlib.sha256(b"abc").hexdigest()
    for size, sha256, code in ((4, digest, "upload_size"), (3, "0" * 64, "upload_hash")):
        await files.upload_chunk("u", 0, b"abc")
        with pytest.raises(Conflict) as caught:
            await files.upload_commit("u", "/f", size=size, sha256=sha256, mode=None, parents=False)
        assert caught.value.code == code
        assert not (root / UPLOADS_DIR).exists()
    assert not (root / "f").exists()
    with pytest.raises(InvalidRequest):
        await files.upload_chunk("../x", 0, b"")


async def test_a_small_file_with_a_wrong_hash_is_refused_and_what_was_there_stays(
    files: RootFiles, root: Path
) -> None:
    await write(files, "/tmp/f", b"old")
    entry = TreeEntry(name=b"f", kind="file", data=b"new", sha256=hashlib.sha256(b"sent").digest())
    for attempt in (
        files.write("/tmp/f", b"new", mode=None, parents=True, sha256=entry.sha256),
        files.write_tree("/tmp", [entry]),
    ):
        with pytest.raises(Conflict, match="Cannot write /tmp/f: what arrived has the SHA-256") as caught:
            await attempt
        assert caught.value.code == "upload_hash"
    assert [path.name for path in (root / "tmp").iterdir()] == ["f"]
    assert await read(files, "/tmp/f") == b"old"
    digest = hashlib.sha256(b"new").digest()
    await files.write("/tmp/f", b"new", mode=None, parents=True, sha256=digest)
    assert await read(files, "/tmp/f") == b"new"


async def test_an_upload_goes_on_after_a_restart_of_the_edge(files: RootFiles, root: Path) -> None:
    await files.upload_chunk("u", 0, b"abc")
    again = RootFiles(lambda: os.open(root, os.O_PATH | os.O_DIRECTORY), BASE)
    assert await again.upload_chunk("u", 3, b"def") == 6
    digest = hashlib.sha256(b"abcdef").hexdigest()
    await again.upload_commit("u", "/f", size=6, sha256=digest, mode=None, parents=False)
    assert (root / "f").read_bytes() == b"abcdef"


async def test_uploads_that_were_given_up_are_dropped(files: RootFiles, root: Path) -> None:
    await files.upload_chunk("old", 0, b"abc")
    os.utime(root / UPLOADS_DIR / "old", (1, 1))
    await files.upload_chunk("new", 0, b"abc")
    assert [file.name for file in (root / UPLOADS_DIR).iterdir()] == ["new"]


async def test_an_uploads_directory_that_is_a_link_is_not_followed(
    files: RootFiles, root: Path, outside: Path
) -> None:
    (root / UPLOADS_DIR).symlink_to(outside)
    with pytest.raises(CloudyardError):
        await files.upload_chunk("secret", 0, b"abc")
    assert (outside / "secret").read_bytes() == SECRET


async def test_an_upload_to_another_disk_is_copied(mounted: RootFiles) -> None:
    await mounted.upload_chunk("u", 0, b"abc")
    digest = hashlib.sha256(b"abc").hexdigest()
    info = await mounted.upload_commit("u", "/small/f", size=3, sha256=digest, mode=None, parents=False)
    assert (info.size, info.uid) == (3, 0)
    assert await read(mounted, "/small/f") == b"abc"
    assert [entry.path for entry in (await mounted.list_dir("/small")).entries] == ["/small/f"]
