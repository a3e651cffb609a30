"""Stateless calls at an edge's door: read and checked, handed to what makes them, killed when nobody waits.

Knows messages and the protocol of whatever makes a call, and nothing of how that is done.
"""

from __future__ import annotations

from typing import Protocol

import anyio
from msgspec.structs import replace

from cloudyard.errors import Conflict
from cloudyard.model import CallResult, CallSpec, normalised_call
from cloudyard.wire.messages import CallCancel, CallFunction, decode_call


class Functions(Protocol):
    """What makes calls on this node."""

    async def call(self, spec: CallSpec, *, project: str, cause: str) -> CallResult:
        """Run the code and say how it ended. Cancelling it kills every process of the call.

        Args:
            spec: checked, and its memory in bytes.
            project: whose call it is.
            cause: the id of the request behind it.

        Raises:
            NotFound: there is no such image.
            Unsupported: the image lacks an interpreter or a compiler; the hint says what to install.
            LimitExceeded: too many calls wait (`retry_safe`).
            SandboxUnavailable: it could not be run, through no doing of its own.
        """


class Calls:
    """The calls under way on this edge."""

    def __init__(self, functions: Functions, *, edge: str) -> None:
        self._functions = functions
        self._edge = edge
        self._under_way: dict[tuple[str, str], anyio.CancelScope] = {}

    async def call(self, call: CallFunction) -> CallResult:
        """Make a call. Until its first await it is known to `cancel`, so that a cancel that came right after
        it finds it.

        Raises:
            InvalidRequest: the spec cannot be read, or is out of range.
            Conflict: it was cancelled (`call_cancelled`).
            CloudyardError: as `Functions.call` does.
        """
        spec = normalised_call(decode_call(call.spec))
        name = (call.project, call.cause)
        with anyio.CancelScope() as scope:
            self._under_way[name] = scope
            try:
                result = await self._functions.call(spec, project=call.project, cause=call.cause)
            finally:
                if self._under_way.get(name) is scope:
                    del self._under_way[name]
            return result if result.edge else replace(result, edge=self._edge)
        raise Conflict("The call was cancelled: nobody waits for it.", code="call_cancelled")

    def cancel(self, cancel: CallCancel) -> bool:
        """Kill the call that had this cause; gives whether there is one."""
        scope = self._under_way.get((cancel.project, cancel.cause))
        if scope is None:
            return False
        scope.cancel()
        return True
