"""Root inside tries to get out, in every way of the table in `tests/escapes`.

Each attempt is made twice: with every defence up, where it gets exactly the refusal that the table says, and
with exactly one away, where it succeeds. So a refusal is known to come from the wall that it is put down to,
and the attempt to be one. Where walls stand one behind another, `behind` names those that are away both
times.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cloudyard.edge.backends.container import ContainerOptions
from escapes import calls, downloads, files, limits, rights, views
from escapes.kit import Attempt, Stage

pytestmark = pytest.mark.live

ATTEMPTS: list[Attempt] = [
    attempt for part in (calls, rights, views, limits, files, downloads) for attempt in part.ATTEMPTS
]


@pytest.fixture
def stage(node: ContainerOptions, depot: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(node, depot, monkeypatch)


def test_the_table_is_as_long_and_as_wide_as_it_has_to_be() -> None:
    assert max(Counter(attempt.name for attempt in ATTEMPTS).values()) == 1
    assert len(ATTEMPTS) >= 40
    assert len({attempt.mechanism for attempt in ATTEMPTS}) >= 15


@pytest.mark.parametrize("attempt", [pytest.param(one, id=one.name) for one in ATTEMPTS])
async def test_root_inside_cannot(stage: Stage, attempt: Attempt) -> None:
    if attempt.behind:
        assert await stage.outcome(attempt) != attempt.succeeds
    assert await stage.outcome(attempt, *attempt.behind) == attempt.refused
    if attempt.has_a_chance:
        assert await stage.outcome(attempt, *attempt.behind, attempt.without) == attempt.succeeds
