"""Figures of a benchmark: what one is, how samples become one, and how they are printed. Does no
measuring."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from rich.table import Table

UNITS = {"ratio": "x", "p50": " (p50)", "value": ""}


class Goal(Struct, frozen=True):
    """What a figure is held to: a ratio to its floor, a median or a value, at most or at least."""

    of: str
    """`ratio`, `value` or `p50`."""
    bound: float
    at_least: bool = False

    def holds(self, metric: Metric) -> bool | None:
        """Whether the figure meets it; None when it was not measured."""
        figure: float | None = getattr(metric, self.of)
        if figure is None:
            return None
        return figure >= self.bound if self.at_least else figure <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}{UNITS[self.of]}"


GOALS = {
    "create_to_first_exec_ms": Goal("ratio", 2.5),
    "exec_ms": Goal("ratio", 3.5),
    "exec_http_ms": Goal("ratio", 5.0),
    "creates_per_s": Goal("value", 100.0, at_least=True),
    "idle_sandbox_mb": Goal("value", 1.0),
    "create_at_1000_ratio": Goal("value", 1.5),
    "gone_s": Goal("value", 10.0),
    "memory_back_s": Goal("value", 30.0),
    "call_ms": Goal("p50", 5.0),
    "mixed_exec_ratio": Goal("value", 3.0),
    "mixed_create_ratio": Goal("value", 3.0),
    "mixed_call_ratio": Goal("value", 3.0),
    "neighbour_exec_ratio": Goal("value", 3.0),
    "neighbour_info_ratio": Goal("value", 3.0),
}


class Metric(Struct, frozen=True, kw_only=True):
    """One figure. A time has percentiles, and a ratio where it has a floor; a rate or a size has a value."""

    name: str
    unit: str
    p50: float | None = None
    p99: float | None = None
    floor_p50: float | None = None
    """The same by the bare kernel or bare tools, measured between our own samples in the same run."""
    ratio: float | None = None
    """p50 by floor_p50."""
    value: float | None = None
    note: str = ""


class Report(Struct, frozen=True):
    """All figures of a run."""

    load: list[float]
    """Load averages of the machine (1, 5 and 15 minutes) when it began."""
    metrics: list[Metric]

    def to_json(self) -> str:
        """As JSON, for programs."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def to_table(self) -> Table:
        """As a table, for people; notes are not in it."""
        table = Table("", "", box=None, pad_edge=False)
        table.columns[0].no_wrap = True
        for title in ("p50", "p99", "floor", "ratio", "value", "goal"):
            table.add_column(title, justify="right")
        for metric in self.metrics:
            goal = GOALS.get(metric.name)
            held = goal.holds(metric) if goal is not None else None
            colour = {True: "green", False: "red", None: "default"}[held]
            table.add_row(
                metric.name,
                metric.unit,
                *(_short(figure) for figure in (metric.p50, metric.p99, metric.floor_p50)),
                _short(metric.ratio, "x"),
                _short(metric.value),
                f"[{colour}]{goal}[/]" if goal is not None else "",
            )
        return table


def percentile(samples: Sequence[float], part: float) -> float:
    """The smallest sample that at least `part` (0 to 1) of all samples do not exceed.

    Raises:
        ValueError: there are no samples.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples")
    rank = max(1, -(-len(ordered) * round(part * 1000) // 1000))  # rounded up, in whole numbers
    return ordered[rank - 1]


def timed(name: str, samples_s: Sequence[float], floor_s: Sequence[float], *, note: str = "") -> Metric:
    """A time in milliseconds from samples in seconds, with its ratio to the floor where there is one."""
    p50 = percentile(samples_s, 0.50) * 1000
    floor = percentile(floor_s, 0.50) * 1000 if floor_s else None
    return Metric(
        name=name,
        unit="ms",
        p50=round(p50, 3),
        p99=round(percentile(samples_s, 0.99) * 1000, 3),
        floor_p50=None if floor is None else round(floor, 3),
        ratio=None if floor is None else round(p50 / floor, 2),
        note=note,
    )


def _short(figure: float | None, unit: str = "") -> str:
    if figure is None:
        return ""
    return f"{figure:,.0f}{unit}" if figure >= 100 else f"{figure:.2f}{unit}"
