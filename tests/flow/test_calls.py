"""Calls from the SDK through the real gateway and NATS to edges whose calls are plain processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import httpx
import msgspec
import pytest

from cloudyard import (
    CallResult,
    CallSpec,
    Case,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    SandboxUnavailable,
    Unsupported,
    Yard,
    blocking,
    connect,
)
from cloudyard.model import CALL_BYTES_MAX, CALL_OUTPUT_MAX_BYTES, MIB
from cloudyard.sdk.calls import INFRA_TRIES
from flow.chain import TOKEN, Chain, chain, real_edge
from flow.echo_edge import echo_edge
from flow.process_functions import ProcessFunctions
from support import REPOSITORY

both = pytest.mark.parametrize("transport", ["mux", "http"])
HANG = "import time\ntime.sleep(600)"


class Setup:
    """A yard of one or two edges, and what makes their calls."""

    def __init__(self, made: Chain, yard: Yard, functions: list[ProcessFunctions]) -> None:
        self.chain = made
        self.yard = yard
        self.functions = functions
        self.first = functions[0]


@asynccontextmanager
async def yard_at(directory: Path, *, transport: str = "mux", edges: int = 1) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(chain(directory))
        functions = []
        for name in ("e1", "e2")[:edges]:
            functions.append(ProcessFunctions())
            (directory / name).mkdir()
            await stack.enter_async_context(
                real_edge(made, directory / name, name=name, functions=functions[-1])
            )
        yard = await stack.enter_async_context(connect(made.url, TOKEN, transport=transport))  # type: ignore[arg-type]
        yield Setup(made, yard, functions)


@both
async def test_code_runs_and_says_how_it_ended(yard_dir: Path, transport: str) -> None:
    async with yard_at(yard_dir, transport=transport) as at:
        done = await at.yard.call("print(6 * 7)")
        assert (done.text, done.exit_code, done.ok, done.passed, done.edge) == ("42\n", 0, True, True, "e1")
        done = await at.yard.call("exit 3", language="shell")
        assert (done.exit_code, done.ok) == (3, False)
        assert done.fault is not None
        assert done.fault.label == "policy"
        done = await at.yard.call(
            "import sys, os\nsys.stdout.write(sys.stdin.read() + sys.argv[1] + os.environ['A'])\n"
            "sys.stdout.write(open('data/in.txt').read())",
            stdin="typed ",
            args=["said "],
            env={"A": "set "},
            files={"data/in.txt": "kept"},
        )
        assert done.text == "typed said set kept"
        assert (await at.yard.call(HANG, timeout_s=0.3)).timed_out


@both
async def test_a_file_and_a_directory_of_this_machine_are_taken_along(
    yard_dir: Path, tmp_path: Path, transport: str
) -> None:
    (tmp_path / "main.sh").write_text("cat sub/a; cat b")
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "sub" / "a").write_bytes(b"\xff")
    (tmp_path / "data" / "b").write_bytes(b"B")
    async with yard_at(yard_dir, transport=transport) as at:
        done = await at.yard.call(file=tmp_path / "main.sh", files=tmp_path / "data")
        assert done.stdout == b"\xffB"


@both
async def test_cases_are_judged_in_one_call(yard_dir: Path, transport: str) -> None:
    async with yard_at(yard_dir, transport=transport) as at:
        done = await at.yard.call(
            "print(int(input()) ** 2)",
            cases=[("3\n", "9\n"), Case(stdin=b"4\n", expected=b"16\n"), {"stdin": "5", "expected": "0"}],
        )
        assert [case.verdict for case in done.cases] == ["passed", "passed", "wrong"]
        assert (done.ok, done.passed) == (True, False)
        assert len(at.first.made) == 1


@both
async def test_cancelling_kills_the_call_on_its_edge(yard_dir: Path, transport: str) -> None:
    async with yard_at(yard_dir, transport=transport) as at, anyio.create_task_group() as tasks:
        tasks.start_soon(at.yard.call, HANG)
        await at.first.until(running=1)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await at.first.until(running=0)
        assert at.first.killed == 1


async def test_a_client_that_leaves_leaves_no_call_behind(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as at:
        for transport in ("mux", "http"):
            scope = anyio.CancelScope()
            with scope:
                async with (
                    connect(at.chain.url, TOKEN, transport=transport) as other,  # type: ignore[arg-type]
                    anyio.create_task_group() as tasks,
                ):
                    tasks.start_soon(other.call, HANG)
                    await at.first.until(running=1)
                    scope.cancel()
            await at.first.until(running=0)


async def test_a_batch_comes_back_in_order_and_no_more_run_at_once_than_asked(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as at:
        batch = [f"print({number})" for number in range(38)]
        results = await at.yard.call_many(
            [*batch, {"code": "echo shell", "language": "shell"}, CallSpec(code="print('spec')")], at_once=4
        )
        assert [each.text for each in results] == [
            *(f"{number}\n" for number in range(38)),
            "shell\n",
            "spec\n",
        ]
        assert at.first.most <= 4
        assert await at.yard.call_many([]) == []


async def test_our_failures_are_tried_again_and_then_said(yard_dir: Path) -> None:
    def broken() -> SandboxUnavailable:
        return SandboxUnavailable("The worker broke.", code="worker_lost")

    async with yard_at(yard_dir) as at:
        at.first.fail_with = [broken()]
        assert (await at.yard.call("print(1)")).text == "1\n"
        at.first.spoil = 1
        assert (await at.yard.call("print(2)")).text == "2\n"
        at.first.fail_with = [broken() for _ in range(INFRA_TRIES)]
        with pytest.raises(SandboxUnavailable, match="worker broke"):
            await at.yard.call("print(3)")
        at.first.fail_with = [broken() for _ in range(INFRA_TRIES)]
        results = await at.yard.call_many(["print(4)", "print(5)", "print(6)"], at_once=1)
        assert [each.text for each in results] == ["", "5\n", "6\n"]
        assert results[0].fault is not None
        assert (results[0].fault.label, results[0].fault.reason) == ("infra", "worker_lost")
        at.first.spoil = INFRA_TRIES
        fault = (await at.yard.call("print(7)")).fault
        assert fault is not None
        assert fault.label == "infra"


async def test_a_full_queue_is_asked_again(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as at:
        at.first.fail_with = [
            LimitExceeded("The queue is full.", code="calls_queued", retry_safe=True) for _ in range(4)
        ]
        assert (await at.yard.call("print(1)")).text == "1\n"


async def test_what_the_yard_refuses_fails_the_batch_by_number(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as at:
        with pytest.raises(InvalidRequest, match="Call 1 of the batch: timeout_s"):
            await at.yard.call_many(["print(1)", {"code": "print(2)", "timeout_s": -1}])
        assert at.first.made == []
        at.first.fail_with = [Unsupported("The image has no compiler.", code="no_compiler")]
        with pytest.raises(Unsupported, match="Call 0 of the batch"):
            await at.yard.call_many(["int main(){}"], language="c")
        with pytest.raises(NotFound) as caught:
            await at.yard.call("print(1)", image="nothing")
        assert "debian" in caught.value.hint


async def test_calls_go_to_the_edge_with_fewer_and_to_the_next_when_one_refuses(yard_dir: Path) -> None:
    async with yard_at(yard_dir, edges=2) as at:
        one, two = at.functions
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(at.yard.call, HANG)
            await one.until(running=4)
            await two.until(running=4)
            tasks.cancel_scope.cancel()
        await one.until(running=0)
        await two.until(running=0)
        for functions in (one, two):
            functions.fail_with = [LimitExceeded("Full.", code="calls_queued", retry_safe=True)]
            assert (await at.yard.call("print(1)")).text == "1\n"
            functions.fail_with = []


async def test_a_yard_without_functions_says_so(yard_dir: Path) -> None:
    async with chain(yard_dir) as made:
        (yard_dir / "e1").mkdir()
        async with real_edge(made, yard_dir / "e1"), connect(made.url, TOKEN) as yard:
            with pytest.raises(Unsupported) as caught:
                await yard.call("print(1)")
            assert caught.value.code == "no_functions"
            with pytest.raises(Unsupported, match="makes no sandbox") as caught:
                await yard.create("debian", backend="function")
            assert "yard.call" in caught.value.hint


@both
async def test_the_largest_call_fits_and_a_larger_one_is_refused_in_words(
    yard_dir: Path, transport: str
) -> None:
    async with yard_at(yard_dir, transport=transport) as at:
        data = os.urandom(CALL_BYTES_MAX - 200)
        code = "import sys\nprint(len(sys.stdin.buffer.read()))"
        assert (await at.yard.call(code, stdin=data)).text == f"{len(data)}\n"
        with pytest.raises(LimitExceeded, match="4 MiB") as caught:
            await at.yard.call(code, stdin=data + bytes(1000))
        assert caught.value.code == "call_too_large"
        done = await at.yard.call(
            f"import sys\nfor s in (sys.stdout, sys.stderr): s.buffer.write(bytes([255]) * {2 * MIB})",
            output_limit_bytes=CALL_OUTPUT_MAX_BYTES,
        )
        assert len(done.stdout) == len(done.stderr) == CALL_OUTPUT_MAX_BYTES
        assert (done.truncated, done.stdout_total) == (True, 2 * MIB)


async def test_http_takes_the_same_in_json_and_names_what_is_wrong(yard_dir: Path) -> None:
    async with (
        yard_at(yard_dir) as at,
        httpx.AsyncClient(
            base_url=at.chain.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30
        ) as client,
    ):
        done = await client.post("/v1/calls", json={"code": "print(input())", "stdin": "aGk="})
        assert (done.status_code, done.json()["stdout"]) == (200, "aGkK")
        wrong = await client.post("/v1/calls", json={"code": "1", "timout_s": 1})
        assert wrong.status_code == 400
        assert "timout_s" in wrong.json()["error"]["message"]
        wrong = await client.post("/v1/calls", json={"code": "1", "memory": "1KiB"})
        assert (wrong.status_code, "memory is 1 KiB" in wrong.json()["error"]["message"]) == (400, True)
        huge = await client.post("/v1/calls", json={"code": "1", "stdin": "A" * 9 * MIB})
        assert (huge.status_code, huge.json()["error"]["code"]) == (413, "body_too_large")
        schema = (await client.get("/schema/openapi.json")).json()
        assert "/v1/calls" in schema["paths"]
        assert schema["components"]["schemas"]["CallSpec"]["properties"]["stdin"]["contentEncoding"]


async def test_a_token_without_the_right_makes_no_call(yard_dir: Path) -> None:
    from flow import gateway_yard

    async with (
        gateway_yard.nats(yard_dir) as server,
        echo_edge(server),
        gateway_yard.gateway(server) as client,
    ):
        done = await client.post("/v1/calls", json={"code": "1"}, headers=gateway_yard.bearer("reader"))
        assert (done.status_code, done.json()["error"]["code"]) == (403, "action_not_granted")


async def test_a_batch_outlives_a_killed_gateway(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as at, anyio.create_task_group() as tasks:
        results: list[str] = []

        async def batch() -> None:
            calls = [f"import time\ntime.sleep(0.05)\nprint({number})" for number in range(60)]
            results.extend(each.text for each in await at.yard.call_many(calls, at_once=4))

        tasks.start_soon(batch)
        await at.first.until(running=4)
        await at.chain.kill_control()
        await at.chain.start_control()
        tasks.start_soon(anyio.sleep, 0)
        with anyio.fail_after(60):
            while not results:
                await anyio.sleep(0.05)
        assert results == [f"{number}\n" for number in range(60)]


async def test_without_any_edge_a_batch_is_answered_with_our_fault(
    yard_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudyard.sdk.calls.MANY_PATIENCE_S", 0.5)
    async with chain(yard_dir) as made, connect(made.url, TOKEN) as yard:
        results = await yard.call_many(["print(1)"] * 3)
        assert [each.fault.label for each in results if each.fault] == ["infra"] * 3
        assert {each.fault.reason for each in results if each.fault} == {"no_edge"}


async def test_the_blocking_facade_calls_too(yard_dir: Path) -> None:
    async with yard_at(yard_dir) as at:
        url = at.chain.url

        def work() -> list[str]:
            with blocking.connect(url, TOKEN) as yard:
                one = yard.call("print('one')")
                return [one.text, *(each.text for each in yard.call_many(["print('two')"]))]

        assert await anyio.to_thread.run_sync(work) == ["one\n", "two\n"]


def test_results_are_json_of_the_documented_shape() -> None:
    assert msgspec.json.encode(CallResult(exit_code=0, stdout=b"hi\n")) == b'{"exit_code":0,"stdout":"aGkK"}'


async def test_the_command_line_runs_and_judges(yard_dir: Path, tmp_path: Path) -> None:
    program, cases = tmp_path / "main.py", tmp_path / "cases.jsonl"
    program.write_text(
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(len(sys.argv) - 1)"
    )
    cases.write_text('{"stdin": "1 2", "expected": "3\\n"}\n{"stdin": "3", "expected": "4\\n"}\n')
    async with yard_at(yard_dir) as at:

        async def call(*words: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
            done = await anyio.run_process(
                [sys.executable, "-m", "cloudyard.cli", "call", *words],
                input=stdin,
                check=False,
                env={
                    **os.environ,
                    "PYTHONPATH": str(REPOSITORY / "src"),
                    "CLOUDYARD_URL": at.chain.url,
                    "CLOUDYARD_TOKEN": TOKEN,
                },
            )
            return done.returncode, done.stdout, done.stderr

        assert await call(str(program), "--stdin", "-", stdin=b"1 2 3") == (0, b"6\n", b"")
        assert await call(str(program), "a", "b") == (2, b"0\n", b"")
        assert await call("-", "--language", "shell", stdin=b"echo hi; exit 5") == (5, b"hi\n", b"")
        code, out, err = await call("-c", "import time; time.sleep(60)", "--timeout", "0.3")
        assert (code, out) == (124, b"")
        assert b"timeout" in err
        code, out, _ = await call(str(program), "--cases", str(cases))
        assert code == 1
        assert [line.split(b",")[0] for line in out.splitlines()] == [b"case 1: passed", b"case 2: wrong"]
        assert rb"expected '4\n', got '3\n'" in out
        code, out, _ = await call(str(program), "--cases", str(cases), "--json")
        assert (code, json.loads(out)["cases"][1]["verdict"]) == (1, "wrong")
        code, out, err = await call("-c", "1", "--memory", "1KiB")
        assert (code, out) == (2, b"")
        assert b"memory is 1 KiB" in err


async def test_a_result_that_no_message_holds_is_an_error_in_words(
    yard_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_much(self: ProcessFunctions, spec: CallSpec, *, project: str, cause: str) -> CallResult:
        return CallResult(exit_code=0, stdout=bytes(9 * MIB))

    monkeypatch.setattr(ProcessFunctions, "call", too_much)
    async with yard_at(yard_dir) as at:
        with anyio.fail_after(20), pytest.raises(LimitExceeded, match="can be sent") as caught:
            await at.yard.call("print(1)")
        assert caught.value.code == "reply_too_large"
