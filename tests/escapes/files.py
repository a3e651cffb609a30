"""Attempts to lead the edge, which is root of the machine, out of the sandbox by what lies in it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from cloudyard.edge.host import inroot
from cloudyard.errors import CloudyardError
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
