"""What each operation does in a sandbox that runs, and what makes it a step.

`perform` numbers it, answers a repeated key from the record, and records the result before it is
answered. Bad requests are refused before they become a step.
"""

from __future__ import annotations

import anyio
from msgspec.structs import replace

from cloudyard.edge.backends.base import Files
from cloudyard.edge.config import LISTED_COMMANDS_MAX
from cloudyard.edge.history import History
from cloudyard.edge.journal import Journal
from cloudyard.edge.records import Ended
from cloudyard.edge.refusals import Refused
from cloudyard.edge.sandbox import Sandbox
from cloudyard.edge.steps import Step, StepBook, digest_of
from cloudyard.errors import CloudyardError, InvalidRequest, YardUnavailable
from cloudyard.model import (
    CHUNK_BYTES_MAX,
    TIMEOUT_MAX_S,
    TTL_MAX_S,
    TTL_MIN_S,
    AnyOp,
    AnyResult,
    CommandList,
    Done,
    Exec,
    GetSandbox,
    KeepAlive,
    KillAll,
    ListCommands,
    ListDir,
    ListTree,
    MakeDir,
    OutputChunk,
    ReadFile,
    ReadOutput,
    Remove,
    Resize,
    SendStdin,
    Signal,
    Start,
    Stat,
    StopSandbox,
    UploadChunk,
    UploadCommit,
    Wait,
    WriteFile,
    WriteTree,
    check_below,
    check_command,
    check_entries,
    check_key,
    check_path,
)
from cloudyard.wire.guest import Kind, Tag, encode

DAY_S = 24 * 3600
READS = (Wait, ReadOutput, ListCommands, ReadFile, ListTree, ListDir, Stat)
NO_STEP = (UploadChunk,)
FileOp = (
    ReadFile
    | WriteFile
    | UploadChunk
    | UploadCommit
    | ListTree
    | WriteTree
    | ListDir
    | Stat
    | Remove
    | MakeDir
)

MODE_MAX = 0o7777


def check(op: AnyOp) -> None:
    """Refuse what can never be done.

    Raises:
        InvalidRequest, LimitExceeded: as the sentence says.
    """
    if isinstance(op, Exec | Start):
        check_command(op.command)
    elif isinstance(op, KeepAlive):
        _check_lives(op)
    elif isinstance(op, WriteTree):
        check_entries(op.entries)
    for below in (getattr(op, "below", b""), getattr(op, "after", b"")):
        if below:
            check_below(below)
    path = getattr(op, "path", None)
    if path is not None:
        check_path(path)
    data = getattr(op, "data", b"")
    if len(data) > CHUNK_BYTES_MAX:
        raise InvalidRequest(
            f"data is {len(data)} bytes; one piece holds at most {CHUNK_BYTES_MAX}.",
            code="chunk_too_large",
            hint="Send it in pieces, or upload it.",
        )
    for name in ("offset", "max_bytes", "size"):
        if getattr(op, name, 0) < 0:
            raise InvalidRequest(
                f"{name} is {getattr(op, name)}, below zero.",
                code="out_of_range",
                hint="It counts bytes, from 0 up.",
            )
    mode = getattr(op, "mode", None)
    if mode is not None and not 0 <= mode <= MODE_MAX:
        raise InvalidRequest(
            f"mode is {mode}, out of range.",
            code="out_of_range",
            hint="Permission bits, between 0 and 0o7777, such as 0o644.",
        )
    wait_s = getattr(op, "wait_s", 0.0)
    if not 0 <= wait_s <= TIMEOUT_MAX_S:
        raise InvalidRequest(
            f"wait_s is {wait_s}.", code="out_of_range", hint=f"Between 0 and {TIMEOUT_MAX_S:.0f} seconds."
        )


def _check_lives(op: KeepAlive) -> None:
    for ttl in (op.idle_ttl_s, op.max_ttl_s):
        if isinstance(ttl, float | int) and not TTL_MIN_S <= ttl <= TTL_MAX_S:
            raise InvalidRequest(
                f"A time to live of {ttl} is out of range.",
                code="out_of_range",
                hint=f"Between {TTL_MIN_S:.0f} second and {TTL_MAX_S / DAY_S:.0f} days.",
            )


