"""A NATS connection that is always there or on its way back.

Requests use reply subjects of our own, `cy.reply.<edge>.<client>.<n>` on one wildcard subscription, so that
an edge may be allowed to publish its answers and nothing else. A request waits until it is answered or
cancelled, and fails at once when the connection breaks: nothing is buffered for later, so what a caller was
told had failed is not sent behind its back.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import NamedTuple, Self

import anyio
import nats.errors
from anyio.abc import TaskGroup, TaskStatus
from nats.aio.client import Client
from nats.aio.msg import Msg

from cloudyard.errors import Forbidden, LimitExceeded, Unauthorized, YardUnavailable
from cloudyard.fabric.answers import Handler, answer_lost, busy, error_reply, handled
from cloudyard.fabric.bucket import Bucket
from cloudyard.fabric.link import (
    CLOSE_S,
    FAILURES,
    Credentials,
    Link,
    Listener,
    OnMessage,
    check_address,
    shown,
)
from cloudyard.fabric.store import StoreHealth

log = logging.getLogger(__name__)

BACKOFF_MIN_S, BACKOFF_MAX_S = 0.05, 2.0  # between attempts
LOST_CHECK_S = 0.25  # a backstop: some failures of the client end it without a callback
SERVE_MAX = 16_384  # requests under way in one `serve`
SUBSCRIBE_MAX = 1024  # messages that wait in one `subscribe`

_REFUSED = re.compile(
    r"permissions violation for (publish|subscription) to [\"']([^\"']+)[\"']", re.IGNORECASE
)


class Message(NamedTuple):
    """A message that was published to a subject."""

    subject: str
    data: bytes


class _Wait(NamedTuple):
    """A request under way."""

    answer: asyncio.Future[bytes]
    subject: str
    since: float


class Fabric:
    """One connection to NATS. Use `async with Fabric.connect(...)`; everything else needs it open."""

    def __init__(self, url: str, credentials: Credentials, name: str) -> None:
        self.store = StoreHealth()
        self._url = url
        self._credentials = credentials
        self._name = name
        self._me = secrets.token_hex(6)
        self._link: Link | None = None
        self._back = anyio.Event()
        self._waits: dict[str, _Wait] = {}
        self._count = 0
        self._answers = Listener(f"cy.reply.*.{self._me}.*", self._on_reply)
        self._listeners: list[Listener] = []
        self._tasks: TaskGroup | None = None

    @classmethod
    def connect(cls, url: str, credentials: Credentials | None = None, *, name: str) -> Self:
        """A fabric to enter with `async with`, which waits until NATS is there (bound it with `fail_after`).

        Args:
            url: such as `nats://127.0.0.1:4222` or `nats://user:password@host:4222`; `tls://` for TLS.
            credentials: who we are, if the URL does not say it.
            name: how the connection is called in NATS' own logs.
        """
        return cls(url, credentials or Credentials(), name)

    async def __aenter__(self) -> Self:
        check_address(self._url, self._credentials)
        await self._reconnect(first=True)
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._keep)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        try:
            # Only a cancellation is the group's to judge: any other error it would wrap in an ExceptionGroup.
            if isinstance(error, anyio.get_cancelled_exc_class()):
                return await self._tasks.__aexit__(kind, error, trace)
            await self._tasks.__aexit__(None, None, None)
            return None
        finally:
            with anyio.CancelScope(shield=True):
                await self._drop("The connection to NATS was closed.")

    @property
    def connected(self) -> bool:
        """Whether a message can be sent now."""
        return self._link is not None and self._link.client.is_connected

    async def wait_connected(self) -> None:
        """Return once a message can be sent."""
        while not self.connected:
            await self._back.wait()
            await anyio.lowlevel.checkpoint()

    async def renew(self) -> None:
        """Leave the present connection, with all that has come through it and was not heard yet, and return
        when there is a new one.
        """
        back = self._back
        if self._link is not None:
            self._link.lost.set()
        await back.wait()

    # --- sending --------------------------------------------------------------------------------------------

    async def request(self, subject: str, payload: bytes) -> bytes:
        """Send a request to an edge's subject, `cy.edge.<edge>.<...>`, and wait for its answer.

        Raises:
            YardUnavailable: nobody listens there (`edge_unreachable`), NATS is away (`fabric_unreachable`),
                or the connection broke before the answer came (`answer_lost`: it may have been done).
            LimitExceeded: the payload is larger than the server takes.
            Forbidden: NATS does not let us send there.
        """
        link = self._present()
        if self._answers not in self._listeners:
            # Only now, at the first request: an edge sends none, and may not listen there.
            self._listeners.append(self._answers)
            await _hear(link, self._answers)
        self._count += 1
        reply = f"cy.reply.{subject.split('.', 3)[2]}.{self._me}.{self._count}"
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waits[reply] = _Wait(answer, subject, anyio.current_time())
        try:
            await self._send(link.client, subject, payload, reply)
            return await answer
        finally:
            del self._waits[reply]

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send a message to whoever listens. It is not kept for those that come later, nor while NATS is
        away.

        Raises:
            YardUnavailable: NATS is away.
            LimitExceeded: the payload is larger than the server takes.
        """
        await self._send(self._present().client, subject, payload, "")

    def abandon(self, subject: str, reason: str, *, older_s: float = 0.0) -> int:
        """Fail the requests to a subject that have been under way for longer than `older_s` with
        `answer_lost`; gives how many there were.
        """
        begun = anyio.current_time() - older_s
        waits = [
            wait
            for wait in self._waits.values()
            if wait.subject == subject and wait.since <= begun and not wait.answer.done()
        ]
        for wait in waits:
            wait.answer.set_exception(answer_lost(reason))
        return len(waits)

    def bucket(self, name: str, *, ttl_s: float = 0.0) -> Bucket:
        """The key-value bucket of this name, made at its first use; entries live for `ttl_s` (0: ever)."""
        return Bucket(lambda: self._present().client, name, ttl_s=ttl_s, health=self.store)

    # --- hearing --------------------------------------------------------------------------------------------

    async def serve(
        self,
        subject: str,
        handler: Handler,
        *,
        limit: int = SERVE_MAX,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer requests on a subject until cancelled, each in its own task; ready when `task_status` says
        so.

        A Cloudyard error of the handler goes back as an EdgeReply; so does `edge_busy` past `limit` requests
        under way.

        Raises:
            Forbidden: NATS does not let us listen there.
        """
        under_way = 0

        async def answer(reply: str, data: bytes) -> None:
            nonlocal under_way
            try:
                await self._respond(reply, await handled(handler, data))
            finally:
                under_way -= 1

        async with anyio.create_task_group() as tasks:

            async def on_message(message: Msg) -> None:
                nonlocal under_way
                if under_way >= limit:
                    await self._respond(message.reply, busy(subject, limit))
                    return
                under_way += 1
                tasks.start_soon(answer, message.reply, message.data)

            async with self._listening(subject, on_message):
                task_status.started()
                await anyio.sleep_forever()

    def listening_s(self, subject: str) -> float:
        """For how many seconds requests to a subject that we serve have come through; 0 if they do not."""
        if self.connected:
            for listener in self._listeners:
                if listener.subject == subject:
                    return anyio.current_time() - listener.since
        return 0.0

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, limit: int = SUBSCRIBE_MAX
    ) -> AsyncIterator[AsyncIterator[Message]]:
        """Hear what is published to a subject. Past `limit` waiting messages the newest are dropped, and a
        log says so.

        Raises:
            Forbidden: NATS does not let us listen there.
        """
        send, receive = anyio.create_memory_object_stream[Message](limit)
        dropped = 0

        async def on_message(message: Msg) -> None:
            nonlocal dropped
            try:
                send.send_nowait(Message(message.subject, message.data))
                dropped = 0
            except anyio.WouldBlock:
                dropped += 1
                if dropped == 1:
                    log.warning("messages on %s come faster than they are read: dropping them", subject)
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                return  # the reader has just left

        with send, receive:
            async with self._listening(subject, on_message):
                yield receive

    @asynccontextmanager
    async def _listening(self, subject: str, on_message: OnMessage) -> AsyncIterator[None]:
        listener = Listener(subject, on_message)
        self._listeners.append(listener)
        try:
            if (link := self._link) is not None:  # else it is subscribed when the connection is back
                await _hear(link, listener)
            if listener.refused:
                raise Forbidden(
                    f"NATS does not let {self._credentials.user or 'this connection'} listen on {subject}.",
                    code="fabric_forbidden",
                    hint="Its permissions come from the server's configuration.",
                )
            yield
        finally:
            self._listeners.remove(listener)
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_S):
                if listener.now is not None and self.connected:
                    with suppress(nats.errors.Error, OSError):
                        await listener.now.unsubscribe()

    # --- inside ---------------------------------------------------------------------------------------------

    def _present(self) -> Link:
        link = self._link
        if link is None or not link.client.is_connected:
            raise YardUnavailable(
                f"NATS at {shown(self._url)} is away.",
                code="fabric_unreachable",
                hint="It is being reconnected to.",
            )
        return link

    async def _send(self, client: Client, subject: str, payload: bytes, reply: str) -> None:
        try:
            await client.publish(subject, payload, reply)
        except nats.errors.MaxPayloadError as exc:
            raise LimitExceeded(
                f"A message to {subject} has {len(payload)} bytes; NATS takes {client.max_payload}.",
                code="message_too_large",
                hint="Send it in pieces: files by UploadChunk, output by ReadOutput.",
            ) from exc
        except (nats.errors.Error, OSError) as exc:
            raise YardUnavailable(
                f"Sending to {subject} failed: {exc}.",
                code="fabric_unreachable",
                hint="It is being reconnected to.",
            ) from exc

    async def _respond(self, reply: str, answer: bytes) -> None:
        """Send an answer. When NATS is away the asker has been told so already, and will ask again."""
        try:
            await self.publish(reply, answer)
        except LimitExceeded as exc:
            await self._respond(reply, error_reply(exc))
        except YardUnavailable:
            log.info("an answer could not be sent: NATS is away")

    async def _on_reply(self, message: Msg) -> None:
        wait = self._waits.get(message.subject)
        if wait is None or wait.answer.done():
            return
        if message.headers and message.headers.get("Status") == "503":
            wait.answer.set_exception(
                YardUnavailable(
                    f"Nobody listens on {wait.subject}.",
                    code="edge_unreachable",
                    hint="The edge is starting, stopping or down; cloudyard doctor says more.",
                )
            )
        else:
            wait.answer.set_result(message.data)

    def _on_error(self, error: Exception) -> bool:
        """What the library reports outside of any call; gives whether the connection lives on."""
        refused = _REFUSED.search(str(error))
        if refused is None:
            return False
        log.warning("NATS refuses %s: %s to %s", self._credentials.user or self._name, refused[1], refused[2])
        for listener in self._listeners:
            if refused[1] == "subscription" and listener.subject == refused[2]:
                listener.refused = True
        for wait in self._waits.values():
            if refused[1] == "publish" and wait.subject == refused[2] and not wait.answer.done():
                wait.answer.set_exception(
                    Forbidden(f"NATS does not let us send to {wait.subject}.", code="fabric_forbidden")
                )
        return True

    async def _keep(self) -> None:
        """Notice when the connection is gone, fail what waits on it, and make a new one. For ever."""
        while True:
            assert self._link is not None
            with anyio.move_on_after(LOST_CHECK_S):
                await self._link.lost.wait()
            if self._link.alive:
                continue
            log.warning("the connection to NATS at %s broke: reconnecting", shown(self._url))
            await self._drop("The connection to NATS broke before the answer came.")
            await self._reconnect(first=False)
            log.info("the connection to NATS is back")

    async def _drop(self, reason: str) -> None:
        link, self._link = self._link, None
        for wait in self._waits.values():
            if not wait.answer.done():
                wait.answer.set_exception(answer_lost(reason))
        if link is not None:
            await link.close(self._listeners)

    async def _reconnect(self, *, first: bool) -> None:
        pause_s, told = BACKOFF_MIN_S, not first
        while True:
            try:
                self._link = await self._connect()
                self._back.set()
                self._back = anyio.Event()
                return
            except FAILURES as exc:
                if "authorization" in str(exc).lower():
                    refusal = self._refusal(exc)
                    if first:
                        raise refusal from exc
                    log.warning("%s", refusal)
                if not told:
                    log.warning("NATS at %s does not answer yet (%s): trying on", shown(self._url), exc)
                    told = True
            await anyio.sleep(pause_s)
            pause_s = min(pause_s * 2, BACKOFF_MAX_S)

    async def _connect(self) -> Link:
        """A link on which everything that we listen to is heard."""
        link = await Link.open(self._url, self._credentials, name=self._name, on_error=self._on_error)
        try:
            for listener in self._listeners:
                await link.hear(listener)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await link.close(self._listeners)
            raise
        return link

    def _refusal(self, reason: BaseException) -> Unauthorized:
        who = self._credentials.user or "whoever the URL names"
        return Unauthorized(
            f"NATS at {shown(self._url)} does not let {who} in: {reason}.",
            code="fabric_unauthorized",
            hint="Use the credentials that `cloudyard up` wrote for this role.",
        )


async def _hear(link: Link, listener: Listener) -> None:
    """Subscribe. A link that fails at it is lost, and the next one hears this listener like all others."""
    try:
        await link.hear(listener)
    except FAILURES:
        link.lost.set()
