"""An edge whose guest lies: every frame well-formed and none of it true, or bytes that are no frames at all.

PID 1 of a sandbox is ours, but it lives among hostile processes. Whatever it says, an edge answers every
request within a bound, serves its other sandboxes, holds no more memory for it than for an honest one, and
handles each frame without an error of its own.
"""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskGroup
from hypothesis import HealthCheck, given, settings, strategies as st

from cloudyard.edge.backends.base import Instance
from cloudyard.edge.daemon import Edge
from cloudyard.edge.listing import Listing
from cloudyard.errors import CloudyardError
from cloudyard.model import ExecResult, Image, SandboxId, SandboxSpec, StopSandbox
from cloudyard.testing.fake_backend import FakeBackend, fake_images
from cloudyard.wire.guest import (
    FRAME_BODY_MAX,
    GUEST_COMMANDS_MAX,
    HEADER,
    Decoder,
    Frame,
    FrameError,
    Kind,
    Tag,
    encode,
)
from flow.edge_kit import BOUND_S, Box, EdgeKit, config_for, guest_program

Lie = tuple[Kind, str, list[tuple[Tag, bytes | int]]] | bytes
EXAMPLES, LIARS = 8, 16  # so many liars at once, for their time is mostly spent in waiting
LIES_MAX = 6
LIAR_TIMEOUT_S = 0.2  # of its commands, so that an edge that waits in vain goes on
NUMBERS = st.sampled_from([0, 1, 2, 9, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
TEXTS = st.sampled_from([b"", b"x", b"exec", b"\xff\xfe", b"\0", b"y" * 40_000])
_TEXT_TAGS = [Tag.BUILD, Tag.DATA, Tag.WHAT, Tag.TEXT]
FIELDS = st.one_of(
    st.tuples(st.sampled_from([tag for tag in Tag if tag >= Tag.OFFSET and tag not in _TEXT_TAGS]), NUMBERS),
    st.tuples(st.sampled_from(_TEXT_TAGS), TEXTS),
)
SAID = st.tuples(
    st.sampled_from([kind for kind in Kind if kind >= Kind.WELCOME]),
    st.sampled_from(["the command", "another", "none", "huge"]),
    st.lists(FIELDS, max_size=5),
)
NOISE = st.one_of(st.binary(max_size=64), st.just(HEADER.pack(FRAME_BODY_MAX + 1, Kind.OUTPUT, 0, 1)))
LIES = st.lists(st.one_of(SAID, NOISE), max_size=LIES_MAX)


def as_bytes(what: Lie, command: int) -> bytes:
    """One lie as bytes."""
    if isinstance(what, bytes):
        return what
    kind, about, fields = what
    number = {"the command": command, "another": command + 1, "none": 0, "huge": 2**64 - 1}[about]
    return encode(kind, number, *fields)


class Liar:
    """A guest that greets, lists nothing, answers a command with lies and hangs up."""

    def __init__(self, tasks: TaskGroup) -> None:
        self.lies: list[Lie] = []
        self.links: list[socket.socket] = []
        self._tasks = tasks

    def connect(self) -> socket.socket:
        """The edge's end of a new connection."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self.links.append(theirs)
        self._tasks.start_soon(self._serve, theirs)
        return ours

    async def _serve(self, link: socket.socket) -> None:
        decoder = Decoder()
        with link, suppress(OSError):
            while True:
                await anyio.wait_readable(link)
                data = link.recv(1 << 20)
                if not data:
                    return
                for frame in decoder.feed(data):
                    if not self._answer(link, frame):
                        return

    def _answer(self, link: socket.socket, frame: Frame) -> bool:
        match frame.kind:
            case Kind.HELLO:
                link.send(encode(Kind.WELCOME, 0, (Tag.VERSION, 1), (Tag.BUILD, b"liar")))
            case Kind.LIST:
                link.send(encode(Kind.LISTED))
            case Kind.EXEC:
                link.send(b"".join(as_bytes(what, frame.command) for what in self.lies))
                return False
        return True


class LyingBackend(FakeBackend):
    """The fake, with a liar in the place of the guest of a sandbox that has the liar's host name."""

    liars: dict[str, Liar]

    async def create(self, sandbox: SandboxId, spec: SandboxSpec, image: Image) -> Instance:
        instance = await super().create(sandbox, spec, image)
        if spec.hostname in self.liars:
            self.instances[sandbox].connect = self.liars[spec.hostname].connect  # type: ignore[method-assign]
        return instance


@asynccontextmanager
async def edge_and_liars() -> AsyncIterator[tuple[EdgeKit, list[Liar]]]:
    with tempfile.TemporaryDirectory(prefix="cy-lied-") as name:
        backend = LyingBackend(Path(name) / "fake", guest_program())
        config = config_for(Path(name))
        async with anyio.create_task_group() as tasks, backend:
            backend.liars = {f"liar{number}": Liar(tasks) for number in range(LIARS)}
            async with Edge(config, backends={"container": backend}, images=fake_images) as edge:
                kit = EdgeKit(edge, backend)
                yield kit, list(backend.liars.values())
                await edge.stop_all()
                assert not edge.yard.sandboxes
            tasks.cancel_scope.cancel()
        for liar in backend.liars.values():
            for link in liar.links:
                link.close()


async def answered(box: Box) -> None:
    """A command of it comes to an end: a result, or an error of ours."""
    with anyio.fail_after(BOUND_S), suppress(CloudyardError):
        assert isinstance(await box.run("true", timeout_s=LIAR_TIMEOUT_S), ExecResult)


@pytest.fixture
async def lied_to() -> AsyncIterator[tuple[EdgeKit, list[Liar]]]:
    async with edge_and_liars() as made:
        yield made


@given(lies=st.lists(st.tuples(LIES, LIES), min_size=LIARS, max_size=LIARS))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
async def test_whatever_a_guest_says_every_request_is_answered(
    lied_to: tuple[EdgeKit, list[Liar]],
    caplog: pytest.LogCaptureFixture,
    lies: list[tuple[list[Lie], list[Lie]]],
) -> None:
    kit, liars = lied_to
    caplog.clear()
    made = len(kit.backend.instances)

    async def one(number: int) -> None:
        box = await kit.create(made + number, hostname=f"liar{number}")
        for said in lies[number]:
            liars[number].lies = said
            await answered(box)
        await box.do(StopSandbox())

    async with anyio.create_task_group() as tasks:
        for number in range(LIARS):
            tasks.start_soon(one, number)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


async def test_other_sandboxes_do_not_feel_it(lied_to: tuple[EdgeKit, list[Liar]]) -> None:
    kit, liars = lied_to
    honest = await kit.create(0)
    box = await kit.create(1, hostname="liar0")
    output: Lie = (
        Kind.OUTPUT,
        "the command",
        [(Tag.STREAM, 1), (Tag.OFFSET, 0), (Tag.DATA, bytes(32_000))],
    )
    liars[0].lies = [output] * 50
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answered, box)
        for _ in range(20):
            assert (await honest.run("echo fine")).stdout == b"fine\n"


def test_a_list_that_nobody_asked_for_or_that_never_ends_takes_no_memory() -> None:
    listing = Listing()
    for number in range(GUEST_COMMANDS_MAX):
        listing.note(Frame(Kind.STATE, number, ()))
    with pytest.raises(FrameError, match="more than"):
        listing.note(Frame(Kind.STATE, GUEST_COMMANDS_MAX, ()))
