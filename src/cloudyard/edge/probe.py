"""The first command of a sandbox: the image's own probe, run by us to see that anything runs in it at all.

It is no step and leaves no record. It is over before the link is handed to the sandbox's `Commands`.
"""

from __future__ import annotations

import anyio

from cloudyard.edge.config import PROBE_S
from cloudyard.edge.guest_link import GuestLink
from cloudyard.edge.records import Head
from cloudyard.edge.translate import exec_frame
from cloudyard.edge.verdict import judge_not_started
from cloudyard.errors import SandboxUnavailable
from cloudyard.model import CommandSpec
from cloudyard.wire.guest import Frame, Kind, Tag, encode

PROBE_COMMAND = 1 << 62  # a command id that no step has
SAID_MAX_BYTES = 2000  # of the probe's output, shown when it fails


class Probe:
    """Runs the probe over a link and receives what comes of it."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._done = anyio.Event()
        self._problem = ""
        self._said = b""

    async def run(self, link: GuestLink) -> None:
        """Run it to its end.

        Raises:
            SandboxUnavailable: it did not run, did not end within PROBE_S or did not end well.
        """
        spec = CommandSpec(argv=self._head.image.probe)
        link.send(exec_frame(PROBE_COMMAND, spec, self._head))
        self._problem = f"did not end within {PROBE_S:g} s"
        with anyio.move_on_after(PROBE_S):
            await self._done.wait()
        link.send(encode(Kind.FORGET, PROBE_COMMAND))
        if self._problem:
            said = self._said.decode("utf-8", "replace").strip()
            raise SandboxUnavailable(
                f"Image {self._head.spec.image!r} cannot be used: its probe {self._head.image.probe} "
                + f"{self._problem}."
                + (f" It said: {said}" if said else ""),
                code="image_unusable",
                fault="policy",
                hint="Check that the image holds the probe, or name another one in the image's config.",
            )

    def on_frame(self, frame: Frame) -> None:
        """Take note of what the probe did."""
        if frame.command != PROBE_COMMAND:
            return
        match frame.kind:
            case Kind.OUTPUT:
                self._said = (self._said + frame.data(Tag.DATA))[:SAID_MAX_BYTES]
            case Kind.EXITED:
                code, signal = frame.maybe_number(Tag.EXIT_CODE), frame.maybe_number(Tag.SIGNAL)
                how = f"ended with exit code {code}" if signal is None else f"was ended by signal {signal}"
                self._end("" if code == 0 else how)
            case Kind.NOT_STARTED:
                what, number, text = frame.text(Tag.WHAT), frame.number(Tag.ERRNO, 0), frame.text(Tag.TEXT)
                why = judge_not_started(what, number, text, forks_refused=0)
                self._end(f"could not be started ({why.error})")
            case _:
                pass  # that it has started, or has left no process

    def on_quiet(self) -> None:
        """Its output fits the guest's window; nothing is acknowledged."""

    def on_broken(self, why: str) -> None:
        """The sandbox died of it, or by itself."""
        self._end(f"was cut off: {why}")

    def _end(self, problem: str) -> None:
        self._problem = problem
        self._done.set()
