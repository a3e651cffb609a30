"""A session: a shell whose directory, variables and functions go on from one command to the next.

No process waits between two runs. Each run is a command of its own, in a shell that takes up where the one
before ended (`session_shell`): so its output, exit code and limits are exact, a run that hangs is killed with
its whole tree while what was before it stays, and nothing that an earlier run left behind can speak in a
later one's name.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import TracebackType
from typing import Literal, Protocol, Self
from uuid import uuid4

import anyio
from msgspec.structs import asdict

from cloudyard.errors import CloudyardError, Conflict, InvalidRequest
from cloudyard.model import MIB, OUTPUT_LIMIT_DEFAULT_BYTES, FileChunk, ReadFile
from cloudyard.sdk import files
from cloudyard.sdk.process import Completed
from cloudyard.sdk.session_shell import OPENER, ShellName, State, argv_of, program, state_in
from cloudyard.sdk.transport import Caller, text_only

STATE_BYTES_MAX = 4 * MIB  # of variables and functions together; more is not kept
CLOSE_WITHIN_S = 10.0


class SessionResult(Completed, frozen=True, kw_only=True):
    """How a command of a session ended, and what became of the session's shell by it."""

    shell: Literal["kept", "restored", "fresh"]
    """What the next run finds. `kept`: all that this one did. `restored`: all as it was before this one,
    which was killed or could not leave its state behind. `fresh`: a new shell, since this one ended its own
    (`exit`, `exec`, an error under `set -e`)."""


class Box(Protocol):
    """What a session needs of its sandbox."""

    async def run(
        self,
        command: list[str],
        *,
        timeout_s: float | None = None,
        no_output_timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: bytes = b"",
        output_limit_bytes: int = OUTPUT_LIMIT_DEFAULT_BYTES,
    ) -> Completed: ...

    async def remove(self, path: str, *, missing_ok: bool = False) -> None: ...


class Session:
    """A stateful shell in a sandbox: bash where there is one, else sh. Made by `Sandbox.session`.

    Open it with `async with`, or with `await`, and then close it. The directory, variables (exported or not),
    umask and options go on from run to run; with bash also functions, aliases, arrays and traps. Processes
    that a run leaves in the background live on; a later run knows them by their pids and not as its jobs.
    """

    def __init__(
        self,
        box: Box,
        caller: Caller,
        *,
        name: str,
        env: Mapping[str, str] | None,
        cwd: str,
        user: str,
        shell: str,
    ) -> None:
        if shell not in ("", "bash", "sh"):
            raise InvalidRequest(f"shell is {shell!r}.", code="bad_shell", hint="Either bash or sh.")
        self._box = box
        self._caller = caller
        self._name = name
        self._env = dict(env or {})
        self._cwd = cwd
        self._user = user
        self._shell: ShellName | None = None
        self._wanted = shell
        self._file = ""
        self._turn = anyio.Lock()
        self._state: State | None = None
        self._runs = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<Session of {self._name}>"

    def __await__(self) -> Generator[object, None, Self]:
        return self._opened().__await__()

    async def __aenter__(self) -> Self:
        return await self._opened()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        no_output_timeout_s: float | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_DEFAULT_BYTES,
    ) -> SessionResult:
        """Run a command in the session's shell and wait for its end. Its stdin is empty.

        Runs wait for each other, in the order in which they were called; none of their time counts while they
        wait. Cancelling the call kills the command with all its children, and the session is as before it.

        Args:
            command: shell text of any length. A mistake in it, such as a quote that is not closed, is an
                error of this command alone.
            timeout_s: kill it after so long; what it wrote until then is in the result.
            no_output_timeout_s: kill it once it has written nothing for so long.
            output_limit_bytes: bytes kept of stdout and of stderr.

        Raises:
            InvalidRequest: an argument is wrong or out of range, or the session could not be opened.
            Conflict: the session is closed.
            SandboxUnavailable: the sandbox stopped, or broke.
            YardUnavailable: the yard could not be reached for RESTART_PATIENCE_S.
        """
        _check(command)
        async with self._turn:
            shell = await self._open()
            self._runs += 1
            state, number = self._state, self._runs
            with text_only():
                text = program(shell, state, command, file=self._file, number=number)
            done = await self._box.run(
                argv_of(shell, state),
                stdin=text,
                timeout_s=timeout_s,
                no_output_timeout_s=no_output_timeout_s,
                output_limit_bytes=output_limit_bytes,
                env=self._env,
                cwd=self._cwd if state is None else "/",
                user=self._user,
            )
            return SessionResult(**asdict(done), shell=await self._became(done, number))

    async def close(self) -> None:
        """End the session. What its commands left running goes on. Closing it again is no error."""
        self._closed = True
        if self._file:
            with anyio.move_on_after(CLOSE_WITHIN_S, shield=True):
                try:
                    await self._box.remove(self._file, missing_ok=True)
                except CloudyardError:
                    return  # the sandbox is gone, and its files with it; or it keeps a small one

    async def _opened(self) -> Self:
        async with self._turn:
            await self._open()
        return self

    async def _open(self) -> ShellName:
        """Find the shell, which also tells whether user and directory are there."""
        if self._closed:
            raise Conflict(f"The session of {self._name} is closed.", code="session_closed")
        if self._shell is None:
            name = f".cloudyard-session-{uuid4().hex}"
            found = await self._box.run(
                ["/bin/sh", "-c", OPENER, "sh", name], env=self._env, cwd=self._cwd, user=self._user
            )
            if found.error:
                raise InvalidRequest(
                    f"A session in {self._name} could not be opened: {found.error}.",
                    code=found.error_code or "not_started",
                    hint=found.fault.evidence if found.fault else "",
                    fault=found.fault.label if found.fault else None,
                )
            file, _, bash = found.text.partition("\n")
            if not file:
                raise InvalidRequest(
                    f"A session in {self._name} could not be opened: its user cannot write to /tmp.",
                    code="session_no_tmp",
                    hint="A session keeps its state in a file there; name another directory in TMPDIR.",
                )
            self._file = file
            if self._wanted == "bash" and not bash:
                raise InvalidRequest(f"There is no bash in {self._name}.", code="no_bash", hint="Use sh.")
            self._shell = "sh" if self._wanted == "sh" or not bash else "bash"
        return self._shell

    async def _became(self, done: Completed, number: int) -> Literal["kept", "restored", "fresh"]:
        """Look at what the run has left, and go on from there."""
        if done.exit_code is None or done.timed_out:
            return "restored"
        written = await self._written()
        match state_in(written, number=number, status=done.exit_code):
            case State() as state:
                self._state = state
                return "kept"
            case "ended":
                self._state = None
                return "fresh"
            case "unwritten":
                return "restored"

    async def _written(self) -> bytes:
        """The run's file, nothing where it cannot be read: the run has its result all the same."""
        try:
            chunk = await self._caller.ask(self._name, ReadFile(path=self._file), FileChunk)
            if chunk.size == len(chunk.data):
                return chunk.data
            return await files.read(self._caller, self._name, self._file, max_bytes=STATE_BYTES_MAX)
        except CloudyardError:
            return b""


def _check(command: str) -> None:
    if not command.strip() or "\0" in command:
        raise InvalidRequest(
            "The command of a session is empty or holds a NUL byte, which no shell text can carry.",
            code="bad_command",
        )