async def perform(sandbox: Sandbox, op: AnyOp, *, key: str, cause: str, at: float) -> AnyResult:
    """Do an operation and record it.

    Args:
        sandbox: where.
        op: what.
        key: the step key; empty for none.
        cause: the id of the request.
        at: the monotonic clock.

    Raises:
        CloudyardError: what it ended with.
    """
    check(op)
    check_key(key)
    digest = digest_of(op) if key else b""
    if key:
        found = sandbox.steps.repeated(key, digest)
        if found is not None:
            if isinstance(found, Step):
                return replace(await found.wait(), replayed=True)
            return _recalled(sandbox.history, found)
    sandbox.check_running()
    if isinstance(op, NO_STEP):
        return await _perform_in(sandbox, op)
    reads = isinstance(op, READS)
    runs = isinstance(op, (Exec, Start))
    refused = sandbox.commands.refused() if runs else None
    step = sandbox.steps.open(
        op, name=type_name(op), key=key, digest=digest, at=at, reads=reads, refused=refused
    )
    if isinstance(op, (Exec, Start)):
        return await _run(sandbox, op, step, cause, refused)
    try:
        result = await _perform_in(sandbox, op)
    except CloudyardError as exc:
        sandbox.steps.fail(step, exc)
        raise
    except BaseException:
        if not step.done:  # given up by its caller, or a fault of ours: nobody may wait for it for ever
            sandbox.steps.fail(step, YardUnavailable(f"Step {step.number} was given up.", code="given_up"))
        raise
    return sandbox.steps.answer(step, result)


def answer_from_record(journal: Journal, history: History, op: AnyOp, key: str) -> AnyResult | None:
    """What a key brings in a sandbox that has ended; None when it is new.

    Raises:
        Conflict: the key was used for another operation.
        CloudyardError: the error that is on record for it.
    """
    found = StepBook(journal).repeated(key, digest_of(op))
    assert not isinstance(found, Step), "nothing is under way in a sandbox that has ended"
    return None if found is None else _recalled(history, found)


def _recalled(history: History, found: Ended | AnyResult) -> AnyResult:
    result = history.result(found) if isinstance(found, Ended) else found
    return replace(result, replayed=True)


def type_name(op: AnyOp) -> str:
    """The operation's tag."""
    return str(op.__struct_config__.tag)


async def _run(
    sandbox: Sandbox, op: Exec | Start, step: Step, cause: str, refused: Refused | None
) -> AnyResult:
    command = sandbox.commands.begin(step, op.command, cause=cause, waits=isinstance(op, Exec))
    command.refused_before = refused
    try:
        await sandbox.commands.launch(command)
    except CloudyardError as exc:
        sandbox.commands.give_up(command, exc)
    except BaseException:  # it waited for a place, and its caller went away
        gone = YardUnavailable(f"Step {step.number} was given up.", code="given_up")
        sandbox.commands.give_up(command, gone)
        raise
    return await step.wait()


async def _perform_in(sandbox: Sandbox, op: AnyOp) -> AnyResult:
    match op:
        case Wait():
            return await _wait(sandbox, op)
        case ReadOutput():
            return await _read_output(sandbox, op)
        case SendStdin():
            return await _send_stdin(sandbox, op)
        case Signal():
            sandbox.commands.signal(op.command_id, op.signal)
            return Done()
        case Resize():
            size = ((Tag.ROWS, op.pty.rows), (Tag.COLS, op.pty.cols))
            sandbox.commands.find(op.command_id)
            sandbox.commands.tell(encode(Kind.RESIZE, op.command_id, *size))
            return Done()
        case ListCommands():
            running = [command.now() for command in sandbox.commands.live.values()]
            return CommandList(commands=running + sandbox.history.newest(LISTED_COMMANDS_MAX - len(running)))
        case KillAll():
            return await _kill_all(sandbox)
        case GetSandbox() | KeepAlive() | StopSandbox() | Exec() | Start():
            raise AssertionError("done elsewhere")
        case (
            ReadFile()
            | WriteFile()
            | UploadChunk()
            | UploadCommit()
            | ListTree()
            | WriteTree()
            | ListDir()
            | Stat()
            | Remove()
            | MakeDir()
        ):
            result: AnyResult = Done()
            with anyio.CancelScope(shield=True):  # short, and its result has to be on record once it is done
                result = await perform_on_files(sandbox.check_running().files, op)
            return result


