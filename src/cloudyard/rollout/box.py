"""What an agent acts through: a sandbox whose every use is written down.

Each call is an action with a begin, an end and an outcome, cut to a bounded size. When the agent's time is
over the box is closed: what it still does is cancelled, and nothing it left running on this side can act
again. Knows the SDK; knows nothing of tasks and rewards.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio

from cloudyard.errors import CloudyardError, Conflict, LimitExceeded
from cloudyard.model import KIB, MIB, FileInfo
from cloudyard.rollout.records import Action, AttemptKey, Phase
from cloudyard.sdk.process import Completed, Process
from cloudyard.sdk.sandbox import Sandbox

OUTPUT_LIMIT_BYTES = 1 * MIB  # of each stream of a command, unless the agent asks for more
READ_BYTES_MAX = 16 * MIB  # of one file; many attempts share one process
ACTIONS_MAX = 10_000  # of one try, by the agent
REFUSED_PAUSE_S = 0.5
OUTPUT_SHOWN_BYTES = 16 * KIB  # of each stream, in the record of an action
ARGUMENT_SHOWN_BYTES = 4 * KIB

Record = Callable[[Action], None]


def shown(data: bytes, total: int | None = None, *, limit: int = OUTPUT_SHOWN_BYTES) -> str:
    """Bytes as text of bounded size: the middle of long ones is left out, and the text says how much.

    Args:
        data: what is there of them.
        total: how many there were, if more than are here.
        limit: bytes to show.
    """
    total = len(data) if total is None else max(total, len(data))
    if total <= limit:
        return data.decode(errors="replace")
    head, tail = data[: limit // 2], data[limit // 2 :][-(limit // 2) :] if total == len(data) else b""
    left_out = f"\n[{total - len(head) - len(tail)} bytes left out]\n"
    return head.decode(errors="replace") + left_out + tail.decode(errors="replace")


class Log:
    """The actions of one try: numbered, written down, and watched for faults of ours."""

    def __init__(self, key: AttemptKey, try_: int, record: Record) -> None:
        self.count = 0
        self.infra = ""
        """The first fault of ours that an action met: what came of the attempt then says nothing of it."""
        self._key = key
        self._try = try_
        self._record = record

    @property
    def full(self) -> bool:
        """It has as many actions as one try may take."""
        return self.count >= ACTIONS_MAX

    def take_number(self) -> int:
        """A number for an action that begins."""
        self.count += 1
        return self.count - 1

    def write(self, fields: dict[str, Any], *, fault: str) -> None:
        """An action has ended."""
        if fault == "infra" and not self.infra:
            self.infra = fields.get("error") or f"the yard lost the end of a {fields['op']}"
        key = self._key
        self._record(
            Action(task=key.task, agent=key.agent, attempt=key.attempt, try_=self._try, fault=fault, **fields)
        )


class Box:
    """A sandbox, with the calls of `cloudyard.Sandbox` under the same names. Relative paths are of `cwd`."""

    def __init__(
        self, sandbox: Sandbox, log: Log, *, phase: Phase = "agent", cwd: str = "/", user: str = ""
    ) -> None:
        self._sandbox = sandbox
        self._log = log
        self._phase: Phase = phase
        self._cwd = cwd
        self._user = user
        self._closed = False
        self._under_way: set[anyio.CancelScope] = set()

    def __repr__(self) -> str:
        return f"<Box {self.id}>"

    @property
    def id(self) -> str:
        """Id of the sandbox."""
        return self._sandbox.id

    @property
    def cwd(self) -> str:
        """Where commands start, and what relative paths are relative to."""
        return self._cwd

    def close(self) -> None:
        """Let nobody act through it any more. What is under way is cancelled."""
        self._closed = True
        for scope in tuple(self._under_way):
            scope.cancel()

    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: bytes = b"",
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    ) -> Completed:
        """Run a command and wait for its end; see `Sandbox.run`. At most `output_limit_bytes` of each stream
        are kept, which is less than there: attempts share one process.

        Raises:
            CloudyardError: it could not be run. A command that fails, or runs out of time, is a result.
        """
        async with self._act(
            "run", _command(command, timeout_s=timeout_s, env=env, cwd=cwd, user=user)
        ) as draft:
            done = await self._sandbox.run(
                command,
                timeout_s=timeout_s,
                env=env,
                cwd=self._path(cwd),
                user=user or self._user,
                stdin=stdin,
                output_limit_bytes=output_limit_bytes,
            )
            draft.completed(done)
            return done

    async def start(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: bool = False,
    ) -> BoxProcess:
        """Start a command in the background; see `Sandbox.start`. It ends with the agent's time."""
        async with self._act(
            "start", _command(command, timeout_s=timeout_s, env=env, cwd=cwd, user=user)
        ) as draft:
            process = await self._sandbox.start(
                command,
                timeout_s=timeout_s,
                env=env,
                cwd=self._path(cwd),
                user=user or self._user,
                stdin=stdin,
            )
            draft.fields["arguments"]["process"] = process.id
            return BoxProcess(self, process)

    async def read(self, path: str) -> bytes:
        """All bytes of a file, of READ_BYTES_MAX at most.

        Raises:
            NotFound: it does not exist.
            Conflict: it is a directory, or changed while it was read.
            LimitExceeded: it is larger.
        """
        path = self._path(path)
        async with self._act("read", {"path": path}) as draft:
            info = await self._sandbox.stat(path)
            if info.size > READ_BYTES_MAX:
                raise LimitExceeded(
                    f"{path} has {info.size} bytes; at most {READ_BYTES_MAX} are read.",
                    code="file_too_large",
                    hint="Take a part of it with a command, such as head or sed.",
                    fault="policy",
                )
            data = await self._sandbox.read(path)
            draft.data(data)
            return data

    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> FileInfo:
        """Write a file in one move, making missing directories; see `Sandbox.write`."""
        path = self._path(path)
        arguments = {"path": path, "data": shown(data, limit=ARGUMENT_SHOWN_BYTES), "bytes": len(data)}
        async with self._act("write", arguments):
            return await self._sandbox.write(path, data, mode=mode)

    async def listdir(self, path: str = ".") -> list[FileInfo]:
        """Entries of a directory, sorted by name."""
        path = self._path(path)
        async with self._act("listdir", {"path": path}) as draft:
            entries = await self._sandbox.listdir(path)
            draft.data("\n".join(entry.path for entry in entries).encode())
            return entries

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What is at a path.

        Raises:
            NotFound: nothing is.
        """
        path = self._path(path)
        async with self._act("stat", {"path": path}):
            return await self._sandbox.stat(path, follow=follow)

    async def mkdir(self, path: str, *, mode: int = 0o755) -> FileInfo:
        """Make a directory, and missing ones above it."""
        path = self._path(path)
        async with self._act("mkdir", {"path": path}):
            return await self._sandbox.mkdir(path, mode=mode)

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, a link, or a directory (`recursive` if it is not empty)."""
        path = self._path(path)
        async with self._act("remove", {"path": path}):
            return await self._sandbox.remove(path, recursive=recursive, missing_ok=missing_ok)

    async def kill_all(self) -> None:
        """End every process in the sandbox, however it tries to stay; files stay."""
        async with self._act("kill_all", {}):
            await self._sandbox.kill_all()

    async def upload(self, local: str | Path, path: str) -> None:
        """Copy a file or directory of this machine into the sandbox."""
        path = self._path(path)
        async with self._act("upload", {"local": str(local), "path": path}):
            await self._sandbox.upload(local, path)

    async def download(self, path: str, local: str | Path) -> None:
        """Copy a file or directory out of the sandbox. Do not follow links in it."""
        path = self._path(path)
        async with self._act("download", {"path": path, "local": str(local)}):
            await self._sandbox.download(path, local)

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._cwd, path)) if path else self._cwd

    def _act(self, op: str, arguments: dict[str, Any]) -> _Act:
        return _Act(self, op, arguments)

    def _shut(self) -> CloudyardError:
        """Why nothing can be done through it any more."""
        if self._closed:
            return Conflict(
                f"The box of sandbox {self.id} is closed: the agent's time is over.",
                code="box_closed",
                fault="policy",
            )
        return LimitExceeded(
            f"The attempt has taken {ACTIONS_MAX} actions, which is the most that one may take.",
            code="too_many_actions",
            fault="policy",
        )


class _Act:
    """One action: what is done in the block is numbered, timed and written down, and ends with the box."""

    def __init__(self, box: Box, op: str, arguments: dict[str, Any]) -> None:
        self.fields: dict[str, Any] = {"phase": box._phase, "op": op, "arguments": arguments}
        self._box = box
        self._fault = ""
        self._scope = anyio.CancelScope()

    def completed(self, done: Completed) -> None:
        """A command ended."""
        self.fields |= {
            "exit_code": done.exit_code,
            "signal": done.signal,
            "timed_out": done.timed_out,
            "stdout": shown(done.stdout, done.stdout_total),
            "stderr": shown(done.stderr, done.stderr_total),
            "stdout_bytes": done.stdout_total,
            "stderr_bytes": done.stderr_total,
            "cpu_s": done.cpu_s,
            "error": done.error,
        }
        self._fault = done.fault.label if done.fault else ""

    def data(self, data: bytes) -> None:
        """Bytes came out of it."""
        self.fields |= {"stdout": shown(data), "stdout_bytes": len(data)}

    async def __aenter__(self) -> Self:
        if self._box._closed or (self._box._phase == "agent" and self._box._log.full):
            await anyio.sleep(REFUSED_PAUSE_S)  # who tries for ever must not keep others from their turn
            raise self._box._shut()
        self.fields["number"] = self._box._log.take_number()
        self.fields["begin"] = time.time()
        self._box._under_way.add(self._scope)
        self._scope.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:  # an agent that would not end is disposed of, maybe outside the event loop
            return
        shut = self._scope.__exit__(kind, error, trace)
        self._box._under_way.discard(self._scope)
        if isinstance(error, CloudyardError):
            self.fields["error"] = str(error)
            self._fault = error.fault or "policy"
        elif error is not None:
            self.fields["error"] = "The agent's time was over." if shut else "It was cancelled."
        self.fields["end"] = time.time()
        self._box._log.write(self.fields, fault=self._fault)
        if shut:
            raise self._box._shut()


