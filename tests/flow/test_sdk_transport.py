"""The SDK against a yard that breaks, lies or stays silent."""

from __future__ import annotations

import time
from hashlib import sha256

import anyio
import pytest

from cloudyard import (
    Conflict,
    LimitExceeded,
    NotFound,
    Unauthorized,
    YardUnavailable,
    connect,
)
from cloudyard.errors import CloudyardError, SandboxUnavailable
from cloudyard.model import (
    CHUNK_BYTES_MAX,
    AnyOp,
    AnyResult,
    CommandInfo,
    Exec,
    ExecResult,
    OutputChunk,
    ReadOutput,
    SandboxInfo,
    Start,
)
from cloudyard.sdk import transport
from flow.scripted_yard import SANDBOX, TOKEN, ScriptedYard, box_of, scripted
from support import wait_until


async def ok(op: AnyOp, key: str) -> AnyResult:
    return ExecResult(command_id=1, exit_code=0, stdout=b"42\n", stdout_kept=3, stdout_total=3)


async def test_a_command_runs_and_its_key_is_fresh_each_time() -> None:
    async with scripted(ok) as (server, yard):
        box = box_of(yard)
        done = await box.run("echo 42")
        assert (done.ok, done.stdout, done.text) == (True, b"42\n", "42\n")
        await box.run(["echo", "42"], key="mine")
        await box.run("echo 42")
    keys = [key for _, key in server.seen]
    assert len(keys[0]) == 32
    assert keys[1] == "mine"
    assert len(set(keys)) == 3
    assert server.seen[0][0] == Exec(command=server.seen[0][0].command)
    assert server.seen[1][0].command.argv == ["echo", "42"]


async def test_a_thousand_commands_in_flight_from_one_client() -> None:
    waiting = 0
    all_there = anyio.Event()

    async def together(op: AnyOp, key: str) -> AnyResult:
        nonlocal waiting
        waiting += 1
        if waiting == 1000:
            all_there.set()
        await all_there.wait()
        return await ok(op, key)

    async with scripted(together) as (server, yard):
        box = box_of(yard)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _ in range(1000):
                    tasks.start_soon(box.run, "true")
        assert len(server.connections) == 1


async def test_a_broken_connection_is_made_again_and_the_same_key_sent_again() -> None:
    held = anyio.Event()

    async def hold_first(op: AnyOp, key: str) -> AnyResult:
        if not held.is_set():
            held.set()
            await anyio.sleep_forever()
        return await ok(op, key)

    async with scripted(hold_first) as (server, yard), anyio.create_task_group() as tasks:
        tasks.start_soon(box_of(yard).run, "true")
        await held.wait()
        await server.stop()
        await server.start()
    assert len(server.seen) == 2
    assert server.seen[0] == server.seen[1]


async def test_a_yard_that_says_try_again_is_asked_again_with_the_same_key() -> None:
    async def twice_away(op: AnyOp, key: str) -> AnyResult:
        if len(server.seen) < 3:
            raise YardUnavailable("The edge is starting.")
        return await ok(op, key)

    async with scripted(twice_away) as (server, yard):
        assert (await box_of(yard).run("true")).ok
    assert len({key for _, key in server.seen}) == 1
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    "error",
    [
        YardUnavailable("It may have been done.", code="answer_lost", retry_safe=False),
        YardUnavailable("The caller's own doing.", retry_safe=True, fault="policy"),
        SandboxUnavailable("Gone, and by our fault."),
        LimitExceeded(
            "No room for it now.", retry_safe=True, fault="infra"
        ),  # its caller knows what it is worth
    ],
)
async def test_what_is_not_both_ours_and_safe_to_repeat_is_raised_at_once(error: CloudyardError) -> None:
    async def refuse(op: AnyOp, key: str) -> AnyResult:
        raise error

    async with scripted(refuse) as (server, yard):
        with pytest.raises(type(error), match=error.message):
            await box_of(yard).run("true")
        assert len(server.seen) == 1


