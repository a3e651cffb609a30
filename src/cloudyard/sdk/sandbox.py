"""One sandbox: run commands, start them, move files, stop it. A handle is cheap and holds nothing open."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
from msgspec import UNSET, UnsetType

from cloudyard.errors import Conflict, InvalidRequest, NotFound
from cloudyard.model import (
    GIB,
    KIB,
    MIB,
    OUTPUT_LIMIT_DEFAULT_BYTES,
    CommandInfo,
    CommandList,
    CommandSpec,
    DirListing,
    Done,
    Exec,
    ExecResult,
    FileInfo,
    GetSandbox,
    KeepAlive,
    KillAll,
    ListCommands,
    ListDir,
    MakeDir,
    Pty,
    Remove,
    SandboxInfo,
    Start,
    Stat,
    StopSandbox,
    check_command,
    check_path,
    edge_of,
)
from cloudyard.sdk import files, trees
from cloudyard.sdk.given import Data, bytes_of
from cloudyard.sdk.process import Completed, Process, completed
from cloudyard.sdk.session import Session
from cloudyard.sdk.tasks import plain_task_group
from cloudyard.sdk.transport import Caller, text_only
from cloudyard.sdk.trees import Transfer

KILL_WITHIN_S = 10.0  # after the caller of `run` was cancelled
READ_BYTES_MAX = GIB  # of one file, in memory, unless the caller says otherwise
DOWNLOAD_BYTES_MAX = 64 * GIB  # on the caller's disk, unless it says otherwise: a sandbox may claim any size
INLINE_STDIN_BYTES_MAX = 384 * KIB  # larger input goes through the pipe of a started command
START_OUTPUT_LIMIT_DEFAULT_BYTES = 256 * MIB  # kept per stream of a started command, which may run for long
_SHELL = "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l"


class Sandbox:
    """A sandbox that exists, or did. Made by `Yard.create`, `Yard.sandbox` and `Yard.get`."""

    def __init__(self, caller: Caller, sandbox_id: str) -> None:
        edge_of(sandbox_id)
        self._caller = caller
        self._id = sandbox_id

    def __repr__(self) -> str:
        return f"<Sandbox {self._id}>"

    @property
    def id(self) -> str:
        """Its id, which names its edge."""
        return self._id

    async def info(self) -> SandboxInfo:
        """Its state. Does not count as use.

        Raises:
            NotFound: the yard knows no such sandbox, or has forgotten it.
        """
        return await self._caller.ask(self._id, GetSandbox(), SandboxInfo)

    async def stop(self) -> SandboxInfo:
        """Stop it and give back all it holds. Stopping a stopped sandbox is no error."""
        return await self._caller.ask(self._id, StopSandbox(), SandboxInfo)

    async def keep_alive(
        self, *, idle_ttl_s: float | UnsetType | None = UNSET, max_ttl_s: float | UnsetType | None = UNSET
    ) -> SandboxInfo:
        """Count as use; change its times to live where given (seconds; None: no such limit)."""
        return await self._caller.ask(
            self._id, KeepAlive(idle_ttl_s=idle_ttl_s, max_ttl_s=max_ttl_s), SandboxInfo
        )

    # --- commands
    # -----------------------------------------------------------------------------------------------

    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        no_output_timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: Data = b"",
        output_limit_bytes: int = OUTPUT_LIMIT_DEFAULT_BYTES,
        key: str = "",
    ) -> Completed:
        """Run a command and wait for its end. Cancelling the call kills it.

        Args:
            command: a string for `/bin/sh -c`, or a list of arguments that no shell sees.
            timeout_s: kill it after so long; what it wrote until then is in the result.
            no_output_timeout_s: kill it once it has written nothing for so long.
            env: added to the sandbox's own environment.
            cwd: where it starts; the image's own directory if empty.
            user: who it runs as: a name, a uid or uid:gid.
            stdin: bytes, or text as UTF-8, for its stdin, any number; then end of file.
            output_limit_bytes: bytes kept of stdout and of stderr. It never waits for a reader.
            key: step key: the same key on the same sandbox gives the same result and runs nothing again.

        Returns:
            How it ended. A non-zero exit code is a result, not an exception.

        Raises:
            InvalidRequest: an argument is wrong or out of range.
            NotFound: there is no such sandbox.
            SandboxUnavailable: the sandbox stopped, or broke.
            YardUnavailable: the yard could not be reached for RESTART_PATIENCE_S.
        """
        given = bytes_of("stdin", stdin)
        piped = len(given) > INLINE_STDIN_BYTES_MAX
        spec = command_spec(
            command,
            timeout_s=timeout_s,
            no_output_timeout_s=no_output_timeout_s,
            env=env,
            cwd=cwd,
            user=user,
            stdin=b"" if piped else given,
            keep_stdin=piped,
            output_limit_bytes=output_limit_bytes,
        )
        if piped:
            return await self._run_piped(spec, given, key=key)
        result = await self._caller.ask(self._id, Exec(command=spec), ExecResult, key=key)
        return await completed(self._caller, self._id, result)

    async def start(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        no_output_timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: bool = False,
        pty: Pty | None = None,
        output_limit_bytes: int = START_OUTPUT_LIMIT_DEFAULT_BYTES,
        key: str = "",
    ) -> Process:
        """Start a command and return at once. It goes on without this client; see `run` for the arguments.

        Args:
            stdin: leave its stdin open for `Process.write`; otherwise it reads end of file at once.
            pty: give it a terminal of this size. Its stderr is then part of its stdout.
            output_limit_bytes: bytes kept of stdout and of stderr. It never waits for a reader: what it
                writes past this is counted and dropped, and whoever reads that far gets LimitExceeded.

        Raises:
            InvalidRequest: an argument is wrong or out of range.
            NotFound: there is no such sandbox, or no such program in it.
            SandboxUnavailable: the sandbox stopped, or broke.
        """
        spec = command_spec(
            command,
            timeout_s=timeout_s,
            no_output_timeout_s=no_output_timeout_s,
            env=env,
            cwd=cwd,
            user=user,
            keep_stdin=stdin or pty is not None,
            pty=pty,
            output_limit_bytes=output_limit_bytes,
        )
        return await self._start(spec, key=key)

    async def attach(self, command_id: int) -> Process:
        """A handle on a command that was started before, by this client or another.

        Raises:
            NotFound: no such command runs here, and no result of it is kept.
        """
        for info in await self.commands():
            if info.command_id == command_id:
                return Process(self._caller, self._id, info)
        raise NotFound(
            f"Sandbox {self._id} has no command {command_id}.",
            code="command_not_found",
            hint="`Sandbox.commands()` lists those that run and those whose results are kept.",
        )

    async def commands(self) -> list[CommandInfo]:
        """Commands that run, and ended ones whose results are kept."""
        return (await self._caller.ask(self._id, ListCommands(), CommandList)).commands

    async def kill_all(self) -> None:
        """End every process in the sandbox but its PID 1, however it tries to stay. Files stay.

        Commands under way end with signal 9. Returns once none is left.

        Raises:
            SandboxUnavailable: the sandbox stopped, or broke.
        """
        await self._caller.ask(self._id, KillAll(), Done)

    async def shell(
        self,
        *,
        rows: int = 24,
        cols: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
    ) -> Process:
        """An interactive login shell on a terminal: bash where the image has it, else sh."""
        return await self.start(_SHELL, env=env, cwd=cwd, user=user, pty=Pty(rows=rows, cols=cols))

    def session(
        self,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        shell: Literal["", "bash", "sh"] = "",
    ) -> Session:
        """A stateful shell: directory, variables and functions go on from one command to the next.

        Open it with `async with box.session() as session`, or with `await box.session()` and then close it.

        Args:
            env: added to the sandbox's own environment.
            cwd: where it starts; the image's own directory if empty.
            user: who it runs as: a name, a uid or uid:gid.
            shell: bash where the sandbox has it, else sh, if empty.

        Raises:
            InvalidRequest: when it is opened: there is no such user or directory, or no such shell.
        """
        return Session(self, self._caller, name=self._id, env=env, cwd=cwd, user=user, shell=shell)

    # --- files
    # --------------------------------------------------------------------------------------------------

    async def read(self, path: str, *, max_bytes: int = READ_BYTES_MAX) -> bytes:
        """All bytes of a file.

        Args:
            max_bytes: what you would take at most, in memory.

        Raises:
            LimitExceeded: it is larger.
            NotFound: it does not exist.
            Conflict: it is a directory, or changed while it was read.
        """
        _check_path(path)
        return await files.read(self._caller, self._id, path, max_bytes=max_bytes)

    async def write(self, path: str, data: Data, *, mode: int | None = None) -> FileInfo:
        """Write a file of any size in one move, making missing directories.

        Args:
            data: bytes, or text as UTF-8.
            mode: permission bits; None keeps those of the file it replaces, or 0644.
        """
        _check_path(path)
        given = bytes_of("data", data)
        source = io.BytesIO(given)
        return await files.write(self._caller, self._id, path, source=source, size=len(given), mode=mode)

    async def upload(self, local: str | Path, path: str) -> Transfer:
        """Copy a local file or directory to `path`, with permission bits. Links are kept as links.

        Returns:
            What was copied, and what was not because it has no content, such as a FIFO.

        Raises:
            NotFound: there is nothing at `local`.
            InvalidRequest: it cannot be read here.
            LimitExceeded: the sandbox's disk is full.
        """
        _check_path(path)
        return await trees.upload(self._caller, self._id, Path(local), path=path)

    async def download(
        self, path: str, local: str | Path, *, max_bytes: int = DOWNLOAD_BYTES_MAX
    ) -> Transfer:
        """Copy a file or directory of the sandbox to `local`, with permission bits. Links are kept as links.

        Nothing is written outside `local`, whatever the sandbox says. A link in it may point anywhere: look
        before you follow one.

        Args:
            max_bytes: what you would take at most, on the disk here.

        Returns:
            What was copied, and what was not because it has no content, such as a FIFO.

        Raises:
            LimitExceeded: there is more, or more than 1,000,000 entries; or the disk here is full.
            NotFound: there is nothing at `path`, or no directory here for `local` to be in.
            InvalidRequest: `local` cannot be written.
            Conflict: a file changed while it was read.
        """
        _check_path(path)
        return await trees.download(self._caller, self._id, path, local=Path(local), max_bytes=max_bytes)

    async def listdir(self, path: str) -> list[FileInfo]:
        """Entries of a directory, sorted by name; links are described, not followed."""
        _check_path(path)
        return (await self._caller.ask(self._id, ListDir(path=path), DirListing)).entries

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What is at a path.

        Raises:
            NotFound: nothing is.
        """
        _check_path(path)
        return await self._caller.ask(self._id, Stat(path=path, follow=follow), FileInfo)

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, a link, or a directory (`recursive` if it is not empty)."""
        _check_path(path)
        await self._caller.ask(self._id, Remove(path=path, recursive=recursive, missing_ok=missing_ok), Done)

    async def mkdir(
        self, path: str, *, mode: int = 0o755, parents: bool = True, exist_ok: bool = True
    ) -> FileInfo:
        """Make a directory."""
        _check_path(path)
        op = MakeDir(path=path, mode=mode, parents=parents, exist_ok=exist_ok)
        return await self._caller.ask(self._id, op, FileInfo)

    # --- inside
    # -------------------------------------------------------------------------------------------------

    async def _start(self, spec: CommandSpec, *, key: str) -> Process:
        info = await self._caller.ask(self._id, Start(command=spec), CommandInfo, key=key)
        return Process(self._caller, self._id, info)

    async def _run_piped(self, spec: CommandSpec, stdin: bytes, *, key: str) -> Completed:
        with anyio.CancelScope(shield=True):  # what nobody knows the number of, nobody could kill
            process = await self._start(spec, key=key)

        async def feed() -> None:
            try:
                await process.write(stdin)
                await process.close_stdin()
            except Conflict:
                pass  # it ended, or closed its stdin, before it had read everything

        try:
            async with plain_task_group() as tasks:
                tasks.start_soon(feed)
                done = await process.wait()
                tasks.cancel_scope.cancel()
        except BaseException:
            with anyio.move_on_after(KILL_WITHIN_S, shield=True):
                await process.kill()
            raise
        return done


def command_spec(command: object, **fields: Any) -> CommandSpec:
    """A checked CommandSpec of what a user passed: text for the shell, or a sequence of arguments.

    Raises:
        InvalidRequest: a value is of the wrong type or out of range.
        LimitExceeded: it is too large to send.
    """
    env = fields.pop("env", None) or {}
    how: dict[str, object]
    if isinstance(command, str):
        how = {"shell": command}
    elif isinstance(command, Sequence) and not isinstance(command, bytes | bytearray):
        how = {"argv": list(command)}
    else:
        raise InvalidRequest(
            f"The command is a {type(command).__name__}.",
            code="bad_command",
            hint='Pass one string to run through /bin/sh, or a list such as ["ls", "-l"].',
        )
    try:
        spec = msgspec.convert({**how, **fields, "env": dict(env)}, CommandSpec)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"The command cannot be run: {exc}.", code="bad_command") from exc
    with text_only():
        check_command(spec)
    return spec


def _check_path(path: str) -> None:
    with text_only():
        check_path(path)
