"""What becomes of what an edge finds at its start."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cloudyard.core.reconcile import (
    ENDED_KEPT_MAX,
    ENDED_KEPT_S,
    Fate,
    OpenStep,
    Settlement,
    expired,
    settle,
    triage,
)


@pytest.mark.parametrize(
    ("state", "placed", "ended", "fate"),
    [
        ("absent", False, False, Fate.FORGET),
        ("creating", False, False, Fate.FORGET),
        ("creating", True, False, Fate.FORGET),
        ("running", True, False, Fate.ADOPT),
        ("running", False, False, Fate.FORGET),
        ("stopping", True, False, Fate.ADOPT),
        ("failed", True, False, Fate.ADOPT),
        ("stopped", True, True, Fate.REMEMBER),
        ("failed", False, True, Fate.REMEMBER),
    ],
)
def test_triage(state: str, placed: bool, ended: bool, fate: Fate):
    assert triage(state, placed=placed, ended=ended) is fate  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "known", "settlement"),
    [
        (OpenStep(1, command=True, repeatable=False), {1: None}, Settlement.GO_ON),
        (OpenStep(1, command=True, repeatable=False), {2: None}, Settlement.START),
        (OpenStep(1, command=True, repeatable=False, begun=True), {1: None}, Settlement.GO_ON),
        (OpenStep(1, command=True, repeatable=False, begun=True), {2: None}, Settlement.LOST),
        (OpenStep(1, command=False, repeatable=True), {}, Settlement.RELEASE),
        (OpenStep(1, command=False, repeatable=False), {1: None}, Settlement.LOST),
    ],
)
def test_settle(step: OpenStep, known: dict[int, None], settlement: Settlement):
    assert settle([step], known) == {1: settlement}


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 10_000)), st.floats(0, 20_000))
def test_only_old_ones_are_forgotten_while_there_are_few(ended: dict[str, float], now: float):
    assert set(expired(ended, now)) == {name for name, at in ended.items() if now - at > ENDED_KEPT_S}


def test_the_oldest_of_too_many_are_forgotten():
    ended = {str(number): float(number) / 1000 for number in range(ENDED_KEPT_MAX + 3)}
    assert expired(ended, 20.0) == ["0", "1", "2"]
