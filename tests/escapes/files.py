"""Attempts to lead the edge, which is root of the machine, out of the sandbox by what lies in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from cloudyard.edge.host import inroot
from cloudyard.errors import CloudyardError
from cloudyard.model import TreeEntry
from escapes.kit import Attempt, Patch, Scene

PROC = 0x9FA0  # the number of its file system
RACE_S = 2.0
SECRET = b"the machine's"


def openat(directory: int, path: str, flags: int, resolve: int) -> int:
    """As one would open a path below a directory without openat2."""
    return os.open(path.lstrip("/") or ".", flags | os.O_CLOEXEC, dir_fd=directory)


OUTSIDE = Patch(inroot, "_openat2", openat)
KERNEL_FILES = Patch(inroot, "_FILE_SYSTEMS", {**inroot._FILE_SYSTEMS, PROC: "proc"})
"""Files of the kernel's own are taken for those of a sandbox."""


@asynccontextmanager
async def secrets(scene: Scene) -> AsyncIterator[None]:
    """A directory of the machine's with a file in it."""
    folder = scene.host / "secrets"
    folder.mkdir()
    (folder / "secret").write_bytes(SECRET)
    scene.words.append(str(folder))
    yield


@asynccontextmanager
async def deep_secrets(scene: Scene) -> AsyncIterator[None]:
    """The file is a directory deeper, under a name that the sandbox has, too."""
    async with secrets(scene):
        deep = scene.host / "secrets" / "deep"
        deep.mkdir()
        (deep / "secret").write_bytes(SECRET)
        yield


async def read(scene: Scene) -> str:
    return (await scene.instance.files.read("/root/link/secret", 0, 100)).data.decode()


async def list_names(scene: Scene) -> str:
    return " ".join(entry.path for entry in (await scene.instance.files.list_dir("/root/link")).entries)


async def write(scene: Scene) -> str:
    await scene.instance.files.write("/root/link/left", b"by the edge", mode=None, parents=False)
    return on_the_machine(scene)


async def make(scene: Scene) -> str:
    await scene.instance.files.make_dir("/root/link/left", mode=0o755, parents=False, exist_ok=False)
    return on_the_machine(scene)


async def remove(scene: Scene) -> str:
    await scene.instance.files.remove("/root/link/secret", recursive=False, missing_ok=False)
    return "it is there" if (scene.host / "secrets" / "secret").exists() else "gone from the machine"


async def write_in_a_race(scene: Scene) -> str:
    with anyio.move_on_after(RACE_S):
        while on_the_machine(scene) == "nothing":
            with suppress(CloudyardError):
                await scene.instance.files.write("/root/place/left", b"by the edge", mode=None, parents=False)
            await anyio.sleep(0)
    return on_the_machine(scene)


async def open_of_the_kernel(scene: Scene) -> str:
    """To open such a file may do something by itself. What is in it is not read: its size is said to be 0."""
    await scene.instance.files.read("/root/link", 0, 100)
    return "opened by the machine's root"


async def list_tree(scene: Scene) -> str:
    return " ".join(
        entry.name.decode() for entry in (await scene.instance.files.list_tree("/root/link", b"")).entries
    )


async def list_tree_in_a_race(scene: Scene) -> str:
    """What is in the machine's directory does not come as what is in one of the sandbox's."""
    with anyio.move_on_after(RACE_S):
        while True:
            with suppress(CloudyardError):
                for entry in (await scene.instance.files.list_tree("/root", b"")).entries:
                    if entry.name.endswith(b"/secret"):
                        return (entry.data or b"").decode()
            await anyio.sleep(0)
    return "nothing"


async def write_tree(scene: Scene) -> str:
    entry = TreeEntry(name=b"link/left", kind="file", mode=0o644, data=b"by the edge")
    await scene.instance.files.write_tree("/root", [entry])
    return on_the_machine(scene)


async def list_kernels_tree(scene: Scene) -> str:
    part = await scene.instance.files.list_tree("/root/link", b"")
    return (
        "listed by the machine's root" if b"boot_id" in {entry.name for entry in part.entries} else "nothing"
    )


async def read_below(scene: Scene) -> str:
    """As a large file of a tree is read that was listed before."""
    return (await scene.instance.files.read("/root", 0, 100, below=b"link/secret")).data.decode()


async def commit_below(scene: Scene) -> str:
    """As a large file of a tree is put in its place."""
    data = b"by the edge"
    files = scene.instance.files
    await files.upload_chunk("upload", 0, data)
    digest = hashlib.sha256(data).hexdigest()
    await files.upload_commit(
        "upload", "/root", below=b"link/left", size=len(data), sha256=digest, mode=None, parents=False
    )
    return on_the_machine(scene)


