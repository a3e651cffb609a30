"""Commands: what a finished one gave (`Completed`), and a handle on one that runs (`Process`)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import anyio
import msgspec
from msgspec.structs import replace

from cloudyard.errors import Conflict
from cloudyard.model import (
    CHUNK_BYTES_MAX,
    CommandInfo,
    Done,
    ExecResult,
    Fault,
    LimitName,
    Pty,
    Resize,
    SendStdin,
    Signal,
    StartError,
    Wait,
)
from cloudyard.sdk.given import Data, bytes_of
from cloudyard.sdk.output import Output
from cloudyard.sdk.transport import Caller

WAIT_S = 60.0  # one long poll for a command's end
SIGKILL = 9


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended, and all that is kept of what it wrote.

    A command that fails, is killed or runs out of time is a result and no exception. `fault` says whose doing
    it was: `policy` for the command's own, `infra` for ours.
    """

    command_id: int
    exit_code: int | None
    """None where a signal ended it, it never started, or its end is unknown."""
    signal: int | None
    stdout: bytes
    """Complete up to the limit that was asked for; of a terminal, everything."""
    stderr: bytes
    stdout_total: int
    """Bytes that the command really wrote, kept or not."""
    stderr_total: int
    truncated: bool
    """More was written than is kept."""
    timed_out: bool
    oom: bool
    """The sandbox's memory limit killed a process of it."""
    limits_hit: list[LimitName]
    """Limits that were seen to be hit while it ran: oom, pids, disk, output."""
    duration_s: float
    stalled_s: float
    """Time in which it could not run through no doing of its own; not counted to its timeout."""
    cpu_s: float
    peak_memory_bytes: int
    """Largest resident size of any one process of it that was waited for."""
    error: str
    """Why it never started: the call, its object and the kernel's reason."""
    error_code: StartError | None
    """The same as a name, for programs: `program_not_found`, `not_executable`, `is_a_directory`,
    `not_a_program`, `too_many_arguments`; of its cwd `directory_not_found`, `directory_forbidden`,
    `not_a_directory`; `user_not_found`, `user_refused`; and `not_started` for the rest."""
    fault: Fault | None
    step: int
    replayed: bool
    """A repeated key brought back an earlier result and nothing ran."""

    @property
    def ok(self) -> bool:
        """It ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """Its stdout as text; bytes that are no UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")


async def completed(caller: Caller, sandbox: str, result: ExecResult) -> Completed:
    """The result with its output completed beyond what came inside it."""
    streams: dict[str, bytes] = {}
    for name, head, kept in (
        ("stdout", result.stdout, result.stdout_kept),
        ("stderr", result.stderr, result.stderr_kept),
    ):
        output = Output(
            caller, sandbox, command_id=result.command_id, stream="stdout" if name == "stdout" else "stderr"
        )
        streams[name] = await output.complete(head, kept)
    return Completed(
        command_id=result.command_id,
        exit_code=result.exit_code,
        signal=result.signal,
        stdout=streams["stdout"],
        stderr=streams["stderr"],
        stdout_total=result.stdout_total,
        stderr_total=result.stderr_total,
        truncated=result.truncated,
        timed_out=result.timed_out,
        oom=result.oom,
        limits_hit=result.limits_hit,
        duration_s=result.duration_s,
        stalled_s=result.stalled_s,
        cpu_s=result.cpu_s,
        peak_memory_bytes=result.peak_memory_bytes,
        error=result.error,
        error_code=result.error_code,
        fault=result.fault,
        step=result.step,
        replayed=result.replayed,
    )