async def test_a_yard_that_stays_away_is_given_up_with_the_time_that_was_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scripted(ok) as (server, yard):
        await server.stop()
        begun = time.monotonic()
        with pytest.raises(YardUnavailable, match=r"was tried for \d\.\d s.*cloudyard up"):
            await transport.wait_out_restarts(lambda: yard._mux.open(), patience_s=0.5)
        assert time.monotonic() - begun < 5


async def test_the_errors_of_the_yard_are_raised_as_they_are() -> None:
    async def missing(op: AnyOp, key: str) -> AnyResult:
        raise NotFound("There is no such file: /x.", code="file_not_found", hint="Look with listdir.")

    async with scripted(missing) as (_, yard):
        with pytest.raises(NotFound, match="no such file") as caught:
            await box_of(yard).read("/x")
        assert (caught.value.code, caught.value.hint) == ("file_not_found", "Look with listdir.")


async def test_cancelling_a_call_tells_the_yard_and_leaves_the_connection_usable() -> None:
    started = anyio.Event()

    async def hang(op: AnyOp, key: str) -> AnyResult:
        if isinstance(op, Exec) and op.command.shell == "sleep inf":
            started.set()
            await anyio.sleep_forever()
        return await ok(op, key)

    async with scripted(hang) as (server, yard):
        box = box_of(yard)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(box.run, "sleep inf")
            await started.wait()
            tasks.cancel_scope.cancel()
        await wait_until(lambda: len(server.cancelled) == 1, "the yard hears of the cancel")
        assert (await box.run("true")).ok
        assert len(server.connections) == 1


async def test_a_wrong_token_is_refused_at_once() -> None:
    server = ScriptedYard(ok)
    await server.start()
    with pytest.raises(Unauthorized, match=r"401.*CLOUDYARD_TOKEN"):
        async with connect(server.url, "wrong"):
            pass
    await server.stop()


async def test_nobody_at_the_address_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudyard.sdk.client.FIRST_CONNECT_PATIENCE_S", 0.1)
    for name in ("mux", "http"):
        with pytest.raises(YardUnavailable, match=r"127\.0\.0\.1:1 cannot be reached.*cloudyard up"):
            async with connect("http://127.0.0.1:1", "x", transport=name):
                pass


async def test_errors_of_the_block_come_out_in_no_group() -> None:
    async with scripted(ok) as (_, yard):
        pass
    with pytest.raises(Conflict, match="closed"):
        await box_of(yard).run("true")
    server = ScriptedYard(ok)
    await server.start()
    with pytest.raises(ZeroDivisionError):
        async with connect(server.url, TOKEN):
            _ = 1 / 0
    await server.stop()


async def test_a_client_is_opened_once_and_used_while_it_is_open() -> None:
    yard = connect("http://127.0.0.1:1", "secret")
    assert "secret" not in repr(yard) + repr(yard._config)
    with pytest.raises(Conflict, match="async with"):
        await yard.images()
    with pytest.raises(Conflict, match="async with"):
        await box_of(yard).run("true")
    async with scripted(ok) as (_, yard):
        with pytest.raises(Conflict, match="open and cannot be opened again"):
            await yard.__aenter__()


async def test_an_answer_that_never_comes_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ANSWER_GRACE_S", 0.1)

    async def silent(op: AnyOp, key: str) -> AnyResult:
        await anyio.sleep_forever()
        raise AssertionError

    async with scripted(silent) as (server, yard):
        with pytest.raises(YardUnavailable, match="no answer within"):
            await box_of(yard).stat("/")
        with pytest.raises(YardUnavailable, match="no answer within"):
            await box_of(yard).run("true", timeout_s=0.1)
        assert server.cancelled == []  # giving up is no order to kill


async def test_a_command_that_was_frozen_past_its_time_is_joined_by_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "ANSWER_GRACE_S", 0.1)
    execs = 0

    async def late(op: AnyOp, key: str) -> AnyResult:
        nonlocal execs
        if not isinstance(op, Exec):
            return _info()
        execs += 1
        if execs == 1:
            await anyio.sleep_forever()
        return await ok(op, key)

    async with scripted(late) as (server, yard):
        assert (await box_of(yard).run("true", timeout_s=0.1)).ok
    keys = {key for op, key in server.seen if isinstance(op, Exec)}
    assert (execs, len(keys)) == (2, 1)


