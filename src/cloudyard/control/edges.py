"""Calls to edges: envelope out, answer in, the edge's errors raised as they are."""

from __future__ import annotations

import logging

import anyio
from msgspec import Raw

from cloudyard.control.watcher import Watcher
from cloudyard.errors import CloudyardError, YardUnavailable
from cloudyard.fabric import Fabric
from cloudyard.model import EdgeId, edge_of
from cloudyard.wire.messages import (
    REPEATABLE,
    UNREADABLE,
    AnyCall,
    CallCancel,
    CallOp,
    call_subject,
    encode,
    error_of,
    op_tag,
    reply_decoder,
)

log = logging.getLogger(__name__)

CANCEL_S = 5.0  # to tell an edge that nobody waits any more


class Edges:
    """The edges, as things to call."""

    def __init__(self, fabric: Fabric, watcher: Watcher) -> None:
        self._fabric = fabric
        self._watcher = watcher

    async def call(self, edge: EdgeId, call: AnyCall) -> Raw:
        """Ask an edge and wait for its result, still encoded, until cancelled.

        Raises:
            YardUnavailable: it is away, or its answer was lost.
            CloudyardError: whatever the edge says.
        """
        self._watcher.check(edge)
        answer = await self._fabric.request(call_subject(edge), encode(call))
        try:
            reply = reply_decoder.decode(answer)
        except UNREADABLE as exc:
            raise CloudyardError(
                f"The answer of edge {edge} cannot be read: {exc}.", code="bad_reply"
            ) from exc
        if reply.error is not None:
            raise error_of(reply.error)
        return reply.result

    async def cancel(self, call: CallOp) -> None:
        """Tell the edge that nobody waits for this call any more. Bounded, and finished also when cancelled:
        a client that gives up and leaves at once still gets its command killed.
        """
        cancel = CallCancel(project=call.project, cause=call.cause, sandbox=call.sandbox, key=call.key)
        await self.tell(edge_of(call.sandbox), cancel)

    async def tell(self, edge: EdgeId, cancel: CallCancel) -> None:
        """The same, where the edge is known."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(CANCEL_S):
            try:
                await self.call(edge, cancel)
            except CloudyardError as error:
                log.info("a cancel did not reach its edge: %s", error)

    async def op(self, call: CallOp) -> Raw:
        """Do an operation on the edge that its sandbox's id names.

        Raises:
            InvalidRequest: the text is no sandbox id.
            YardUnavailable: its edge is away, or the answer was lost; `retry_safe` is false when it may have
                been done and has no key to recognise it by.
            CloudyardError: whatever the edge says.
        """
        try:
            return await self.call(edge_of(call.sandbox), call)
        except YardUnavailable as exc:
            if exc.code != "answer_lost" or call.key or op_tag(call.op) in REPEATABLE:
                raise
            raise YardUnavailable(
                exc.message,
                code=exc.code,
                hint="It may have been done. With a step key it could be sent again safely.",
                retry_safe=False,
            ) from exc
