"""Creating once per key: at the same time, through two gateways, after restarts, and when edges refuse or
vanish.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from cloudyard.testing.nats import NatsServer
from flow.echo_edge import EchoEdge, echo_edge
from flow.gateway_yard import BOUND_S, bearer, gateway, nats

SPEC = {"image": "debian", "labels": {"a": "1", "b": "2"}}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    with anyio.fail_after(BOUND_S):
        async with nats(tmp_path) as running:
            yield running


async def create(client: httpx.AsyncClient, key: str = "", **changes: Any) -> httpx.Response:
    return await client.post("/v1/sandboxes", json={"spec": SPEC | changes}, headers={"Idempotency-Key": key})


async def hears(client: httpx.AsyncClient, edges: list[str]) -> None:
    while (await client.get("/v1/health")).json()["edges"] != edges:
        await anyio.sleep(0.02)


async def create_many(clients: list[httpx.AsyncClient], key: str, count: int) -> list[httpx.Response]:
    answers: list[httpx.Response] = []

    async def one(client: httpx.AsyncClient) -> None:
        answers.append(await create(client, key))

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(one, clients[number % len(clients)])
    return answers


def running(*edges: EchoEdge) -> list[str]:
    return [info.id for edge in edges for info in edge.sandboxes.values() if info.state == "running"]


async def test_a_key_gives_the_same_sandbox_also_from_another_gateway_and_after_a_restart(
    server: NatsServer,
) -> None:
    async with echo_edge(server) as edge:
        async with gateway(server) as client:
            first = (await create(client, "k")).json()["id"]
            assert (await create(client, "k")).json()["id"] == first
            other_order = {"labels": {"b": "2", "a": "1"}, "memory": 512 * 1024**2}
            assert (await create(client, "k", **other_order)).json()["id"] == first
        async with gateway(server) as client:
            assert (await create(client, "k")).json()["id"] == first
            await client.delete(f"/v1/sandboxes/{first}")
            again = (await create(client, "k")).json()
            assert (again["id"], again["state"]) == (first, "stopped")
        assert list(edge.sandboxes) == [first]


async def test_a_key_whose_sandbox_is_long_forgotten_makes_no_second_one(server: NatsServer) -> None:
    async with echo_edge(server) as edge, gateway(server) as client:
        first = (await create(client, "k")).json()["id"]
        await create(client, "k")
        edge.sandboxes.clear()
        answer = await create(client, "k")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "key_spent")
        assert first in answer.json()["error"]["message"]
        assert edge.sandboxes == {}


async def test_a_repeated_key_finds_its_sandbox_also_when_nothing_has_room(server: NatsServer) -> None:
    async with echo_edge(server, room=1), gateway(server) as client:
        first = (await create(client, "k")).json()["id"]
        assert (await create(client, "other")).status_code == 429
        assert (await create(client, "k")).json()["id"] == first


async def test_an_edge_that_is_leaving_is_passed_over(server: NatsServer) -> None:
    async with echo_edge(server, "e1") as one, echo_edge(server, "e2"), gateway(server) as client:
        await hears(client, ["e1", "e2"])
        one.draining = True
        assert {(await create(client, f"k{n}")).json()["edge"] for n in range(6)} == {"e2"}


async def test_many_at_once_with_one_key_through_two_gateways_make_one_sandbox(server: NatsServer) -> None:
    async with echo_edge(server, "e1") as one, echo_edge(server, "e2") as two:
        async with gateway(server) as red, gateway(server) as also_red:
            await hears(red, ["e1", "e2"])
            await hears(also_red, ["e1", "e2"])
            answers = await create_many([red, also_red], "k", 24)
        assert {answer.status_code for answer in answers} == {201}
        assert {answer.json()["id"] for answer in answers} == set(running(one, two))
        assert len(running(one, two)) == 1


async def test_a_key_with_another_spec_is_a_conflict_and_another_projects_key_is_its_own(
    server: NatsServer,
) -> None:
    async with echo_edge(server), gateway(server) as client:
        first = (await create(client, "k")).json()["id"]
        answer = await create(client, "k", cpu=2)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "key_reused")
        assert first in answer.json()["error"]["message"]
        client.headers.update(bearer("blue"))
        assert (await create(client, "k", cpu=2)).json()["id"] != first


async def test_without_a_key_each_call_makes_its_own(server: NatsServer) -> None:
    async with echo_edge(server) as edge, gateway(server) as client:
        made = {(await create(client)).json()["id"] for _ in range(3)}
        assert made == set(edge.sandboxes)
        assert len(made) == 3


async def test_an_edge_that_refuses_is_passed_over(server: NatsServer) -> None:
    async with echo_edge(server, "e1") as one, echo_edge(server, "e2") as two, gateway(server) as client:
        await hears(client, ["e1", "e2"])
        one.refuse = True
        answers = [await create(client, f"k{number}") for number in range(8)]
        assert {answer.json()["edge"] for answer in answers} == {"e2"}
        again = [await create(client, f"k{number}") for number in range(8)]
        assert [answer.json()["id"] for answer in again] == [answer.json()["id"] for answer in answers]
        assert len(two.sandboxes) == 8


async def test_many_at_once_with_one_key_while_an_edge_refuses_leave_one_sandbox(server: NatsServer) -> None:
    async with (
        echo_edge(server, "e1") as one,
        echo_edge(server, "e2") as two,
        gateway(server) as red,
        gateway(server) as also_red,
    ):
        await hears(red, ["e1", "e2"])
        await hears(also_red, ["e1", "e2"])
        for number in range(6):
            one.refuse, two.refuse = number % 2 == 0, number % 2 == 1
            before = set(running(one, two))
            answers = await create_many([red, also_red], f"k{number}", 12)
            made = set(running(one, two)) - before
            assert len(made) == 1
            assert {answer.json()["id"] for answer in answers} == made


async def test_when_no_edge_has_room_the_caller_is_told_when_to_try_again(server: NatsServer) -> None:
    async with echo_edge(server, room=2), gateway(server) as client:
        assert [(await create(client, f"k{number}")).status_code for number in range(2)] == [201, 201]
        answer = await create(client, "k2")
        assert answer.status_code == 429
        assert answer.headers["Retry-After"]
        error = answer.json()["error"]
        assert (error["code"], error["retry_safe"]) == ("no_capacity", True)
        assert error["hint"]


async def test_an_image_is_known_as_soon_as_it_is_built(server: NatsServer) -> None:
    async with echo_edge(server, "e1") as one, echo_edge(server, "e2"), gateway(server) as client:
        await hears(client, ["e1", "e2"])
        one.images = ["debian", "fresh"]
        answer = await create(client, image="fresh")
        assert answer.status_code == 201, answer.text
        assert answer.json()["edge"] == "e1"


async def test_an_image_that_nobody_has_is_refused_once_every_edge_was_heard_again(
    server: NatsServer,
) -> None:
    async with echo_edge(server), gateway(server) as client:
        await hears(client, ["e1"])
        begun = anyio.current_time()
        answer = await create(client, image="nobodys")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "image_not_found")
        assert anyio.current_time() - begun < 1.3


async def test_capacity_under_a_burst_is_never_exceeded(server: NatsServer) -> None:
    """Elsewhere overcommit was ignored under concurrency: stale metrics, no reservation."""
    async with echo_edge(server, room=5) as edge, gateway(server) as client:
        await hears(client, ["e1"])
        answers = [answer for number in range(50) for answer in await create_many([client], f"k{number}", 1)]
        codes = [answer.status_code for answer in answers]
        assert (codes.count(201), codes.count(429)) == (5, 45)
        assert len(edge.sandboxes) == 5


async def test_a_create_that_failed_for_good_frees_its_key(server: NatsServer) -> None:
    async with echo_edge(server) as edge, gateway(server) as client:
        edge.refuse = True
        assert (await create(client, "k")).status_code == 429
        edge.refuse = False
        assert (await create(client, "k", cpu=2)).status_code == 201


async def test_no_edge_at_all_is_our_fault_and_worth_a_retry(server: NatsServer) -> None:
    async with gateway(server) as client:
        answer = await create(client, "k")
        assert answer.status_code == 503
        assert answer.headers["Retry-After"]
        assert (answer.json()["error"]["code"], answer.json()["error"]["retry_safe"]) == ("no_edge", True)


async def test_a_claim_whose_edge_is_away_waits_for_it_and_is_made_once(server: NatsServer) -> None:
    async with gateway(server) as client:
        async with echo_edge(server) as edge:
            await hears(client, ["e1"])
            held = edge.sandboxes
        answer = await create(client, "k")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "edge_unreachable")
        async with echo_edge(server) as edge:
            edge.sandboxes, edge.boot = held, "boot-2"
            first = (await create(client, "k")).json()["id"]
            assert (await create(client, "k")).json()["id"] == first
            assert list(edge.sandboxes) == [first]