def _info() -> AnyResult:
    return SandboxInfo(
        id=SANDBOX,
        project="p",
        edge="e1",
        image="debian",
        backend="container",
        state="running",
        created_at=1.0,
        cpu=1.0,
        memory_bytes=1,
    )


# --- streams
# ------------------------------------------------------------------------------------------

DATA = bytes(range(256)) * 4096 * 3 + b"end"


def output(data: bytes, *, corrupt: str = "") -> object:
    async def answer(op: AnyOp, key: str) -> AnyResult:
        match op:
            case Exec():
                return ExecResult(
                    command_id=1,
                    exit_code=0,
                    stdout=data[:1000],
                    stdout_kept=len(data),
                    stdout_total=len(data),
                )
            case Start():
                return CommandInfo(command_id=1, running=True)
            case ReadOutput(offset=offset, max_bytes=most):
                piece = data[offset : offset + most]
                eof = offset + len(piece) == len(data)
                if corrupt == "gap" and offset > 500_000:
                    return OutputChunk(data=piece, offset=offset + 1)
                if corrupt == "short" and offset > 500_000:
                    piece = piece[:-1]
                if corrupt == "bytes":
                    piece = b"\0" * len(piece)
                digest = sha256(data).hexdigest() if eof else ""
                return OutputChunk(
                    data=piece, offset=offset, eof=eof, total=len(data) if eof else 0, sha256=digest
                )
        raise AssertionError(op)

    return answer


async def test_output_beyond_the_inline_part_is_fetched_in_a_window() -> None:
    async with scripted(output(DATA)) as (server, yard):
        assert (await box_of(yard).run("x")).stdout == DATA
    offsets = [op.offset for op, _ in server.seen if isinstance(op, ReadOutput)]
    assert offsets == list(range(1000, len(DATA), CHUNK_BYTES_MAX))


@pytest.mark.parametrize("corrupt", ["gap", "short", "bytes"])
async def test_a_gap_or_a_changed_byte_in_output_is_an_error(corrupt: str) -> None:
    async with scripted(output(DATA, corrupt=corrupt)) as (_, yard):
        with pytest.raises(CloudyardError, match="came incomplete") as caught:
            await box_of(yard).run("x")
        assert caught.value.code == "stream_broken"


async def test_a_stream_is_replayed_from_any_offset() -> None:
    async with scripted(output(DATA)) as (_, yard):
        process = await box_of(yard).start("x")
        for offset in (0, 1, len(DATA) - 1, len(DATA)):
            assert b"".join([piece async for piece in process.stdout(offset)]) == DATA[offset:]


async def test_an_end_that_is_seen_before_the_piece_in_front_of_it_waits_its_turn() -> None:
    """Pieces are asked for ahead: the command may write its last bytes and end between two answers."""
    ended = False

    async def growing(op: AnyOp, key: str) -> AnyResult:
        nonlocal ended
        if isinstance(op, Start):
            return CommandInfo(command_id=1, running=True)
        assert isinstance(op, ReadOutput)
        if not ended and op.offset == 2 * CHUNK_BYTES_MAX:
            ended = True
            return OutputChunk(offset=op.offset)
        piece = short[op.offset : op.offset + op.max_bytes]
        eof = ended and op.offset + len(piece) >= len(short)
        digest = sha256(short).hexdigest() if eof else ""
        return OutputChunk(
            data=piece, offset=op.offset, eof=eof, total=len(short) if eof else 0, sha256=digest
        )

    short = DATA[: 2 * CHUNK_BYTES_MAX + 1000]
    async with scripted(growing) as (_, yard):
        process = await box_of(yard).start("x")
        assert b"".join([piece async for piece in process.stdout()]) == short


async def test_a_stream_whose_hash_is_wrong_is_an_error() -> None:
    async with scripted(output(DATA, corrupt="bytes")) as (_, yard):
        process = await box_of(yard).start("x")
        with pytest.raises(CloudyardError, match="SHA-256"):
            _ = [piece async for piece in process.stdout()]