async def write_tree_in_a_race(scene: Scene) -> str:
    entry = TreeEntry(name=b"place/left", kind="file", mode=0o644, data=b"by the edge")
    with anyio.move_on_after(RACE_S):
        while on_the_machine(scene) == "nothing":
            with suppress(CloudyardError):
                await scene.instance.files.write_tree("/root", [entry])
            await anyio.sleep(0)
    return on_the_machine(scene)


def on_the_machine(scene: Scene) -> str:
    return "left on the machine" if (scene.host / "secrets" / "left").exists() else "nothing"


LINK = 'os.symlink(sys.argv[1], "/root/link"); print("planted")'
SWAP = """
    os.mkdir("/root/place"); os.symlink(sys.argv[1], "/root/other")
    if not os.fork():
        os.setsid()
        for fd in range(3):
            os.close(fd)
        end = time.monotonic() + 4
        while time.monotonic() < end:
            call(316, -100, b"/root/place", -100, b"/root/other", 2)  # exchanges the two
        os._exit(0)
    print("planted")
"""

ATTEMPTS = [
    Attempt(
        name="have the edge read through a link",
        mechanism="links in downloads",
        program=LINK,
        refused="file_not_found",
        succeeds=SECRET.decode(),
        without=OUTSIDE,
        arrange=secrets,
        evidence=read,
    ),
    Attempt(
        name="have the edge list through a link",
        mechanism="links in downloads",
        program=LINK,
        refused="file_not_found",
        succeeds="/root/link/secret",
        without=OUTSIDE,
        arrange=secrets,
        evidence=list_names,
    ),
    Attempt(
        name="have the edge write through a link",
        mechanism="links in uploads",
        program=LINK,
        refused="file_not_found",
        succeeds="left on the machine",
        without=OUTSIDE,
        arrange=secrets,
        evidence=write,
    ),
    Attempt(
        name="have the edge make a directory through a link",
        mechanism="links in uploads",
        program=LINK,
        refused="file_not_found",
        succeeds="left on the machine",
        without=OUTSIDE,
        arrange=secrets,
        evidence=make,
    ),
    Attempt(
        name="have the edge remove through a link",
        mechanism="links in uploads",
        program=LINK,
        refused="file_not_found",
        succeeds="gone from the machine",
        without=OUTSIDE,
        arrange=secrets,
        evidence=remove,
    ),
    Attempt(
        name="have the edge list all that is below a link",
        mechanism="links in trees",
        program=LINK,
        refused="file_not_found",
        succeeds="secret",
        without=OUTSIDE,
        arrange=secrets,
        evidence=list_tree,
    ),
    Attempt(
        name="have the edge write a tree through a link in it",
        mechanism="links in trees",
        program=LINK,
        refused="file_not_found",
        succeeds="left on the machine",
        without=OUTSIDE,
        arrange=secrets,
        evidence=write_tree,
    ),
    Attempt(
        name="have the edge read a large file of a tree through a link",
        mechanism="links in trees",
        program=LINK,
        refused="file_not_found",
        succeeds=SECRET.decode(),
        without=OUTSIDE,
        arrange=secrets,
        evidence=read_below,
    ),
    Attempt(
        name="have the edge put a large file of a tree in its place through a link",
        mechanism="links in trees",
        program=LINK,
        refused="file_not_found",
        succeeds="left on the machine",
        without=OUTSIDE,
        arrange=secrets,
        evidence=commit_below,
    ),
    Attempt(
        name="put a link in the place of a directory while the edge writes a tree",
        mechanism="races",
        program=SWAP,
        refused="nothing",
        succeeds="left on the machine",
        without=OUTSIDE,
        arrange=secrets,
        evidence=write_tree_in_a_race,
    ),
    Attempt(
        name="have the edge list what is the kernel's",
        mechanism="files of the kernel",
        program='os.symlink("/proc/sys/kernel/random", "/root/link"); print("planted")',
        refused="kernel_file",
        succeeds="listed by the machine's root",
        without=KERNEL_FILES,
        evidence=list_kernels_tree,
    ),
    Attempt(
        name="put a link in the place of a directory while the edge lists the tree",
        mechanism="races",
        program=SWAP.replace('os.mkdir("/root/place")', 'os.makedirs("/root/place/deep")'),
        refused="nothing",
        succeeds=SECRET.decode(),
        without=OUTSIDE,
        arrange=deep_secrets,
        evidence=list_tree_in_a_race,
    ),
    Attempt(
        name="put a link in the place of a directory while the edge writes into it",
        mechanism="races",
        program=SWAP,
        refused="nothing",
        succeeds="left on the machine",
        without=OUTSIDE,
        arrange=secrets,
        evidence=write_in_a_race,
    ),
    Attempt(
        name="have the edge open a file that only the machine's root may open",
        mechanism="files of the kernel",
        program='os.symlink("/proc/vmallocinfo", "/root/link"); print("planted")',
        refused="kernel_file",
        succeeds="opened by the machine's root",
        without=KERNEL_FILES,
        evidence=open_of_the_kernel,
    ),
]
