"""HTTP routes for sandboxes, images and commands: each puts what its path says into an operation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from litestar import Router
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from litestar.response import Stream

from cloudyard.control.api import Call, CreateKey, SandboxPath, StepKey, TheYard, delete, get, post
from cloudyard.control.results import ended, only
from cloudyard.model import (
    CHUNK_BYTES_MAX,
    AnyOp,
    AnyResult,
    CommandInfo,
    CommandList,
    CommandSpec,
    CreateRequest,
    Done,
    Exec,
    ExecResult,
    GetSandbox,
    KeepAlive,
    ListCommands,
    OutputChunk,
    Pty,
    ReadOutput,
    Resize,
    SandboxInfo,
    SendStdin,
    Signal,
    Start,
    StopSandbox,
    StreamName,
    Wait,
)
from cloudyard.wire.messages import ImageRow, SandboxPage

FOLLOW_S = 20.0  # one long poll for output


class ImageList(msgspec.Struct, frozen=True):
    """Images that sandboxes can be made from."""

    images: list[ImageRow]


class SignalRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A signal for a command's whole process tree."""

    signal: Annotated[int, msgspec.Meta(ge=1, le=64)] = 9


class StdinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes (base64) for a command's stdin, at `offset` of all that was sent; `eof` closes it after them."""

    data: bytes = b""
    offset: int = 0
    eof: bool = False


@post("/sandboxes", summary="Create a sandbox, or get the one that the key has made")
async def create_sandbox(
    yard: TheYard, request: Call, data: JSONBody[CreateRequest], create_key: CreateKey = ""
) -> SandboxInfo:
    key = data.key or create_key
    return await yard.create(request.auth, CreateRequest(spec=data.spec, key=key))


@get("/sandboxes", summary="List the project's sandboxes")
async def list_sandboxes(yard: TheYard, request: Call, *, stopped: FromQuery[bool] = False) -> SandboxPage:
    return await yard.sandboxes(request.auth, stopped=stopped)


@get("/sandboxes/{sandbox:str}", summary="The state of a sandbox")
async def get_sandbox(yard: TheYard, request: Call, sandbox: SandboxPath) -> SandboxInfo:
    return only(SandboxInfo, await yard.op(request.auth, sandbox, GetSandbox()))


@delete("/sandboxes/{sandbox:str}", status_code=200, summary="Stop a sandbox and give everything back")
async def stop_sandbox(yard: TheYard, request: Call, sandbox: SandboxPath) -> SandboxInfo:
    return only(SandboxInfo, await yard.op(request.auth, sandbox, StopSandbox()))


@post(
    "/sandboxes/{sandbox:str}/keep-alive", status_code=200, summary="Count as use; change its times to live"
)
async def keep_alive(
    yard: TheYard, request: Call, sandbox: SandboxPath, data: JSONBody[KeepAlive]
) -> SandboxInfo:
    return only(SandboxInfo, await yard.op(request.auth, sandbox, data))


@post("/sandboxes/{sandbox:str}/ops", status_code=200, summary="Any operation, named by its field `op`")
async def do_op(
    yard: TheYard, request: Call, sandbox: SandboxPath, data: JSONBody[AnyOp], step_key: StepKey = ""
) -> AnyResult:
    return await yard.op(request.auth, sandbox, data, key=step_key)


@post(
    "/sandboxes/{sandbox:str}/cancel",
    status_code=204,
    summary="Kill the command that the call with this Step-Key waits for",
)
async def cancel_call(yard: TheYard, request: Call, sandbox: SandboxPath, step_key: StepKey) -> None:
    await yard.cancel(request.auth, sandbox, key=step_key)


@post("/sandboxes/{sandbox:str}/exec", status_code=200, summary="Run a command and wait for it")
async def exec_command(
    yard: TheYard, request: Call, sandbox: SandboxPath, data: JSONBody[CommandSpec], step_key: StepKey = ""
) -> ExecResult:
    return only(ExecResult, await yard.op(request.auth, sandbox, Exec(command=data), key=step_key))


@post("/sandboxes/{sandbox:str}/commands", summary="Start a command and return at once")
async def start_command(
    yard: TheYard, request: Call, sandbox: SandboxPath, data: JSONBody[CommandSpec], step_key: StepKey = ""
) -> CommandInfo:
    return only(CommandInfo, await yard.op(request.auth, sandbox, Start(command=data), key=step_key))


@get("/sandboxes/{sandbox:str}/commands", summary="Commands that run or whose results are kept")
async def list_commands(yard: TheYard, request: Call, sandbox: SandboxPath) -> CommandList:
    return only(CommandList, await yard.op(request.auth, sandbox, ListCommands()))


