"""Steps and their keys: done once, answered as often as asked."""

from __future__ import annotations

import hashlib
from pathlib import Path

import anyio
import pytest

from cloudyard.errors import CloudyardError, Conflict, InvalidRequest, LimitExceeded, NotFound
from cloudyard.model import (
    CommandInfo,
    CommandList,
    CommandSpec,
    DirListing,
    Done,
    ExecResult,
    FileChunk,
    FileInfo,
    ListCommands,
    ListDir,
    MakeDir,
    ReadFile,
    Remove,
    Signal,
    Start,
    Stat,
    UploadChunk,
    UploadCommit,
    WriteFile,
)
from flow.edge_kit import Box, EdgeKit, kit

__all__ = ["kit"]


@pytest.fixture
async def box(kit: EdgeKit) -> Box:
    return await kit.create()


async def test_a_repeated_key_brings_the_recorded_result_and_runs_nothing(box: Box, tmp_path: Path):
    mark = tmp_path / "mark"
    first = await box.run(f"echo ran >> {mark}; echo out; exit 4", key="k")
    again = await box.run(f"echo ran >> {mark}; echo out; exit 4", key="k")
    assert mark.read_text() == "ran\n"
    assert not first.replayed
    assert again.replayed
    assert (again.stdout, again.exit_code, again.step) == (b"out\n", 4, first.step)


async def test_a_hundred_at_once_under_one_key_run_once_and_all_hear_of_it(box: Box, tmp_path: Path):
    mark = tmp_path / "mark"
    results: list[ExecResult] = []

    async def run() -> None:
        results.append(await box.run(f"echo ran >> {mark}; sleep 0.1; echo $$", key="k"))

    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(run)
    assert mark.read_text() == "ran\n"
    assert len({result.stdout for result in results}) == 1
    assert sum(not result.replayed for result in results) == 1


async def test_a_key_used_for_another_operation_is_refused(box: Box):
    await box.run("true", key="k")
    for op in (ListCommands(), Signal(command_id=1)):
        with pytest.raises(Conflict) as caught:
            await box.do(op, key="k")
        assert caught.value.code == "key_reused"
    with pytest.raises(Conflict):
        await box.run("true", key="k", env={"A": "b"})


async def test_the_order_of_an_environment_makes_no_other_operation(box: Box):
    await box.run("true", key="k", env={"A": "1", "B": "2"})
    assert (await box.run("true", key="k", env={"B": "2", "A": "1"})).replayed


async def test_every_operation_is_numbered_and_bad_ones_are_not(box: Box):
    with pytest.raises(InvalidRequest):
        await box.run("", key="bad")
    with pytest.raises(InvalidRequest):
        await box.do(Stat(path="relative"))
    with pytest.raises(LimitExceeded):
        await box.run("true", stdin=bytes(3_000_000))
    steps = [(await box.run("true")).step, (await box.get(CommandList, ListCommands())).step]
    steps.append((await box.start("sleep 100", key="s")).step)
    assert steps == [1, 2, 3]
    assert (await box.start("sleep 100", key="s")).step == 3
    await box.do(Signal(command_id=3))


async def test_a_start_under_a_key_starts_once(box: Box):
    first, again = await box.start("sleep 100", key="k"), await box.start("sleep 100", key="k")
    assert (first.pid, first.command_id) == (again.pid, again.command_id)
    await box.do(Signal(command_id=first.command_id), key="kill")
    assert (await box.get(Done, Signal(command_id=first.command_id), key="kill")).replayed
    assert (await box.wait(first.command_id)).signal == 9
    assert (await box.get(CommandInfo, start_op("sleep 100"), key="k")).running


def start_op(shell: str):
    return Start(command=CommandSpec(shell=shell))


async def test_an_error_is_recorded_too(box: Box, tmp_path: Path):
    path = str(tmp_path / "x")
    with pytest.raises(NotFound):
        await box.do(Remove(path=path), key="k")
    (tmp_path / "x").write_bytes(b"now it is there")
    with pytest.raises(NotFound):
        await box.do(Remove(path=path), key="k")
    assert await box.do(Remove(path=path), key="k2")


async def test_a_read_under_a_key_is_answered_from_the_record(box: Box, tmp_path: Path):
    file = tmp_path / "x"
    file.write_bytes(b"first")
    op = ReadFile(path=str(file))
    assert (await box.get(FileChunk, op, key="k")).data == b"first"
    file.write_bytes(b"second")
    assert (await box.get(FileChunk, op, key="k")).data == b"first"
    assert (await box.get(FileChunk, op)).data == b"second"


async def test_files_are_written_listed_uploaded_and_removed(box: Box, tmp_path: Path):
    base = str(tmp_path)
    made = await box.get(FileInfo, WriteFile(path=f"{base}/a/b", data=b"abc"), key="w")
    assert (made.kind, made.size) == ("file", 3)
    await box.do(MakeDir(path=f"{base}/d"))
    listing = await box.get(DirListing, ListDir(path=base))
    assert [entry.path.rsplit("/", 1)[-1] for entry in listing.entries] == ["a", "d"]
    data = bytes(range(256)) * 1024
    for at in (0, 131_072):
        piece = UploadChunk(upload_id="u1", path=f"{base}/up", offset=at, data=data[at : at + 131_072])
        await box.do(piece)
    digest = hashlib.sha256(data).hexdigest()
    commit = UploadCommit(upload_id="u1", path=f"{base}/up", size=len(data), sha256=digest)
    assert (await box.get(FileInfo, commit, key="u")).size == len(data)
    assert (await box.get(FileInfo, commit, key="u")).replayed
    assert (tmp_path / "up").read_bytes() == data


async def test_the_oldest_output_goes_first_when_it_is_too_much(box: Box, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cloudyard.edge.history.OUTPUT_KEPT_MAX_BYTES", 500_000)
    numbers = [(await box.run("head -c 200000 /dev/zero", key=f"k{n}")).command_id for n in range(4)]
    with pytest.raises(NotFound):
        await box.read(numbers[0])
    assert await box.read(numbers[3]) == bytes(200_000)
    replayed = await box.run("head -c 200000 /dev/zero", key="k0")
    assert (replayed.stdout_total, replayed.stdout_kept, replayed.truncated) == (200_000, 0, True)
    directory = box.kit.edge.config.output_dir / box.id
    assert sorted(path.name for path in directory.iterdir()) == [f"{numbers[2]}.out", f"{numbers[3]}.out"]


async def test_a_full_disk_refuses_the_step_and_the_edge_goes_on(kit: EdgeKit, box: Box):
    journal = kit.edge.yard.sandboxes[box.id].journal
    path = journal.file.path
    path.rename(path.with_suffix(".aside"))
    try:
        with pytest.raises(CloudyardError) as caught:
            await box.run("true", key="k")
        assert caught.value.code == "edge_disk_full"
    finally:
        path.with_suffix(".aside").rename(path)
    assert (await box.run("true", key="k")).exit_code == 0
