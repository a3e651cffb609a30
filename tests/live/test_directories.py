"""Directories with everything in them that Linux lets one make, out of a real sandbox and into it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from cloudyard import Sandbox
from yards import TestYard

pytestmark = pytest.mark.live

MIB = 2**20
MANY = 5000
LONG = b"n" * 255
NOT_UTF8 = b"\xff\xfe name\n with \"quotes'"
ODD = f"""
import os, socket
os.umask(0)
os.makedirs("/root/odd/" + "/".join(["deep"] * 60))
os.chdir("/root/odd")
os.mkdir("many", 0o755)
for number in range({MANY}):
    with open(f"many/{{number}}", "w") as file:
        file.write(str(number))
for name in ({LONG!r}, {NOT_UTF8!r}):
    with open(name, "wb") as file:
        file.write(name)
with open("set-uid", "w") as file:
    os.fchmod(file.fileno(), 0o6755)
with open("sparse", "wb") as file:
    file.truncate(64 << 20)
    os.pwrite(file.fileno(), b"end", (64 << 20) - 3)
with open("first", "w") as file:
    file.write("one file")
os.link("first", "second")
os.symlink("/etc/passwd", "out")
os.symlink("../../../../../../etc/passwd", "up")
os.symlink("first", "in")
os.symlink("nowhere", "dangling")
os.mkdir("closed", 0o000)
os.mkfifo("fifo")
socket.socket(socket.AF_UNIX).bind("socket")
"""


def facts(top: Path) -> dict[bytes, tuple[object, ...]]:
    """Every entry below: kind, permissions, and content or target."""
    found: dict[bytes, tuple[object, ...]] = {}
    for root, directories, files in os.walk(os.fsencode(top)):
        for own in [*directories, *files]:
            path = os.path.join(root, own)
            mode = os.lstat(path).st_mode
            name = os.path.relpath(path, os.fsencode(top))
            if stat.S_ISLNK(mode):
                found[name] = ("link", os.readlink(path))
            elif stat.S_ISREG(mode):
                found[name] = (oct(mode), Path(os.fsdecode(path)).read_bytes())
            else:
                found[name] = (oct(mode),)
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory of this machine with what only its root can make."""
    made = tmp_path / "source"
    made.mkdir()
    os.mkfifo(made / "fifo")
    os.mknod(made / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    (made / "file").write_text("a file")
    (made / "file").chmod(0o4755)
    (made / "out").symlink_to("/etc/passwd")
    return made


async def test_an_odd_directory_comes_out_and_goes_in_again(up: TestYard, tmp_path: Path) -> None:
    """Files of all names, holes, links and modes are carried; what has no content is left out and named."""
    back = tmp_path / "back"
    async with up.connect() as yard, yard.sandbox("debian") as box:
        assert (await box.run(["python3", "-c", ODD])).ok
        done = await box.download("/root/odd", back)
        assert (done.skipped, sorted(done.skipped_paths)) == (2, ["fifo", "socket"])
        assert (done.files, done.links) == (MANY + 5, 5)
        carried = facts(back)
        assert carried[NOT_UTF8][1] == NOT_UTF8
        assert carried[LONG][1] == LONG
        assert carried[b"set-uid"] == (oct(stat.S_IFREG | 0o755), b"")  # of another owner here: no such bits
        assert carried[b"out"] == ("link", b"/etc/passwd")
        assert carried[b"up"] == ("link", b"../../../../../../etc/passwd")
        assert carried[b"dangling"] == ("link", b"nowhere")
        assert (back / "first").samefile(back / "second")
        sparse = (back / "sparse").stat()
        assert (sparse.st_size, sparse.st_blocks * 512 < MIB) == (64 * MIB, True)
        assert len(list((back / "many").iterdir())) == MANY

        again = await box.upload(back, "/root/again")
        assert (again.files, again.links, again.skipped) == (done.files, done.links, 0)
        await box.download("/root/again", tmp_path / "twice")
        assert facts(tmp_path / "twice") == carried
        await same_inside(box, "/root/odd", "/root/again")
    shutil.rmtree(back)


async def same_inside(box: Sandbox, one: str, other: str) -> None:
    """Every file that one has is in the other, byte for byte."""
    done = await box.run(f"cd {one} && find . -type f -print0 | sort -z | xargs -0 cat | sha256sum")
    than = await box.run(f"cd {other} && find . -type f -print0 | sort -z | xargs -0 cat | sha256sum")
    assert done.ok
    assert done.stdout == than.stdout


async def test_what_has_no_content_here_is_left_out_of_an_upload_and_named(
    up: TestYard, source: Path
) -> None:
    async with up.connect() as yard, yard.sandbox("debian") as box:
        done = await box.upload(source, "/root/in")
        assert (done.files, done.links, done.skipped) == (1, 1, 2)
        assert sorted(done.skipped_paths) == ["device", "fifo"]
        listed = (await box.run("cd /root/in && stat -c '%A %U %n' *")).text
        assert listed.splitlines() == ["-rwxr-xr-x root file", "lrwxrwxrwx root out"]


async def test_a_directory_that_changes_while_it_is_read_comes_with_all_that_stays(
    up: TestYard, tmp_path: Path
) -> None:
    """Entries that come and go are there or not."""
    churn = """
import os, itertools
os.makedirs("/root/live/kept")
for n in range(50):
    open(f"/root/live/kept/{n}", "w").write("kept")
print("ready", flush=True)
for n in itertools.count():
    d = f"/root/live/{n % 7}"
    os.makedirs(d, exist_ok=True)
    for m in range(20):
        open(f"{d}/{m}", "w").write("x" * 100)
    os.rename(d, f"/root/live/m{n % 3}") if not os.path.exists(f"/root/live/m{n % 3}") else None
    for top in (d, f"/root/live/m{(n + 1) % 3}"):
        for m in range(20):
            try: os.unlink(f"{top}/{m}")
            except OSError: pass
        try: os.rmdir(top)
        except OSError: pass
"""
    async with up.connect() as yard, yard.sandbox("debian") as box:
        process = await box.start(["python3", "-c", churn])
        async for piece in process.stdout():
            assert piece == b"ready\n"
            break
        for number in range(20):
            await box.download("/root/live", tmp_path / str(number))
            kept = tmp_path / str(number) / "kept"
            assert {path.read_text() for path in kept.iterdir()} == {"kept"}
            assert len(list(kept.iterdir())) == 50
        await process.kill()
