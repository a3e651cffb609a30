"""Stateless calls on a whole yard, as a user makes them: languages, judging, batches, and a killed edge."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

import cloudyard
import support
from yards import TestYard

pytestmark = [pytest.mark.live, pytest.mark.slow]

MANY = 1000
BOUND_S = 120.0
SQUARE_C = """
#include <stdio.h>
int main(void) {
    long n;
    if (scanf("%ld", &n) != 1) return 3;
    printf("%ld\\n", n * n);
    return 0;
}
"""


@pytest.fixture
def compiler(depot: Path) -> str:
    """The name of an image with Python and a C compiler."""
    support.debian_depot(support.COMPILER_IMAGE, support.COMPILER_PACKAGES)
    return support.COMPILER_IMAGE


@pytest.fixture
def up(yard: TestYard) -> TestYard:
    """The test's yard, up."""
    done = yard.up()
    assert done.returncode == 0, done.stderr
    return yard


async def test_each_language_runs_with_files_input_and_cases(up: TestYard, compiler: str) -> None:
    with anyio.fail_after(BOUND_S):
        async with up.connect() as yard:
            done = await yard.call(
                "import sys, os, helper\nprint(helper.twice(input()), sys.argv[1:], os.environ['A'])",
                stdin="ab\n",
                files={"helper.py": "def twice(text): return 2 * text"},
                args=["x", "y"],
                env={"A": "1"},
                preload=["json"],
            )
            assert (done.stderr, done.text, done.exit_code) == (b"", "abab ['x', 'y'] 1\n", 0)
            done = await yard.call('read line; echo "got $line"; exit 4', language="shell", stdin="it\n")
            assert (done.text, done.exit_code) == ("got it\n", 4)
            assert done.fault is not None
            assert done.fault.label == "policy"
            done = await yard.call(
                SQUARE_C,
                language="c",
                image=compiler,
                cases=[("3\n", "9\n"), ("12", "144"), ("4", "17"), ("x", "")],
            )
            assert [case.verdict for case in done.cases] == ["passed", "passed", "wrong", "failed"]
            assert done.cases[3].exit_code == 3
            done = await yard.call("int main(void) { return x; }", language="c", image=compiler)
            assert (done.phase, done.ok) == ("compile", False)
            assert b"undeclared" in done.stderr
            done = await yard.call("1 / 0", cases=[("", "")])
            assert done.cases[0].verdict == "failed"
            assert b"ZeroDivisionError" in done.cases[0].stderr


async def test_limits_of_time_and_memory_end_a_call(up: TestYard) -> None:
    with anyio.fail_after(BOUND_S):
        async with up.connect() as yard:
            done = await yard.call("print('begun', flush=True)\nwhile True: pass", timeout_s=0.5)
            assert (done.timed_out, done.text) == (True, "begun\n")
            done = await yard.call("data = bytearray(400 * 2**20)", memory="64MiB")
            assert not done.ok
            assert done.oom
            assert (await yard.call("print('still here')")).text == "still here\n"


async def test_a_cancelled_call_is_killed_and_holds_nobody_up(up: TestYard) -> None:
    with anyio.fail_after(BOUND_S):
        async with up.connect() as yard:
            for _ in range(4):
                with anyio.move_on_after(1.0) as scope:
                    await yard.call("import time\ntime.sleep(300)", timeout_s=300)
                assert scope.cancelled_caught
            assert (await yard.call("print(1)")).text == "1\n"


async def test_a_thousand_calls_come_back_in_order(up: TestYard) -> None:
    with anyio.fail_after(BOUND_S):
        async with up.connect() as yard:
            results = await yard.call_many(f"print({number} * 7)" for number in range(MANY))
            assert [each.text for each in results] == [f"{number * 7}\n" for number in range(MANY)]
            assert not any(each.fault for each in results)


async def test_a_batch_loses_nothing_when_the_edge_is_killed_in_the_middle(up: TestYard) -> None:
    results: list[cloudyard.CallResult] = []
    with anyio.fail_after(BOUND_S):
        async with up.connect() as yard, anyio.create_task_group() as tasks:

            async def batch() -> None:
                calls = [f"import time\ntime.sleep(0.05)\nprint({number})" for number in range(MANY // 2)]
                results.extend(await yard.call_many(calls))

            tasks.start_soon(batch)
            for _ in range(2):
                assert (await yard.call("print('at work')")).text == "at work\n"  # it queued behind the batch
                assert not results, "the batch was over too soon to be disturbed"
                pids = await to_thread.run_sync(up.pids)
                os.kill(pids["edge"], signal.SIGKILL)
    assert [each.text for each in results] == [f"{number}\n" for number in range(MANY // 2)]
    assert not any(each.fault for each in results)


async def test_the_command_line_calls(up: TestYard, tmp_path: Path) -> None:
    program, cases = tmp_path / "main.py", tmp_path / "cases.jsonl"
    program.write_text("print(int(input()) ** 2)")
    cases.write_text('{"stdin": "3\\n", "expected": "9\\n"}\n{"stdin": "4\\n", "expected": "16\\n"}\n')
    environment = {"CLOUDYARD_CLIENT_FILE": str(up.state / "client.json")}

    def call(*words: str) -> tuple[int, str, str]:
        done = up.call("call", *words, environment=environment)
        return done.returncode, done.stdout, done.stderr

    assert call("-c", "import sys; print(6 * 7); sys.exit(3)") == (3, "42\n", "")
    code, out, err = call(str(program), "--cases", str(cases), "--json")
    assert (code, json.loads(out)["passed"], err) == (0, True, "")
    code, out, err = call("-c", "int main(void) { return 0; }", "--language", "c")
    assert (code, out) == (1, "")
    assert "gcc" in err