async def perform_on_files(files: Files, op: FileOp) -> AnyResult:
    """Do an operation on files, which is no step by itself. Raises CloudyardError."""
    match op:
        case ReadFile():
            return await files.read(op.path, op.offset, min(op.max_bytes, CHUNK_BYTES_MAX), below=op.below)
        case WriteFile():
            return await files.write(op.path, op.data, mode=op.mode, parents=op.parents, sha256=op.sha256)
        case UploadChunk():
            return Done(taken=await files.upload_chunk(op.upload_id, op.offset, op.data))
        case UploadCommit():
            return await files.upload_commit(
                op.upload_id,
                op.path,
                size=op.size,
                sha256=op.sha256,
                mode=op.mode,
                parents=op.parents,
                below=op.below,
            )
        case ListTree():
            return await files.list_tree(op.path, op.after)
        case WriteTree():
            await files.write_tree(op.path, op.entries)
            return Done()
        case ListDir():
            return await files.list_dir(op.path)
        case Stat():
            return await files.stat(op.path, follow=op.follow)
        case Remove():
            await files.remove(op.path, recursive=op.recursive, missing_ok=op.missing_ok)
            return Done()
        case MakeDir():
            return await files.make_dir(op.path, mode=op.mode, parents=op.parents, exist_ok=op.exist_ok)


async def _wait(sandbox: Sandbox, op: Wait) -> AnyResult:
    command = sandbox.commands.live.get(op.command_id)
    if command is not None:
        with anyio.move_on_after(op.wait_s):
            await command.wait_ended()
        if op.command_id in sandbox.commands.live:
            return command.now()
    return sandbox.history.result(sandbox.history.find(op.command_id))


async def _read_output(sandbox: Sandbox, op: ReadOutput) -> OutputChunk:
    size = min(op.max_bytes, CHUNK_BYTES_MAX)
    command = sandbox.commands.live.get(op.command_id)
    if command is not None:
        stream = command.stream(op.stream)
        if stream.kept <= op.offset and op.wait_s > 0:
            with anyio.move_on_after(op.wait_s):
                while stream.kept <= op.offset and op.command_id in sandbox.commands.live:
                    await stream.wait_changed()
        if op.command_id in sandbox.commands.live:
            return OutputChunk(data=stream.read(op.offset, size), offset=op.offset)
    return await sandbox.history.read(op.command_id, op.stream, offset=op.offset, size=size)


async def _send_stdin(sandbox: Sandbox, op: SendStdin) -> Done:
    command = sandbox.commands.find(op.command_id)
    stdin = command.stdin
    end = op.offset + len(op.data)
    with anyio.move_on_after(op.wait_s):
        while stdin is not None and stdin.full and op.command_id in sandbox.commands.live:
            await stdin.wait_changed()
        sandbox.commands.feed(command, op.offset, op.data, eof=op.eof)
        while (
            stdin is not None
            and stdin.taken < end
            and not stdin.closed
            and op.command_id in sandbox.commands.live
        ):
            await stdin.wait_changed()
    if stdin is None:
        return Done()
    return Done(taken=min(end, stdin.taken) if op.data or op.eof else stdin.end)


async def _kill_all(sandbox: Sandbox) -> Done:
    instance = sandbox.check_running()
    under_way = list(sandbox.commands.live.values())
    with anyio.CancelScope(shield=True):  # bounded; half of it done helps nobody
        for command in under_way:
            sandbox.commands.kill(command, "all processes of the sandbox were ended by request")
        await instance.end_processes()
        for command in under_way:
            if command.id in sandbox.commands.live:  # most have ended meanwhile
                await command.wait_ended()  # it is given up after KILL_WAIT_S
    return Done()
