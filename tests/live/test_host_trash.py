"""Removing trees that somebody made to be hard to remove."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloudyard.edge.host.trash import discard

DEEP = 6_000  # far past what a recursion or a path can hold
WIDE = 5_000
WAIT_S = 30.0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "tree"
    path.mkdir()
    return path


def test_a_tree_deeper_than_any_path_is_removed(tree: Path) -> None:
    here = os.open(tree, os.O_RDONLY)
    for _ in range(DEEP):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    before = len(os.listdir("/proc/self/fd"))
    assert discard(tree, WAIT_S)
    assert not tree.exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_with_many_entries_is_removed(tree: Path) -> None:
    for number in range(WIDE):
        (tree / str(number)).touch()
        if number % 10 == 0:
            (tree / f"d{number}").mkdir()
    assert discard(tree, WAIT_S)
    assert not tree.exists()


def test_links_are_removed_and_never_followed(tree: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("still here")
    (tree / "to-directory").symlink_to(kept)
    (tree / "below").mkdir()
    (tree / "below" / "to-file").symlink_to(kept / "file")
    (tree / "below" / "nowhere").symlink_to("/no/such/thing")
    os.link(kept / "file", tree / "hard")
    assert discard(tree, WAIT_S)
    assert (kept / "file").read_text() == "still here"


def test_names_that_it_would_give_itself_do_no_harm(tree: Path) -> None:
    for number in range(20):
        (tree / "a" / f"{number}.0").mkdir(parents=True)
        (tree / f"{number}.1").mkdir()
    assert discard(tree, WAIT_S)
    assert not tree.exists()


def test_sockets_pipes_and_forbidden_directories_are_removed(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    (tree / "work").mkdir(mode=0)
    assert discard(tree, WAIT_S)
    assert not tree.exists()


def test_a_link_in_place_of_the_tree_is_refused(tree: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tree)
    with pytest.raises(NotADirectoryError):
        discard(link, WAIT_S)
    assert tree.exists()


def test_a_removal_that_is_cut_off_goes_on_in_the_next_call(tree: Path) -> None:
    for number in range(100):
        (tree / f"d{number}").mkdir()
        (tree / f"d{number}" / "file").touch()
    (tree / "file").touch()
    assert not discard(tree, 0)
    assert tree.exists()
    assert discard(tree, WAIT_S)
    assert not tree.exists()
