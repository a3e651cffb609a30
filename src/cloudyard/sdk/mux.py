"""Operations and calls over one WebSocket, many at a time: the default way to a yard.

One reader and one writer task per connection, in the client's task group. A writer of its own means that a
cancelled caller never leaves half a frame on the wire, and that requests made together go out in one send.
The WebSocket protocol is that of `websockets` without its I/O; sockets are anyio's.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable
from functools import partial
from itertools import count
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream, TaskGroup
from msgspec import Raw
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from cloudyard.errors import CloudyardError, YardUnavailable
from cloudyard.model import AnyOp, AnyResult, CallResult, CallSpec, CreateRequest, SandboxInfo
from cloudyard.sdk.config import Config
from cloudyard.sdk.transport import (
    CREATE_WITHIN_S,
    error_of_response,
    expect,
    lost,
    no_answer,
    unreachable,
)
from cloudyard.wire import messages
from cloudyard.wire.messages import (
    MUX_FRAME_MAX,
    MUX_IN_FLIGHT_MAX,
    MUX_PATH,
    MuxCall,
    MuxCreate,
    MuxFrame,
    MuxReply,
    MuxRequest,
)

CONNECT_WITHIN_S = 5.0  # from the first packet to the end of the handshake
CLOSE_WITHIN_S = 1.0
PING_EVERY_S = 10.0  # a connection on which nothing came for two of these is broken
READ_BYTES = 256 * 1024
OUTGOING_BYTES_MAX = 4 * 1024 * 1024  # queued for the socket; requests wait beyond it


class MuxTransport:
    """A connection to a yard that is made when it is needed and made again when it breaks."""

    def __init__(self, config: Config, tasks: TaskGroup) -> None:
        self._config = config
        self._tasks = tasks
        self._link: _Link | None = None
        self._connecting = anyio.Lock()
        self._attempts = 0
        self._failure: CloudyardError | None = None
        self._closed = False
        self._in_flight = anyio.Semaphore(MUX_IN_FLIGHT_MAX, fast_acquire=True)

    async def ask(self, sandbox: str, op: AnyOp, *, key: str, within_s: float | None) -> AnyResult:
        """See `Transport.ask`."""
        body = messages.raw(op)

        def frame(number: int) -> MuxFrame:
            return MuxFrame(MuxRequest(id=number, sandbox=sandbox, op=body, key=key))

        return messages.result_decoder.decode(await self._answer(frame, within_s=within_s))

    async def create(self, request: CreateRequest) -> SandboxInfo:
        """See `Transport.create`."""
        answer = await self._answer(partial(_create_frame, request), within_s=CREATE_WITHIN_S)
        return expect(SandboxInfo, messages.result_decoder.decode(answer), what="a create")

    async def call(self, spec: CallSpec, *, within_s: float) -> CallResult:
        """See `Transport.call`."""
        frame = partial(_call_frame, messages.raw(spec))
        return messages.call_result_decoder.decode(await self._answer(frame, within_s=within_s))

    async def open(self) -> None:
        """Connect now, so that a yard that is not there is noticed at once."""
        await self._connected()

    async def close(self) -> None:
        """Say goodbye. The tasks of the connection end with it."""
        self._closed = True
        if self._link is not None:
            await self._link.close()

    async def _answer(self, frame: Callable[[int], MuxFrame], *, within_s: float | None) -> Raw:
        async with self._in_flight:
            link = self._link
            if link is None or link.broken is not None:
                link = await self._connected()
            return await link.ask(frame, within_s=within_s)

    async def _connected(self) -> _Link:
        seen = self._attempts
        async with self._connecting:
            if self._link is not None and self._link.broken is None:
                return self._link
            if self._attempts != seen and self._failure is not None:
                raise _again(self._failure)  # whoever held the lock has just tried, for all of us
            self._attempts += 1
            self._failure = None
            try:
                with anyio.fail_after(CONNECT_WITHIN_S):
                    self._link = await _connect(self._config)
            except TimeoutError as exc:
                self._failure = unreachable(self._config.url, f"no answer within {CONNECT_WITHIN_S:g} s")
                raise self._failure from exc
            except CloudyardError as error:
                self._failure = error
                raise
            self._tasks.start_soon(self._link.run, name="cloudyard mux")
            if self._closed:
                await self._link.close()
            return self._link


class _Pending:
    """A request whose answer is awaited."""

    __slots__ = ("done", "reply")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.reply: MuxReply | None = None


class _Link:
    """One connection, from the handshake to its break."""

    def __init__(self, url: str, stream: ByteStream, protocol: ClientProtocol) -> None:
        self.broken: YardUnavailable | None = None
        self._url = url
        self._stream = stream
        self._protocol = protocol
        self._pending: dict[int, _Pending] = {}
        self._ids = count(1)
        self._message = bytearray()  # of a message in several frames
        self._heard = True
        self._outgoing_bytes = 0
        self._to_send = anyio.Event()
        self._sent = anyio.Event()
        # Who is cancelled still has a command to kill and a sandbox to stop: only `close` ends the link.
        self._scope = anyio.CancelScope(shield=True)

    async def ask(self, frame: Callable[[int], MuxFrame], *, within_s: float | None) -> Raw:
        """Send the frame under a new number and wait for its result, still encoded; see `Transport.ask`."""
        while self._outgoing_bytes > OUTGOING_BYTES_MAX and self.broken is None:
            await self._sent.wait()
        number = next(self._ids)
        pending = _Pending()
        self._send(frame(number))
        self._pending[number] = pending
        try:
            with anyio.move_on_after(math.inf if within_s is None else within_s):
                await pending.done.wait()
        except anyio.get_cancelled_exc_class():
            if pending.reply is None and self.broken is None and self._protocol.state is State.OPEN:
                self._send(MuxFrame(cancel=number))
            raise
        finally:
            del self._pending[number]
        reply = pending.reply
        if reply is None:
            raise _again(self.broken) if self.broken is not None else no_answer(self._url, within_s or 0)
        if reply.error is not None:
            raise messages.error_of(reply.error)
        return reply.result

    async def run(self) -> None:
        """Read, write and ping until the connection breaks or is closed; then fail what still waits."""
        reason: object = "it was closed"
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write)
                    tasks.start_soon(self._ping)
                    await self._read()
        except* (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as group:
            reason = _first_reason(group)
        except* (WebSocketException, *messages.UNREADABLE) as group:
            reason = f"the yard broke the protocol ({_first_reason(group)})"
        finally:
            self.broken = lost(self._url, reason)
            self._sent.set()
            for pending in self._pending.values():
                pending.done.set()
            with anyio.CancelScope(shield=True):
                await self._stream.aclose()

    async def close(self) -> None:
        """Send a close frame, give it a moment, and end the tasks."""
        try:
            if self.broken is None and self._protocol.state is State.OPEN:
                self._protocol.send_close(1000)
                self._to_send.set()
                with anyio.move_on_after(CLOSE_WITHIN_S, shield=True):
                    while self._to_send.is_set() and self.broken is None:
                        await self._sent.wait()
        finally:
            self._scope.cancel()

    def _send(self, frame: MuxFrame) -> None:
        if self.broken is not None:
            raise _again(self.broken)
        if self._protocol.state is not State.OPEN:
            raise lost(self._url, "the yard is closing it")
        data = messages.encode(frame)
        self._protocol.send_binary(data)
        self._outgoing_bytes += len(data)
        self._to_send.set()

    async def _write(self) -> None:
        while True:
            await self._to_send.wait()
            self._to_send = anyio.Event()
            data = b"".join(self._protocol.data_to_send())
            self._outgoing_bytes = 0
            if data:
                await self._stream.send(data)
            sent, self._sent = self._sent, anyio.Event()
            sent.set()

    async def _read(self) -> None:
        while True:
            self._protocol.receive_data(await self._stream.receive(READ_BYTES))
            self._heard = True
            for event in self._protocol.events_received():
                if isinstance(event, Frame):
                    self._take(event)
            if self._protocol.parser_exc is not None:
                raise self._protocol.parser_exc
            if self._protocol.state is not State.OPEN:
                raise anyio.EndOfStream

    def _take(self, frame: Frame) -> None:
        if frame.opcode not in (Opcode.BINARY, Opcode.CONT):
            self._to_send.set()  # the protocol has an answer to a ping or a close
            return
        if frame.fin and not self._message:
            data: bytes | bytearray | memoryview = frame.data
        else:
            self._message += frame.data
            if not frame.fin:
                return
            data, self._message = self._message, bytearray()
        reply = messages.mux_reply_decoder.decode(data)
        pending = self._pending.get(reply.id)
        if pending is not None:
            pending.reply = reply
            pending.done.set()

    async def _ping(self) -> None:
        while True:
            await anyio.sleep(PING_EVERY_S)
            if not self._heard:
                raise OSError(f"nothing came for {2 * PING_EVERY_S:g} s")
            self._heard = False
            self._protocol.send_ping(b"")
            self._to_send.set()


def _create_frame(request: CreateRequest, number: int) -> MuxFrame:
    return MuxFrame(create=MuxCreate(id=number, request=request))


def _call_frame(spec: Raw, number: int) -> MuxFrame:
    return MuxFrame(call=MuxCall(id=number, spec=spec))


async def _connect(config: Config) -> _Link:
    parts = urlsplit(config.url)
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    try:
        stream: ByteStream
        if secure:
            context = ssl.create_default_context()
            stream = await anyio.connect_tcp(host, port, ssl_context=context, tls_standard_compatible=False)
        else:
            stream = await anyio.connect_tcp(host, port)
    except OSError as exc:
        raise unreachable(config.url, _reason(exc)) from exc
    try:
        protocol = await _handshake(config, stream)
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError) as exc:
        await anyio.aclose_forcefully(stream)
        raise unreachable(config.url, _reason(exc)) from exc
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise
    return _Link(config.url, stream, protocol)


async def _handshake(config: Config, stream: ByteStream) -> ClientProtocol:
    address = "ws" + config.url.removeprefix("http") + MUX_PATH
    protocol = ClientProtocol(parse_uri(address), max_size=MUX_FRAME_MAX)
    request = protocol.connect()
    request.headers["Authorization"] = f"Bearer {config.token}"
    protocol.send_request(request)
    await stream.send(b"".join(protocol.data_to_send()))
    while protocol.state is State.CONNECTING and protocol.handshake_exc is None:
        try:
            protocol.receive_data(await stream.receive())
        except anyio.EndOfStream:
            protocol.receive_eof()
            break
    match protocol.handshake_exc:
        case None if protocol.state is State.OPEN:
            return protocol
        case InvalidStatus(response=response):
            raise error_of_response(response.status_code, bytes(response.body or b""), url=config.url)
        case error:
            raise unreachable(config.url, error or "it closed the connection")


def _again(error: CloudyardError) -> CloudyardError:
    """A copy: one exception object must not be raised in several tasks, which would share its traceback."""
    return type(error)(
        error.message, code=error.code, hint=error.hint, retry_safe=error.retry_safe, fault=error.fault
    )


def _first_reason(group: BaseExceptionGroup[BaseException]) -> str:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return _reason(error)


def _reason(error: BaseException) -> str:
    if isinstance(error, anyio.EndOfStream):
        return "the yard closed it"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, OSError) and isinstance(error.__cause__, OSError):
        return _reason(error.__cause__)  # anyio says only that all attempts failed
    return str(error) or type(error).__name__
