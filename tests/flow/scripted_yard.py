"""A yard whose answers a test writes, on real sockets: for what a real one does only when it breaks.

It speaks the mux protocol and nothing else. Flows that work are tested against the real gateway and edge.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import anyio
import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from cloudyard.errors import CloudyardError
from cloudyard.model import AnyOp, AnyResult
from cloudyard.sdk.client import Yard, connect
from cloudyard.sdk.sandbox import Sandbox
from cloudyard.wire import messages

TOKEN = "cy_test_token"
SANDBOX = "sb-e1-0a1b2c3d4e5f"
Answer = Callable[[AnyOp, str], Awaitable[AnyResult]]


def box_of(yard: Yard) -> Sandbox:
    """A sandbox that the yard is to know."""
    return Sandbox(yard._caller, SANDBOX)


class ScriptedYard:
    """Answers every request by `answer(op, key)`, concurrently. Remembers what it saw."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.seen: list[tuple[AnyOp, str]] = []
        self.cancelled: list[AnyOp] = []
        self.connections: list[ServerConnection] = []
        self.port = 0
        self._server: Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the port of the first start."""
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            self.port,
            process_request=self._check,
            compression=None,
            ping_interval=None,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and drop every connection without a goodbye."""
        if self._server is not None:
            self._server.close(close_connections=False)
            for connection in self.connections:
                connection.transport.abort()
            await self._server.wait_closed()
        self.connections.clear()
        self._server = None

    def _check(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "no such token")
        return None

    async def _serve(self, connection: ServerConnection) -> None:
        self.connections.append(connection)
        scopes: dict[int, tuple[anyio.CancelScope, AnyOp]] = {}

        async def one(request: messages.MuxRequest, op: AnyOp) -> None:
            with anyio.CancelScope() as scope:
                scopes[request.id] = scope, op
                try:
                    reply = messages.MuxReply(
                        id=request.id, result=messages.raw(await self.answer(op, request.key))
                    )
                except CloudyardError as error:
                    reply = messages.MuxReply(id=request.id, error=messages.error_body(error))
                try:
                    await connection.send(messages.encode(reply))
                except ConnectionClosed:
                    return

        async with anyio.create_task_group() as tasks:
            try:
                async for data in connection:
                    frame = messages.mux_frame_decoder.decode(data)
                    if frame.request is not None:
                        op = messages.decode_op(frame.request.op)
                        self.seen.append((op, frame.request.key))
                        tasks.start_soon(one, frame.request, op)
                    elif frame.cancel in scopes:
                        scope, op = scopes[frame.cancel]
                        self.cancelled.append(op)
                        scope.cancel()
            except (ConnectionClosed, msgspec.MsgspecError):
                pass
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[tuple[ScriptedYard, Yard]]:
    """A scripted yard and an open client of it."""
    server = ScriptedYard(answer)
    await server.start()
    try:
        async with connect(server.url, TOKEN) as yard:
            yield server, yard
    finally:
        await server.stop()
