"""Removing a directory tree that nobody uses any more, however deep or wide somebody made it.

Every directory found is first moved up to the top and then emptied there, so that depth costs neither stack
nor
descriptors: three are open at a time. Works on descriptors and names, so no link is ever followed.
"""

from __future__ import annotations

import errno
import os
import time
from itertools import count
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def discard(path: Path, within_s: float) -> bool:
    """Remove the directory and all in it. Blocks for so long at most: for a thread.

    Returns:
        Whether it is gone; if not, another call goes on where this one ended.

    Raises:
        OSError: the kernel refused.
    """
    deadline = time.monotonic() + within_s
    fresh = (f"{number}.{os.urandom(4).hex()}" for number in count())
    top = os.open(path, _DIRECTORY)
    try:
        while directories := _unlink_all(top, deadline):
            for name in directories:
                if time.monotonic() > deadline:
                    return False
                here = os.open(name, _DIRECTORY, dir_fd=top)
                try:
                    for below in _unlink_all(here, deadline):
                        os.rename(below, next(fresh), src_dir_fd=here, dst_dir_fd=top)
                finally:
                    os.close(here)
                _remove_if_empty(top, name)
    finally:
        os.close(top)
    return _remove_if_empty(None, os.fspath(path))


def _unlink_all(directory: int, deadline: float) -> list[str]:
    """Unlink what is no directory in it, until the deadline; give the names of those that are directories."""
    directories = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            elif time.monotonic() < deadline:
                os.unlink(entry.name, dir_fd=directory)
    return directories


def _remove_if_empty(top: int | None, name: str) -> bool:
    try:
        os.rmdir(name, dir_fd=top)
    except OSError as exc:
        # A listing that was read while the directory shrank, or past the deadline, may have left some out.
        if exc.errno != errno.ENOTEMPTY:
            raise
        return False
    return True
