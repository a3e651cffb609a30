"""The connection to one guest: greets it, sends frames, hands each frame that comes to its owner.

Knows the frame format and sockets, and nothing of what the frames mean. It lives in the edge's `Poller`:
no task, no buffer while idle. A link breaks once and for good; whoever owns it connects again with a new
one.
"""

from __future__ import annotations

import logging
import socket
from typing import Protocol

import anyio

from cloudyard.edge.config import COMPLAINTS_MAX, GUEST_ANSWER_S, LINK_PENDING_MAX_BYTES
from cloudyard.edge.poller import WRITABLE, Poller
from cloudyard.errors import SandboxUnavailable
from cloudyard.wire.guest import Decoder, Frame, FrameError, Kind, Tag, greeting

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who gets what comes over a link. None of the three may wait."""

    def on_frame(self, frame: Frame) -> None:
        """A frame has come."""

    def on_quiet(self) -> None:
        """All frames that had come together have been handed over: the moment to acknowledge them at once."""

    def on_broken(self, why: str) -> None:
        """The link broke; nothing more comes."""


class GuestLink:
    """One connection, from its greeting to its end."""

    __slots__ = (
        "_complaints",
        "_corked",
        "_decoder",
        "_out",
        "_poller",
        "_sock",
        "_welcome",
        "_writing",
        "broken",
        "build",
        "receiver",
    )

    def __init__(self, poller: Poller, sock: socket.socket, receiver: Receiver) -> None:
        self._poller = poller
        self._sock = sock
        self.receiver = receiver
        """Who gets what comes; may change hands between two frames."""
        self._decoder = Decoder()
        self._out = bytearray()
        self._complaints = 0
        self._corked = False
        self._writing = False
        self._welcome: anyio.Event | None = anyio.Event()
        self.broken = ""
        """Why it broke; empty while it works."""
        self.build = ""

    async def greet(self) -> None:
        """Say hello and wait for the guest's answer.

        Raises:
            SandboxUnavailable: the guest refused, broke off or said nothing for GUEST_ANSWER_S.
        """
        welcome = self._welcome
        assert welcome is not None, "a link greets once"
        self._poller.add(self._sock.fileno(), self._on_ready)
        self.send(greeting())
        with anyio.move_on_after(GUEST_ANSWER_S):
            await welcome.wait()
        if not self.build and not self.broken:
            self.close(f"the guest did not greet within {GUEST_ANSWER_S:g} s")
        if self.broken:
            raise SandboxUnavailable(
                f"The connection to the guest could not be made: {self.broken}.", code="guest_unreachable"
            )
        self._welcome = None

    def send(self, data: bytes) -> None:
        """Send whole frames, in order, after what is still waiting. On a broken link they go nowhere."""
        if self.broken:
            return
        self._out += data
        if len(self._out) > LINK_PENDING_MAX_BYTES:
            self._break("the guest does not read what it is sent")
        elif not self._corked and not self._writing:
            self._flush()

    def close(self, why: str) -> None:
        """End it from our side. The receiver is not told."""
        if not self.broken:
            self.broken = why
            self._poller.remove(self._sock.fileno())
            self._sock.close()
            self._out = bytearray()
        if self._welcome is not None:
            self._welcome.set()

    def _on_ready(self, bits: int) -> None:
        if bits & WRITABLE:
            self._flush()
        if self.broken or not bits & ~WRITABLE:
            return
        try:
            size = self._sock.recv_into(self._poller.scratch)
        except BlockingIOError:
            return
        except OSError as exc:
            self._break(f"receiving from the guest failed: {exc.strerror}")
            return
        if not size:
            self._break("the guest closed the connection")
            return
        self._corked = True  # what frames cause to be sent goes out together, below
        try:
            for frame in self._decoder.feed(bytes(self._poller.scratch[:size])):
                self._take(frame)
            self.receiver.on_quiet()
        except FrameError as exc:
            self._break(f"the guest broke the protocol: {exc.message}")
            return
        except Exception:
            log.exception("A frame could not be dealt with; the link is given up and made anew.")
            self._break("a frame could not be dealt with")
            return
        self._corked = False
        if self._out and not self.broken:
            self._flush()

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.ERROR:
            self._complaints += 1
            if self._complaints > COMPLAINTS_MAX:
                raise FrameError("it complains without end")
        if self._welcome is None or self.build:
            self.receiver.on_frame(frame)
        elif frame.kind == Kind.WELCOME:
            self.build = frame.text(Tag.BUILD) or "unnamed"
            self._welcome.set()
        else:
            raise FrameError(frame.text(Tag.TEXT) or f"it began with a frame of kind {frame.kind}")

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._out)
        except BlockingIOError:
            sent = 0
        except OSError as exc:
            self._break(f"sending to the guest failed: {exc.strerror}")
            return
        del self._out[:sent]
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            self._poller.want_write(self._sock.fileno(), wanted=self._writing)

    def _break(self, why: str) -> None:
        greeted = bool(self.build)
        self.close(why)
        if greeted:
            self.receiver.on_broken(why)
