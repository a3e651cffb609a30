"""An edge on the fake backend, with the real guest, and a client that speaks to it in messages."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import pytest
from anyio import fail_after

import support
from cloudyard.edge.clock import Clock
from cloudyard.edge.config import EdgeConfig
from cloudyard.edge.daemon import Edge
from cloudyard.model import (
    GIB,
    AnyOp,
    AnyResult,
    CommandInfo,
    CommandSpec,
    Exec,
    ExecResult,
    OutputChunk,
    ReadOutput,
    SandboxInfo,
    SandboxSpec,
    Start,
    StreamName,
    Wait,
)
from cloudyard.testing.fake_backend import FakeBackend, FakeInstance, fake_images
from cloudyard.wire.messages import (
    AnyCall,
    CallCreate,
    CallOp,
    EdgeReply,
    encode,
    error_of,
    raw,
    reply_decoder,
    result_decoder,
)

GUEST = support.REPOSITORY / "guest" / "build" / "guest"
PROJECT = "p1"
BOUND_S = 30.0
_T = TypeVar("_T", bound=AnyResult)


def guest_program() -> Path:
    """The guest, compiled if it is not yet. Skips the test where there is no compiler."""
    if not GUEST.exists():
        if shutil.which("make") is None or shutil.which("musl-gcc") is None:
            support.cannot_run("the guest is not compiled, and there is no make or musl-gcc")
        subprocess.run(["make", "-C", str(GUEST.parent.parent)], check=True, capture_output=True, timeout=120)
    return GUEST


def mirrored_root(directory: Path) -> Path:
    """The directory as the root of file operations. Its own path leads back to it inside, so that below it
    commands and file operations see the same under the same names, and nothing of the machine beside it.
    """
    inside = directory / directory.resolve().relative_to("/")
    inside.parent.mkdir(parents=True, exist_ok=True)
    if not inside.is_symlink():
        inside.symlink_to("/")
    return directory


def sandbox_id(number: int = 0) -> str:
    """An id of the edge e1."""
    return f"sb-e1-{number:012d}"


class Box:
    """One sandbox as a client sees it."""

    def __init__(self, kit: EdgeKit, name: str, project: str = PROJECT) -> None:
        self.kit = kit
        self.id = name
        self.project = project

    async def do(self, op: AnyOp, *, key: str = "", cause: str = "") -> AnyResult:
        """Do an operation; raises what the edge answers."""
        call = CallOp(project=self.project, cause=cause, sandbox=self.id, op=raw(op), key=key)
        return await self.kit.ask(call)

    async def get(self, kind: type[_T], op: AnyOp, *, key: str = "", cause: str = "") -> _T:
        """Do an operation that gives this kind of result."""
        result = await self.do(op, key=key, cause=cause)
        assert isinstance(result, kind), result
        return result

    async def run(self, shell: str, *, key: str = "", cause: str = "", **settings: object) -> ExecResult:
        """Run a shell command to its end."""
        return await self.get(ExecResult, Exec(command=command(shell, **settings)), key=key, cause=cause)

    async def start(self, shell: str, *, key: str = "", **settings: object) -> CommandInfo:
        """Start a shell command in the background."""
        return await self.get(CommandInfo, Start(command=command(shell, **settings)), key=key)

    async def wait(self, command_id: int, wait_s: float = BOUND_S) -> ExecResult:
        """Wait for a command's end."""
        return await self.get(ExecResult, Wait(command_id=command_id, wait_s=wait_s))

    async def read(self, command_id: int, stream: StreamName = "stdout", offset: int = 0) -> bytes:
        """All of a stream from an offset on; checks the total and the hash at its end."""
        chunks: list[bytes] = []
        while True:
            op = ReadOutput(command_id=command_id, stream=stream, offset=offset, wait_s=BOUND_S)
            chunk = await self.get(OutputChunk, op)
            assert chunk.offset == offset
            chunks.append(chunk.data)
            offset += len(chunk.data)
            if chunk.eof:
                return b"".join(chunks)

    @property
    def instance(self) -> FakeInstance:
        """What it is made of."""
        return self.kit.backend.instances[self.id]


def command(shell: str, **settings: object) -> CommandSpec:
    """A shell command."""
    return CommandSpec(shell=shell, **settings)  # type: ignore[arg-type]


class EdgeKit:
    """A running edge and what it runs on."""

    def __init__(self, edge: Edge, backend: FakeBackend) -> None:
        self.edge = edge
        self.backend = backend

    async def reply(self, call: AnyCall) -> EdgeReply:
        """The edge's answer to a call."""
        with fail_after(BOUND_S):
            return reply_decoder.decode(await self.edge.call(encode(call)))

    async def ask(self, call: AnyCall) -> AnyResult:
        """The edge's result; raises what it answers otherwise."""
        reply = await self.reply(call)
        if reply.error is not None:
            raise error_of(reply.error)
        return result_decoder.decode(reply.result)

    async def create(self, number: int = 0, *, project: str = PROJECT, **spec: object) -> Box:
        """Make a sandbox."""
        name = sandbox_id(number)
        wanted = SandboxSpec(**{"image": "debian", **spec})  # type: ignore[arg-type]
        info = await self.ask(CallCreate(project=project, sandbox=name, spec=wanted, cause="test"))
        assert isinstance(info, SandboxInfo)
        assert info.state == "running"
        return Box(self, name, project)


def config_for(directory: Path, **settings: object) -> EdgeConfig:
    """A roomy edge."""
    roomy = {"cpu_total": 64.0, "memory_total_bytes": 1024 * GIB}
    return EdgeConfig(edge="e1", state_dir=directory, **{**roomy, **settings})  # type: ignore[arg-type]


@asynccontextmanager
async def running_edge(
    directory: Path,
    *,
    clock: Clock | None = None,
    root: Path | None = None,
    slots: int = 4096,
    **settings: object,
) -> AsyncIterator[EdgeKit]:
    """An edge over a state directory. Its sandboxes outlive it, as in life.

    Args:
        root: below it file operations see what commands see; the state directory if left out.
    """
    backend = FakeBackend(
        directory / "fake", guest_program(), files_root=mirrored_root(root or directory), slots=slots
    )
    config = config_for(directory, **settings)
    async with (
        backend,
        Edge(config, backends={"container": backend}, images=fake_images, clock=clock) as edge,
    ):
        yield EdgeKit(edge, backend)


async def until(condition: Callable[[], bool | Awaitable[bool]], bound_s: float = BOUND_S) -> None:
    """Wait for a condition, within a bound."""
    with fail_after(bound_s):
        while True:
            met = condition()
            if met if isinstance(met, bool) else await met:
                return
            await anyio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[EdgeKit]:
    """An edge whose file operations see the test's directory. At the end every sandbox of it is stopped and
    nothing may be left.
    """
    with tempfile.TemporaryDirectory(prefix="cy-edge-") as name:
        async with running_edge(Path(name), root=tmp_path.parent) as made:
            yield made
            await made.edge.stop_all()
            assert not made.edge.yard.sandboxes
            assert not list((Path(name) / "fake").iterdir())
            assert not list(made.edge.config.output_dir.iterdir())
