"""What is refused before anything is done, and in which words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cloudyard.edge.records import Head
from cloudyard.edge.translate import exec_frame
from cloudyard.errors import CloudyardError, InvalidRequest, LimitExceeded, Unsupported
from cloudyard.model import (
    CALL_ARGS_BYTES_MAX,
    CALL_BYTES_MAX,
    CALL_CASES_MAX,
    CALL_COMPILE_MAX_S,
    CALL_FILES_MAX,
    CALL_OUTPUT_MAX_BYTES,
    CALL_PRELOAD_MAX,
    CALL_QUEUE_MAX_S,
    CALL_TOTAL_MAX_S,
    COMMAND_BYTES_MAX,
    ENV_BYTES_MAX,
    MIB,
    PATH_BYTES_MAX,
    USER_BYTES_MAX,
    CallResult,
    CallSpec,
    Case,
    CaseResult,
    CommandSpec,
    ImageConfig,
    SandboxSpec,
    call_limit_s,
    check_command,
    check_env,
    check_key,
    normalised,
    normalised_call,
)
from cloudyard.wire.guest import FRAME_BODY_MAX
from cloudyard.wire.messages import MESSAGE_BYTES_MAX, encode, raw


@pytest.mark.parametrize(
    "command",
    [
        CommandSpec(argv=["a\udc80"]),
        CommandSpec(shell="\ud800"),
        CommandSpec(shell="a", cwd="/\udfff"),
        CommandSpec(shell="a", user="\udc80"),
        CommandSpec(shell="a", env={"A": "\udc80"}),
    ],
)
def test_what_is_no_text_is_refused_as_such(command: CommandSpec):
    with pytest.raises(InvalidRequest) as caught:
        check_command(command)
    assert caught.value.code == "bad_text"


WIDE = [str(number) for number in range(150_000)]


@pytest.mark.parametrize(
    "command",
    [
        CommandSpec(argv=["x" * (COMMAND_BYTES_MAX - 9)]),
        CommandSpec(argv=["x", *[""] * (COMMAND_BYTES_MAX // 9 - 2)]),
        CommandSpec(argv=["a"], env={number: number for number in WIDE[:90_000]}),
        CommandSpec(shell="x" * COMMAND_BYTES_MAX, cwd="/" * PATH_BYTES_MAX, user="u" * USER_BYTES_MAX),
    ],
)
def test_the_largest_commands_fit_into_a_frame_with_all_that_goes_with_them(command: CommandSpec):
    check_command(command)
    env = {number: number for number in WIDE[:13_000]}
    spec = normalised(SandboxSpec(image="a", env=env))
    head = Head(sandbox="", project="", spec=spec, image=ImageConfig(), created_at=0.0, created_mono=0.0)
    frame = exec_frame(1, command, head)
    assert len(frame) <= FRAME_BODY_MAX


@pytest.mark.parametrize(
    "command",
    [
        CommandSpec(argv=["x" * (COMMAND_BYTES_MAX - 8)]),
        CommandSpec(argv=["x"] * (COMMAND_BYTES_MAX // 10 + 1)),
        CommandSpec(argv=["a"], env={number: number for number in WIDE}),
        CommandSpec(shell="x", stdin=bytes(COMMAND_BYTES_MAX)),
    ],
)
def test_what_the_kernel_would_not_take_is_refused_before_it_is_sent(command: CommandSpec):
    with pytest.raises(LimitExceeded) as caught:
        check_command(command)
    assert caught.value.code == "command_too_large"
    assert "at most 2 MiB fit" in caught.value.message


def test_an_environment_that_would_fill_every_command_is_refused():
    with pytest.raises(LimitExceeded) as caught:
        normalised(SandboxSpec(image="a", env={"A": "x" * ENV_BYTES_MAX}))
    assert caught.value.code == "env_too_large"


def test_text_of_any_script_is_taken():
    check_command(CommandSpec(argv=["\u00e4\u6f22\U0001f600"], cwd="/\u00e4"))
    check_env({"\u00e4": "\U0001f600"})
    check_key("\u00e4")


def test_a_relative_cwd_is_refused():
    for refuse in (
        lambda: check_command(CommandSpec(shell="a", cwd="work")),
        lambda: normalised(SandboxSpec(image="debian", cwd="work")),
    ):
        with pytest.raises(InvalidRequest) as caught:
            refuse()
        assert caught.value.code == "bad_cwd"


@pytest.mark.parametrize(
    ("spec", "value", "bounds"),
    [
        (SandboxSpec(image="debian", memory="1MiB"), "1 MiB", "16 MiB and 4096 GiB"),
        (SandboxSpec(image="debian", max_ttl_s=1e9), "1000000000 seconds", "1 second and 30 days"),
        (SandboxSpec(image="debian", cpu=0.01), "0.01 cores", "0.05 cores and 512 cores"),
    ],
)
def test_a_value_out_of_range_and_its_range_can_be_read(spec: SandboxSpec, value: str, bounds: str):
    with pytest.raises(InvalidRequest) as caught:
        normalised(spec)
    assert f"is {value}, out of range" in caught.value.message
    assert bounds in caught.value.hint


def call(**fields: object) -> CallSpec:
    return CallSpec(**{"code": "print(1)", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        (call(code=" \n"), "no_code", "no code"),
        (call(code="a\0b"), "bad_code", "NUL byte"),
        (call(args=["a\0"]), "bad_code", "NUL byte"),
        (call(code="\ud800"), "bad_text", "half a character"),
        (call(args=["\udc80"]), "bad_text", "half a character"),
        (call(image="No Name"), "bad_image_name", "'No Name'"),
        (call(memory="lots"), "bad_size", "'lots'"),
        (call(memory="1MiB"), "out_of_range", "memory is 1 MiB"),
        (call(memory="1TiB"), "out_of_range", "memory is 1024 GiB"),
        (call(timeout_s=0), "bad_timeout", "timeout_s is 0"),
        (call(timeout_s=float("nan")), "bad_timeout", "timeout_s is nan"),
        (call(timeout_s=301), "bad_timeout", "timeout_s is 301"),
        (call(output_limit_bytes=-1), "out_of_range", "output_limit_bytes"),
        (call(output_limit_bytes=2 * CALL_OUTPUT_MAX_BYTES), "out_of_range", "2 MiB"),
        (call(env={"A=B": ""}), "bad_env", "'A=B'"),
        (call(preload=["os; import x"]), "bad_preload", "os; import x"),
        (call(preload=["os"], language="shell"), "bad_preload", "language shell"),
        (call(preload=["os"] * (CALL_PRELOAD_MAX + 1)), "bad_preload", "33 modules"),
        (
            call(files={f"{number}": b"" for number in range(CALL_FILES_MAX + 1)}),
            "too_many_files",
            "65 files",
        ),
        (call(cases=[Case()] * (CALL_CASES_MAX + 1), timeout_s=1), "too_many_cases", "257 cases"),
        (call(cases=[Case()], stdin=b"x"), "bad_cases", "both cases and stdin"),
        (call(cases=[Case()] * 100, timeout_s=60), "bad_timeout", "100 cases of 1 minute each"),
        *(
            (call(files={path: b""}), "bad_path", "path")
            for path in (
                "",
                "/etc/passwd",
                "..",
                "a/../b",
                "./a",
                "a//b",
                "a/",
                "a\0",
                "a" * 256,
                "a/" * 300 + "b",
            )
        ),
        (call(files={"a": b"", "a/b": b""}), "bad_path", "'a' and 'a/b'"),
        (call(args=["a" * CALL_ARGS_BYTES_MAX], env={"A": "1"}), "call_too_large", "args and env"),
        (call(stdin=bytes(CALL_BYTES_MAX)), "call_too_large", "4 MiB"),
        (call(files={"a": bytes(CALL_BYTES_MAX)}), "call_too_large", "4 MiB"),
        (call(cases=[Case(expected=bytes(CALL_BYTES_MAX))]), "call_too_large", "4 MiB"),
    ],
)
def test_a_call_out_of_its_bounds_is_refused_in_words(spec: CallSpec, code: str, words: str):
    with pytest.raises(CloudyardError) as caught:
        normalised_call(spec)
    assert caught.value.code == code
    assert words in caught.value.message


def test_a_call_within_its_bounds_is_taken_and_its_memory_counted():
    spec = call(
        memory="64MiB",
        files={"\u00e4/b.txt": b"", "\u00e4/c": b"", "ab": b""},
        preload=["numpy", "xml.etree"],
        cases=[Case()] * CALL_CASES_MAX,
        env={"A": "\u6f22"},
    )
    assert normalised_call(spec) == replace(spec, memory=64 * MIB)


def test_the_largest_call_and_the_largest_result_fit_into_one_message():
    name = "n" * 128
    spec = call(
        code="#" * (CALL_BYTES_MAX - CALL_ARGS_BYTES_MAX - 200 * CALL_FILES_MAX),
        args=["a"] * CALL_ARGS_BYTES_MAX,
        files={f"{name}{number}": b"" for number in range(CALL_FILES_MAX)},
        cases=[Case(expected=b"")] * CALL_CASES_MAX,
    )
    assert len(encode(raw(normalised_call(spec)))) < MESSAGE_BYTES_MAX
    half = bytes(CALL_OUTPUT_MAX_BYTES // CALL_CASES_MAX)
    case = CaseResult(verdict="failed", signal=9, stdout=half, stderr=half, truncated=True, duration_s=1.0)
    assert len(encode(CallResult(cases=[case] * CALL_CASES_MAX))) < MESSAGE_BYTES_MAX


def test_a_function_has_no_sandbox_and_its_hint_says_what_there_is_instead():
    with pytest.raises(Unsupported) as caught:
        normalised(SandboxSpec(image="debian", backend="function"))
    assert "yard.call" in caught.value.hint


def test_a_call_waits_no_longer_than_its_own_limits():
    assert call_limit_s(10, 0) == CALL_QUEUE_MAX_S + CALL_COMPILE_MAX_S + 10
    assert call_limit_s(10, 5) == CALL_QUEUE_MAX_S + CALL_COMPILE_MAX_S + 50
    assert call_limit_s(1e9, 10**9) == CALL_QUEUE_MAX_S + CALL_COMPILE_MAX_S + CALL_TOTAL_MAX_S
