"""Messages between gateway and edge (over NATS) and between client and gateway (over the mux socket), in
msgpack.

The gateway hands operations and results on as the raw bytes they came in: it reads the envelope, never the
content.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from cloudyard.errors import CloudyardError, InvalidRequest, error_from_wire
from cloudyard.model import (
    CALL_IMAGE_DEFAULT,
    CALL_TIMEOUT_DEFAULT_S,
    AnyOp,
    AnyResult,
    CallResult,
    CallSpec,
    CreateRequest,
    ErrorBody,
    Heartbeat,
    ImageConfig,
    SandboxInfo,
    SandboxSpec,
)

MUX_PATH = "/v1/mux"
MESSAGE_BYTES_MAX = 8 * 1024 * 1024  # one message over NATS; streams and files go in far smaller pieces
MUX_FRAME_MAX = MESSAGE_BYTES_MAX + 1024  # bytes of one mux frame: what fits through NATS, and its envelope
MUX_IN_FLIGHT_MAX = 4096  # requests under way on one mux socket

# Operations that may be sent again though the first may have been done: they change nothing, or end in the
# same state. Any other one is safe to repeat only with its step key.
REPEATABLE = frozenset(
    {
        "wait",
        "read_output",
        "send_stdin",
        "resize",
        "list_commands",
        "read_file",
        "upload_chunk",
        "list_dir",
        "list_tree",
        "stat",
        "get_sandbox",
        "keep_alive",
        "stop_sandbox",
    }
)


def call_subject(edge: str) -> str:
    """Where an edge listens for calls."""
    return f"cy.edge.{edge}.call"


def beat_subject(edge: str) -> str:
    """Where an edge's heartbeats go; `*` hears every edge."""
    return f"cy.beat.{edge}"


# --- client <-> gateway: the mux socket ---------------------------------------------------------------------


class MuxRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation on one sandbox. `id` is the client's, unique among its requests under way; `key` is the
    step key.
    """

    id: int
    sandbox: str
    op: Raw
    key: str = ""


class MuxCancel(Struct, frozen=True, kw_only=True, tag="cancel"):
    """The client no longer wants the answer of a request. A command that the request runs is killed."""

    id: int


class MuxReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a request: exactly one of `result` and `error`."""

    id: int
    result: Raw = Raw()
    error: ErrorBody | None = None


