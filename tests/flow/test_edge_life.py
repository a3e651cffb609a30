"""Sandboxes of an edge: made, limited, kept alive, lost and ended."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from cloudyard.edge.daemon import Edge
from cloudyard.errors import (
    CloudyardError,
    Conflict,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    SandboxUnavailable,
    Unsupported,
    YardUnavailable,
)
from cloudyard.model import (
    GIB,
    ExecResult,
    GetSandbox,
    KeepAlive,
    SandboxInfo,
    SandboxSpec,
    SendStdin,
    Signal,
    StopSandbox,
    Wait,
)
from cloudyard.testing.fake_backend import fake_images
from cloudyard.testing.fake_clock import FakeClock
from cloudyard.wire.messages import CallCreate, CallList, CallOp, page_decoder, raw, reply_decoder
from flow.edge_kit import PROJECT, Box, EdgeKit, alive, config_for, kit, running_edge, sandbox_id, until

__all__ = ["kit"]


@pytest.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def timed(clock: FakeClock) -> AsyncIterator[EdgeKit]:
    """An edge whose time a test moves."""
    with tempfile.TemporaryDirectory(prefix="cy-edge-") as name:
        async with running_edge(Path(name), clock=clock) as made:
            yield made
            await made.edge.stop_all()


async def test_a_create_that_nobody_waits_for_any_more_is_not_begun(timed: EdgeKit, clock: FakeClock):
    now = clock.wall()
    call = CallCreate(
        project=PROJECT, sandbox=sandbox_id(), spec=SandboxSpec(image="debian"), begin_by=now - 1
    )
    with pytest.raises(YardUnavailable) as caught:
        await timed.ask(call)
    assert (caught.value.code, caught.value.retry_safe) == ("create_expired", True)
    assert not timed.edge.yard.sandboxes
    info = await timed.ask(msgspec.structs.replace(call, begin_by=now + 1, expires_at=now + 100))
    assert isinstance(info, SandboxInfo)
    assert await timed.ask(call) == info


async def test_a_sandbox_that_is_ready_too_late_is_removed_unless_somebody_waits_longer(
    timed: EdgeKit, clock: FakeClock
):
    now = clock.wall()
    early = CallCreate(
        project=PROJECT, sandbox=sandbox_id(), spec=SandboxSpec(image="debian"), expires_at=now - 1
    )
    with pytest.raises(SandboxUnavailable) as caught:
        await timed.ask(early)
    assert caught.value.code == "create_expired"
    await until(lambda: not timed.edge.yard.sandboxes)
    patient = msgspec.structs.replace(early, sandbox=sandbox_id(1), expires_at=now + 100)
    hasty = msgspec.structs.replace(patient, expires_at=now - 1)
    answers: list[object] = []

    async def ask(call: CallCreate) -> None:
        answers.append(await timed.ask(call))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, hasty)
        tasks.start_soon(ask, patient)
    assert [isinstance(answer, SandboxInfo) for answer in answers] == [True, True]


async def state_of(box: Box) -> tuple[str, str]:
    info = await box.get(SandboxInfo, GetSandbox())
    return info.state, info.reason


# --- creating and stopping ----------------------------------------------------------------------------------


async def test_the_same_id_gives_the_same_sandbox(kit: EdgeKit):
    infos: list[SandboxInfo] = []
    call = CallCreate(project=PROJECT, sandbox=sandbox_id(), spec=SandboxSpec(image="debian"))

    async def create() -> None:
        info = await kit.ask(call)
        assert isinstance(info, SandboxInfo)
        infos.append(info)

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(create)
    assert len({info.created_at for info in infos}) == 1
    assert {info.state for info in infos} == {"running"}
    assert len(kit.backend.instances) == 1
    with pytest.raises(Conflict):
        await kit.create(0, cpu=2.0)
    with pytest.raises(Conflict):
        await kit.create(0, project="other")


async def test_an_image_whose_probe_fails_gives_an_error_and_leaves_nothing(kit: EdgeKit):
    for _ in range(2):
        with pytest.raises(SandboxUnavailable, match=r"exit code 3.*no good") as caught:
            await kit.create(image="broken")
        assert caught.value.code == "image_unusable"
    assert not kit.edge.yard.sandboxes
    assert kit.edge.heartbeat().load.sandboxes == 0
    assert not list(kit.backend.directory_of(0).parent.iterdir())


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ({"image": "no-such"}, NotFound, "no-such"),
        ({"backend": "vm"}, Unsupported, "vm"),
        ({"cpu": 0.0}, InvalidRequest, "cpu"),
        ({"memory": "1KiB"}, InvalidRequest, "memory"),
        ({"memory": "much"}, InvalidRequest, "memory"),
    ],
)
async def test_a_bad_spec_is_refused_with_a_sentence(
    kit: EdgeKit, spec: dict[str, object], error: type[CloudyardError], said: str
):
    with pytest.raises(error, match=said):
        await kit.create(**spec)
    assert kit.edge.heartbeat().load.sandboxes == 0
    assert not list(kit.edge.config.records_dir.iterdir())


async def test_stopping_ends_commands_and_can_be_repeated(kit: EdgeKit):
    box = await kit.create()
    info = await box.start("sleep 1000")
    results: list[ExecResult] = []

    async def wait() -> None:
        results.append(await box.wait(info.command_id))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        stopped = await box.get(SandboxInfo, StopSandbox())
    assert (stopped.state, stopped.reason) == ("stopped", "asked")
    assert stopped.stopped_at is not None
    assert results[0].fault is not None
    assert (results[0].fault.label, results[0].fault.reason) == ("policy", "killed")
    assert not alive(info.pid)
    assert (await box.get(SandboxInfo, StopSandbox())).state == "stopped"
    with pytest.raises(SandboxUnavailable) as caught:
        await box.run("true")
    assert caught.value.code == "sandbox_stopped"
    assert kit.edge.heartbeat().load.sandboxes == 0
    assert any("StopWanted" in line for line in kit.edge.story(box.id))


async def test_another_project_finds_nothing(kit: EdgeKit):
    box = await kit.create()
    stranger = Box(kit, box.id, "p2")
    for op in (GetSandbox(), StopSandbox(), KeepAlive(), Signal(command_id=1)):
        with pytest.raises(NotFound) as caught:
            await stranger.do(op)
        assert caught.value.code == "sandbox_not_found"
    page = page_decoder.decode((await kit.reply(CallList(project="p2"))).result)
    assert page.sandboxes == []


async def test_a_list_shows_what_lives_and_on_demand_what_ended(kit: EdgeKit):
    boxes = [await kit.create(number) for number in range(3)]
    await boxes[1].do(StopSandbox())
    living = page_decoder.decode((await kit.reply(CallList(project=PROJECT))).result)
    assert [info.id for info in living.sandboxes] == [boxes[0].id, boxes[2].id]
    every = page_decoder.decode((await kit.reply(CallList(project=PROJECT, stopped=True))).result)
    assert [info.state for info in every.sandboxes] == ["running", "stopped", "running"]


# --- the guest goes -----------------------------------------------------------------------------------------


async def test_a_guest_that_dies_fails_the_sandbox_and_loses_its_commands(kit: EdgeKit):
    box = await kit.create()
    info = await box.start("sleep 1000")
    results: list[ExecResult] = []

    async def run() -> None:
        results.append(await box.run("sleep 1000"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(lambda: len(kit.edge.yard.sandboxes[box.id].commands.live) == 2)
        await box.instance.crash()
    assert results[0].fault is not None
    assert (results[0].fault.label, results[0].fault.reason) == ("infra", "lost")
    await until(lambda: box.id in kit.edge.yard.ended)
    assert await state_of(box) == ("failed", "guest_gone")
    reply = await kit.reply(CallOp(project=PROJECT, sandbox=box.id, op=raw(Wait(command_id=info.command_id))))
    assert reply.error is not None
    assert (reply.error.code, reply.error.fault) == ("sandbox_failed", "infra")
    assert kit.edge.heartbeat().load.sandboxes == 0
    assert not kit.backend.directory_of(0).exists()


async def test_a_broken_connection_is_made_anew_and_nothing_is_lost(kit: EdgeKit):
    box = await kit.create()
    info = await box.start(
        "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $i; done; read x", keep_stdin=True
    )
    for _ in range(5):
        link = kit.edge.yard.sandboxes[box.id].commands.link
        assert link is not None
        link._break("the test broke it")
        await until(lambda: kit.edge.yard.sandboxes[box.id].commands.link is not None)
    link = kit.edge.yard.sandboxes[box.id].commands.link
    assert link is not None
    link._break("once more")
    assert (await box.run("echo meanwhile")).stdout == b"meanwhile\n"
    await box.do(SendStdin(command_id=info.command_id, data=b"\n"))
    done = await box.wait(info.command_id)
    assert await box.read(done.command_id) == b"".join(b"%d\n" % number for number in range(1, 3001))
    assert (await box.run("echo ok")).stdout == b"ok\n"


# --- admission ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"sandboxes_max": 7}, "holds 7 sandboxes"),
        ({"cpu_total": 3.5, "cpu_overcommit": 2.0}, "7 of 7 cores"),
        ({"memory_total_bytes": 7 * GIB // 2, "memory_overcommit": 1.0}, "MiB of memory"),
    ],
)
async def test_two_hundred_creates_at_once_get_what_there_is_and_no_more(
    limits: dict[str, object], said: str
):
    with tempfile.TemporaryDirectory(prefix="cy-edge-") as name:
        async with running_edge(Path(name), **limits) as kit:
            refusals: list[LimitExceeded] = []

            async def create(number: int) -> None:
                try:
                    await kit.create(number)
                except LimitExceeded as exc:
                    refusals.append(exc)

            async with anyio.create_task_group() as tasks:
                for number in range(200):
                    tasks.start_soon(create, number)
            assert len(kit.edge.yard.sandboxes) == 7
            assert len(refusals) == 193
            assert all(refusal.code == "edge_full" and said in refusal.message for refusal in refusals)
            first = next(iter(kit.edge.yard.sandboxes))
            await Box(kit, first).do(StopSandbox())
            await kit.create(900)
            await kit.edge.stop_all()
            load = kit.edge.heartbeat().load
            assert (load.sandboxes, load.cpu_promised, load.memory_promised_bytes) == (0, 0.0, 0)


async def test_failed_creates_give_their_room_back():
    with tempfile.TemporaryDirectory(prefix="cy-edge-") as name:
        async with running_edge(Path(name), sandboxes_max=1) as kit:
            for number in range(20):
                with pytest.raises(SandboxUnavailable):
                    await kit.create(number, image="broken")
            await kit.create(50)
            await kit.edge.stop_all()


# --- times to live ------------------------------------------------------------------------------------------


async def test_an_idle_sandbox_is_stopped_and_one_in_use_is_not(timed: EdgeKit, clock: FakeClock):
    idle, used = await timed.create(1, idle_ttl_s=10), await timed.create(2, idle_ttl_s=10)
    for _ in range(3):
        await clock.advance(6)
        await used.run("true")
    await until(lambda: idle.id in timed.edge.yard.ended)
    assert await state_of(idle) == ("stopped", "idle_ttl")
    assert await state_of(used) == ("running", "")
    with pytest.raises(SandboxUnavailable) as caught:
        await idle.run("true")
    assert caught.value.code == "sandbox_expired"
    await clock.advance(10.5)
    await until(lambda: used.id in timed.edge.yard.ended)


async def test_a_running_command_is_use_and_looking_is_not(timed: EdgeKit, clock: FakeClock):
    box = await timed.create(idle_ttl_s=10)
    info = await box.start("sleep 1000")
    await clock.advance(100)
    assert (await state_of(box))[0] == "running"
    await box.do(Signal(command_id=info.command_id))
    await box.wait(info.command_id)
    await clock.advance(9)
    assert (await state_of(box))[0] == "running"
    await clock.advance(1.5)
    await until(lambda: box.id in timed.edge.yard.ended)


async def test_the_longest_life_ends_whatever_runs(timed: EdgeKit, clock: FakeClock):
    box = await timed.create(max_ttl_s=60)
    await box.start("sleep 1000")
    await clock.advance(59)
    assert (await state_of(box))[0] == "running"
    await clock.advance(1.5)
    await until(lambda: box.id in timed.edge.yard.ended)
    assert await state_of(box) == ("stopped", "max_ttl")


async def test_keeping_alive_changes_both_times_and_counts_as_use(timed: EdgeKit, clock: FakeClock):
    box = await timed.create(idle_ttl_s=10, max_ttl_s=20)
    await clock.advance(9)
    info = await box.get(SandboxInfo, KeepAlive(max_ttl_s=None))
    assert (info.idle_ttl_s, info.max_ttl_s) == (10, None)
    await clock.advance(9)
    await box.do(KeepAlive(idle_ttl_s=100.0))
    await clock.advance(99)
    assert (await state_of(box))[0] == "running"
    with pytest.raises(InvalidRequest):
        await box.do(KeepAlive(idle_ttl_s=0.001))
    await box.do(KeepAlive(idle_ttl_s=None))
    await clock.advance(100_000)
    assert (await state_of(box))[0] == "running"


async def test_keeping_alive_at_the_last_moment_wins_or_loses_whole(timed: EdgeKit, clock: FakeClock):
    outcomes: set[str] = set()
    for number in range(6):
        box = await timed.create(number, idle_ttl_s=10)
        await clock.advance(9.99)

        async def keep(box: Box = box) -> None:
            try:
                await box.do(KeepAlive())
            except SandboxUnavailable:
                outcomes.add("lost")
            else:
                outcomes.add("won")
                await clock.advance(9.5)
                assert (await state_of(box))[0] == "running"

        async with anyio.create_task_group() as tasks:
            if number % 2:
                tasks.start_soon(keep)
                tasks.start_soon(clock.advance, 0.01)
            else:
                tasks.start_soon(clock.advance, 0.01)
                tasks.start_soon(keep)
    assert outcomes <= {"won", "lost"}
    assert outcomes


async def test_times_to_live_hold_over_a_restart(clock: FakeClock):
    with tempfile.TemporaryDirectory(prefix="cy-edge-") as name:
        async with running_edge(Path(name), clock=clock) as kit:
            idle, kept = await kit.create(1, idle_ttl_s=10), await kit.create(2, idle_ttl_s=10)
            await clock.advance(8)
            await kept.do(KeepAlive(idle_ttl_s=50.0))
        await clock.advance(4)
        async with running_edge(Path(name), clock=clock) as kit:
            await until(lambda: idle.id in kit.edge.yard.ended)
            assert kept.id in kit.edge.yard.sandboxes
            await clock.advance(47)
            await until(lambda: kept.id in kit.edge.yard.ended)


async def test_a_timeout_is_measured_by_the_edges_clock(timed: EdgeKit, clock: FakeClock):
    box = await timed.create()
    info = await box.start("sleep 1000", timeout_s=30.0)
    await clock.advance(29)
    assert timed.edge.yard.sandboxes[box.id].commands.live
    await clock.advance(1.5)
    done = await box.wait(info.command_id)
    assert done.timed_out


async def test_ended_sandboxes_are_forgotten_after_an_hour(timed: EdgeKit, clock: FakeClock):
    first = await timed.create(1)
    await first.do(StopSandbox())
    await clock.advance(3700)
    second = await timed.create(2)
    await second.do(StopSandbox())
    await clock.advance(31)
    with pytest.raises(NotFound):
        await first.do(GetSandbox())
    assert [path.stem for path in timed.edge.config.records_dir.iterdir()] == [second.id]


# --- bad calls ----------------------------------------------------------------------------------------------


ITEMS = st.none() | st.text(max_size=9) | st.integers(0, 1 << 40)


@settings(deadline=None)
@given(st.binary(max_size=60) | st.recursive(ITEMS, st.lists).map(msgspec.msgpack.encode))
def test_garbage_is_answered_with_an_error(data: bytes):
    edge = Edge(config_for(Path("/nowhere")), backends={}, images=fake_images)
    reply = reply_decoder.decode(anyio.run(edge.call, data))
    assert reply.error is not None
    assert (reply.error.kind, reply.error.code) == ("invalid_request", "bad_call")
    assert reply.boot == edge.boot


async def test_an_operation_with_a_misspelt_field_names_it(kit: EdgeKit):
    box = await kit.create()
    op = msgspec.Raw(msgspec.msgpack.encode({"op": "stat", "path": "/", "folow": True}))
    reply = await kit.reply(CallOp(project=PROJECT, sandbox=box.id, op=op))
    assert reply.error is not None
    assert "folow" in reply.error.message


async def test_a_fault_of_ours_is_an_answer_with_a_number_and_not_an_end(
    kit: EdgeKit, monkeypatch: pytest.MonkeyPatch
):
    box = await kit.create()

    def broken(self: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr("cloudyard.edge.sandbox.Sandbox.check_running", broken)
        reply = await kit.reply(CallOp(project=PROJECT, sandbox=box.id, op=raw(Signal(command_id=1))))
    assert reply.error is not None
    assert (reply.error.kind, reply.error.fault) == ("internal", "infra")
    assert (await box.run("echo ok")).stdout == b"ok\n"


async def test_a_heartbeat_tells_what_is_promised(kit: EdgeKit):
    first = kit.edge.heartbeat()
    await kit.create(cpu=2.0, memory="1GiB")
    second = kit.edge.heartbeat()
    assert second.boot == first.boot
    assert (second.load.sandboxes, second.load.cpu_promised) == (1, 2.0)
    assert second.load.memory_promised_bytes == GIB
    assert second.load.memory_available_bytes > 0
    assert second.backends == ["container"]
