"""The edge's side of the guest protocol, against the real guest and against one that breaks it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from cloudyard.edge.guest_link import GuestLink
from cloudyard.edge.poller import Poller
from cloudyard.errors import SandboxUnavailable
from cloudyard.testing.guest_client import running_guest
from cloudyard.wire.guest import STDOUT, Frame, Kind, Tag, encode
from flow.edge_kit import guest_program

BOUND_S = 20.0


class Listener:
    """Keeps what comes over a link."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.quiet = 0
        self.broken = ""
        self._changed = anyio.Event()

    def on_frame(self, frame: Frame) -> None:
        self.frames.append(frame)

    def on_quiet(self) -> None:
        self.quiet += 1
        self._changed.set()

    def on_broken(self, why: str) -> None:
        self.broken = why
        self._changed.set()

    async def until(self, kind: Kind) -> Frame:
        """The first frame of a kind, once it has come."""
        with anyio.fail_after(BOUND_S):
            while True:
                for frame in self.frames:
                    if frame.kind == kind:
                        return frame
                await self.wait()

    async def wait(self) -> None:
        """Something more has come."""
        await self._changed.wait()
        self._changed = anyio.Event()


@pytest.fixture
async def poller() -> AsyncIterator[Poller]:
    made = Poller()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        yield made
        tasks.cancel_scope.cancel()
    made.close()


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Path]:
    """A socket on which the real guest listens."""
    with running_guest(guest_program()) as running:
        yield running.path


def connect(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.setblocking(False)
    link.connect(str(path))
    return link


def fake_peer() -> tuple[socket.socket, socket.socket]:
    """Our end, and the end of a guest that a test plays."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


async def test_it_greets_and_learns_who_is_there(poller: Poller, guest: Path):
    listener = Listener()
    link = GuestLink(poller, connect(guest), listener)
    await link.greet()
    assert link.build
    link.send(encode(Kind.PING, 0, (Tag.DATA, b"hello")))
    assert (await listener.until(Kind.PONG)).data(Tag.DATA) == b"hello"
    link.close("done")
    assert listener.broken == ""


async def test_frames_that_come_together_are_handed_over_before_it_is_quiet(poller: Poller, guest: Path):
    listener = Listener()
    link = GuestLink(poller, connect(guest), listener)
    await link.greet()
    link.send(b"".join(encode(Kind.PING, 0, (Tag.DATA, b"%d" % number)) for number in range(50)))
    with anyio.fail_after(BOUND_S):
        while len(listener.frames) < 50:
            await listener.wait()
    assert [frame.data(Tag.DATA) for frame in listener.frames] == [b"%d" % number for number in range(50)]
    assert listener.quiet <= 50
    link.close("done")


async def test_a_command_runs_over_it(poller: Poller, guest: Path):
    listener = Listener()
    link = GuestLink(poller, connect(guest), listener)
    await link.greet()
    link.send(encode(Kind.EXEC, 1, (Tag.ARG, b"/bin/echo"), (Tag.ARG, b"hi"), (Tag.CWD, b"/")))
    assert (await listener.until(Kind.EXITED)).number(Tag.EXIT_CODE) == 0
    output = await listener.until(Kind.OUTPUT)
    assert (output.number(Tag.STREAM), output.data(Tag.DATA)) == (STDOUT, b"hi\n")
    link.close("done")


async def test_a_guest_that_refuses_is_unreachable_and_says_why(poller: Poller):
    ours, theirs = fake_peer()
    with theirs:
        theirs.sendall(encode(Kind.ERROR, 0, (Tag.TEXT, b"no version in common")))
        with pytest.raises(SandboxUnavailable, match="no version in common") as caught:
            await GuestLink(poller, ours, Listener()).greet()
    assert caught.value.code == "guest_unreachable"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 16,
        encode(Kind.PONG),
        b"\x05\x00\x00\x00\x40\x00\x00\x00" + bytes(8) + b"\x01\x00\x09\x00\x00",
    ],
)
async def test_a_peer_that_is_no_guest_is_refused(poller: Poller, data: bytes):
    ours, theirs = fake_peer()
    with theirs:
        theirs.sendall(data)
        with pytest.raises(SandboxUnavailable):
            await GuestLink(poller, ours, Listener()).greet()


async def test_a_guest_that_hangs_up_while_greeting_is_unreachable(poller: Poller):
    ours, theirs = fake_peer()
    theirs.close()
    with pytest.raises(SandboxUnavailable):
        await GuestLink(poller, ours, Listener()).greet()


@pytest.mark.parametrize("ending", ["close", "garbage"])
async def test_a_link_breaks_once_and_sends_nothing_more(poller: Poller, ending: str):
    ours, theirs = fake_peer()
    listener = Listener()
    with theirs:
        theirs.sendall(encode(Kind.WELCOME, 0, (Tag.VERSION, 1), (Tag.BUILD, b"test")))
        link = GuestLink(poller, ours, listener)
        await link.greet()
        if ending == "close":
            theirs.close()
        else:
            theirs.sendall(b"\xff" * 64)
        with anyio.fail_after(BOUND_S):
            while not listener.broken:
                await listener.wait()
        assert link.broken == listener.broken
        link.send(encode(Kind.PING))
        link.close("again")
        assert link.broken == listener.broken


async def test_a_guest_that_does_not_read_is_waited_for_and_then_gets_all(poller: Poller):
    ours, theirs = fake_peer()
    listener = Listener()
    theirs.sendall(encode(Kind.WELCOME, 0, (Tag.VERSION, 1), (Tag.BUILD, b"test")))
    link = GuestLink(poller, ours, listener)
    await link.greet()
    data = encode(Kind.STDIN, 1, (Tag.DATA, bytes(1_000_000)))
    for _ in range(4):
        link.send(data)
    with theirs:
        received = 0
        hello = len(encode(Kind.HELLO, 0, (Tag.VERSION_MIN, 1), (Tag.VERSION_MAX, 1)))
        theirs.settimeout(BOUND_S)
        while received < hello + 4 * len(data):
            received += len(await anyio.to_thread.run_sync(theirs.recv, 1 << 20))
        assert received == hello + 4 * len(data)
        assert not link.broken
        link.close("done")
