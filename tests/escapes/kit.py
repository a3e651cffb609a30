"""What an attempt to escape is, and how it is carried out."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from msgspec import structs
from msgspec.structs import replace

from cloudyard.edge.backends.base import Instance
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.edge.backends.container.defences import Defences
from cloudyard.edge.host import syscalls
from cloudyard.errors import CloudyardError
from cloudyard.images.depot import Depot
from cloudyard.model import MIB, SandboxSpec
from cloudyard.testing.backend_contract import SPEC, new_id, run
from container_kit import GUEST_DIR

BY_DEFENCES = frozenset(field.name for field in structs.fields(Defences))
BY_OPTIONS = {"shm_bytes": 512 * MIB}
COMPILED_IN = frozenset({"GUEST_DUMPABLE", "GUEST_KEEPS_DESCRIPTORS", "GUEST_SHARES_UID"})
OPEN_TREE, CLONE_TREE, AT_FDCWD = 428, 1, -100

PRELUDE = """
import array, ctypes, errno, fcntl, glob, mmap, os, signal, socket, struct, sys, time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def call(number, *arguments):
    "A system call by its number."
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    done = libc.syscall(ctypes.c_long(number), *words)
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return done

try:
"""
POSTLUDE = """
except OSError as refusal:
    print(errno.errorcode[refusal.errno])
"""


@dataclass
class Scene:
    """Where an attempt takes place."""

    instance: Instance
    options: ContainerOptions
    backend: ContainerBackend
    depot: Path
    host: Path
    """A directory of the host's for what an arrangement needs."""
    words: list[str] = field(default_factory=list)
    """What the arrangement has to tell the program; it finds them in `sys.argv`."""

    @property
    def pid(self) -> int:
        """PID 1 of the sandbox, as the host numbers it."""
        return self.instance.facts.pid

    @property
    def token(self) -> str:
        """A word that what is made on the host carries."""
        return self.options.state.parent.name

    async def python(self, program: str) -> str:
        """What a program of root inside prints; it finds `words` in its arguments."""
        return await python(self.instance, program, *self.words)


async def python(instance: Instance, program: str, *words: str) -> str:
    """What a program of root inside prints, after PRELUDE, and how it ended where that was not well."""
    whole = f"{PRELUDE}{textwrap.indent(textwrap.dedent(program).strip(), '    ')}{POSTLUDE}"
    done = await run(instance, "/usr/bin/python3", "-c", whole, *words)
    if done.signal is not None:
        return f"{done.stdout}killed by signal {done.signal}"
    return done.stdout.strip() if done.exit_code == 0 else f"{done.stdout}{done.stderr}".strip()


Arrange = Callable[[Scene], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Patch:
    """A defence that is a value in our own code, and the value without it."""

    module: ModuleType | type
    name: str
    value: object

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One way out, and the wall in it."""

    name: str
    mechanism: str
    """What of the kernel, or of ours, it goes through."""
    program: str
    """What root inside runs, in Python after PRELUDE. It prints what came of it: a refusal as its errno."""
    refused: str
    """What it prints when it is refused."""
    succeeds: str
    """What it prints when it is not."""
    without: str | Patch
    """The one defence without which it succeeds: of `Defences`, of BY_OPTIONS, of COMPILED_IN, or a Patch."""
    behind: tuple[str | Patch, ...] = ()
    """Defences that stand before that one, and are away both times, for it would not be reached. With all up
    the attempt is refused as well, by whichever comes first."""
    since: tuple[int, int] = (0, 0)
    """The kernel that can first do what it tries; an older one refuses without any wall of ours."""
    spec: SandboxSpec = SPEC
    arrange: Arrange | None = None
    """What the host does before and after."""
    evidence: Callable[[Scene], Awaitable[str]] | None = None
    """What is to be seen on the host afterwards, or the code of our error: in the place of what the program
    printed, unless that was refused."""

    @property
    def has_a_chance(self) -> bool:
        """Whether this machine's kernel is new enough."""
        return tuple(int(part) for part in os.uname().release.split(".")[:2]) >= self.since

    async def outcome(self, scene: Scene) -> str:
        """Carry it out."""
        async with self.arrange(scene) if self.arrange is not None else nullcontext():
            printed = await scene.python(self.program)
            if self.evidence is None or printed == self.refused:
                return printed
            try:
                return await self.evidence(scene)
            except CloudyardError as error:
                return error.code


class Stage:
    """Makes scenes: sandboxes with some defences away."""

    def __init__(self, options: ContainerOptions, depot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._options = options
        self._depot = depot
        self._monkeypatch = monkeypatch

    async def outcome(self, attempt: Attempt, *away: str | Patch) -> str:
        """What comes of an attempt without these defences."""
        with self._monkeypatch.context() as patching:
            for one in away:
                if isinstance(one, Patch):
                    patching.setattr(one.module, one.name, one.value)
            async with self._scene(attempt, {one for one in away if isinstance(one, str)}) as scene:
                return await attempt.outcome(scene)

    @asynccontextmanager
    async def _scene(self, attempt: Attempt, away: set[str]) -> AsyncIterator[Scene]:
        depot = Depot(self._depot)
        options = replace(
            self._options,
            pool_size=0,
            guest=_guest_without(frozenset(away & COMPILED_IN)) or self._options.guest,
            defences=Defences(**dict.fromkeys(away & BY_DEFENCES, False)),
            **{name: value for name, value in BY_OPTIONS.items() if name in away},
        )
        assert away <= BY_DEFENCES | COMPILED_IN | set(BY_OPTIONS), away
        async with ContainerBackend(options, depot.layer_path) as backend:
            instance = await backend.create(new_id(), attempt.spec, depot.image("debian"))
            try:
                with tempfile.TemporaryDirectory(dir=options.state.parent) as host:
                    yield Scene(instance, options, backend, self._depot, Path(host))
            finally:
                await instance.stop()


@contextmanager
def shown(scene: Scene, folder: Path) -> Iterator[None]:
    """A directory of the host's can be seen at /mnt in the sandbox."""
    libc = ctypes.CDLL(None, use_errno=True)
    tree = libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(folder), CLONE_TREE | os.O_CLOEXEC)
    assert tree >= 0, os.strerror(ctypes.get_errno())
    inside = os.open(f"/proc/{scene.pid}/ns/mnt", os.O_RDONLY)

    def attach() -> None:
        syscalls.enter_mount_namespace(inside)
        syscalls.move_mount(tree, "/mnt")

    def detach() -> None:
        syscalls.enter_mount_namespace(inside)
        syscalls.unmount("/mnt", syscalls.MNT_DETACH)

    try:
        syscalls.on_own_thread(attach)
        yield
        syscalls.on_own_thread(detach)
    finally:
        os.close(tree)
        os.close(inside)


def _guest_without(flags: frozenset[str]) -> Path | None:
    """The guest, compiled with these left out; None for the one that is there anyway."""
    if not flags:
        return None
    build = GUEST_DIR / "build" / "-".join(sorted(flags))
    wanted = ["make", "-s", "-C", str(GUEST_DIR), f"BUILD={build}", f"{build}/guest"]
    words = " ".join(f"-D{flag}" for flag in sorted(flags))
    subprocess.run([*wanted, f"CFLAGS=-O2 -g {words}"], check=True, timeout=300, stdin=subprocess.DEVNULL)
    return build / "guest"