@get("/sandboxes/{sandbox:str}/commands/{command:int}", summary="Its result, or that it still runs")
async def get_command(
    yard: TheYard, request: Call, sandbox: SandboxPath, command: FromPath[int]
) -> ExecResult | CommandInfo:
    return ended(await yard.op(request.auth, sandbox, Wait(command_id=command, wait_s=0.0)))


@get("/sandboxes/{sandbox:str}/commands/{command:int}/wait", summary="Wait for its end, at most `wait_s`")
async def wait_command(
    yard: TheYard,
    request: Call,
    sandbox: SandboxPath,
    command: FromPath[int],
    wait_s: FromQuery[float] = 3600.0,
) -> ExecResult | CommandInfo:
    return ended(await yard.op(request.auth, sandbox, Wait(command_id=command, wait_s=wait_s)))


@get(
    "/sandboxes/{sandbox:str}/commands/{command:int}/output",
    media_type="application/octet-stream",
    summary="Its output as it comes, from `offset` on; with `follow` until the stream ends",
)
async def command_output(
    yard: TheYard,
    request: Call,
    sandbox: SandboxPath,
    command: FromPath[int],
    stream: FromQuery[StreamName] = "stdout",
    offset: Annotated[int, QueryParameter(ge=0)] = 0,
    *,
    follow: FromQuery[bool] = False,
) -> Stream:
    async def read(at: int, wait_s: float) -> OutputChunk:
        op = ReadOutput(
            command_id=command, stream=stream, offset=at, max_bytes=CHUNK_BYTES_MAX, wait_s=wait_s
        )
        return only(OutputChunk, await yard.op(request.auth, sandbox, op))

    async def pull(chunk: OutputChunk) -> AsyncIterator[bytes]:
        at = offset
        while True:
            if chunk.data:
                yield chunk.data
                at += len(chunk.data)
            if chunk.eof or not (chunk.data or follow):
                return
            chunk = await read(at, FOLLOW_S if follow else 0.0)

    # The first piece is asked for before the answer begins: a command that is not there is a 404, not a
    # broken stream.
    return Stream(pull(await read(offset, 0.0)), media_type="application/octet-stream")


@post(
    "/sandboxes/{sandbox:str}/commands/{command:int}/stdin",
    status_code=200,
    summary="Send bytes to its stdin",
)
async def send_stdin(
    yard: TheYard,
    request: Call,
    sandbox: SandboxPath,
    command: FromPath[int],
    data: JSONBody[StdinRequest],
    step_key: StepKey = "",
) -> Done:
    op = SendStdin(command_id=command, data=data.data, offset=data.offset, eof=data.eof)
    return only(Done, await yard.op(request.auth, sandbox, op, key=step_key))


@post(
    "/sandboxes/{sandbox:str}/commands/{command:int}/signal",
    status_code=200,
    summary="Signal its process tree",
)
async def signal_command(
    yard: TheYard,
    request: Call,
    sandbox: SandboxPath,
    command: FromPath[int],
    data: JSONBody[SignalRequest],
    step_key: StepKey = "",
) -> Done:
    op = Signal(command_id=command, signal=data.signal)
    return only(Done, await yard.op(request.auth, sandbox, op, key=step_key))


@post(
    "/sandboxes/{sandbox:str}/commands/{command:int}/resize", status_code=200, summary="Resize its terminal"
)
async def resize_command(
    yard: TheYard, request: Call, sandbox: SandboxPath, command: FromPath[int], data: JSONBody[Pty]
) -> Done:
    return only(Done, await yard.op(request.auth, sandbox, Resize(command_id=command, pty=data)))


@get("/images", summary="Images that sandboxes can be made from")
async def list_images(yard: TheYard, request: Call) -> ImageList:
    return ImageList(await yard.images(request.auth))


class Health(msgspec.Struct, frozen=True):
    """That the gateway answers, and which edges it hears. Needs no token. `store` is false while nothing can
    be written, as after a full disk: then nothing new can be made, and what runs goes on.
    """

    ok: bool
    edges: list[str]
    store: bool


@get(
    "/health",
    opt={"exclude_from_auth": True},
    security=[{}],
    summary="Whether the gateway works; no token needed",
)
async def health(yard: TheYard) -> Health:
    edges = [str(edge) for edge in yard.health()]
    return Health(ok=bool(edges), edges=edges, store=yard.store_works())


def router() -> Router:
    """All routes of this file."""
    return Router(
        "/",
        route_handlers=[
            create_sandbox,
            list_sandboxes,
            get_sandbox,
            stop_sandbox,
            keep_alive,
            do_op,
            cancel_call,
            exec_command,
            start_command,
            list_commands,
            get_command,
            wait_command,
            command_output,
            send_stdin,
            signal_command,
            resize_command,
            list_images,
            health,
        ],
    )
