"""The files that control groups are made of. Knows how the kernel spells numbers, and no group by name."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

PARENT_TRIES = 16
TABLE_BYTES_MAX = 4096
_GONE = (errno.ENOENT, errno.ENODEV)


def read_number(path: Path) -> int:
    """The number in a file; `max` is the largest there is."""
    text = path.read_text().strip()
    return 2**63 - 1 if text == "max" else int(text)


def read_table(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as in memory.events."""
    return {
        name: int(value) for name, _, value in (line.partition(" ") for line in path.read_text().splitlines())
    }


def read_entry(path: str, name: str) -> int:
    """One number of such a table, in the fewest calls; 0 where it is not listed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        table = os.read(fd, TABLE_BYTES_MAX).decode()
    finally:
        os.close(fd)
    _, found, rest = f"\n{table}".partition(f"\n{name} ")
    return int(rest.partition("\n")[0]) if found else 0


def read_pids(path: Path) -> list[int]:
    """The processes in a cgroup.procs file; none when it is not there."""
    try:
        return [int(line) for line in path.read_text().split()]
    except OSError as exc:
        if exc.errno in _GONE:
            return []
        raise


def write(path: Path, text: str) -> None:
    """Write to a file that is there, in one call."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
    finally:
        os.close(fd)


def open_entries(homes: Iterable[Path]) -> list[int]:
    """The cgroup.procs file of each directory, opened for writing; all or none."""
    opened: list[int] = []
    try:
        for home in homes:
            opened.append(os.open(home / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
    except OSError:
        for fd in opened:
            os.close(fd)
        raise
    return opened


def make_directories(homes: Sequence[Path]) -> None:
    """Make each, which must not be there; all or none."""
    made: list[Path] = []
    try:
        for home in homes:
            home.mkdir()
            made.append(home)
    except OSError:
        for home in made:
            home.rmdir()
        raise


def make_parents(homes: Iterable[Path]) -> None:
    """Make what is missing of each and of the directories above it, which another yard may remove at any
    moment."""
    for home in homes:
        for tries_left in reversed(range(PARENT_TRIES)):
            try:
                home.mkdir(parents=True, exist_ok=True)
                break
            except FileNotFoundError:
                if not tries_left:
                    raise


def write_if_there(path: Path, text: str) -> None:
    """Write to a file that not every kernel has; what it then refuses is no harm."""
    with contextlib.suppress(OSError):
        write(path, text)


def remove_directory(path: Path) -> None:
    """Remove a group's directory and those below it, if it is there."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as exc:
        below = [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
        if exc.errno not in (errno.EBUSY, errno.ENOTEMPTY) or not below:
            raise
        for child in below:
            remove_directory(Path(child))
        path.rmdir()


def remove_parents(homes: Iterable[Path]) -> None:
    """Remove the parents that are empty, and the directory above each that is empty then: also where the
    parent was gone already."""
    for home in homes:
        for directory in (home, home.parent):
            with contextlib.suppress(OSError):  # another yard's are in it, or it is gone
                directory.rmdir()
