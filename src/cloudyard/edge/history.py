"""The finished commands of one sandbox: their results and their output, and what is dropped when it gets
too much.

Small output lies in the journal beside the result, larger output in the command's files. The oldest go first.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from msgspec.structs import replace

from cloudyard.edge.config import COMMANDS_KEPT_MAX, OUTPUT_KEPT_MAX_BYTES
from cloudyard.edge.journal import Journal, OutputPlace
from cloudyard.edge.output import bytes_sha256, file_sha256, read_file
from cloudyard.edge.records import Ended
from cloudyard.errors import NotFound
from cloudyard.model import OUTPUT_INLINE_BYTES, CommandInfo, ExecResult, OutputChunk, StreamName


def output_name(command_id: int, stream: StreamName) -> str:
    """The file in which a stream of a command is kept once it is large."""
    return f"{command_id}.{'out' if stream == 'stdout' else 'err'}"


class History:
    """Finished commands of one sandbox, over its journal and its directory of output files."""

    __slots__ = ("_directory", "_journal", "_kept")

    def __init__(self, journal: Journal, directory: Path) -> None:
        self._journal = journal
        self._directory = directory
        self._kept = sum(known.kept for known in journal.ended.values())
        journal.on_dropped = self._dropped

    def add(self, ended: Ended) -> None:
        """Put a command's end on record, then drop the oldest past the bounds.

        Raises:
            LimitExceeded: the record cannot be written.
        """
        self._journal.append(ended)
        known = self._journal.ended.get(ended.command_id)
        self._kept += known.kept if known is not None else 0
        while len(self._journal.ended) > 1 and (
            len(self._journal.ended) > COMMANDS_KEPT_MAX or self._kept > OUTPUT_KEPT_MAX_BYTES
        ):
            self._drop_oldest()

    def __contains__(self, command_id: int) -> bool:
        return command_id in self._journal.ended

    def find(self, command_id: int) -> Ended:
        """The end of a command.

        Raises:
            NotFound: there was no such command, or it was dropped.
        """
        known = self._journal.ended.get(command_id)
        if known is None:
            raise NotFound(
                f"There is no command {command_id} in sandbox {self._journal.head.sandbox}.",
                code="command_not_found",
                hint=f"The newest {COMMANDS_KEPT_MAX} finished commands are kept, with "
                f"{OUTPUT_KEPT_MAX_BYTES >> 20} MiB of output.",
            )
        record = self._journal.read(known.place)
        assert isinstance(record, Ended), "a command's place holds its end"
        return record

    def result(self, ended: Ended) -> ExecResult:
        """A command's result as it is answered: with the first bytes of its output, wherever they lie, or
        none where they were dropped since."""
        result = ended.result
        here = ended.command_id in self
        if ended.stdout_in_file:
            kept = result.stdout_kept if here else 0
            data = self._inline(ended.command_id, "stdout")
            result = replace(result, stdout=data, stdout_kept=kept, truncated=result.truncated or not here)
        if ended.stderr_in_file:
            kept = result.stderr_kept if here else 0
            data = self._inline(ended.command_id, "stderr")
            result = replace(result, stderr=data, stderr_kept=kept, truncated=result.truncated or not here)
        return result

    def newest(self, count: int) -> list[CommandInfo]:
        """The latest finished commands, in the order in which they ended."""
        numbers = list(self._journal.ended)[-count:] if count > 0 else []
        return [self.find(number).info for number in numbers]

    async def read(self, command_id: int, stream: StreamName, *, offset: int, size: int) -> OutputChunk:
        """A piece of a finished command's output.

        Raises:
            NotFound: there was no such command, or it was dropped.
        """
        ended = self.find(command_id)
        out = stream == "stdout"
        kept = ended.result.stdout_kept if out else ended.result.stderr_kept
        total = ended.result.stdout_total if out else ended.result.stderr_total
        path = self._directory / output_name(command_id, stream)
        in_file = ended.stdout_in_file if out else ended.stderr_in_file
        held = ended.result.stdout if out else ended.result.stderr
        size = min(size, max(0, kept - offset))
        data = read_file(path, offset, size) if in_file else held[offset : offset + size]
        if offset + len(data) < kept:
            return OutputChunk(data=data, offset=offset)
        digest = await file_sha256(path, kept) if in_file else bytes_sha256(held)
        return OutputChunk(data=data, offset=offset, eof=True, total=total, sha256=digest)

    def discard(self) -> None:
        """Remove all output files."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _inline(self, command_id: int, stream: StreamName) -> bytes:
        return read_file(self._directory / output_name(command_id, stream), 0, OUTPUT_INLINE_BYTES)

    def _drop_oldest(self) -> None:
        number, known = next(iter(self._journal.ended.items()))
        del self._journal.ended[number]
        self._dropped(number, known)

    def _dropped(self, number: int, known: OutputPlace) -> None:
        self._kept -= known.kept
        names: list[StreamName] = []
        names += ["stdout"] if known.stdout_in_file else []
        names += ["stderr"] if known.stderr_in_file else []
        for name in names:
            (self._directory / output_name(number, name)).unlink(missing_ok=True)
