"""The examples of docs/rollouts.md and docs/agents.md, done as a reader would do them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import support
from cloudyard.rollout import journal
from yards import COMMAND_S, TestYard

pytestmark = pytest.mark.live

DOCS = support.REPOSITORY / "docs"
_FILE = re.compile(r"^`([\w./]+)`:\n\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^cloudyard rollout .*?(?=\s+#|$)", re.MULTILINE)
_PROGRAM = re.compile(r"^```python\n(import anyio\n.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_examples_work_as_written(yard: TestYard, tmp_path: Path) -> None:
    assert yard.up().returncode == 0
    environment = {**os.environ, "PYTHONPATH": str(support.REPOSITORY / "src")}
    environment["CLOUDYARD_CLIENT_FILE"] = str(yard.state / "client.json")

    def python(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = []
    for name in ("rollouts.md", "agents.md"):
        text = (DOCS / name).read_text()
        for path, content in _FILE.findall(text):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content)
        for command in _COMMAND.findall(text):
            said.append(python("-m", "cloudyard.cli", *command.split()[1:]))
        for program in _PROGRAM.findall(text):
            said.append(python("-c", program))
    assert len(said) == 6
    ended = journal.read(tmp_path / "out").ended
    assert {(key.agent, attempt.reward) for key, attempt in ended.items()} == {("oracle", 1.0), ("nop", 0.0)}
    assert {attempt.reward for attempt in journal.read(tmp_path / "out-looper").ended.values()} == {0.0, 1.0}
    assert said[3].split() == ["hello", "oracle", "1.0", "0.0"]
