"""What is refused before anything is done, and in which words."""

from __future__ import annotations

import pytest

from cloudyard.errors import InvalidRequest
from cloudyard.model import CommandSpec, SandboxSpec, check_command, check_env, check_key, normalised


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
