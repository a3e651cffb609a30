"""The HTTP API, in memory, over the real NATS, against an edge that answers from memory."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx
import pytest

from cloudyard.model import CHUNK_BYTES_MAX
from flow.echo_edge import EchoEdge, echo_edge
from flow.gateway_yard import bearer, gateway, nats

SPEC = {"image": "debian"}


@pytest.fixture
async def edge_and_client(tmp_path: Path) -> AsyncIterator[tuple[EchoEdge, httpx.AsyncClient]]:
    async with nats(tmp_path) as server, gateway(server) as client, echo_edge(server) as edge:
        yield edge, client


@pytest.fixture
def edge(edge_and_client: tuple[EchoEdge, httpx.AsyncClient]) -> EchoEdge:
    return edge_and_client[0]


@pytest.fixture
def client(edge_and_client: tuple[EchoEdge, httpx.AsyncClient]) -> httpx.AsyncClient:
    return edge_and_client[1]


@pytest.fixture
async def box(client: httpx.AsyncClient) -> str:
    """The path of a sandbox."""
    answer = await client.post("/v1/sandboxes", json={"spec": SPEC})
    assert answer.status_code == 201, answer.text
    return f"/v1/sandboxes/{answer.json()['id']}"


def error(answer: httpx.Response) -> tuple[int, str, str]:
    """Status, kind and code, after a look at the shape."""
    assert list(answer.json()) == ["error"], answer.text
    body = answer.json()["error"]
    assert body.keys() == {"kind", "code", "message", "hint", "retry_safe", "fault"}
    assert body["message"].endswith("."), body
    return answer.status_code, body["kind"], body["code"]


async def test_a_sandbox_is_created_used_listed_and_stopped(client: httpx.AsyncClient, box: str) -> None:
    done = (await client.post(f"{box}/exec", json={"argv": ["echo", "hi", "there"]})).json()
    assert (done["exit_code"], base64.b64decode(done["stdout"])) == (0, b"hi there\n")
    identity = box.rsplit("/", 1)[1]
    assert [info["id"] for info in (await client.get("/v1/sandboxes")).json()["sandboxes"]] == [identity]
    assert (await client.get(box)).json()["state"] == "running"
    assert (await client.delete(box)).json()["state"] == "stopped"
    assert (await client.get("/v1/sandboxes")).json()["sandboxes"] == []
    stopped = (await client.get("/v1/sandboxes", params={"stopped": "true"})).json()["sandboxes"]
    assert [info["id"] for info in stopped] == [identity]


async def test_health_needs_no_token_and_everything_else_does(client: httpx.AsyncClient) -> None:
    client.headers.pop("Authorization")
    assert (await client.get("/v1/health")).status_code == 200
    answer = await client.get("/v1/sandboxes")
    assert error(answer) == (401, "unauthorized", "no_token")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    answer = await client.get("/v1/images", headers={"Authorization": "Bearer cy_wrong"})
    assert error(answer) == (401, "unauthorized", "unknown_token")
    assert "cy_wrong" not in answer.text


async def test_a_token_reaches_only_its_project_and_its_actions(client: httpx.AsyncClient, box: str) -> None:
    assert error(await client.get(box, headers=bearer("blue"))) == (403, "forbidden", "not_yours")
    assert (await client.get("/v1/sandboxes", headers=bearer("blue"))).json()["sandboxes"] == []
    assert (await client.get(box, headers=bearer("reader"))).status_code == 200
    refused = await client.post(f"{box}/exec", json={"shell": "echo"}, headers=bearer("reader"))
    assert error(refused) == (403, "forbidden", "action_not_granted")
    assert error(await client.delete(box, headers=bearer("reader")))[2] == "action_not_granted"


@pytest.mark.parametrize(
    ("method", "path", "body", "expected", "named"),
    [
        ("GET", "/v1/nothing", None, (404, "not_found", "no_such_route"), "/v1/nothing"),
        ("PATCH", "/v1/sandboxes", None, (405, "invalid_request", "method_not_allowed"), "PATCH"),
        ("POST", "/v1/sandboxes", b"{", (400, "invalid_request", "bad_request"), ""),
        (
            "POST",
            "/v1/sandboxes",
            {"spec": {"image": "debian", "memroy": 1}},
            (400, "invalid_request", "bad_request"),
            "memroy",
        ),
        (
            "POST",
            "/v1/sandboxes",
            {"spec": {"image": "debian", "cpu": "x"}},
            (400, "invalid_request", "bad_request"),
            "cpu",
        ),
        (
            "POST",
            "/v1/sandboxes",
            {"spec": {"image": "debian", "cpu": 0}},
            (400, "invalid_request", "out_of_range"),
            "cpu",
        ),
        (
            "POST",
            "/v1/sandboxes",
            {"spec": {"image": "debian", "memory": "many"}},
            (400, "invalid_request", "bad_size"),
            "many",
        ),
        (
            "POST",
            "/v1/sandboxes",
            {"spec": {"image": "gentoo"}},
            (404, "not_found", "image_not_found"),
            "gentoo",
        ),
        (
            "POST",
            "/v1/sandboxes",
            {"spec": {"image": "debian", "backend": "vm"}},
            (501, "unsupported", "backend_not_offered"),
            "vm",
        ),
        (
            "POST",
            "/v1/sandboxes",
            {"spec": {"image": "debian", "cpu": 500}},
            (429, "limit_exceeded", "too_large"),
            "500",
        ),
        ("GET", "/v1/sandboxes/box", None, (400, "invalid_request", "bad_sandbox_id"), "box"),
        (
            "GET",
            "/v1/sandboxes/sb-e1-000000000000",
            None,
            (404, "not_found", "sandbox_not_found"),
            "000000000000",
        ),
        (
            "GET",
            "/v1/sandboxes/sb-e2-000000000000",
            None,
            (503, "yard_unavailable", "edge_unreachable"),
            "e2",
        ),
    ],
)
async def test_every_refusal_has_the_one_shape_and_names_what_is_wrong(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    body: object,
    expected: tuple[int, str, str],
    named: str,
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode() if body else None
    answer = await client.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert error(answer) == expected
    assert named in answer.json()["error"]["message"]
    assert answer.json()["error"]["hint"]


async def test_a_misspelt_field_of_an_operation_is_named(client: httpx.AsyncClient, box: str) -> None:
    for path, body in (
        (f"{box}/ops", {"op": "exec", "command": {"shel": "x"}}),
        (f"{box}/exec", {"shel": "x"}),
        (f"{box}/ops", {"op": "shel"}),
    ):
        answer = await client.post(path, json=body)
        assert error(answer) == (400, "invalid_request", "bad_request")
        assert "shel" in answer.json()["error"]["message"]


async def test_a_missing_parameter_is_named(client: httpx.AsyncClient, box: str) -> None:
    answer = await client.get(f"{box}/files")
    assert error(answer) == (400, "invalid_request", "bad_request")
    assert "path" in answer.json()["error"]["message"]


async def test_a_body_that_is_too_large_is_refused_with_the_way_that_works(
    client: httpx.AsyncClient, box: str
) -> None:
    answer = await client.post(f"{box}/exec", json={"shell": "x" * (5 * 1024 * 1024)})
    assert error(answer) == (413, "limit_exceeded", "body_too_large")
    assert "PUT" in answer.json()["error"]["hint"]


async def test_a_body_without_end_in_its_depth_is_refused(client: httpx.AsyncClient, box: str) -> None:
    answer = await client.post(
        "/v1/sandboxes", content=b'{"spec": ' + b"[" * 200_000, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "bad_request"


async def test_any_operation_goes_through_ops_and_a_step_key_is_passed_on(
    edge: EchoEdge, client: httpx.AsyncClient, box: str
) -> None:
    body = {"op": "exec", "command": {"shell": "echo once"}}
    for _ in range(2):
        answer = await client.post(f"{box}/ops", json=body, headers={"Step-Key": "k1"})
        assert answer.json()["result"] == "exec"
    assert edge.calls.count("Exec") == 1
    for body in (
        {"op": "stat", "path": "/x"},
        {"op": "keep_alive", "idle_ttl_s": None},
        {"op": "get_sandbox"},
    ):
        assert (await client.post(f"{box}/ops", json=body)).status_code in (200, 404)


async def test_commands_have_their_routes(client: httpx.AsyncClient, box: str) -> None:
    started = await client.post(f"{box}/commands", json={"argv": ["cat"], "keep_stdin": True})
    assert (started.status_code, started.json()["command_id"]) == (201, 7)
    assert len((await client.get(f"{box}/commands")).json()["commands"]) == 1
    taken = await client.post(
        f"{box}/commands/7/stdin", json={"data": base64.b64encode(b"abc").decode(), "offset": 2}
    )
    assert taken.json()["taken"] == 5
    assert (await client.post(f"{box}/commands/7/signal", json={"signal": 15})).status_code == 200
    assert error(await client.post(f"{box}/commands/7/signal", json={"signal": 99}))[2] == "bad_request"
    assert (await client.post(f"{box}/commands/7/resize", json={"rows": 10, "cols": 20})).status_code == 200
    assert (await client.get(f"{box}/commands/7")).json()["exit_code"] == 0
    assert (await client.get(f"{box}/commands/7/wait", params={"wait_s": 1})).json()["exit_code"] == 0


async def test_output_is_streamed_from_any_offset_to_its_end(client: httpx.AsyncClient, box: str) -> None:
    size = 3 * CHUNK_BYTES_MAX + 17
    whole = await client.get(f"{box}/commands/{size}/output")
    assert len(whole.content) == size
    rest = await client.get(f"{box}/commands/{size}/output", params={"offset": size - 5, "follow": "true"})
    assert len(rest.content) == 5


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX + 1, 5 * 1024 * 1024 + 3])
async def test_files_of_any_size_go_up_and_down_whole_and_in_pieces(
    edge: EchoEdge, client: httpx.AsyncClient, box: str, size: int
) -> None:
    """Elsewhere an upload over 18 KB said ok and the file was absent."""
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)

    async def body() -> AsyncIterator[bytes]:
        for at in range(0, size, 100_000):
            yield data[at : at + 100_000]

    answer = await client.put(f"{box}/files", params={"path": "/a file", "mode": "600"}, content=body())
    assert (answer.status_code, answer.json()["size"]) == (200, size), answer.text
    assert edge.largest_piece <= CHUNK_BYTES_MAX
    got = await client.get(f"{box}/files", params={"path": "/a file"})
    assert got.content == data
    assert int(got.headers["Content-Length"]) == size


async def test_file_routes_list_stat_make_and_remove(client: httpx.AsyncClient, box: str) -> None:
    await client.put(f"{box}/files", params={"path": "/d/f"}, content=b"x")
    assert (await client.get(f"{box}/files/stat", params={"path": "/d/f"})).json()["size"] == 1
    entries = (await client.get(f"{box}/files/list", params={"path": "/d"})).json()["entries"]
    assert [entry["path"] for entry in entries] == ["/d/f"]
    assert (await client.post(f"{box}/files/mkdir", json={"path": "/d/e"})).status_code == 200
    assert (await client.delete(f"{box}/files", params={"path": "/d/f"})).status_code == 200
    assert error(await client.get(f"{box}/files", params={"path": "/d/f"})) == (
        404,
        "not_found",
        "no_such_file",
    )


async def test_images_are_those_that_edges_have(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/images")).json() == {"images": [{"name": "debian"}, {"name": "python"}]}


async def test_a_misspelt_query_parameter_is_named_with_those_there_are(
    client: httpx.AsyncClient, box: str
) -> None:
    answer = await client.get("/v1/sandboxes", params={"stoped": "true"})
    assert error(answer) == (400, "invalid_request", "unknown_parameter")
    assert "stoped" in answer.json()["error"]["message"]
    assert answer.json()["error"]["hint"] == "It takes: stopped."
    assert error(await client.get(box, params={"x": "1"}))[2] == "unknown_parameter"


async def test_a_missing_body_is_called_that(client: httpx.AsyncClient, box: str) -> None:
    for path in (f"{box}/exec", "/v1/sandboxes"):
        answer = await client.post(path)
        assert error(answer) == (400, "invalid_request", "body_missing")


async def test_the_schema_is_a_page_that_loads_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    page = await client.get("/schema", headers={"Authorization": ""})
    assert page.status_code == 200
    assert page.headers["Content-Type"].startswith("text/html")
    assert "/v1/sandboxes/{sandbox}/exec" in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text


async def test_the_schema_describes_every_route_from_the_same_structs(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/schema/openapi.json", headers={"Authorization": ""})).json()
    assert schema["openapi"].startswith("3.1")
    assert "base64" in schema["info"]["description"]
    paths = schema["paths"]
    assert {"/v1/sandboxes", "/v1/sandboxes/{sandbox}/exec", "/v1/images"} <= paths.keys()
    assert paths["/v1/sandboxes/{sandbox}/files"].keys() == {"get", "put", "delete"}
    failed = paths["/v1/sandboxes"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    assert failed["$ref"].endswith("ErrorAnswer")
    stdout = schema["components"]["schemas"]["ExecResult"]["properties"]["stdout"]
    assert stdout["contentEncoding"] == "base64"
    specs = [name for name in schema["components"]["schemas"] if name.endswith("SandboxSpec")]
    assert "memory" in schema["components"]["schemas"][specs[0]]["properties"]


async def test_a_list_says_which_edges_did_not_answer(tmp_path: Path) -> None:
    with anyio.fail_after(30):
        async with nats(tmp_path) as server, gateway(server) as client, echo_edge(server, "e1"):
            async with echo_edge(server, "e2") as second:
                await second.beat()
                while (await client.get("/v1/health")).json()["edges"] != ["e1", "e2"]:
                    await anyio.sleep(0.02)
            page = (await client.get("/v1/sandboxes")).json()
            assert page == {"sandboxes": [], "missing": ["e2"]}


@pytest.mark.slow
async def test_a_silent_edge_is_named_by_lists_for_as_long_as_it_is_silent(tmp_path: Path) -> None:
    with anyio.fail_after(30):
        async with nats(tmp_path) as server, gateway(server) as client, echo_edge(server, "e1"):
            async with echo_edge(server, "e2"):
                while (await client.get("/v1/health")).json()["edges"] != ["e1", "e2"]:
                    await anyio.sleep(0.02)
            while (await client.get("/v1/health")).json()["edges"] != ["e1"]:
                await anyio.sleep(0.1)
            assert (await client.get("/v1/sandboxes")).json()["missing"] == ["e2"]
            async with echo_edge(server, "e2"):
                while "missing" in (await client.get("/v1/sandboxes")).json():
                    await anyio.sleep(0.02)
