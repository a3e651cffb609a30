"""The edge daemon: one node's sandboxes, served to gateways as bytes in and bytes out.

`Edge` knows messages and sandboxes and no transport; `serve` ties it to a fabric. Leaving an Edge leaves its
sandboxes alive: the next one on the same state directory takes them up where they are. Backends are entered
before it and left after it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol, Self
from uuid import uuid4

import anyio
from anyio.abc import TaskStatus
from msgspec import Raw

from cloudyard.core.call_placement import BACKEND, no_functions
from cloudyard.core.lifecycle import Life, story
from cloudyard.edge.backends.base import Backend
from cloudyard.edge.calls import Calls, Functions
from cloudyard.edge.clock import Clock, SystemClock, Timers
from cloudyard.edge.config import ALIVE_STAMP_S, CALLS_MAX, FORGET_S, LEAVE_S, REPLY_BYTES_MAX, EdgeConfig
from cloudyard.edge.history import History
from cloudyard.edge.journal import Journal
from cloudyard.edge.life import Yard
from cloudyard.edge.meminfo import available_bytes
from cloudyard.edge.operations import answer_from_record, perform
from cloudyard.edge.poller import Poller
from cloudyard.edge.presence import Presence
from cloudyard.edge.recovery import recover
from cloudyard.edge.remembered import Ended
from cloudyard.edge.sandbox import Sandbox, unavailable
from cloudyard.errors import (
    CloudyardError,
    InvalidRequest,
    LimitExceeded,
    YardUnavailable,
)
from cloudyard.model import (
    EDGE_SILENT_S,
    HEARTBEAT_S,
    AnyOp,
    AnyResult,
    GetSandbox,
    Heartbeat,
    Image,
    KeepAlive,
    StopSandbox,
    edge_of,
    normalised,
)
from cloudyard.wire.messages import (
    UNREADABLE,
    CallCancel,
    CallCreate,
    CallFunction,
    CallList,
    CallOp,
    EdgeReply,
    SandboxPage,
    beat_subject,
    call_decoder,
    call_subject,
    decode_op,
    encode,
    error_body,
    raw,
)

log = logging.getLogger(__name__)


class Edge:
    """One node's daemon.

    Args:
        config: what it is and what it may promise.
        backends: by the names that users write.
        images: an image by name; raises NotFound.
        image_names: the names that `images` knows, for the heartbeat.
        functions: makes stateless calls; without it the edge takes none.
        clock: where the time is read.
    """

    def __init__(
        self,
        config: EdgeConfig,
        *,
        backends: Mapping[str, Backend],
        images: Callable[[str], Image],
        image_names: Callable[[], list[str]] = list,
        functions: Functions | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.boot = uuid4().hex
        self._backends = backends
        self._images = images
        self._image_names = image_names
        self._functions = Calls(functions, edge=config.edge) if functions is not None else None
        self._clock = clock or SystemClock()
        self._timers = Timers(self._clock)
        self._presence = Presence(config.edge_dir)
        self._calls = 0
        self._draining = False
        self._running = AsyncExitStack()
        self._yard: Yard | None = None

    async def __aenter__(self) -> Self:
        """Take the state directory and bring node and records together; ready to serve when it returns.

        Raises:
            Conflict: another edge runs on this state directory.
        """
        async with AsyncExitStack() as stack:
            self._presence.enter()
            stack.callback(self._presence.leave)
            for directory in (self.config.records_dir, self.config.output_dir):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            poller = Poller()
            stack.callback(poller.close)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.push_async_callback(self._stop_tasks, tasks.cancel_scope)
            tasks.start_soon(poller.run)
            tasks.start_soon(self._timers.run)
            self._yard = Yard(
                self.config,
                backends=self._backends,
                images=self._images,
                clock=self._clock,
                timers=self._timers,
                poller=poller,
                tasks=tasks,
            )
            seen = self._presence.last_seen()
            stalled_s = max(0.0, self._clock.monotonic() - seen) if seen is not None else 0.0
            await recover(self._yard, stalled_s=stalled_s)
            self._note_alive()
            self._forget_ended()
            self._running = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draining = True
        await self._running.__aexit__(kind, exc, trace)

    @property
    def yard(self) -> Yard:
        """Its sandboxes."""
        assert self._yard is not None, "the edge is used inside `async with`"
        return self._yard

    async def call(self, data: bytes) -> bytes:
        """Answer one EdgeCall with one EdgeReply. Raises nothing: a fault of ours is an answer too."""
        if self._calls >= CALLS_MAX:
            return self._reply_error(
                LimitExceeded(
                    f"Edge {self.config.edge} has {CALLS_MAX} calls under way.",
                    code="edge_busy",
                    fault="infra",
                    retry_safe=True,
                )
            )
        self._calls += 1
        try:
            result = await self._answer(data)
            answer = EdgeReply(boot=self.boot) if result is None else EdgeReply(boot=self.boot, result=result)
            reply = encode(answer)
        except CloudyardError as exc:
            return self._reply_error(exc)
        except Exception as exc:
            trouble = uuid4().hex[:12]
            log.exception("A call failed through a fault of ours (%s).", trouble)
            message = f"The edge failed through a fault of ours ({trouble}): {type(exc).__name__}: {exc}."
            return self._reply_error(
                CloudyardError(message, hint="The edge's log has more under that number.")
            )
        finally:
            self._calls -= 1
        if len(reply) > REPLY_BYTES_MAX:
            return self._reply_error(
                LimitExceeded(
                    f"The answer has {len(reply)} bytes; at most {REPLY_BYTES_MAX} can be sent.",
                    code="reply_too_large",
                    hint="Ask for less at once.",
                )
            )
        return reply

    def heartbeat(self, *, listening_s: float = 0.0) -> Heartbeat:
        """The next word that it lives, and has heard calls for `listening_s` seconds."""
        return Heartbeat(
            edge=self.config.edge,
            boot=self.boot,
            backends=sorted([*self._backends, *([BACKEND] if self._functions else [])]),
            load=self.yard.admission.load(available_bytes()),
            images=self._image_names(),
            draining=self._draining,
            listening_s=listening_s,
        )

    async def stop_all(self) -> None:
        """Stop every sandbox and admit no new one; returns when nothing of them is left."""
        self._draining = True
        async with anyio.create_task_group() as tasks:
            for sandbox in list(self.yard.sandboxes.values()):
                tasks.start_soon(self._stop, sandbox)

    def story(self, sandbox: str) -> list[str]:
        """What happened to a sandbox, in order, each with its cause."""
        held = self.yard.sandboxes.get(sandbox)
        if held is not None:
            return story(held.journal.transitions)
        ended = self.yard.ended.get(sandbox)
        journal = Journal.peek(ended.path) if ended is not None else None
        return story(journal.transitions) if journal is not None else []

    # --- inside -----------------------------------------------------------------------------------------

    async def _answer(self, data: bytes) -> Raw | None:
        try:
            call = call_decoder.decode(data)
        except UNREADABLE as exc:
            raise InvalidRequest(f"The call cannot be read: {exc}.", code="bad_call") from exc
        match call:
            case CallOp():
                return raw(await self._operate(call))
            case CallCreate():
                if edge_of(call.sandbox) != self.config.edge:
                    message = f"{call.sandbox} does not belong to edge {self.config.edge}."
                    hint = "The id names the edge; send it there."
                    raise InvalidRequest(message, code="wrong_edge", hint=hint)
                self._check_staying()
                return raw(
                    await self.yard.create(
                        call.sandbox,
                        normalised(call.spec),
                        project=call.project,
                        cause=call.cause,
                        begin_by=call.begin_by,
                        expires_at=call.expires_at,
                    )
                )
            case CallList():
                return raw(self._list(call))
            case CallFunction():
                if self._functions is None:
                    raise no_functions(f"Edge {self.config.edge} takes no calls.")
                self._check_staying()
                return raw(await self._functions.call(call))
            case CallCancel():
                if self._functions is not None and self._functions.cancel(call):
                    return None
                for sandbox in self.yard.sandboxes.values():
                    if sandbox.project == call.project and call.sandbox in ("", sandbox.id):
                        sandbox.commands.cancel(call.cause, key=call.key if call.sandbox else "")
                return None

    def _check_staying(self) -> None:
        if self._draining:
            hint = "Try again: another edge takes it, or this one once it is back."
            raise YardUnavailable(f"Edge {self.config.edge} is leaving.", code="draining", hint=hint)

    async def _operate(self, call: CallOp) -> AnyResult:
        op = decode_op(call.op)
        found = self.yard.find(call.sandbox, call.project)
        if isinstance(found, Ended):
            return self._operate_on_ended(found, op, call.key)
        match op:
            case GetSandbox():
                return found.info_with_usage()
            case StopSandbox():
                return await self.yard.stop(found, cause=call.cause)
            case KeepAlive():
                self.yard.keep_alive(found, op)
                return found.info()
            case _:
                pass  # done inside it
        with found.in_use():
            return await perform(found, op, key=call.key, cause=call.cause, at=self._clock.monotonic())

    def _operate_on_ended(self, ended: Ended, op: AnyOp, key: str) -> AnyResult:
        if isinstance(op, GetSandbox | StopSandbox):
            return ended.info
        journal = Journal.load(ended.path) if key else None
        if journal is not None:
            history = History(journal, self.config.output_dir / ended.info.id)
            known = answer_from_record(journal, history, op, key)
            if known is not None:
                return known
        raise ended.error or unavailable(ended.info.id, Life(ended.info.state, ended.info.reason))

    def _list(self, call: CallList) -> SandboxPage:
        infos = [one.info() for one in self.yard.sandboxes.values() if one.project == call.project]
        if call.stopped:
            infos += [one.info for one in self.yard.ended if one.info.project == call.project]
        return SandboxPage(sorted(infos, key=lambda info: (info.created_at, info.id)))

    def _reply_error(self, error: CloudyardError) -> bytes:
        return encode(EdgeReply(boot=self.boot, error=error_body(error)))

    async def _stop(self, sandbox: Sandbox) -> None:
        await self.yard.stop(sandbox, cause="stop_all")

    def _note_alive(self) -> None:
        now = self._clock.monotonic()
        self._presence.note(now)
        self._timers.at(now + ALIVE_STAMP_S, self._note_alive)

    def _forget_ended(self) -> None:
        self.yard.ended.forget_expired()
        self._timers.at(self._clock.monotonic() + FORGET_S, self._forget_ended)

    async def _stop_tasks(self, scope: anyio.CancelScope) -> None:
        """What is being torn down comes to its end, within a bound; the next start goes on with the rest."""
        sandboxes = list(self._yard.sandboxes.values()) if self._yard is not None else []
        with anyio.move_on_after(LEAVE_S, shield=True):
            for sandbox in sandboxes:
                if sandbox.tearing_down:
                    await sandbox.gone.wait()
        scope.cancel()
        for sandbox in sandboxes:
            sandbox.commands.let_go("the edge is leaving")
        self._presence.note(self._clock.monotonic())


class Fabric(Protocol):
    """What an edge needs of the fabric."""

    async def serve(
        self,
        subject: str,
        handler: Callable[[bytes], Awaitable[bytes]],
        *,
        limit: int = ...,
        task_status: TaskStatus[None] = ...,
    ) -> None:
        """Answer requests on a subject until cancelled."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send a message to whoever listens. Raises YardUnavailable while NATS is away."""

    def listening_s(self, subject: str) -> float:
        """For how long requests to a subject have come through, in seconds."""

    async def renew(self) -> None:
        """Leave the connection with all that has come through it, and return when there is a new one."""


