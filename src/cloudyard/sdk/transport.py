"""What carries operations to a yard, and what is done when it does not answer: the same call again, with the
same key.

A transport makes one attempt. `Caller` makes it a call that survives a restart of any part of the yard: every
operation that changes something goes under a step key, so that sending it again joins the step under way or
gives its recorded result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Protocol, TypeVar
from uuid import uuid4

import anyio
import msgspec

from cloudyard.errors import (
    CloudyardError,
    Conflict,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Unauthorized,
    YardUnavailable,
)
from cloudyard.model import (
    AnyOp,
    AnyResult,
    CallResult,
    CallSpec,
    CreateRequest,
    ErrorBody,
    Exec,
    GetSandbox,
    ReadOutput,
    Result,
    SandboxInfo,
    SendStdin,
    Wait,
    check_key,
)
from cloudyard.wire.messages import REPEATABLE, error_of

RESTART_PATIENCE_S = 10.0  # how long a yard that is away is waited for
CREATE_WITHIN_S = 300.0  # an image may have to be brought to the node first
ANSWER_GRACE_S = 60.0  # how much later than an operation's own time its answer may come
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 1.0

T = TypeVar("T")
R = TypeVar("R", bound=Result)


class Transport(Protocol):
    """One way to a yard's gateway."""

    async def ask(self, sandbox: str, op: AnyOp, *, key: str, within_s: float | None) -> AnyResult:
        """Send an operation once and give its result. Cancelling it tells the yard, which then kills the
        command.

        Raises:
            YardUnavailable: unreachable, the connection broke (code `connection_lost`), or no answer came
                `within_s` (code `no_answer`; the yard is not told to give up).
            CloudyardError: what the yard answered.
        """

    async def create(self, request: CreateRequest) -> SandboxInfo:
        """Ask once for the sandbox of this request, or the one that its key has made already."""

    async def call(self, spec: CallSpec, *, within_s: float) -> CallResult:
        """Make a stateless call once. Cancelling it tells the yard, which then kills the call.

        Raises: as `ask`.
        """


class ClientState(Enum):
    """Where a client is in its life. It is opened once and closed once."""

    UNOPENED = "unopened"
    OPEN = "open"
    CLOSED = "closed"


class Caller:
    """Operations on sandboxes, sent as often as it takes. Every handle of one client shares one."""

    def __init__(self) -> None:
        self._transport: Transport | None = None
        self._closed = False

    @property
    def state(self) -> ClientState:
        """Whether operations can be sent."""
        if self._closed:
            return ClientState.CLOSED
        return ClientState.UNOPENED if self._transport is None else ClientState.OPEN

    def open(self, transport: Transport) -> None:
        """From now on operations go this way."""
        self._transport = transport

    def close(self) -> None:
        """From now on every operation is refused."""
        self._closed = True

    def check_unopened(self) -> None:
        """Raises Conflict when it was opened before."""
        if self.state is not ClientState.UNOPENED:
            raise Conflict(
                f"The client is {self.state.value} and cannot be opened again.",
                code="client_reopened",
                hint="Make a new one with connect() for every `async with`.",
            )

    def check_open(self) -> Transport:
        """The transport. Raises Conflict when there is none, or none any more."""
        if self._transport is None:
            raise Conflict(
                "The client is not open.", code="client_unopened", hint="Use `async with connect() as yard:`."
            )
        if self._closed:
            raise Conflict(
                "The client is closed.",
                code="client_closed",
                hint="Use sandboxes and commands inside the `async with` block that they came from.",
            )
        return self._transport

    async def ask(self, sandbox: str, op: AnyOp, want: type[R], *, key: str = "") -> R:
        """Do an operation and give its result, which must be of the type `want`.

        Raises:
            CloudyardError: what the yard answered, or that it could not be reached for RESTART_PATIENCE_S.
        """
        return expect(
            want, await self.ask_any(sandbox, op, key=key), what=f"{type(op).__name__} on {sandbox}"
        )

    async def ask_any(self, sandbox: str, op: AnyOp, *, key: str = "") -> AnyResult:
        """The same for an operation that has more than one kind of result."""
        if key:
            with text_only():
                check_key(key)
        elif op.__struct_config__.tag not in REPEATABLE:
            key = uuid4().hex
        within_s = _answer_within_s(op)

        async def attempt() -> AnyResult:
            with text_only():
                return await self.check_open().ask(sandbox, op, key=key, within_s=within_s)

        while True:
            try:
                return await wait_out_restarts(attempt)
            except YardUnavailable as error:
                if error.code != "no_answer" or not isinstance(op, Exec):
                    raise
            # The command has had its time and more, yet nothing came. If the sandbox still answers, it was
            # frozen or the answer was lost: the same key joins the step, or brings back what it gave.
            await self.ask(sandbox, GetSandbox(), SandboxInfo)


