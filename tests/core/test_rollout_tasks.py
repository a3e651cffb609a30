"""Tasks in Harbor's layout: what is read, what is refused and what is warned about."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloudyard.errors import InvalidRequest, NotFound
from cloudyard.model import MIB
from cloudyard.rollout.scripts import by_shell
from cloudyard.rollout.task import filled_in, find, load
from rollout_kit import make_task

FULL = """\
schema_version = "1.4"
[task]
name = "org/fix-it"
description = "a task"
[metadata]
difficulty = "easy"
[metadata.cloudyard]
absent = ["the line"]
reward_range = [-1.0, 1.0]
made_from = "elsewhere"
[environment]
docker_image = "debian"
cpus = 2
memory_mb = 1024
workdir = "/app"
env = { A = "${A}", B = "${B:-b}", C = "c" }
network_mode = "no-network"
[environment.healthcheck]
command = "true"
[agent]
timeout_sec = 10.0
user = "nobody"
[verifier]
timeout_sec = 20
user = 1000
env = { V = "1" }
[solution]
env = { S = "2" }
"""
PLAIN = '[environment]\ndocker_image = "debian"\n'


def test_all_that_a_task_says_is_read(tmp_path: Path) -> None:
    task = load(make_task(tmp_path / "t", toml=FULL))
    assert (task.name, task.image, task.cpu, task.memory) == ("org/fix-it", "debian", 2.0, 1024 * MIB)
    assert (task.workdir, task.agent_user, task.verifier_user) == ("/app", "nobody", "1000")
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (10.0, 20.0)
    assert (task.verifier_env, task.agent_env) == ({"V": "1"}, {"S": "2"})
    assert (task.absent, task.reward_range) == (("the line",), (-1.0, 1.0))
    assert task.healthcheck is not None
    assert task.metadata["difficulty"] == "easy"
    assert task.instruction.startswith("Make the file")
    assert task.warnings == ()


def test_the_name_is_that_of_the_directory_if_none_is_given(tmp_path: Path) -> None:
    assert load(make_task(tmp_path / "fix-it", toml=PLAIN)).name == "fix-it"


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[environment]\n", "names no image"),
        ("environment = 1", "cannot be understood"),
        ("[environment", "cannot be understood"),
        (PLAIN + "cpus = 'two'\n", "cannot be understood: Expected `float"),
        (PLAIN + "cpus = -1\n", "cpu is -1 cores"),
        (PLAIN + "memory_mb = 1\n", "memory is 1 MiB"),
        (PLAIN + "memory = 'much'\n", "is not a size"),
        (PLAIN + "workdir = 'app'\n", "not absolute"),
        (PLAIN + "gpus = 1\n", "environment.gpus: a sandbox has no GPU"),
        (PLAIN + "os = 'windows'\n", "sandboxes are Linux"),
        (PLAIN + "mcp_servers = [{name = 'x', url = 'y'}]\n", "environment.mcp_servers"),
        (PLAIN + "[verifier]\nenvironment_mode = 'separate'\n", "verifier.environment_mode"),
        (PLAIN + "[verifier.environment]\ndocker_image = 'x'\n", "verifier.environment"),
        (PLAIN + "[agent]\ntimeout_sec = 0.0\n", "agent.timeout_sec to 0"),
        (PLAIN + "[verifier]\ntimeout_sec = inf\n", "verifier.timeout_sec to inf"),
        (PLAIN + "[[steps]]\nname = 'one'\n", "steps"),
        (PLAIN + "[metadata.cloudyard]\nreward_range = [1.0, 0.0]\n", "reward_range"),
        (PLAIN + "[metadata.cloudyard]\nabsent = ['']\n", "absent"),
        (PLAIN + "[metadata]\ncloudyard = 3\n", "cannot be understood"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, toml: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(make_task(tmp_path / "t", toml=toml))
    assert said in str(caught.value)


def test_a_dockerfile_is_refused_with_a_word_on_naming_an_image(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t", image="")
    (directory / "environment").mkdir()
    (directory / "environment" / "Dockerfile").write_text("FROM debian\n")
    with pytest.raises(InvalidRequest) as caught:
        load(directory)
    assert "environment/Dockerfile is not built here" in caught.value.message
    assert 'docker_image = "debian"' in caught.value.hint


def test_files_beside_a_dockerfile_were_for_the_image_and_are_not_uploaded(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t")
    (directory / "environment").mkdir()
    (directory / "environment" / "data").write_text("x")
    assert load(directory).environment == directory / "environment"
    (directory / "environment" / "Dockerfile").write_text("FROM debian\n")
    assert load(directory).environment is None


def test_what_a_task_survives_without_is_warned_about_by_name(tmp_path: Path) -> None:
    toml = (
        PLAIN
        + "storage_mb = 5\nnetwork_mode = 'public'\nskills_dir = '/s'\ncolour = 'red'\nartifacts = ['/x']\n"
    )
    directory = make_task(tmp_path / "t", toml="strange = 1\n" + toml)
    (directory / "tests" / ".harborignore").write_text("*\n")
    warnings = "\n".join(load(directory).warnings)
    for name in ("environment.storage_mb", "network_mode", "skills_dir", "environment.colour", "strange",
                 ".harborignore"):  # fmt: skip
        assert name in warnings


@pytest.mark.parametrize("test", [None, ""])
def test_a_task_without_tests_is_refused(tmp_path: Path, test: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(make_task(tmp_path / "t", test=test))
    assert caught.value.code == "task_without_tests"


def test_a_task_without_instruction_or_with_one_that_is_no_text_is_refused(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t")
    (directory / "instruction.md").write_bytes(b"\xff")
    with pytest.raises(InvalidRequest, match=r"instruction\.md"):
        load(directory)
    (directory / "instruction.md").unlink()
    with pytest.raises(InvalidRequest, match=r"no instruction\.md"):
        load(directory)


def test_a_link_out_of_the_task_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t")
    (directory / "tests" / "inside").symlink_to("test.sh")
    load(directory)
    (directory / "tests" / "outside").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequest, match="leads out of the task"):
        load(directory)
    (directory / "tests" / "outside").unlink()
    os.mkfifo(directory / "tests" / "pipe")
    with pytest.raises(InvalidRequest, match="no file, directory or link"):
        load(directory)


def test_the_digest_changes_with_every_file_its_name_and_its_executable_bit(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t")
    seen = {load(directory).digest}
    script = directory / "tests" / "test.sh"
    for change in (
        lambda: script.write_text("exit 0\n"),
        lambda: script.chmod(0o755),
        lambda: (directory / "tests" / "expected").rename(directory / "tests" / "other"),
        lambda: (directory / "tests" / "link").symlink_to("other"),
    ):
        change()
        seen.add(load(directory).digest)
    assert len(seen) == 5
    assert load(directory).digest in seen


def test_a_directory_of_tasks_is_taken_apart_and_broken_ones_do_not_stop_the_others(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_task(tmp_path / "tasks" / name)
    make_task(tmp_path / "tasks" / "broken", test=None)
    (tmp_path / "tasks" / "notes").mkdir()
    tasks, broken = find([tmp_path / "tasks"])
    assert [task.name for task in tasks] == ["a", "b"]
    assert [(task.name, "no tests" in task.error) for task in broken] == [("broken", True)]


def test_a_path_without_a_task_and_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no task\.toml"):
        find([tmp_path])
    with pytest.raises(NotFound, match="no such directory"):
        find([tmp_path / "nowhere"])
    make_task(tmp_path / "x" / "same")
    make_task(tmp_path / "y" / "same")
    with pytest.raises(InvalidRequest, match="both named 'same'"):
        find([tmp_path / "x", tmp_path / "y"])


def test_env_is_filled_in_from_what_was_given_and_from_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load(make_task(tmp_path / "t", toml=FULL))
    monkeypatch.setenv("A", "of this process")
    with pytest.raises(InvalidRequest, match="--env A"):
        filled_in(task, {})
    assert filled_in(task, {"A": "a"}).env == {"A": "a", "B": "b", "C": "c"}


@pytest.mark.parametrize(
    ("first", "shell"),
    [
        ("", True),
        ("echo 1", True),
        ("#!/bin/bash -e", True),
        ("#!/usr/bin/env bash", True),
        ("#!/bin/sh", True),
        ("#!/usr/bin/env python3", False),
        ("#!/usr/bin/python3", False),
    ],
)
def test_scripts_in_other_languages_are_told_by_their_first_line(
    tmp_path: Path, first: str, shell: bool
) -> None:
    script = tmp_path / "test.sh"
    script.write_text(f"{first}\n")
    assert by_shell(script) is shell
