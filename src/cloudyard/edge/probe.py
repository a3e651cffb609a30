"""The first command of a sandbox: the image's own probe, run by the backend to see that anything runs in it.

It is no step and leaves no record. A backend runs it over a connection of its own, which is closed before
anybody else's, so that a create gives only what has worked.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

import anyio
from anyio import wait_readable

from cloudyard.edge.config import PROBE_S
from cloudyard.edge.verdict import judge_not_started
from cloudyard.errors import SandboxUnavailable
from cloudyard.wire.guest import Decoder, Frame, FrameError, Kind, Tag, encode, greeting

PROBE_COMMAND = 1 << 62  # a command id that no step has
SAID_MAX_BYTES = 2000  # of the probe's output, shown when it fails
RECEIVED_MAX_BYTES = 64 * 1024  # at once


class GuestSilent(Exception):
    """The guest's connection ended before it had answered."""


async def prove(
    link: socket.socket, image: str, *, probe: Sequence[str], env: Iterable[tuple[str, str]]
) -> None:
    """Greet a guest, run the image's probe and wait for its end.

    Args:
        link: a non-blocking connection that nobody has used yet. It is of no use afterwards.
        image: the image's name, for the error.
        probe: its probe's arguments.
        env: its environment.

    Raises:
        GuestSilent: the connection ended.
        SandboxUnavailable: the probe did not run, did not end within PROBE_S or did not end well.
        FrameError: the guest broke the protocol.
    """
    said = b""
    try:
        link.send(greeting() + _exec_frame(probe, env))
        with anyio.move_on_after(PROBE_S):
            decoder = Decoder()
            while True:
                await wait_readable(link)
                data = link.recv(RECEIVED_MAX_BYTES)
                if not data:
                    raise GuestSilent
                for frame in decoder.feed(data):
                    if frame.kind == Kind.OUTPUT:
                        said = (said + frame.data(Tag.DATA))[:SAID_MAX_BYTES]
                    problem = _problem(frame)
                    if problem:
                        raise _unusable(image, probe, problem, said)
                    if problem is not None:
                        link.send(encode(Kind.FORGET, PROBE_COMMAND))
                        return
    except OSError as exc:
        raise GuestSilent from exc
    raise _unusable(image, probe, f"did not end within {PROBE_S:g} s", said)


def _exec_frame(probe: Sequence[str], env: Iterable[tuple[str, str]]) -> bytes:
    arguments = [(Tag.ARG, part.encode()) for part in probe]
    environment = [(Tag.ENV, f"{name}={value}".encode()) for name, value in env]
    return encode(Kind.EXEC, PROBE_COMMAND, *arguments, *environment)


def _problem(frame: Frame) -> str | None:
    """What is wrong, by a frame that ends the probe; empty: nothing is. None: the frame does not end it."""
    match frame.kind:
        case Kind.EXITED:
            code, signal = frame.maybe_number(Tag.EXIT_CODE), frame.maybe_number(Tag.SIGNAL)
            if code == 0:
                return ""
            return f"ended with exit code {code}" if signal is None else f"was ended by signal {signal}"
        case Kind.NOT_STARTED:
            what, number, text = frame.text(Tag.WHAT), frame.number(Tag.ERRNO, 0), frame.text(Tag.TEXT)
            return f"could not be started ({judge_not_started(what, number, text, forks_refused=0).error})"
        case Kind.ERROR:
            raise FrameError(f"The guest refused the image's probe: {frame.text(Tag.TEXT)}")
        case _:
            return None


def _unusable(image: str, probe: Sequence[str], problem: str, said: bytes) -> SandboxUnavailable:
    words = said.decode("utf-8", "replace").strip()
    return SandboxUnavailable(
        f"Image {image!r} cannot be used: its probe {list(probe)} {problem}."
        + (f" It said: {words}" if words else ""),
        code="image_unusable",
        fault="policy",
        hint="Check that the image holds the probe, or name another one in the image's config.",
    )
