"""Fixtures of live tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from yards import TestYard, new_yard


@pytest.fixture
def yard(yard_dir: Path, depot: Path, leaks: None) -> Iterator[TestYard]:
    """A yard of this test's own, not up yet. It is brought down at the end, and nothing may be left of it."""
    with new_yard(yard_dir, depot) as made:
        yield made
