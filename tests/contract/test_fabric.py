"""The fabric against the real nats-server: who may say what, and what a caller sees when things break."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from cloudyard.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Unauthorized,
    YardUnavailable,
)
from cloudyard.fabric import Credentials, Fabric
from cloudyard.testing.nats import NatsServer, nats_server
from cloudyard.wire.messages import (
    MESSAGE_BYTES_MAX,
    beat_subject,
    call_subject,
    reply_decoder,
)

BOUND_S = 20.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with nats_server(tmp_path, edges=["e1", "e2"]) as running:
        yield running


@pytest.fixture
async def control(server: NatsServer) -> AsyncIterator[Fabric]:
    async with Fabric.connect(server.url, server.credentials(), name="control") as fabric:
        yield fabric


def edge(server: NatsServer, name: str = "e1") -> Fabric:
    return Fabric.connect(server.url, server.credentials(f"edge-{name}"), name=name)


async def echo(data: bytes) -> bytes:
    return b"echo " + data


async def test_a_request_is_answered_by_the_edge_that_serves(server: NatsServer, control: Fabric) -> None:
    with anyio.fail_after(BOUND_S):
        async with edge(server) as fabric, anyio.create_task_group() as tasks:
            await tasks.start(fabric.serve, call_subject("e1"), echo)
            assert await control.request(call_subject("e1"), b"\x00\xff") == b"echo \x00\xff"
            tasks.cancel_scope.cancel()


async def test_a_thousand_requests_at_once_each_get_their_own_answer(
    server: NatsServer, control: Fabric
) -> None:
    answers: dict[int, bytes] = {}

    async def ask(number: int) -> None:
        answers[number] = await control.request(call_subject("e1"), str(number).encode())

    with anyio.fail_after(BOUND_S):
        async with edge(server) as fabric, anyio.create_task_group() as serving:
            await serving.start(fabric.serve, call_subject("e1"), echo)
            async with anyio.create_task_group() as tasks:
                for number in range(1000):
                    tasks.start_soon(ask, number)
            serving.cancel_scope.cancel()
    assert answers == {number: b"echo %d" % number for number in range(1000)}


async def test_a_request_to_nobody_fails_at_once(control: Fabric) -> None:
    with anyio.fail_after(BOUND_S), pytest.raises(YardUnavailable) as caught:
        await control.request(call_subject("e1"), b"")
    assert (caught.value.code, caught.value.retry_safe) == ("edge_unreachable", True)


async def test_without_credentials_or_with_wrong_ones_nobody_gets_in(server: NatsServer) -> None:
    for credentials in (Credentials(), Credentials("control", "guess"), Credentials("edge-e9", "guess")):
        with anyio.fail_after(BOUND_S), pytest.raises(Unauthorized) as caught:
            async with Fabric.connect(server.url, credentials, name="stranger"):
                pass
        assert "guess" not in str(caught.value)


async def test_credentials_in_the_url_work_and_are_not_shown(server: NatsServer) -> None:
    who = server.credentials()
    url = server.url.replace("nats://", f"nats://{who.user}:{who.password}@")
    with anyio.fail_after(BOUND_S):
        async with Fabric.connect(url, name="external") as fabric:
            with pytest.raises(YardUnavailable):
                await fabric.request(call_subject("e1"), b"")
    assert who.password not in repr(who)


@pytest.mark.parametrize(
    ("url", "creds_file", "code"),
    [
        ("127.0.0.1:4222", "", "bad_nats_url"),
        ("http://127.0.0.1:4222", "", "bad_nats_url"),
        ("nats://127.0.0.1:4222", "/nowhere/my.creds", "bad_credentials_file"),
    ],
)
async def test_what_no_waiting_makes_better_is_refused_at_once(url: str, creds_file: str, code: str) -> None:
    with anyio.fail_after(BOUND_S), pytest.raises(InvalidRequest) as caught:
        async with Fabric.connect(url, Credentials(creds_file=creds_file), name="x"):
            pass
    assert caught.value.code == code


async def test_an_edge_cannot_speak_in_anothers_name(server: NatsServer, control: Fabric) -> None:
    with anyio.fail_after(BOUND_S):
        async with edge(server) as fabric, control.subscribe(beat_subject("*")) as beats:
            for subject in (beat_subject("e2"), "cy.reply.e2.x.1", call_subject("e2"), "$KV.projects.x"):
                await fabric.publish(subject, b"forged")
            await fabric.publish(beat_subject("e1"), b"honest")
            heard = await anext(beats)
    # One connection keeps its order: had a forged beat been let through, it would have come first.
    assert heard == ("cy.beat.e1", b"honest")


@pytest.mark.parametrize("subject", ["cy.edge.e2.call", "cy.edge.*.call", "cy.beat.*", "cy.reply.>", ">"])
async def test_an_edge_cannot_hear_what_is_not_for_it(server: NatsServer, subject: str) -> None:
    with anyio.fail_after(BOUND_S):
        async with edge(server) as fabric:
            with pytest.raises(Forbidden):
                async with fabric.subscribe(subject):
                    pass


async def test_a_request_that_may_not_be_sent_says_so(server: NatsServer) -> None:
    with anyio.fail_after(BOUND_S):
        async with edge(server) as fabric:
            with pytest.raises(Forbidden):
                await fabric.request(call_subject("e2"), b"")


async def test_pending_requests_fail_when_the_server_dies_and_the_client_comes_back(
    server: NatsServer, control: Fabric
) -> None:
    arrived = anyio.Event()

    async def never(data: bytes) -> bytes:
        if data == b"hang":
            arrived.set()
            await anyio.sleep_forever()
        return await echo(data)

    failures: list[YardUnavailable] = []

    async def ask() -> None:
        try:
            await control.request(call_subject("e1"), b"hang")
        except YardUnavailable as exc:
            failures.append(exc)

    with anyio.fail_after(BOUND_S):
        async with edge(server) as fabric, anyio.create_task_group() as tasks:
            await tasks.start(fabric.serve, call_subject("e1"), never)
            async with anyio.create_task_group() as asking:
                asking.start_soon(ask)
                await arrived.wait()
                await server.kill()
            assert [(error.code, error.retry_safe) for error in failures] == [("answer_lost", True)]
            with pytest.raises(YardUnavailable) as caught:
                await control.request(call_subject("e1"), b"again")
            assert caught.value.code == "fabric_unreachable"
            await server.start()
            await control.wait_connected()
            await fabric.wait_connected()
            assert await control.request(call_subject("e1"), b"again") == b"echo again"
            tasks.cancel_scope.cancel()


async def test_a_connection_waits_for_a_server_that_starts_later(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as server:
        await server.kill()
        joined = anyio.Event()

        async def join() -> None:
            async with Fabric.connect(server.url, server.credentials(), name="early"):
                joined.set()

        with anyio.fail_after(BOUND_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(join)
                await anyio.wait_all_tasks_blocked()
                assert not joined.is_set()
                await server.start()
                await joined.wait()


async def test_a_key_is_claimed_once_changed_by_revision_and_kept_over_a_restart(
    server: NatsServer, control: Fabric
) -> None:
    bucket = control.bucket("create_keys", ttl_s=3600.0)
    winners: list[int] = []

    async def claim(number: int) -> None:
        try:
            await bucket.create("p.key", b"%d" % number)
            winners.append(number)
        except Conflict:
            pass

    with anyio.fail_after(BOUND_S):
        with pytest.raises(NotFound):
            await bucket.get("p.key")
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(claim, number)
        assert len(winners) == 1
        entry = await bucket.get("p.key")
        assert entry.value == b"%d" % winners[0]
        revision = await bucket.update("p.key", b"changed", revision=entry.revision)
        with pytest.raises(Conflict):
            await bucket.update("p.key", b"late", revision=entry.revision)
        await server.kill()
        await server.start()
        await control.wait_connected()
        assert await bucket.get("p.key") == (b"changed", revision)
        assert await bucket.keys() == ["p.key"]
        await bucket.delete("p.key", revision=revision)
        assert await bucket.keys() == []
        await bucket.create("p.key", b"reborn")


async def test_what_is_raised_inside_comes_out_as_it_is_and_a_cancellation_passes(server: NatsServer) -> None:
    with anyio.fail_after(BOUND_S):
        with pytest.raises(KeyError):
            async with edge(server):
                raise KeyError("inside")
        with anyio.move_on_after(0.05) as scope:
            async with edge(server):
                await anyio.sleep_forever()
        assert scope.cancelled_caught


async def test_values_expire(control: Fabric) -> None:
    bucket = control.bucket("short", ttl_s=0.5)
    with anyio.fail_after(BOUND_S):
        await bucket.create("key", b"")
        while await bucket.keys():
            await anyio.sleep(0.05)
        while True:  # the server may count it for a moment longer than it lists it
            with suppress(Conflict):
                await bucket.create("key", b"")
                break
            await anyio.sleep(0.05)


async def test_a_message_that_is_too_large_is_refused_both_ways(server: NatsServer, control: Fabric) -> None:
    async def bloat(data: bytes) -> bytes:
        return b"x" * (MESSAGE_BYTES_MAX + 1)

    with anyio.fail_after(BOUND_S):
        async with edge(server) as fabric, anyio.create_task_group() as tasks:
            await tasks.start(fabric.serve, call_subject("e1"), bloat)
            with pytest.raises(LimitExceeded):
                await control.request(call_subject("e1"), b"x" * (MESSAGE_BYTES_MAX + 1))
            reply = reply_decoder.decode(await control.request(call_subject("e1"), b""))
            assert reply.error is not None
            assert reply.error.code == "message_too_large"
            tasks.cancel_scope.cancel()


async def test_errors_of_a_handler_and_too_many_requests_come_back_as_errors(
    server: NatsServer, control: Fabric
) -> None:
    waiting, release = anyio.Event(), anyio.Event()

    async def handler(data: bytes) -> bytes:
        if data == b"wait":
            waiting.set()
            await release.wait()
            return data
        raise Conflict("It exists.", code="exists", hint="Take another.") if data else KeyError("bug")

    async def ask() -> None:
        assert await control.request(call_subject("e1"), b"wait") == b"wait"

    with anyio.fail_after(BOUND_S):
        async with edge(server) as fabric, anyio.create_task_group() as serving:
            await serving.start(
                lambda *, task_status: fabric.serve(
                    call_subject("e1"), handler, limit=1, task_status=task_status
                )
            )
            codes = []
            for data in (b"conflict", b""):
                reply = reply_decoder.decode(await control.request(call_subject("e1"), data))
                assert reply.error is not None
                codes.append(reply.error.code)
            assert codes == ["exists", "bug"]
            async with anyio.create_task_group() as asking:
                asking.start_soon(ask)
                await waiting.wait()
                busy = reply_decoder.decode(await control.request(call_subject("e1"), b"wait"))
                assert busy.error is not None
                assert (busy.error.code, busy.error.retry_safe) == ("edge_busy", True)
                release.set()
            serving.cancel_scope.cancel()


async def test_it_says_since_when_calls_have_come_through(server: NatsServer) -> None:
    """Counted anew by each connection: what was asked through the one before is not answered."""
    subject = call_subject("e1")
    with anyio.fail_after(BOUND_S):
        async with edge(server) as fabric, anyio.create_task_group() as tasks:
            assert fabric.listening_s(subject) == 0.0
            await tasks.start(fabric.serve, subject, echo)
            while fabric.listening_s(subject) < 0.1:
                await anyio.sleep(0.01)
            await server.kill()
            while fabric.connected:
                await anyio.sleep(0.01)
            assert fabric.listening_s(subject) == 0.0
            again = anyio.current_time()
            await server.start()
            await fabric.wait_connected()
            assert fabric.listening_s(subject) <= anyio.current_time() - again
            tasks.cancel_scope.cancel()


async def test_a_cancelled_request_leaves_nothing_and_abandoned_ones_fail(
    server: NatsServer, control: Fabric
) -> None:
    async def never(data: bytes) -> bytes:
        await anyio.sleep_forever()
        return b""

    lost: list[str] = []

    async def ask() -> None:
        with pytest.raises(YardUnavailable) as caught:
            await control.request(call_subject("e1"), b"")
        lost.append(str(caught.value.code))

    with anyio.fail_after(BOUND_S):
        async with edge(server) as fabric, anyio.create_task_group() as tasks:
            await tasks.start(fabric.serve, call_subject("e1"), never)
            with anyio.move_on_after(0.05) as scope:
                await control.request(call_subject("e1"), b"")
            assert scope.cancelled_caught
            assert control.abandon(call_subject("e1"), "The edge started again.") == 0
            async with anyio.create_task_group() as asking:
                asking.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                assert control.abandon(call_subject("e1"), "The edge started again.") == 1
            tasks.cancel_scope.cancel()
    assert lost == ["answer_lost"]


@contextmanager
def edge_in_a_thread(server: NatsServer, size: int) -> Iterator[None]:
    """An edge with its own loop, which answers with `size` bytes."""
    ready, stop = threading.Event(), threading.Event()

    async def large(data: bytes) -> bytes:
        return data + b"x" * size

    async def main() -> None:
        async with edge(server) as fabric, anyio.create_task_group() as tasks:
            await tasks.start(fabric.serve, call_subject("e1"), large)
            ready.set()
            await anyio.to_thread.run_sync(stop.wait)
            tasks.cancel_scope.cancel()

    thread = threading.Thread(target=anyio.run, args=(main,))
    thread.start()
    try:
        assert ready.wait(BOUND_S)
        yield
    finally:
        stop.set()
        thread.join(BOUND_S)


async def test_a_slow_reader_loses_no_answer_in_silence(server: NatsServer, control: Fabric) -> None:
    """Plain NATS dropped a quarter of a fast stream to a slow reader. Here a request is answered or fails."""
    count, size = 400, 256 * 1024  # 100 MiB: more than the server holds back for one client
    outcomes: list[str] = []

    async def ask() -> None:
        try:
            answer = await control.request(call_subject("e1"), b"")
            outcomes.append("whole" if len(answer) == size else "cut")
        except YardUnavailable as exc:
            outcomes.append(exc.code)

    with anyio.fail_after(60), edge_in_a_thread(server, size):
        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            time.sleep(2)  # the reader is slow: its whole loop stands still
    assert len(outcomes) == count
    assert set(outcomes) <= {"whole", "answer_lost", "fabric_unreachable"}


def test_the_file_with_passwords_is_private(tmp_path: Path) -> None:
    from cloudyard.fabric import NatsServerConfig, render_config, write_private

    config = NatsServerConfig(port=4222, store_dir=str(tmp_path), passwords={"control": "s3cret"})
    write_private(tmp_path / "nats.conf", render_config(config))
    assert stat.S_IMODE((tmp_path / "nats.conf").stat().st_mode) == 0o600
    assert "127.0.0.1:4222" in (tmp_path / "nats.conf").read_text()
    assert "s3cret" not in repr(config)
