"""What a guest holds, asked for with LIST once a link to it is new."""

from __future__ import annotations

import anyio

from cloudyard.edge.guest_link import GuestLink
from cloudyard.errors import SandboxUnavailable
from cloudyard.wire.guest import GUEST_COMMANDS_MAX, Frame, FrameError, Kind, encode


class Listing:
    """One question at a time; STATE and LISTED frames are the answer."""

    __slots__ = ("_done", "_states")

    def __init__(self) -> None:
        self._states: dict[int, Frame] = {}
        self._done: anyio.Event | None = None

    async def ask(self, link: GuestLink) -> dict[int, Frame]:
        """Every command that the guest holds, with what it says of each.

        Raises:
            SandboxUnavailable: the link broke meanwhile.
        """
        self._states = {}
        self._done = anyio.Event()
        link.send(encode(Kind.LIST))
        await self._done.wait()
        self._done = None
        if link.broken:
            raise SandboxUnavailable(
                f"The guest's list did not come: {link.broken}.", code="guest_unreachable"
            )
        return self._states

    def note(self, state: Frame) -> None:
        """One of its commands.

        Raises:
            FrameError: it tells of more commands than a guest holds.
        """
        self._states[state.command] = state
        if len(self._states) > GUEST_COMMANDS_MAX:
            raise FrameError(f"it lists more than {GUEST_COMMANDS_MAX} commands")

    def end(self) -> None:
        """That was the last one, or the link is gone."""
        if self._done is not None:
            self._done.set()
