"""The directories that a yard takes for itself: which it may take, how they are marked, and what of them is
removed again.

A yard writes into a directory only if that was missing, empty, or marked as this yard's before. It changes
the mode of, and removes, only what it made.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from cloudyard.assemble.config import YardConfig, YardPaths, load_config, make_config, write_private
from cloudyard.errors import CloudyardError, Conflict, InvalidRequest

MARKER = ".cloudyard"
DEPOT_PARTS = frozenset({"images", "layers", "lock", "tmp"})  # of a depot, see `images/depot`
_STATE_BEFORE_UP = frozenset({"depot", "lost+found"})  # image build makes the one, mkfs the other
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Mark(Struct, frozen=True, kw_only=True):
    """What the marker in a directory of a yard says."""

    state: str
    """State directory of the yard that has it."""
    made: bool
    """Whether the yard made the directory itself."""
    run: str = ""
    """Run directory of the yard, for who finds its configuration damaged."""


def take(config: YardConfig, *, mode: int) -> list[Path]:
    """Have state and run directory, marked as this yard's. Gives those that were not before.

    Args:
        config: the yard.
        mode: of the state directory, if the yard made it.

    Raises:
        Conflict: one of them holds something else, or is another yard's. Nothing is made or changed then.
        InvalidRequest: others can write to one of them.
        OSError: the kernel refuses.
    """
    paths = config.paths
    refuse_foreign(paths)
    fresh: list[Path] = []
    try:
        for directory, wanted in ((paths.state, mode), (paths.run, 0o700)):
            if _take(directory, config):
                fresh.append(directory)
            mark = read_mark(directory)
            if mark is not None and mark.made:
                directory.chmod(wanted)
    except (CloudyardError, OSError):
        give_back(paths, fresh)
        raise
    return fresh


def refuse_foreign(paths: YardPaths) -> None:
    """Refuse directories that are not for this yard to take. Changes nothing.

    Raises:
        Conflict: one of them holds something else, or is another yard's.
        InvalidRequest: others can write to one of them.
    """
    for directory, option in ((paths.state, "--state"), (paths.run, "--run")):
        try:
            names = set(os.listdir(directory))
        except FileNotFoundError:
            continue
        except OSError as exc:
            raise InvalidRequest(
                f"{option} {directory} cannot be used: {exc.strerror}.",
                code="bad_state",
                hint="Give a directory that does not exist yet; it will be made.",
            ) from exc
        mark = read_mark(directory)
        if mark is not None and mark.state != str(paths.state):
            raise Conflict(
                f"{option} {directory} belongs to the yard in {mark.state}.",
                code="not_this_yard",
                hint=f"Give another {option}; or, if that yard is gone, remove {directory} by hand.",
            )
        if mark is None and not _may_take(paths, directory, names):
            raise Conflict(
                f"{option} {directory} is not empty and is no yard's: nothing in it was touched.",
                code="not_a_yard",
                hint="Give an empty directory, or one that does not exist yet; it will be made.",
            )
        if mark is None and directory.stat().st_mode & _OTHERS_WRITE:
            raise InvalidRequest(
                f"{option} {directory} can be written to by other users: not safe for a yard's files.",
                code="unsafe_directory",
                hint=f"chmod go-w {directory}; or give one that does not exist yet, and it will be made.",
            )


def _may_take(paths: YardPaths, directory: Path, names: set[str]) -> bool:
    if directory == paths.run:
        return not names
    if paths.config.name in names:
        with suppress(CloudyardError):
            return load_config(directory).state == str(directory)
    return names <= _STATE_BEFORE_UP and ("depot" not in names or _is_depot(directory / "depot"))


def _is_depot(path: Path) -> bool:
    return path.is_dir() and set(os.listdir(path)) <= DEPOT_PARTS


def _take(directory: Path, config: YardConfig) -> bool:
    """Make and mark the directory. False when it was marked already."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
        made = True
    except FileExistsError:
        made = os.listdir(directory) == ["depot"]  # `image build` made it
    before = read_mark(directory)
    mark = Mark(state=config.state, made=before.made if before else made, run=config.run)
    if before == mark:
        return False
    try:
        write_private(directory / MARKER, msgspec.json.encode(mark))
    except OSError:
        with suppress(OSError):
            if made:
                directory.rmdir()
        raise
    return before is None


def read_mark(directory: Path) -> Mark | None:
    """What the marker says; nothing if there is none that we can read."""
    try:
        return msgspec.json.decode((directory / MARKER).read_bytes(), type=Mark)
    except (OSError, msgspec.MsgspecError):
        return None


def salvage(state: Path) -> YardConfig | None:
    """What lowering a yard needs of a configuration, by its directory's mark; nothing where there is none."""
    mark = read_mark(state)
    return make_config(state=state, run=Path(mark.run) if mark.run else None, depot=None) if mark else None


def give_back(paths: YardPaths, directories: Sequence[Path]) -> None:
    """Undo the taking of those directories, and remove what the yard put into them; images stay."""
    if paths.run in directories:
        remove_run(paths)
    if paths.state in directories:
        remove_state(paths, images=False)


def remove_run(paths: YardPaths) -> None:
    """Remove what a yard keeps in its run directory; the directory too, if the yard made it and nothing else
    is in it. Nothing if it is another yard's."""
    mark = read_mark(paths.run)
    if mark is not None and mark.state != str(paths.state):
        return
    for directory in (paths.children, paths.run / "guests", paths.run / "lxcfs"):
        shutil.rmtree(directory, ignore_errors=True)
    _unmark(paths.run)


def remove_state(paths: YardPaths, *, images: bool) -> None:
    """Remove what a yard keeps in its state directory; the directory too, if the yard made it and nothing
    else is in it. A depot elsewhere is never touched.

    Args:
        paths: the yard's.
        images: remove the depot in the state directory even if something is in it.
    """
    for directory in (paths.edge, paths.logs, paths.nats_data.parent):
        shutil.rmtree(directory, ignore_errors=True)
    depot = paths.state / "depot"
    if images:
        shutil.rmtree(depot, ignore_errors=True)
    else:
        with suppress(OSError):  # images are in it
            depot.rmdir()
    for file in (paths.client, paths.supervisor_lock, paths.config, paths.change_lock):
        file.unlink(missing_ok=True)
    _unmark(paths.state)


def forget(state: Path) -> None:
    """Remove what an `up` left that was killed before it kept a configuration; nothing where there is no
    marker."""
    if read_mark(state) is not None:
        remove_state(YardPaths(state=state, run=state, depot=state), images=True)


def _unmark(directory: Path) -> None:
    """Forget that the directory is a yard's; remove it if the yard made it and it is empty."""
    mark = read_mark(directory)
    with suppress(FileNotFoundError):
        (directory / MARKER).unlink()
    if mark is not None and mark.made:
        with suppress(OSError):  # somebody keeps something else in it
            directory.rmdir()
