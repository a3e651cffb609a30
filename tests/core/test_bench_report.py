"""Figures of a benchmark: percentiles, ratios, and the JSON that programs read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import anyio
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from cloudyard.cli import main
from cloudyard.cli.benchmarks.measures import MEASURES, _idle, _memory_back
from cloudyard.cli.benchmarks.report import GOALS, Metric, Report, percentile, timed
from cloudyard.cli.benchmarks.yard import own_yard
from cloudyard.errors import LimitExceeded


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_the_smallest_sample_that_so_many_do_not_exceed(
    samples: list[float], part: float
) -> None:
    found = percentile(samples, part)
    assert found in samples
    assert sum(sample <= found for sample in samples) >= part * len(samples)
    smaller = [sample for sample in samples if sample < found]
    assert not smaller or sum(sample <= max(smaller) for sample in samples) < part * len(samples)


def test_no_samples_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 0.5)


def test_a_time_is_in_milliseconds_with_its_ratio_to_the_floor() -> None:
    metric = timed("exec_ms", [0.002, 0.004, 0.003], [0.001])
    assert (metric.p50, metric.p99, metric.floor_p50, metric.ratio) == (3.0, 4.0, 1.0, 3.0)
    assert timed("exec_ms", [0.002], []).ratio is None


@pytest.mark.parametrize(
    ("metric", "held"),
    [
        (Metric(name="exec_ms", unit="ms", ratio=3.5), True),
        (Metric(name="exec_ms", unit="ms", ratio=3.6), False),
        (Metric(name="exec_ms", unit="ms"), None),
        (Metric(name="creates_per_s", unit="1/s", value=99.0), False),
        (Metric(name="creates_per_s", unit="1/s", value=100.0), True),
        (Metric(name="idle_sandbox_mb", unit="MB", value=1.01), False),
    ],
)
def test_a_goal_is_held_up_to_its_bound(metric: Metric, held: bool | None) -> None:
    assert GOALS[metric.name].holds(metric) is held


def test_the_json_names_every_field_of_every_metric() -> None:
    report = Report(
        load=[0.1, 0.2, 0.3], metrics=[timed("exec_ms", [0.002], [0.001]), Metric(name="x", unit="MB")]
    )
    read = json.loads(report.to_json())
    assert read["load"] == [0.1, 0.2, 0.3]
    fields = {"name", "unit", "p50", "p99", "floor_p50", "ratio", "value", "note"}
    assert all(set(metric) == fields for metric in read["metrics"])


def test_the_table_shows_each_metric_with_its_goal() -> None:
    console = Console(width=160, file=io.StringIO(), record=True)
    metric = Metric(name="creates_per_s", unit="1/s", value=123.4)
    console.print(Report(load=[], metrics=[metric]).to_table())
    text = console.export_text()
    assert "creates_per_s" in text
    assert "≥ 100" in text


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "1e9"])
def test_a_length_out_of_range_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--seconds", seconds]) == 2
    assert "cannot be measured for" in capsys.readouterr().err


def test_memory_that_could_not_be_measured_has_no_value() -> None:
    async def back() -> Metric:
        return await _memory_back(
            lambda: (0.0, 0.0), theirs=-16.0, started=0.0, tell=lambda doing, done: None
        )

    for metric in (_idle(-16.0, 50), anyio.run(back)):
        assert metric.value is None
        assert "not to be told, 16 MB came free" in metric.note


def test_an_image_that_could_not_be_built_leaves_nothing() -> None:
    made: list[Path] = []

    def fill(depot: Path) -> None:
        depot.mkdir(parents=True)
        made.append(depot.parent)
        raise LimitExceeded("full", code="disk_full")

    with pytest.raises(LimitExceeded), own_yard(None, fill):
        pass
    assert [state.exists() for state in made] == [False]


def test_every_goal_is_of_a_metric_that_is_measured() -> None:
    assert set(GOALS) <= set(MEASURES)