@contextmanager
def text_only() -> Iterator[None]:
    """Text that UTF-8 has no bytes for, such as a file name that Python read with surrogates, is refused.

    Raises:
        InvalidRequest: there was some.
    """
    try:
        yield
    except UnicodeEncodeError as exc:
        raise InvalidRequest(
            f"The request holds {exc.object[exc.start : exc.end]!r}, which is no text.",
            code="not_text",
            hint="Bytes that are no UTF-8 can go through stdin or in a file.",
        ) from exc


def expect(want: type[R], result: AnyResult, *, what: str) -> R:
    """The result, which must be of the type that belongs to the question."""
    if not isinstance(result, want):
        raise CloudyardError(
            f"The yard answered {what} with {type(result).__name__}.",
            code="unexpected_answer",
            hint="Client and yard may be of different versions.",
        )
    return result


async def wait_out_restarts(
    attempt: Callable[[], Awaitable[T]], *, patience_s: float = RESTART_PATIENCE_S
) -> T:
    """Make an attempt until it does not fail for want of a yard, at most for `patience_s` after the first
    such failure.

    An attempt that had lived longer than that before its connection broke starts the count anew: a command of
    an hour outlives any number of restarts, while a yard that breaks at every attempt is given up.

    Raises:
        YardUnavailable: of the last attempt, saying how long was waited.
    """
    failing_since: float | None = None
    backoff_s = BACKOFF_FIRST_S
    while True:
        begun = time.monotonic()
        try:
            return await attempt()
        except YardUnavailable as error:
            if not error.retry_safe or error.fault != "infra":
                raise
            now = time.monotonic()
            outlived = error.code == "connection_lost" and now - begun > patience_s
            if failing_since is None or outlived:
                failing_since, backoff_s = now, BACKOFF_FIRST_S
            if now - failing_since + backoff_s > patience_s:
                raise _given_up(error, now - failing_since) from error
        await anyio.sleep(backoff_s * random.uniform(0.5, 1.0))
        backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)


def _given_up(error: YardUnavailable, waited_s: float) -> YardUnavailable:
    return YardUnavailable(
        f"{error.message} It was tried for {waited_s:.1f} s.",
        code=error.code,
        hint=error.hint,
        retry_safe=True,
    )


def _answer_within_s(op: AnyOp) -> float | None:
    """How long an answer may take; None for a command without a limit: its connection alone is watched."""
    match op:
        case Exec(command=command):
            return None if command.timeout_s is None else command.timeout_s + ANSWER_GRACE_S
        case Wait(wait_s=wait_s) | ReadOutput(wait_s=wait_s) | SendStdin(wait_s=wait_s):
            return wait_s + ANSWER_GRACE_S
        case _:
            return ANSWER_GRACE_S


def unreachable(url: str, reason: object) -> YardUnavailable:
    """Nobody answers at the yard's address."""
    return YardUnavailable(
        f"The yard at {url} cannot be reached: {reason}.",
        code="unreachable",
        hint="Is it running? `cloudyard up` starts one on this machine; CLOUDYARD_URL names another.",
    )


def lost(url: str, reason: object) -> YardUnavailable:
    """The connection broke while an answer was awaited."""
    return YardUnavailable(f"The connection to the yard at {url} broke: {reason}.", code="connection_lost")


def no_answer(url: str, within_s: float) -> YardUnavailable:
    """The connection stands and no answer comes."""
    return YardUnavailable(
        f"The yard at {url} gave no answer within {within_s:g} s.", code="no_answer", retry_safe=False
    )


class _ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


_STATUS_ERRORS: dict[int, type[CloudyardError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: LimitExceeded,
    429: LimitExceeded,
    502: YardUnavailable,
    503: YardUnavailable,
    504: YardUnavailable,
}


def error_of_response(status: int, body: bytes, *, url: str) -> CloudyardError:
    """The error that an HTTP response describes, also when something between us and the yard wrote it."""
    try:
        return error_of(msgspec.json.decode(body, type=_ErrorEnvelope).error)
    except msgspec.MsgspecError:
        pass
    text = body[:200].decode(errors="replace").strip()
    hint = "Give the yard's token, or set CLOUDYARD_TOKEN." if status in (401, 403) else ""
    return _STATUS_ERRORS.get(status, CloudyardError)(
        f"The yard at {url} answered with HTTP status {status}{': ' + text if text else ''}.",
        code=f"http_{status}",
        hint=hint,
    )
