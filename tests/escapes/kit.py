"""What an attempt to escape is, and how it is carried out."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from cloudyard.edge.backends.base import Instance
from cloudyard.edge.backends.container import ContainerBackend, ContainerOptions
from cloudyard.edge.host.slots import uid_base
from cloudyard.model import SandboxSpec
from cloudyard.testing.backend_contract import SPEC, run

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
    words: list[str] = field(default_factory=list)
    """What the arrangement has to tell the program; it finds them in `sys.argv`."""

    @property
    def pid(self) -> int:
        """PID 1 of the sandbox, as the host numbers it."""
        return self.instance.facts.pid

    @property
    def base(self) -> int:
        """The first uid of its range."""
        return uid_base(self.instance.facts.slot)

    @property
    def host(self) -> Path:
        """A directory of the host's for what an arrangement needs."""
        return self.options.state.parent

    async def python(self, program: str) -> str:
        """What a program of root inside prints, and a word for how it ended where that was not well."""
        whole = f"{PRELUDE}{textwrap.indent(textwrap.dedent(program).strip(), '    ')}{POSTLUDE}"
        done = await run(self.instance, "/usr/bin/python3", "-c", whole, *self.words)
        if done.signal is not None:
            return f"{done.stdout}killed by signal {done.signal}"
        return done.stdout.strip() if done.exit_code == 0 else f"{done.stdout}{done.stderr}".strip()


Arrange = Callable[[Scene], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
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
    without: str
    """The one defence, of `Defences`, without which it succeeds."""
    behind: tuple[str, ...] = ()
    """Defences that stand before that one: away too, both times, or it would not be reached. With all up it
    is refused as well."""
    spec: SandboxSpec = SPEC
    arrange: Arrange | None = None
    """What the host does before and after."""
    evidence: Callable[[Scene], str] | None = None
    """What is to be seen on the host afterwards; takes the place of what the program printed, unless that
    was a refusal."""
