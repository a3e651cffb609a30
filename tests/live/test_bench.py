"""The benchmark against a yard of its own, for real: every figure is there, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import support
from cloudyard.cli.benchmarks.floors import BubblewrapFloor, subprocess_s
from cloudyard.cli.benchmarks.measures import MEASURES

pytestmark = [pytest.mark.live, pytest.mark.slow]


def own_yards() -> set[Path]:
    """State and run directories of yards that benchmarks raise."""
    return {*Path("/run").glob("cloudyard-bench-*"), *Path("/var/tmp").glob("cloudyard-bench-*")}


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cloudyard.cli", "bench", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": str(support.REPOSITORY / "src")},
    )


def test_the_floors_are_measured_and_leave_nothing() -> None:
    before = Path("/proc/self/mountinfo").read_text()
    with BubblewrapFloor() as floor:
        assert 0 < floor.seconds() < 10
        directory = Path(floor._directory.name)
    assert 0 < subprocess_s() < 10
    assert not directory.exists()
    assert Path("/proc/self/mountinfo").read_text() == before


def test_every_figure_is_measured_in_a_yard_of_its_own(depot: Path) -> None:
    before = own_yards()
    done = bench("--quick", "--seconds", "2", "--json", "--depot", str(depot))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["load"]) == 3
    metrics = {metric["name"]: metric for metric in report["metrics"]}
    assert set(metrics) == set(MEASURES)
    for metric in metrics.values():
        measured = metric["p50"] is not None or metric["value"] is not None
        assert measured or "not to be told" in metric["note"], metric
        assert " 0 failed" in metric["note"] or "failed" not in metric["note"], metric
    for name in ("create_to_first_exec_ms", "exec_ms", "exec_http_ms"):
        assert metrics[name]["ratio"] > 0
    assert own_yards() <= before


def test_one_figure_alone_is_measured_when_asked(depot: Path) -> None:
    done = bench("--quick", "--only", "exec_ms", "--json", "--depot", str(depot))
    assert done.returncode == 0, done.stderr
    assert [metric["name"] for metric in json.loads(done.stdout)["metrics"]] == ["exec_ms"]


def test_an_unknown_image_is_refused_and_the_yard_is_taken_down(depot: Path) -> None:
    before = own_yards()
    done = bench("--quick", "--depot", str(depot), "--image", "nowhere")
    assert done.returncode == 1
    assert "no image 'nowhere' (images there: " in done.stderr
    assert own_yards() <= before


def test_an_unknown_figure_is_refused() -> None:
    done = bench("--only", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
