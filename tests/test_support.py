"""The leak census must see what it is there to see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import support


def test_census_sees_a_process_by_its_arguments_and_forgets_it_after(token: str) -> None:
    before = support.take_census(token)
    child = subprocess.Popen([sys.executable, "-c", "input()", token], stdin=subprocess.PIPE)
    try:
        support.wait_until_sync(
            lambda: bool(support.take_census(token).beyond(before)),
            "the process is in the census",
            within_s=5,
        )
    finally:
        child.communicate(b"\n")
    assert support.take_census(token).beyond(before) == []


def test_census_sees_a_process_by_its_directory(token: str, yard_dir: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], cwd=yard_dir, stdin=subprocess.PIPE)
    try:
        assert len(support.take_census(token).processes) == 1
    finally:
        child.communicate(b"\n")
