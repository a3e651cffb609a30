"""What inspect-ai's own check leaves out: its injected tools, limits, cancellation, users, configurations."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.util import (
    ExecRemoteAwaitableOptions,
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxUnavailableError,
)
from inspect_ai.util._sandbox._cli import SANDBOX_TOOLS_DIR
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy
from inspect_ai.util._sandbox.limits import override_max_exec_output_size

import cloudyard
from cloudyard.integrations.inspect_ai import CloudyardConfig, CloudyardSandbox
from conftest import MakeSandbox

MINUTES = 300  # a number of seconds that no other process here sleeps for
WITHIN_S = 15.0


async def words(env: SandboxEnvironment, *command: str, user: str | None = None) -> list[str]:
    done = await env.exec(list(command), user=user)
    assert done.success, done.stderr
    return done.stdout.split()


async def sleepers(env: SandboxEnvironment) -> list[str]:
    done = await env.exec(["sh", "-c", f"ps -eo args | grep -x 'sleep {MINUTES}'"], user="root")
    return done.stdout.splitlines()


async def test_inspect_ais_tools_run_as_root_out_of_the_agents_reach(sandbox_env: SandboxEnvironment) -> None:
    env = SandboxEnvironmentProxy(sandbox_env)
    command = ["sh", "-c", "id -un; pwd; echo bad >&2; exit 3"]
    done = await env.exec_remote(command, ExecRemoteAwaitableOptions(timeout=30), stream=False)
    assert done == ExecResult(False, 3, "agent\n/home/agent\n", "bad\n")
    assert env._root_access is not None
    assert env._root_access.state == "usable"
    assert await words(env, "stat", "-c", "%U %a", SANDBOX_TOOLS_DIR) == ["root", "700"]
    with pytest.raises(PermissionError):
        await env.exec([f"{SANDBOX_TOOLS_DIR}/inspect-sandbox-tools", "exec"])


async def test_a_cancelled_call_leaves_no_process(sandbox_env: SandboxEnvironment) -> None:
    with anyio.move_on_after(1):
        await sandbox_env.exec(["sh", "-c", f"setsid sleep {MINUTES} & sleep {MINUTES}"])
    with anyio.fail_after(WITHIN_S):
        while await sleepers(sandbox_env):
            await anyio.sleep(0.05)


async def test_what_was_written_before_a_timeout_is_told(sandbox_env: SandboxEnvironment) -> None:
    with pytest.raises(TimeoutError) as caught:
        await sandbox_env.exec(
            ["sh", "-c", f"echo begun; setsid sleep {MINUTES} & sleep {MINUTES}"], timeout=1
        )
    assert getattr(caught.value, "truncated_output", None) == "begun\n"
    assert await sleepers(sandbox_env) == []


async def test_output_past_the_limit_is_an_error_that_has_its_beginning(
    sandbox_env: SandboxEnvironment,
) -> None:
    with (
        override_max_exec_output_size(1024),
        pytest.raises(OutputLimitExceededError, match="1 KiB") as caught,
    ):
        await sandbox_env.exec(["sh", "-c", "yes | head -c 1000000"])
    assert caught.value.truncated_output == "y\n" * 512


async def test_bytes_that_are_no_text_are_replaced(sandbox_env: SandboxEnvironment) -> None:
    done = await sandbox_env.exec(["printf", r"caf\303\251 \377"])
    assert done.stdout == "caf\u00e9 \ufffd"
    await sandbox_env.write_file("bytes", b"\xff\r\n")
    assert await sandbox_env.read_file("bytes", text=False) == b"\xff\r\n"
    with pytest.raises(UnicodeDecodeError):
        await sandbox_env.read_file("bytes")
    await sandbox_env.write_file("lines", "a\r\nb\n")
    assert await sandbox_env.read_file("lines") == "a\r\nb\n"


async def test_commands_that_cannot_be_run_are_failed_results_with_the_reason(
    sandbox_env: SandboxEnvironment,
) -> None:
    for done, code, word in (
        (await sandbox_env.exec(["no-such-program"]), 127, "no-such-program"),
        (await sandbox_env.exec(["true"], cwd="no/such/place"), 126, "/home/agent/no/such/place"),
        (await sandbox_env.exec(["true"], user="nobody-here"), 126, "nobody-here"),
        (await sandbox_env.exec(["true", "x" * 200_000]), 126, "too long"),
        (await sandbox_env.exec(["true", *["x"] * 300_000]), 126, "2 MiB"),
    ):
        assert (done.success, done.returncode) == (False, code)
        assert word in done.stderr


@pytest.mark.parametrize("link", ["/etc/passwd", "/root/new"])
async def test_files_are_written_and_read_with_the_samples_rights(
    sandbox_env: SandboxEnvironment, link: str
) -> None:
    await sandbox_env.exec(["ln", "-s", link, "link"])
    with pytest.raises(PermissionError):
        await sandbox_env.write_file("link", "agent::0:0::/:/bin/sh\n")
    with pytest.raises(PermissionError):
        await sandbox_env.read_file("/etc/shadow")
    with pytest.raises(PermissionError):
        await sandbox_env.write_file("/etc/new/file", "x")


async def test_a_file_operation_runs_no_program_that_the_agent_put_on_its_path(
    make_sandbox: MakeSandbox,
) -> None:
    env = await make_sandbox(CloudyardConfig(env={"PATH": "/home/agent:/usr/bin:/bin"}))
    for name in ("head", "cat", "mkdir"):
        await env.write_file(name, "#!/bin/sh\necho forged\n")
    await env.exec(["sh", "-c", "chmod +x head cat mkdir"])
    assert await words(env, "cat") == ["forged"]
    await env.write_file("new/true", "true")
    assert await env.read_file("new/true") == "true"


@pytest.mark.parametrize("kind", ["mkfifo it", "ln -s /dev/zero it", "mkdir it"])
async def test_what_is_no_file_is_an_error_and_not_waited_for(
    sandbox_env: SandboxEnvironment, kind: str
) -> None:
    assert (await sandbox_env.exec(["sh", "-c", kind])).success
    with anyio.fail_after(WITHIN_S), pytest.raises((OSError, OutputLimitExceededError)):
        await sandbox_env.read_file("it")


async def test_writing_keeps_a_files_owner_and_mode_and_names_what_is_in_the_way(
    sandbox_env: SandboxEnvironment,
) -> None:
    await sandbox_env.exec(["sh", "-c", "install -m 700 /dev/null tool; touch file"])
    await sandbox_env.write_file("tool", "#!/bin/sh\necho ran\n")
    assert await words(sandbox_env, "./tool") == ["ran"]
    with pytest.raises(OSError, match="file/below"):
        await sandbox_env.write_file("file/below", "x")
    await sandbox_env.write_file("-n", "dash")
    assert await sandbox_env.read_file("-n") == "dash"


async def test_a_sandbox_that_is_gone_is_unavailable_and_no_result(sandbox_env: SandboxEnvironment) -> None:
    async with cloudyard.connect() as yard:
        await yard.stop(sandbox_env.as_type(CloudyardSandbox).id)
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.exec(["true"])
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.read_file("/etc/passwd")


async def test_the_configuration_names_user_directory_and_limits(
    make_sandbox: MakeSandbox, tmp_path: Path
) -> None:
    file = tmp_path / "cloudyard.yaml"
    file.write_text("user: root\ncwd: /srv/work\nmemory: 64MiB\npids: 20\nenv: {A: b}\nhostname: box\n")
    env = await make_sandbox(str(file))
    assert await words(env, "sh", "-c", "whoami; pwd; echo $A; hostname") == ["root", "/srv/work", "b", "box"]
    async with cloudyard.connect() as yard:
        info = await (await yard.get(env.as_type(CloudyardSandbox).id)).info()
    assert info.memory_bytes == 64 * 2**20
    assert info.labels == {"made-by": "inspect-ai", "task": "check"}


@pytest.mark.parametrize(
    ("user", "who", "where"),
    [("", "agent", "/home/agent"), ("root", "root", "/root"), ("65534", "nobody", "/data/nobody")],
)
async def test_a_samples_directory_is_one_that_its_user_can_write(
    make_sandbox: MakeSandbox, user: str, who: str, where: str
) -> None:
    env = await make_sandbox(CloudyardConfig(user=user, cwd=where if who == "nobody" else ""))
    assert await words(env, "sh", "-c", "touch new; whoami; pwd") == [who, where]
    assert await words(env, "whoami", user="root") == ["root"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("memroy: 1GiB\n", "memroy"),
        ("- image\n", "no mapping"),
        ("image: [\n", "cannot be read"),
        ("user: nobody-here\n", "nobody-here"),
        ("user: nobody\n", "cwd"),
        ("image: no-such-image\n", "no-such-image"),
        ("memory: a lot\n", "a lot"),
    ],
)
async def test_a_configuration_that_cannot_be_had_says_why(
    make_sandbox: MakeSandbox, tmp_path: Path, said: str, reason: str
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(said)
    with pytest.raises((PrerequisiteError, ValueError, cloudyard.CloudyardError), match=reason):
        await make_sandbox(str(file))
    with pytest.raises(PrerequisiteError, match="No such file"):
        await make_sandbox(str(tmp_path / "missing.yaml"))
    async with cloudyard.connect() as yard:
        assert await yard.list() == []


async def test_cleaning_up_by_hand_stops_what_evaluations_left_and_nothing_else(
    make_sandbox: MakeSandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    await make_sandbox()
    one = await make_sandbox()
    async with cloudyard.connect() as yard, yard.sandbox(image="debian") as other:
        await CloudyardSandbox.cli_cleanup(one.as_type(CloudyardSandbox).id)
        assert len(await yard.list()) == 2
        await CloudyardSandbox.cli_cleanup(None)
        assert [info.id for info in await yard.list()] == [other.id]
    assert capsys.readouterr().out == "Stopped 1 sandboxes.\n"


async def test_a_person_can_join_a_sample(sandbox_env: SandboxEnvironment) -> None:
    said = await sandbox_env.connection()
    box_id = sandbox_env.as_type(CloudyardSandbox).id
    assert said.command == f"cloudyard shell {box_id} --cwd /home/agent --user agent"
    assert "--user root" in (await sandbox_env.connection(user="root")).command
