"""Removing a directory tree that nobody uses any more, however deep or wide somebody made it.

Every directory found is first moved up to the top and then emptied there, so that depth costs neither stack
nor
descriptors: three are open at a time. Works on descriptors and names, so no link is ever followed.
"""

from __future__ import annotations

import errno
import os
from itertools import count
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def discard(path: Path) -> None:
    """Remove the directory and all in it. Blocks for as long as it takes: for a thread. May be repeated if it
    was cut off.

    Raises:
        OSError: the kernel refused.
    """
    top = os.open(path, _DIRECTORY)
    fresh = (f"{number}.{os.urandom(4).hex()}" for number in count())
    try:
        while directories := _unlink_all(top):
            for name in directories:
                here = os.open(name, _DIRECTORY, dir_fd=top)
                try:
                    for below in _unlink_all(here):
                        os.rename(below, next(fresh), src_dir_fd=here, dst_dir_fd=top)
                finally:
                    os.close(here)
                _remove_if_empty(top, name)
    finally:
        os.close(top)
    path.rmdir()


def _unlink_all(directory: int) -> list[str]:
    """Unlink what is no directory in it; give the names of those that are."""
    directories = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=directory)
    return directories


def _remove_if_empty(top: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=top)
    except OSError as exc:
        if exc.errno != errno.ENOTEMPTY:  # a listing that was read while it shrank may have left some out
            raise