class Process:
    """A command in a sandbox. It does not end with this handle: `Sandbox.attach(id)` gives another one."""

    def __init__(self, caller: Caller, sandbox: str, info: CommandInfo) -> None:
        self._caller = caller
        self._sandbox = sandbox
        self._info = info
        self._stdin_offset: int | None = None  # unknown until the edge has told
        self._stdin = anyio.Lock()

    def __repr__(self) -> str:
        return f"<Process {self.id} in {self._sandbox}>"

    @property
    def id(self) -> int:
        """Its number in its sandbox, never reused there."""
        return self._info.command_id

    @property
    def pid(self) -> int:
        """Process id inside the sandbox."""
        return self._info.pid

    @property
    def pid_start(self) -> int:
        """Start time of that process in clock ticks since boot: with `pid` it names one process for ever."""
        return self._info.pid_start

    @property
    def info(self) -> CommandInfo:
        """What was known of it when this handle was made."""
        return self._info

    def stdout(self, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Its stdout from a byte offset on: first what was written already, then what comes, until the stream
        ends.

        A terminal has only this stream. Restarts of the yard are waited out; no byte is left out or given
        twice.

        Raises:
            LimitExceeded: all that is kept was given, and the command wrote more (code `output_truncated`).
        """
        return Output(self._caller, self._sandbox, command_id=self.id, stream="stdout").follow(offset)

    def stderr(self, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Its stderr, likewise."""
        return Output(self._caller, self._sandbox, command_id=self.id, stream="stderr").follow(offset)

    async def write(self, data: Data) -> None:
        """Write bytes, or text as UTF-8, to its stdin; returns once the command's pipe has taken every byte.

        Raises:
            InvalidRequest: it was not started with `stdin=True`, or the data are neither.
            Conflict: the command has ended, or has closed its stdin.
        """
        async with self._stdin:
            at = await self._taken()
            view = memoryview(bytes_of("data", data))
            while view:
                piece = bytes(view[:CHUNK_BYTES_MAX])
                op = SendStdin(command_id=self.id, data=piece, offset=at)
                begun = time.monotonic()
                taken = await self._send(op)
                if taken < at + len(piece) and time.monotonic() - begun < op.wait_s:
                    raise Conflict(f"Command {self.id} has ended or closed its stdin.", code="stdin_closed")
                view = view[taken - at :]
                at = taken

    async def close_stdin(self) -> None:
        """End its stdin: it reads end of file."""
        async with self._stdin:
            await self._send(SendStdin(command_id=self.id, offset=await self._taken(), eof=True))

    async def signal(self, number: int) -> None:
        """Send a signal to its whole process tree. No error when it has ended."""
        await self._caller.ask(self._sandbox, Signal(command_id=self.id, signal=number), Done)

    async def kill(self) -> None:
        """Kill its whole process tree."""
        await self.signal(SIGKILL)

    async def resize(self, rows: int, cols: int) -> None:
        """Change the size of its terminal, in characters."""
        await self._caller.ask(self._sandbox, Resize(command_id=self.id, pty=Pty(rows=rows, cols=cols)), Done)

    async def wait(self, *, output: bool = True) -> Completed:
        """Wait for its end, however long that takes. May be called again and by several callers.

        Args:
            output: bring all output that is kept along. Without it `stdout` and `stderr` are empty: for who
                has read the streams, or does not want them in memory.
        """
        while True:
            result = await self._caller.ask_any(self._sandbox, Wait(command_id=self.id, wait_s=WAIT_S))
            if isinstance(result, ExecResult):
                if not output:
                    result = replace(result, stdout=b"", stdout_kept=0, stderr=b"", stderr_kept=0)
                return await completed(self._caller, self._sandbox, result)

    async def _taken(self) -> int:
        """Bytes of stdin that were taken so far, also those that another handle sent."""
        if self._stdin_offset is None:
            await self._send(SendStdin(command_id=self.id))
        return self._stdin_offset or 0

    async def _send(self, op: SendStdin) -> int:
        self._stdin_offset = None  # if this is cancelled, nobody here knows how far it came
        done = await self._caller.ask(self._sandbox, op, Done)
        self._stdin_offset = done.taken
        return done.taken