class BoxProcess:
    """A command that runs in the background of a box. Its end, signals and input are written down; output
    that is followed is not."""

    def __init__(self, box: Box, process: Process) -> None:
        self._box = box
        self._process = process

    @property
    def id(self) -> int:
        """Its number in its sandbox."""
        return self._process.id

    def stdout(self, *, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Its stdout from a byte offset on, as it comes."""
        return self._process.stdout(offset=offset)

    def stderr(self, *, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Its stderr from a byte offset on, as it comes."""
        return self._process.stderr(offset=offset)

    async def write(self, data: bytes) -> None:
        """Bytes for its stdin, if it was started with `stdin=True`."""
        arguments = {"process": self.id, "data": shown(data, limit=ARGUMENT_SHOWN_BYTES), "bytes": len(data)}
        async with self._box._act("write_stdin", arguments):
            return await self._process.write(data)

    async def close_stdin(self) -> None:
        """End its stdin."""
        async with self._box._act("close_stdin", {"process": self.id}):
            return await self._process.close_stdin()

    async def signal(self, number: int) -> None:
        """Send a signal to its whole process tree."""
        async with self._box._act("signal", {"process": self.id, "signal": number}):
            return await self._process.signal(number)

    async def kill(self) -> None:
        """Kill its whole process tree."""
        await self.signal(9)

    async def wait(self) -> Completed:
        """Wait for its end; the result tells how it ended and has no output, which the streams have."""
        async with self._box._act("wait", {"process": self.id}) as draft:
            done = await self._process.wait(output=False)
            draft.completed(done)
            return done


def _command(
    command: str | Sequence[str],
    *,
    timeout_s: float | None,
    env: Mapping[str, str] | None,
    cwd: str,
    user: str,
) -> dict[str, Any]:
    """Arguments of a command for its record: of an environment only the names, for values may be secrets."""
    words = command if isinstance(command, str) else [str(word) for word in command]
    if isinstance(words, list) and sum(map(len, words)) > ARGUMENT_SHOWN_BYTES:
        words = " ".join(words)
    if isinstance(words, str):
        words = shown(words.encode(errors="replace"), limit=ARGUMENT_SHOWN_BYTES)
    arguments: dict[str, Any] = {"command": words}
    given = {"timeout_s": timeout_s, "env": sorted(env or {}), "cwd": cwd, "user": user}
    return arguments | {name: value for name, value in given.items() if value}
