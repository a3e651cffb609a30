"""The sandbox of inspect-ai, checked in an environment of inspect-ai's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.environment import run_checks
from yards import TestYard

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]  # the first to run builds the image, too


def test_inspect_ai_accepts_a_yards_sandboxes_and_reaches_full_marks_in_them(
    yard: TestYard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yard.up().returncode == 0
    done = run_checks("inspect_ai", "inspect", client_file=yard.state / "client.json", home=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with capsys.disabled():
        print("\ninspect-ai:", done.stdout.splitlines()[-1])
