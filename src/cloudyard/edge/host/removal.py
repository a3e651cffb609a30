"""Removing a tree inside another root: never through a link, never across a mount, in bounded time and
descriptors.

One directory is open at a time. The way up is `..`, checked to be the directory that the way down came from,
so that a tree of any depth can be removed and one that is moved meanwhile is noticed.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass, field

from cloudyard.edge.host.inroot import open_child
from cloudyard.errors import Conflict, LimitExceeded

REMOVE_MAX_S = 20.0  # of one call
_BATCH = 1000  # directories noted in one pass over a directory
_FLAGS = os.O_RDONLY | os.O_DIRECTORY


@dataclass
class _Level:
    """A directory on the way down: its name, which directory it was found in, and directories in it to go
    into."""

    name: str
    above: tuple[int, int]
    pending: list[str] = field(default_factory=list)


def remove_tree(directory: int, name: str, path: str) -> None:
    """Remove the directory `name` in `directory` with all that is in it.

    Raises:
        LimitExceeded: it took more than REMOVE_MAX_S; what is removed stays removed, and a further call goes
            on.
        Conflict: the tree was moved meanwhile.
        OSError: the kernel refused; EXDEV or EBUSY where something is mounted in it.
    """
    deadline = time.monotonic() + REMOVE_MAX_S
    here = open_child(directory, name, _FLAGS)
    levels = [_Level(name, _identity(directory))]
    try:
        while levels:
            level = levels[-1]
            if not level.pending:
                level.pending = _clear(here, path, deadline)
            if level.pending:
                below = _enter(here, level.pending.pop())
                if below is not None:
                    levels.append(_Level(below[1], _identity(here)))
                    here = _instead(here, below[0])
                continue
            here = _instead(here, _leave(here, level, path))
            levels.pop()
            try:
                os.rmdir(level.name, dir_fd=here)
            except OSError as exc:  # something new is in it: unless it is the top, it is found again
                if exc.errno != errno.ENOTEMPTY or not levels:
                    raise
    finally:
        os.close(here)


def _clear(here: int, path: str, deadline: float) -> list[str]:
    """Unlink what is no directory; give names of directories that are left, some if there are many."""
    left: list[str] = []
    with os.scandir(here) as entries:
        for entry in entries:
            if time.monotonic() > deadline:
                raise LimitExceeded(
                    f"Cannot remove {path} whole: {REMOVE_MAX_S:.0f} s have passed and there is more.",
                    code="remove_unfinished",
                    hint="Call it again: what is removed stays removed.",
                    retry_safe=True,
                )
            if entry.is_dir(follow_symlinks=False):
                left.append(entry.name)
                if len(left) >= _BATCH:
                    break
                continue
            try:
                os.close(open_child(here, entry.name, os.O_PATH))  # EXDEV where a file is mounted over it
                os.unlink(entry.name, dir_fd=here)
            except FileNotFoundError:
                continue
            except IsADirectoryError:  # it became one since
                left.append(entry.name)
    return left


def _enter(here: int, name: str) -> tuple[int, str] | None:
    try:
        return open_child(here, name, _FLAGS), name
    except (FileNotFoundError, NotADirectoryError):
        return None  # gone since, or no directory any more: the next pass sees what it is
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            return None
        raise


def _leave(here: int, level: _Level, path: str) -> int:
    above = os.open("..", _FLAGS | os.O_CLOEXEC, dir_fd=here)
    if _identity(above) != level.above:
        os.close(above)
        raise Conflict(f"Cannot remove {path}: a directory of it was moved meanwhile.", code="keeps_changing")
    return above


def _instead(old: int, new: int) -> int:
    os.close(old)
    return new


def _identity(descriptor: int) -> tuple[int, int]:
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino
