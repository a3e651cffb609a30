"""The mux: many operations at a time over one WebSocket. A plain ASGI application, for speed.

A frame is read, its envelope is decoded and its operation goes on as it came; so does the result on the way
back. A client that loses its socket will come again with the same keys, so no command is stopped for it; only
an explicit cancel kills one. Stateless calls have no keys: they end with their socket.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import Raw

from cloudyard.control.http_errors import encode_error
from cloudyard.control.yard import Yard
from cloudyard.core.iam import ACTIONS, Grant, action_of, allow
from cloudyard.errors import CloudyardError, InvalidRequest, LimitExceeded
from cloudyard.model import check_key
from cloudyard.wire.messages import (
    MUX_IN_FLIGHT_MAX,
    UNREADABLE,
    CallOp,
    MuxCreate,
    MuxReply,
    MuxRequest,
    encode,
    error_body,
    mux_frame_decoder,
    op_tag,
    raw,
)

log = logging.getLogger(__name__)

CLOSE_BAD_FRAME = 1007  # WebSocket close code: the data is not what the protocol says

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _Numbered(msgspec.Struct):
    id: int = 0


class _Envelope(msgspec.Struct):
    """What can be read of a frame whose content is wrong."""

    request: _Numbered | None = None
    create: _Numbered | None = None
    call: _Numbered | None = None


_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)


class Mux:
    """The ASGI application behind MUX_PATH."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        try:
            grant = await self._yard.tokens.grant(_header(scope, b"authorization"))
        except CloudyardError as error:
            await refuse(scope, send, error)
            return
        await send({"type": "websocket.accept"})
        async with anyio.create_task_group() as tasks:
            await _Session(self._yard, grant, send, tasks).run(receive)
            tasks.cancel_scope.cancel()


class _Session:
    """One client's socket."""

    def __init__(self, yard: Yard, grant: Grant, send: Send, tasks: TaskGroup) -> None:
        self._yard = yard
        self._grant = grant
        self._send = send
        self._tasks = tasks
        self._limited = not set(ACTIONS) <= set(grant.actions)
        self._under_way: dict[int, tuple[anyio.CancelScope, CallOp | None]] = {}

    async def run(self, receive: Receive) -> None:
        """Take frames until the client leaves."""
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("bytes") or b""
            try:
                frame = mux_frame_decoder.decode(data)
            except UNREADABLE as exc:
                if not await self._refuse_frame(data, exc):
                    return
                continue
            if frame.cancel:
                self._cancel(frame.cancel)
                continue
            if frame.create is not None:
                number, call, work = frame.create.id, None, partial(self._create, frame.create)
            elif frame.request is not None:
                number, call = frame.request.id, self._call(frame.request)
                work = partial(self._do, call)
            elif frame.call is not None:
                number, call = frame.call.id, None
                work = partial(self._yard.call, self._grant, frame.call.spec)
            else:
                await self._close("A frame holds no request, no create, no call and no cancel.")
                return
            if number in self._under_way:
                await self._close(f"Request id {number} is under way already.")
                return
            await self._start(number, call, work)

    async def _refuse_frame(self, data: bytes, reason: Exception) -> bool:
        """Answer a frame of the wrong shape, if it says which request it is; else close the socket and give
        False.
        """
        number = 0
        try:
            envelope = _envelope_decoder.decode(data)
            parts = (envelope.request, envelope.create, envelope.call)
            number = max(part.id for part in parts if part is not None)
        except (*UNREADABLE, ValueError):
            pass
        if not number or number in self._under_way:
            await self._close(f"A frame cannot be read: {reason}.")
            return False
        error = InvalidRequest(
            f"The request cannot be read: {reason}.", code="bad_request", hint="See /schema."
        )
        await self._reply(MuxReply(id=number, error=error_body(error)))
        return True

    def _call(self, request: MuxRequest) -> CallOp:
        return CallOp(
            project=self._grant.project,
            cause=self._yard.new_cause(),
            sandbox=request.sandbox,
            op=request.op,
            key=request.key,
        )

    async def _do(self, call: CallOp) -> Raw:
        if self._limited:
            allow(self._grant, action_of(op_tag(call.op)))
        check_key(call.key)
        return await self._yard.edges.op(call)

    async def _create(self, create: MuxCreate) -> Raw:
        return raw(await self._yard.create(self._grant, create.request))

    async def _start(self, number: int, call: CallOp | None, work: Callable[[], Awaitable[Raw]]) -> None:
        if len(self._under_way) >= MUX_IN_FLIGHT_MAX:
            error = LimitExceeded(
                f"{MUX_IN_FLIGHT_MAX} requests are under way on this socket.",
                code="too_many_in_flight",
                hint="Wait for some of them, or open another connection.",
                retry_safe=True,
            )
            await self._reply(MuxReply(id=number, error=error_body(error)))
            return
        scope = anyio.CancelScope()
        self._under_way[number] = (scope, call)
        self._tasks.start_soon(self._answer, number, scope, work)

    async def _answer(
        self, number: int, scope: anyio.CancelScope, work: Callable[[], Awaitable[Raw]]
    ) -> None:
        reply: MuxReply | None = None
        with scope:
            try:
                reply = MuxReply(id=number, result=await work())
            except CloudyardError as error:
                reply = MuxReply(id=number, error=error_body(error))
        del self._under_way[number]
        if reply is not None:
            await self._reply(reply)

    def _cancel(self, number: int) -> None:
        scope, call = self._under_way.get(number, (None, None))
        if scope is not None:
            scope.cancel()
        if call is not None:
            self._tasks.start_soon(self._yard.edges.cancel, call)

    async def _reply(self, reply: MuxReply) -> None:
        try:
            await self._send({"type": "websocket.send", "bytes": encode(reply)})
        except OSError:
            return  # the client has left; `run` sees it too

    async def _close(self, reason: str) -> None:
        log.info("a mux socket of project %s is closed: %s", self._grant.project, reason)
        await self._send({"type": "websocket.close", "code": CLOSE_BAD_FRAME, "reason": reason[:120]})


async def refuse(scope: Scope, send: Send, error: CloudyardError) -> None:
    """Answer a WebSocket handshake with an HTTP error in our shape."""
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008, "reason": error.message[:120]})
        return
    status, headers, body = encode_error(error)
    headers |= {"Content-Type": "application/json"}
    raw_headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "websocket.http.response.start", "status": status, "headers": raw_headers})
    await send({"type": "websocket.http.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None
