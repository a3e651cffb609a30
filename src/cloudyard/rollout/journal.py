"""The JSONL of a run: appended to line by line, read again to take the run up where it stopped.

A line is written whole, by one call, as soon as there is something to say, so that whatever kills the runner
costs at most the line under way: a torn last line is cut off. One runner holds a journal at a time. Knows one
file; decides nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from cloudyard.errors import CloudyardError, Conflict, InvalidRequest, LimitExceeded, NotFound
from cloudyard.rollout.records import FORMAT, Action, AnyLine, Attempt, AttemptKey, Resumed, Run

FILE = "rollouts.jsonl"
LINE_BYTES_MAX = 4 << 20  # of a line that is read; ours are far shorter

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyLine).decode


class _Peek(msgspec.Struct, frozen=True):
    """Enough of an action to know which try it belongs to."""

    task: str
    agent: str
    attempt: int
    try_: int = msgspec.field(name="try")


_peek = msgspec.json.Decoder(_Peek).decode
_ACTION = b'{"type":"action"'


class Past(msgspec.Struct, kw_only=True):
    """What a journal says of the time before."""

    run: Run
    sessions: int = 0
    """How often the run was taken up again."""
    ended: dict[AttemptKey, Attempt] = {}
    """The line of each attempt that counts: its last one."""
    next_try: dict[AttemptKey, int] = {}
    """Of attempts that were begun: a number for the next try, which no line has."""


class Journal:
    """The open journal of a run. Close it with `with`."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._broken: CloudyardError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, line: AnyLine) -> None:
        """Append a line.

        Raises:
            LimitExceeded: the disk is full.
            InvalidRequest: it cannot be written for another reason.

        Once a line failed, all that follow do: half a line is only ever the last.
        """
        if self._broken is not None:
            raise self._broken
        data = memoryview(_encode(line) + b"\n")
        try:
            while data:  # a write is cut short only where the disk is full, and the next one says so
                data = data[os.write(self._file.fileno(), data) :]
        except OSError as exc:
            full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
            self._broken = (LimitExceeded if full else InvalidRequest)(
                f"{self._path} cannot be written: {(exc.strerror or str(exc)).lower()}.",
                code="local_disk_full" if full else "local_file",
                hint="What was written is kept: the same command takes the run up again.",
            )
            raise self._broken from exc


def open_journal(out: Path) -> tuple[Journal, Past | None]:
    """The journal in a directory, made if need be, and what it says of the time before.

    Raises:
        Conflict: another runner holds it.
        InvalidRequest: the directory cannot be used, or the file is not the journal of a run.
    """
    path = out / FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError as exc:
        raise InvalidRequest(
            f"{out} cannot hold the run: {(exc.strerror or str(exc)).lower()}.", code="local_file"
        ) from exc
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        file.close()
        raise Conflict(
            f"Another runner is at work on {out}.",
            code="run_in_use",
            hint="Wait for it, or name another --out.",
        ) from exc
    try:
        file.truncate(_whole_bytes(path))
        return Journal(file, path), _past(path)
    except BaseException:
        file.close()
        raise


def read(out: Path) -> Past:
    """What the journal in a directory says now.

    Raises:
        NotFound: there is none.
        InvalidRequest: it is not the journal of a run.
    """
    past = _past(out / FILE) if (out / FILE).is_file() else None
    if past is None:
        raise NotFound(
            f"{out} holds no run: there is no {FILE} with a line in it.",
            code="run_not_found",
            hint="Name the directory that was given to `cloudyard rollout run --out`.",
        )
    return past


def actions(out: Path, attempt: str, *, try_: int) -> list[Action]:
    """The actions of one try of an attempt, in their order.

    Args:
        out: directory of the journal.
        attempt: `task/agent/number`, as `str` of an AttemptKey gives it.
        try_: number of the try.

    Raises:
        InvalidRequest: a line cannot be understood.
    """
    path = out / FILE
    found = []
    for number, line in _whole_lines(path):
        if line.startswith(_ACTION):
            peek = _peeked(path, number, line)
            if peek.try_ == try_ and str(AttemptKey(peek.task, peek.agent, peek.attempt)) == attempt:
                found.append(_understood(path, number, line))
    return sorted((line for line in found if isinstance(line, Action)), key=lambda line: line.number)


def _past(path: Path) -> Past | None:
    past: Past | None = None
    for number, line in _whole_lines(path):
        if past is None:
            first = _understood(path, number, line)
            if not isinstance(first, Run):
                raise _foreign(path, number, "it does not begin with a run")
            if first.format > FORMAT:
                raise _foreign(path, number, f"its format is {first.format}, and {FORMAT} is known here")
            past = Past(run=first)
        elif line.startswith(_ACTION):
            _begun(past, _peeked(path, number, line))
        else:
            match _understood(path, number, line):
                case Attempt() as attempt:
                    past.ended[attempt.key] = attempt
                    _begun(past, attempt)
                case Resumed():
                    past.sessions += 1
                case _:
                    raise _foreign(path, number, "it holds a second run")
    return past


def _begun(past: Past, line: Attempt | _Peek) -> None:
    key = AttemptKey(line.task, line.agent, line.attempt)
    past.next_try[key] = max(past.next_try.get(key, 0), line.try_ + 1)


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as source:
        number = 0
        while line := source.readline(LINE_BYTES_MAX):
            number += 1
            if line.endswith(b"\n"):
                yield number, line
            elif len(line) == LINE_BYTES_MAX:
                raise _foreign(path, number, "it is too long")


def _whole_bytes(path: Path) -> int:
    """Length of the file up to the end of its last whole line."""
    with path.open("rb") as source:
        end = source.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - LINE_BYTES_MAX)
            source.seek(start)
            newline = source.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _understood(path: Path, number: int, line: bytes) -> AnyLine:
    try:
        return _decode(line)
    except msgspec.MsgspecError as exc:
        raise _foreign(path, number, str(exc)) from exc


def _peeked(path: Path, number: int, line: bytes) -> _Peek:
    try:
        return _peek(line)
    except msgspec.MsgspecError as exc:
        raise _foreign(path, number, str(exc)) from exc


def _foreign(path: Path, number: int, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} is not the journal of a run that can be taken up: line {number}: {reason}.",
        code="bad_journal",
        hint="Name another --out.",
    )