class MuxCreate(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Make a sandbox, as `POST /v1/sandboxes` does. Its answer is a MuxReply with a SandboxInfo."""

    id: int
    request: CreateRequest


class MuxCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stateless call, as `POST /v1/calls` makes it. `spec` is an encoded CallSpec, the answer a MuxReply
    with a CallResult. Cancelling it, or leaving the socket, kills it.
    """

    id: int
    spec: Raw


class MuxFrame(Struct, frozen=True, omit_defaults=True):
    """What a client sends in one WebSocket message: a request, a cancel, a create or a call."""

    request: MuxRequest | None = None
    cancel: int = 0
    create: MuxCreate | None = None
    call: MuxCall | None = None


# --- gateway -> edge, over NATS -----------------------------------------------------------------------------


class EdgeCall(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="call"):
    """What a gateway asks of an edge. `project` is whom the token belongs to; `cause` is the id of the
    request behind it.
    """

    project: str
    cause: str = ""


class CallCreate(EdgeCall, tag="create", frozen=True):
    """Make this sandbox. Repeating it with the same id gives the same sandbox.

    The two moments are seconds since 1970, 0 for never. A call that lay somewhere until nobody waits for it
    makes no sandbox that nobody knows of.
    """

    sandbox: str
    spec: SandboxSpec
    begin_by: float = 0.0
    """An edge that has not begun by then refuses (`create_expired`), and the call may be sent anew."""
    expires_at: float = 0.0
    """A sandbox that is not ready by then is torn down again."""


class CallOp(EdgeCall, tag="op", frozen=True):
    """Do this operation on this sandbox. `op` is an encoded AnyOp."""

    sandbox: str
    op: Raw
    key: str = ""


class CallCancel(EdgeCall, tag="cancel", frozen=True):
    """Nobody waits any more for the call that had this `cause`, or this step key: kill the command that it
    runs. The key holds also where the call was sent again since. Has an empty answer.
    """

    sandbox: str = ""
    key: str = ""


class CallList(EdgeCall, tag="list", frozen=True):
    """All sandboxes of the project on this edge, stopped ones that are still remembered too if asked. Gives a
    SandboxPage.
    """

    stopped: bool = False


class CallFunction(EdgeCall, tag="function", frozen=True):
    """Make a stateless call. `spec` is an encoded CallSpec. Gives a CallResult; sent again, it runs again."""

    spec: Raw


AnyCall = CallCreate | CallOp | CallCancel | CallList | CallFunction


class CallHead(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a gateway reads of an encoded CallSpec: where it can run, and how long it may take."""

    image: str = CALL_IMAGE_DEFAULT
    timeout_s: float = CALL_TIMEOUT_DEFAULT_S
    cases: list[Raw] = []


class SandboxPage(Struct, frozen=True, omit_defaults=True):
    """Sandboxes of one edge, or of all of them; `missing` names edges that did not answer."""

    sandboxes: list[SandboxInfo]
    missing: list[str] = []


class EdgeReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An edge's answer: `result` (an encoded AnyResult or SandboxPage) or `error`. `boot` is the edge's, as
    in its heartbeat.
    """

    boot: str = ""
    result: Raw = Raw()
    error: ErrorBody | None = None


class ImageRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image as the HTTP API lists it. What the yard does not know is left out."""

    name: str
    layers: list[str] = []
    size_bytes: int = 0
    config: ImageConfig | None = None


encode = msgspec.msgpack.Encoder().encode
UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What decoders raise for bytes of somebody else's; the second for what is nested without end."""

op_decoder = msgspec.msgpack.Decoder(AnyOp)
result_decoder = msgspec.msgpack.Decoder(AnyResult)
call_decoder = msgspec.msgpack.Decoder(AnyCall)
reply_decoder = msgspec.msgpack.Decoder(EdgeReply)
page_decoder = msgspec.msgpack.Decoder(SandboxPage)
heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)
call_spec_decoder = msgspec.msgpack.Decoder(CallSpec)
call_head_decoder = msgspec.msgpack.Decoder(CallHead)
call_result_decoder = msgspec.msgpack.Decoder(CallResult)
mux_frame_decoder = msgspec.msgpack.Decoder(MuxFrame)
mux_reply_decoder = msgspec.msgpack.Decoder(MuxReply)


def raw(value: AnyOp | AnyResult | SandboxPage | CallSpec | CallResult) -> Raw:
    """The value, encoded once, to be carried inside another message."""
    return Raw(encode(value))


def decode_op(data: bytes | Raw) -> AnyOp:
    """An operation from bytes that a client sent.

    Raises:
        InvalidRequest: it names no operation, or has a field that it should not; the sentence names the
        field.
    """
    try:
        return op_decoder.decode(data)
    except UNREADABLE as exc:
        raise InvalidRequest(
            f"The operation cannot be read: {exc}.", code="bad_operation", hint="See /schema for its fields."
        ) from exc


def decode_call(data: bytes | Raw) -> CallSpec:
    """A call from bytes that a client sent.

    Raises:
        InvalidRequest: it is none, or has a field that it should not; the sentence names the field.
    """
    try:
        return call_spec_decoder.decode(data)
    except UNREADABLE as exc:
        raise _bad_call(exc) from exc


def decode_call_head(data: bytes | Raw) -> CallHead:
    """What a gateway reads of a call. Raises as `decode_call` does."""
    try:
        return call_head_decoder.decode(data)
    except UNREADABLE as exc:
        raise _bad_call(exc) from exc


def _bad_call(reason: Exception) -> InvalidRequest:
    return InvalidRequest(
        f"The call cannot be read: {reason}.", code="bad_call_spec", hint="See /schema for its fields."
    )


class _Tag(Struct):
    op: str = ""


_tag_decoder = msgspec.msgpack.Decoder(_Tag)


def op_tag(op: Raw) -> str:
    """The name of an encoded operation, the rest of which is not looked at; empty if it is none."""
    try:
        return _tag_decoder.decode(op).op
    except UNREADABLE:
        return ""


def error_body(error: CloudyardError) -> ErrorBody:
    """An error as it goes over the wire."""
    return ErrorBody(
        kind=error.kind,
        code=error.code,
        message=error.message,
        hint=error.hint,
        retry_safe=error.retry_safe,
        fault=error.fault,
    )


def error_of(body: ErrorBody) -> CloudyardError:
    """The error that a body describes."""
    return error_from_wire(
        body.kind,
        body.message,
        code=body.code,
        hint=body.hint,
        retry_safe=body.retry_safe,
        fault=body.fault,
    )
