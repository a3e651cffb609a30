"""Attempts on the machine of whoever uses a sandbox, by what its directories hold when they are downloaded.

The SDK is the real one, and so are the edge's operations on files; only what lies between the two is left
out.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from cloudyard.edge.operations import FileOp, perform_on_files
from cloudyard.model import MIB, AnyOp, AnyResult, CallResult, CallSpec, CreateRequest, SandboxInfo
from cloudyard.sdk import files as sdk_files, local
from cloudyard.sdk.sandbox import Sandbox
from cloudyard.sdk.transport import Caller
from escapes.files import SECRET, on_the_machine, secrets
from escapes.kit import Attempt, Patch, Scene

LARGE = 64 * MIB
ALLOWED = MIB


class Direct:
    """A way from the SDK to the files of one sandbox."""

    def __init__(self, scene: Scene) -> None:
        self._files = scene.instance.files

    async def ask(self, sandbox: str, op: AnyOp, *, key: str, within_s: float | None) -> AnyResult:
        assert isinstance(op, FileOp)
        return await perform_on_files(self._files, op)

    async def create(self, request: CreateRequest) -> SandboxInfo:
        raise AssertionError

    async def call(self, spec: CallSpec, *, within_s: float) -> CallResult:
        raise AssertionError


def client(scene: Scene) -> Sandbox:
    """The sandbox, as whoever uses it has it in hand."""
    caller = Caller()
    caller.open(Direct(scene))
    return Sandbox(caller, scene.instance.facts.sandbox)


def follow_into(self: local.Destination, name: bytes, mode: int) -> None:
    """What is there already is taken for the directory, be it a link to one."""
    with self._above(name) as (above, own), suppress(FileExistsError):
        os.mkdir(own, 0o755, dir_fd=above)


class InPlace:
    """A new file as one would write it without thinking of links."""

    def __init__(self, directory: int, name: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._file = os.open(name, flags, 0o644, dir_fd=directory)

    def write(self, data: bytes) -> None:
        os.write(self._file, data)

    def keep(self, mode: int) -> None:
        os.fchmod(self._file, mode & local.PERMISSIONS)

    def close(self) -> None:
        os.close(self._file)


LINKS_FOLLOWED_ON_THE_WAY = Patch(local, "_BELOW", local._BELOW & ~os.O_NOFOLLOW)
LINKS_TAKEN_FOR_DIRECTORIES = Patch(local.Destination, "make_directory", follow_into)
WRITTEN_IN_PLACE = Patch(local, "NewFile", InPlace)
ALL_MODE_BITS = Patch(local, "PERMISSIONS", 0o7777)
LINKS_LOOKED_THROUGH = Patch(Path, "lstat", Path.stat)
LINKS_OPENED = Patch(local, "_SOURCE", local._SOURCE & ~os.O_NOFOLLOW)
ANY_SIZE = Patch(sdk_files, "check_size", lambda size, max_bytes, what: None)

LINK_TO_A_DIRECTORY = 'os.mkdir("/root/out"); os.symlink(sys.argv[1], "/root/out/a"); print("planted")'
LINK_TO_A_FILE = """
    os.mkdir("/root/out"); os.symlink(sys.argv[1] + "/secret", "/root/out/a"); print("planted")
"""


async def download(scene: Scene) -> Path:
    """The directory, as it is on the machine then."""
    got = scene.host / "got"
    await client(scene).download("/root/out", got)
    return got


async def download_again_with_a_directory(scene: Scene) -> str:
    await download(scene)
    await scene.python("""
        os.unlink("/root/out/a"); os.mkdir("/root/out/a")
        open("/root/out/a/left", "w").write("by the sandbox")
    """)
    await download(scene)
    return on_the_machine(scene)


async def download_again_with_a_file(scene: Scene) -> str:
    await download(scene)
    await scene.python('os.unlink("/root/out/a"); open("/root/out/a", "w").write("by the sandbox")')
    await download(scene)
    return (scene.host / "secrets" / "secret").read_text()


async def mode_of_the_program(scene: Scene) -> str:
    return oct(stat.S_IMODE(((await download(scene)) / "program").stat().st_mode))


async def upload_what_came(scene: Scene) -> str:
    """As one hands on the work of one sandbox to the next."""
    await client(scene).upload(await download(scene), "/root/back")
    return (await scene.instance.files.read("/root/back/a", 0, 100)).data.decode()


async def download_at_most(scene: Scene) -> str:
    got = scene.host / "got"
    await client(scene).download("/root/out", got, max_bytes=ALLOWED)
    return f"{sum(path.stat().st_size for path in got.iterdir())} bytes"


ATTEMPTS = [
    Attempt(
        name="have a second download write through a link to a directory that the first one brought",
        mechanism="links that were downloaded",
        program=LINK_TO_A_DIRECTORY,
        refused="nothing",
        succeeds="left on the machine",
        behind=(LINKS_FOLLOWED_ON_THE_WAY,),
        without=LINKS_TAKEN_FOR_DIRECTORIES,
        arrange=secrets,
        evidence=download_again_with_a_directory,
    ),
    Attempt(
        name="have a download go on through a link that takes the place of a directory",
        mechanism="links that were downloaded",
        program=LINK_TO_A_DIRECTORY,
        refused="local_file",
        succeeds="left on the machine",
        behind=(LINKS_TAKEN_FOR_DIRECTORIES,),
        without=LINKS_FOLLOWED_ON_THE_WAY,
        arrange=secrets,
        evidence=download_again_with_a_directory,
    ),
    Attempt(
        name="have a second download write through a link to a file that the first one brought",
        mechanism="links that were downloaded",
        program=LINK_TO_A_FILE,
        refused=SECRET.decode(),
        succeeds="by the sandbox",
        without=WRITTEN_IN_PLACE,
        arrange=secrets,
        evidence=download_again_with_a_file,
    ),
    Attempt(
        name="have an upload read what a downloaded link leads to",
        mechanism="links in uploads from the machine",
        program=LINK_TO_A_FILE,
        refused="file_not_found",
        succeeds=SECRET.decode(),
        behind=(LINKS_OPENED,),
        without=LINKS_LOOKED_THROUGH,
        arrange=secrets,
        evidence=upload_what_came,
    ),
    Attempt(
        name="have an upload open a link in the place of a file",
        mechanism="links in uploads from the machine",
        program=LINK_TO_A_FILE,
        refused="local_file",
        succeeds=SECRET.decode(),
        behind=(LINKS_LOOKED_THROUGH,),
        without=LINKS_OPENED,
        arrange=secrets,
        evidence=upload_what_came,
    ),
    Attempt(
        name="bring a set-uid program to the machine",
        mechanism="mode bits in downloads",
        program="""
            os.mkdir("/root/out"); open("/root/out/program", "w").write("#!/bin/sh")
            os.chmod("/root/out/program", 0o4755); print("planted")
        """,
        refused="0o755",
        succeeds="0o4755",
        without=ALL_MODE_BITS,
        evidence=mode_of_the_program,
    ),
    Attempt(
        name="fill the machine's disk by a download",
        mechanism="sizes in downloads",
        program=f"""
            os.mkdir("/root/out"); open("/root/out/holes", "w").truncate({LARGE}); print("planted")
        """,
        refused="too_large",
        succeeds=f"{LARGE} bytes",
        without=ANY_SIZE,
        evidence=download_at_most,
    ),
]
