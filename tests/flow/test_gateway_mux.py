"""The mux socket, on a real uvicorn, over the real NATS, against an edge that answers from memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from msgspec import Raw
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from cloudyard.model import (
    AnyOp,
    CommandSpec,
    CreateRequest,
    Exec,
    ExecResult,
    GetSandbox,
    SandboxInfo,
    SandboxSpec,
    StopSandbox,
)
from cloudyard.wire.messages import (
    MUX_IN_FLIGHT_MAX,
    MUX_PATH,
    MuxCreate,
    MuxFrame,
    MuxReply,
    MuxRequest,
    encode,
    mux_reply_decoder,
    raw,
    result_decoder,
)
from flow.echo_edge import EchoEdge, echo_edge
from flow.gateway_yard import BOUND_S, TOKENS, bearer, nats, served

ECHO = Exec(command=CommandSpec(argv=["echo", "hi"]))
DEEP = b"\x91" * 200_000 + b"\xc0"  # arrays in arrays in arrays
UNREADABLE = [b"\xff", b"", "text", DEEP, b"\x81\xa7request" + DEEP, b"\x81\xa4else" + DEEP]
HANG = Exec(command=CommandSpec(argv=["hang"]))


@asynccontextmanager
async def mux(url: str, who: str = "red") -> AsyncIterator[ClientConnection]:
    address = url.replace("http", "ws", 1) + MUX_PATH
    async with connect(address, additional_headers=bearer(who), compression=None, max_size=None) as socket:
        yield socket


class Yard:
    """What a test has: the edge, an address, a socket and a sandbox."""

    def __init__(self, edge: EchoEdge, url: str, socket: ClientConnection, sandbox: str) -> None:
        self.edge = edge
        self.url = url
        self.socket = socket
        self.sandbox = sandbox

    async def send(self, number: int, op: AnyOp, *, key: str = "", sandbox: str = "") -> None:
        request = MuxRequest(id=number, sandbox=sandbox or self.sandbox, op=raw(op), key=key)
        await self.socket.send(encode(MuxFrame(request=request)))

    async def reply(self) -> MuxReply:
        return mux_reply_decoder.decode(await self.socket.recv())


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    with anyio.fail_after(BOUND_S):
        async with (
            nats(tmp_path) as server,
            echo_edge(server) as edge,
            served(server) as address,
            mux(address.url) as socket,
        ):
            create = MuxCreate(id=1, request=CreateRequest(spec=SandboxSpec(image="debian"), key="k"))
            await socket.send(encode(MuxFrame(create=create)))
            reply = mux_reply_decoder.decode(await socket.recv())
            assert reply.error is None
            info = result_decoder.decode(reply.result)
            assert isinstance(info, SandboxInfo)
            yield Yard(edge, address.url, socket, info.id)


async def test_an_operation_goes_and_its_result_comes(yard: Yard) -> None:
    await yard.send(5, ECHO)
    reply = await yard.reply()
    assert reply.id == 5
    result = result_decoder.decode(reply.result)
    assert isinstance(result, ExecResult)
    assert result.stdout == b"hi\n"


async def test_a_frame_that_asks_for_nothing_closes_the_socket_with_a_reason(yard: Yard) -> None:
    await yard.socket.send(encode({"requset": {}}))
    with pytest.raises(ConnectionClosed) as caught:
        await yard.socket.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1007
    assert "no request" in caught.value.rcvd.reason


async def test_a_thousand_in_flight_from_one_client_all_come_back(yard: Yard) -> None:
    for number in range(1, 1001):
        await yard.send(number, ECHO)
    replies = [await yard.reply() for _ in range(1000)]
    assert {reply.id for reply in replies} == set(range(1, 1001))
    assert all(reply.error is None for reply in replies)


async def test_a_slow_operation_holds_up_no_other(yard: Yard) -> None:
    await yard.send(1, HANG)
    await yard.edge.hanging.wait()
    await yard.send(2, ECHO)
    assert (await yard.reply()).id == 2


async def test_a_cancel_reaches_the_edge_and_has_no_reply(yard: Yard) -> None:
    await yard.send(1, HANG)
    await yard.edge.hanging.wait()
    await yard.socket.send(encode(MuxFrame(cancel=1)))
    await yard.edge.cancel_heard.wait()
    await yard.send(1, ECHO)  # the number is free again
    assert (await yard.reply()).error is None


async def test_a_client_that_loses_its_socket_cancels_nothing_and_gets_its_answer_by_key(yard: Yard) -> None:
    await yard.send(1, HANG)
    await yard.edge.hanging.wait()
    await yard.socket.close()
    async with mux(yard.url) as again:
        yard.socket = again
        await yard.send(1, ECHO, key="k1")
        await yard.send(2, ECHO, key="k1")
        assert {(await yard.reply()).id, (await yard.reply()).id} == {1, 2}
    assert yard.edge.cancelled == []
    assert yard.edge.calls.count("Exec") <= 3


async def test_errors_come_back_as_they_are_for_their_own_request(yard: Yard) -> None:
    await yard.send(1, ECHO, sandbox="sb-e1-000000000000")
    await yard.send(2, ECHO, sandbox="nonsense")
    await yard.send(3, ECHO, sandbox="sb-e2-000000000000")
    await yard.send(4, ECHO, key="x" * 300)
    codes = {}
    for _ in range(4):
        reply = await yard.reply()
        assert reply.error is not None
        codes[reply.id] = reply.error.code
    assert codes == {1: "sandbox_not_found", 2: "bad_sandbox_id", 3: "edge_unreachable", 4: "bad_key"}


async def test_an_answer_that_cannot_be_read_fails_its_request_alone(yard: Yard) -> None:
    yard.edge.garbage = b"\xc1"
    await yard.send(1, ECHO)
    reply = await yard.reply()
    assert reply.error is not None
    assert (reply.error.code, reply.error.fault) == ("bad_reply", "infra")
    yard.edge.garbage = b""
    await yard.send(2, ECHO)
    assert (await yard.reply()).error is None


async def test_an_operation_that_is_none_is_refused_with_a_sentence(yard: Yard) -> None:
    request = MuxRequest(id=1, sandbox=yard.sandbox, op=Raw(encode({"op": "exec", "comand": {}})))
    await yard.socket.send(encode(MuxFrame(request=request)))
    reply = await yard.reply()
    assert reply.error is not None
    assert reply.error.code == "bad_operation"
    assert "comand" in reply.error.message


async def test_a_request_of_the_wrong_shape_fails_alone(yard: Yard) -> None:
    await yard.send(1, HANG)
    wrong = {"create": {"id": 2, "request": {"spec": {"image": "debian", "memroy": 1}}}}
    await yard.socket.send(encode(wrong))
    reply = await yard.reply()
    assert reply.error is not None
    assert (reply.id, reply.error.code) == (2, "bad_request")
    assert "memroy" in reply.error.message


@pytest.mark.parametrize(
    "frame", [b"\xff", b"", "text", DEEP, b"\x81\xa7request" + DEEP, b"\x81\xa4else" + DEEP]
)
async def test_a_frame_that_cannot_be_read_closes_the_socket_with_a_reason(
    yard: Yard, frame: bytes | str
) -> None:
    await yard.socket.send(frame)
    with pytest.raises(ConnectionClosed) as caught:
        await yard.socket.recv()
    assert caught.value.rcvd is not None
    assert "frame" in caught.value.rcvd.reason


async def test_a_number_under_way_cannot_be_used_twice(yard: Yard) -> None:
    await yard.send(1, HANG)
    await yard.edge.hanging.wait()
    await yard.send(1, ECHO)
    with pytest.raises(ConnectionClosed):
        await yard.socket.recv()


async def test_more_than_the_bound_in_flight_is_refused_and_the_rest_goes_on(yard: Yard) -> None:
    for number in range(1, MUX_IN_FLIGHT_MAX + 1):
        await yard.send(number, HANG)
    await yard.send(MUX_IN_FLIGHT_MAX + 1, ECHO)
    reply = await yard.reply()
    assert reply.error is not None
    assert (reply.id, reply.error.code, reply.error.retry_safe) == (
        MUX_IN_FLIGHT_MAX + 1,
        "too_many_in_flight",
        True,
    )


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer cy_wrong"}])
async def test_a_handshake_without_a_good_token_is_refused_in_the_one_shape(
    yard: Yard, headers: dict[str, str]
) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(yard.url.replace("http", "ws", 1) + MUX_PATH, additional_headers=headers):
            pass
    assert caught.value.response.status_code == 401
    assert b'"kind":"unauthorized"' in (caught.value.response.body or b"")


async def test_another_websocket_path_is_not_there(yard: Yard) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(yard.url.replace("http", "ws", 1) + "/v1/nope", additional_headers=bearer()):
            pass
    assert caught.value.response.status_code == 404


async def test_a_limited_token_is_held_to_its_actions(yard: Yard) -> None:
    async with mux(yard.url, "reader") as socket:
        yard.socket = socket
        for number, op in enumerate((GetSandbox(), ECHO, StopSandbox()), start=1):
            await yard.send(number, op)
        outcomes = {}
        for _ in range(3):
            reply = await yard.reply()
            outcomes[reply.id] = reply.error.code if reply.error else "done"
    assert outcomes == {1: "done", 2: "action_not_granted", 3: "action_not_granted"}


async def test_pending_calls_fail_when_the_edge_starts_again_and_can_be_repeated(yard: Yard) -> None:
    await yard.send(1, HANG, key="k1")
    await yard.send(2, HANG)
    await yard.send(3, GetSandbox())
    assert (await yard.reply()).id == 3
    yard.edge.boot, yard.edge.listening_since = "boot-2", anyio.current_time()
    outcomes = {}
    for _ in range(2):
        reply = await yard.reply()
        assert reply.error is not None
        outcomes[reply.id] = (reply.error.code, reply.error.retry_safe)
    # Without a key nobody can tell whether it was done: then it is not safe to repeat.
    assert outcomes == {1: ("answer_lost", True), 2: ("answer_lost", False)}


async def test_a_download_that_changes_on_the_way_breaks_instead_of_looking_whole(yard: Yard) -> None:
    yard.edge.files["/f"] = bytes(3 * 1024 * 1024)

    async def download() -> None:
        path = f"/v1/sandboxes/{yard.sandbox}/files"
        async with (
            httpx.AsyncClient(base_url=yard.url, headers=bearer()) as client,
            client.stream("GET", path, params={"path": "/f"}) as answer,
        ):
            assert answer.status_code == 200
            async for _ in answer.aiter_raw():
                yard.edge.files["/f"] = bytes(17)

    with pytest.raises(httpx.RemoteProtocolError):
        await download()


async def test_tokens_never_reach_a_log(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    async with httpx.AsyncClient(base_url=yard.url) as client:
        await client.get("/v1/sandboxes", headers=bearer())
        await client.get("/v1/sandboxes", headers={"Authorization": "Bearer cy_stranger"})
    for secret in (*TOKENS.values(), "cy_stranger"):
        assert secret not in caplog.text
