"""The control process as a whole: its port, its stop, edges that go silent, NATS that goes away under it."""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import httpx
import pytest
from msgspec.structs import replace
from websockets.asyncio.client import connect

from cloudyard.control.service import ControlConfig, serve_control
from cloudyard.errors import Conflict, InvalidRequest, Unauthorized
from cloudyard.fabric import Credentials
from cloudyard.model import EDGE_SILENT_S
from flow.echo_edge import echo_edge
from flow.gateway_yard import BOUND_S, GRANTS, bearer, gateway, nats, served


async def test_a_port_in_use_and_an_address_of_others_are_named(tmp_path: Path) -> None:
    async with nats(tmp_path) as server:
        config = ControlConfig(nats_url=server.url, credentials=server.credentials())
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(Conflict) as caught:
                await serve_control(replace(config, port=port))
            assert (caught.value.code, str(port) in caught.value.message) == ("port_in_use", True)
        with pytest.raises(InvalidRequest) as refused:
            await serve_control(replace(config, host="192.0.2.1", port=0))
        assert refused.value.code == "bad_listen_address"


async def test_wrong_credentials_end_it_with_a_sentence(tmp_path: Path) -> None:
    async with nats(tmp_path) as server:
        with pytest.raises(Unauthorized), anyio.fail_after(BOUND_S):
            await serve_control(
                ControlConfig(nats_url=server.url, credentials=Credentials("control", "no"), port=0)
            )


async def test_it_stops_in_bounded_time_with_a_request_and_a_mux_socket_open(tmp_path: Path) -> None:
    with anyio.fail_after(BOUND_S):
        async with nats(tmp_path) as server, echo_edge(server) as edge, anyio.create_task_group() as outer:
            async with anyio.create_task_group() as tasks:
                config = ControlConfig(
                    nats_url=server.url, credentials=server.credentials(), port=0, grants=GRANTS
                )
                address = await tasks.start(serve_control, config)
                client = await outer.start(hang, address.url)
                await edge.hanging.wait()
                url = address.url.replace("http", "ws", 1) + "/v1/mux"
                socket_ = await connect(url, additional_headers=bearer())
                begun = anyio.current_time()
                tasks.cancel_scope.cancel()
            assert anyio.current_time() - begun < 8
            with pytest.raises(OSError):  # noqa: PT011 - refused, as each system says it
                await anyio.connect_tcp(address.host, address.port)
            await socket_.close()
            client.cancel()


async def hang(url: str, *, task_status: anyio.abc.TaskStatus[anyio.CancelScope]) -> None:
    with anyio.CancelScope() as scope:
        async with httpx.AsyncClient(base_url=url, headers=bearer(), timeout=None) as client:
            box = (await client.post("/v1/sandboxes", json={"spec": {"image": "debian"}})).json()["id"]
            task_status.started(scope)
            try:
                await client.post(f"/v1/sandboxes/{box}/exec", json={"argv": ["hang"]})
            except httpx.HTTPError:
                return


async def test_after_nats_was_killed_it_answers_again_by_itself(tmp_path: Path) -> None:
    with anyio.fail_after(BOUND_S):
        async with (
            nats(tmp_path) as server,
            echo_edge(server),
            served(server) as address,
            httpx.AsyncClient(base_url=address.url, headers=bearer()) as client,
        ):
            box = await client.post("/v1/sandboxes", json={"spec": {"image": "debian"}, "key": "k"})
            identity = box.json()["id"]
            await server.kill()
            down = await client.get(f"/v1/sandboxes/{identity}")
            assert down.status_code == 503
            assert down.json()["error"]["retry_safe"] is True
            await server.start()
            while (up := await client.get(f"/v1/sandboxes/{identity}")).status_code != 200:
                assert up.status_code == 503, up.text
                await anyio.sleep(0.05)
            again = await client.post("/v1/sandboxes", json={"spec": {"image": "debian"}, "key": "k"})
            assert again.json()["id"] == identity


@pytest.mark.slow
async def test_an_edge_that_goes_silent_fails_its_calls_and_gets_no_new_ones(tmp_path: Path) -> None:
    with anyio.fail_after(BOUND_S):
        async with (
            nats(tmp_path) as server,
            echo_edge(server, beating=False) as edge,
            gateway(server) as client,
        ):
            await edge.beat()
            box = (await client.post("/v1/sandboxes", json={"spec": {"image": "debian"}})).json()["id"]
            begun = anyio.current_time()
            hung = await client.post(f"/v1/sandboxes/{box}/exec", json={"argv": ["hang"]})
            assert anyio.current_time() - begun < EDGE_SILENT_S + 2
            assert hung.json()["error"]["code"] == "answer_lost"
            silent = await client.get(f"/v1/sandboxes/{box}")
            assert silent.json()["error"]["code"] == "edge_silent"
            placed = await client.post("/v1/sandboxes", json={"spec": {"image": "debian"}})
            assert placed.json()["error"]["code"] == "no_edge"
            await edge.beat()
            while (await client.get(f"/v1/sandboxes/{box}")).status_code != 200:
                await anyio.sleep(0.02)


@pytest.mark.parametrize("heard", [True, False])
async def test_calls_from_before_an_edge_listened_fail_when_it_is_heard(tmp_path: Path, heard: bool) -> None:
    """Also by a gateway that hears the edge for the first time: both may have been started again at once."""
    with anyio.fail_after(BOUND_S):
        async with (
            nats(tmp_path) as server,
            echo_edge(server, beating=False) as edge,
            gateway(server) as older,
        ):
            await edge.beat()
            box = (await older.post("/v1/sandboxes", json={"spec": {"image": "debian"}})).json()["id"]
            begun = anyio.current_time()
            async with gateway(server) as newer, anyio.create_task_group() as tasks:
                client = older if heard else newer

                async def listen_again() -> None:
                    await edge.hanging.wait()
                    if heard:
                        await edge.beat()  # it has listened since before the call, and may still answer
                    for _ in range(3):
                        assert (await client.get(f"/v1/sandboxes/{box}")).status_code == 200
                    edge.listening_since = anyio.current_time()
                    await edge.beat()

                tasks.start_soon(listen_again)
                hung = await client.post(
                    f"/v1/sandboxes/{box}/exec", json={"argv": ["hang"]}, headers={"Step-Key": "k"}
                )
                assert edge.listening_since > begun
                assert hung.json()["error"] == {
                    "kind": "yard_unavailable",
                    "code": "answer_lost",
                    "message": "Edge e1 was started again, or lost its connection, before it answered.",
                    "hint": "Send it again with the same key: what was done is not done twice.",
                    "retry_safe": True,
                    "fault": "infra",
                }


@pytest.mark.slow
async def test_an_edge_that_is_never_heard_fails_its_calls(tmp_path: Path) -> None:
    with anyio.fail_after(BOUND_S):
        async with (
            nats(tmp_path) as server,
            echo_edge(server, beating=False) as edge,
            gateway(server) as older,
        ):
            await edge.beat()
            box = (await older.post("/v1/sandboxes", json={"spec": {"image": "debian"}})).json()["id"]
            async with gateway(server) as newer:
                begun = anyio.current_time()
                hung = await newer.post(f"/v1/sandboxes/{box}/exec", json={"argv": ["hang"]})
                assert anyio.current_time() - begun < EDGE_SILENT_S + 2
                assert hung.json()["error"]["message"] == "Edge e1 has not been heard yet."