async def serve(
    edge: Edge, fabric: Fabric, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Answer calls and send heartbeats until cancelled; ready when `task_status` says so.

    Whoever asked an edge that was silent for EDGE_SILENT_S was told that it is away. Where this process could
    not run for so long (it was stopped, or its machine was), what has queued up meanwhile is not acted on.
    """
    subject = call_subject(edge.config.edge)
    ran_at = anyio.current_time()

    def stalled() -> bool:
        return anyio.current_time() - ran_at > EDGE_SILENT_S

    async def answer(data: bytes) -> bytes:
        if stalled():
            raise YardUnavailable(f"Edge {edge.config.edge} was silent for too long.", code="edge_stalled")
        return await edge.call(data)

    async with anyio.create_task_group() as tasks:

        async def listen(*, task_status: TaskStatus[None]) -> None:
            await fabric.serve(subject, answer, limit=CALLS_MAX, task_status=task_status)

        await tasks.start(listen)
        task_status.started()
        while True:
            if stalled():
                log.warning("The edge could not run for %.1f s.", anyio.current_time() - ran_at)
                await fabric.renew()
            ran_at = anyio.current_time()
            try:
                beat = edge.heartbeat(listening_s=fabric.listening_s(subject))
                await fabric.publish(beat_subject(edge.config.edge), encode(beat))
            except YardUnavailable:
                log.debug("A heartbeat could not be sent: NATS is away.")
            await anyio.sleep(HEARTBEAT_S)
