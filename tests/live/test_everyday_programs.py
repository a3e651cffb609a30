"""Everyday programs work behind all defences: the filter refuses nothing that any of them needs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

import support
from cloudyard.edge.backends.base import Instance
from cloudyard.edge.backends.container import ContainerBackend
from cloudyard.images.depot import Depot
from cloudyard.model import GIB, SandboxSpec
from cloudyard.testing.backend_contract import new_id, run
from container_kit import options_in

pytestmark = [pytest.mark.live, pytest.mark.slow]

SCRIPTS = Path(__file__).with_name("everyday_programs.sh")
IMAGE = "programs"
PACKAGES = (
    *("gcc", "libc6-dev", "make", "gdb", "strace", "valgrind", "libc6-dbg", "git", "perl", "busybox"),
    *("python3", "python3-venv", "procps", "iproute2", "iputils-ping", "adduser", "sudo", "tmux"),
    *("openssh-server", "openssh-client", "postgresql", "redis-server", "nodejs"),
    "chromium-headless-shell",
)
SPEC = SandboxSpec(image=IMAGE, cpu=2.0, memory=2 * GIB, pids=512)
NESTING = replace(SPEC, user_namespaces=True)
TAIL = 2000  # characters of what a program said, shown where it failed


class Program(NamedTuple):
    name: str
    says: str
    nests: bool
    script: str


def read_programs() -> Iterator[Program]:
    before, *sections = re.split(r"^### ", SCRIPTS.read_text(), flags=re.MULTILINE)
    for section in sections:
        name, said, *lines = section.splitlines()
        nests = "# spec: user_namespaces" in lines
        yield Program(name, said.removeprefix("# says: "), nests, "\n".join([before, *lines]))


PROGRAMS = tuple(read_programs())


@pytest.fixture(scope="module")
async def backend(programs: Path) -> AsyncIterator[ContainerBackend]:
    depot = Depot(support.debian_depot(IMAGE, PACKAGES))
    with tempfile.TemporaryDirectory(prefix="cy-") as directory:
        options = replace(options_in(Path(directory), programs), pool_size=1)
        async with ContainerBackend(options, depot.layer_path) as made:
            yield made


@pytest.fixture(scope="module")
async def boxes(backend: ContainerBackend) -> AsyncIterator[dict[bool, Instance]]:
    """Sandboxes for all of them: without user namespaces, and with."""
    image = Depot(support.BUILD_DIR / "depot").image(IMAGE)
    made = {spec.user_namespaces: await backend.create(new_id(), spec, image) for spec in (SPEC, NESTING)}
    yield made
    for instance in made.values():
        await instance.stop()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_an_everyday_program_works(boxes: dict[bool, Instance], program: Program) -> None:
    done = await run(boxes[program.nests], program.script)
    assert done.exit_code == 0, f"{done.exit_code}: {done.stdout[-TAIL:]} {done.stderr[-TAIL:]}"
    assert program.says in done.stdout, f"{done.stdout[-TAIL:]} {done.stderr[-TAIL:]}"


def test_they_are_forty() -> None:
    assert len(PROGRAMS) >= 40
