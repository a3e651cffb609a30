"""Slots: who has which uids on a machine that several yards share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudyard.edge.host.slots import BLOCK_SLOTS, SLOTS_MAX, Slots, live_slots, slot_of_uid, uid_base
from cloudyard.errors import CloudyardError, Conflict, LimitExceeded, Unsupported

pytestmark = pytest.mark.live

MakeSlots = Callable[[str], Slots]


@pytest.fixture
def make(tmp_path: Path) -> MakeSlots:
    (tmp_path / "claims").mkdir()
    return lambda name: Slots(tmp_path / name, claims=tmp_path / "claims", subids=())


def all_that_are_free(slots: Slots) -> set[int]:
    """Take every slot there is. Real sandboxes of this machine may be in some."""
    taken = set()
    while True:
        try:
            taken.add(slots.take())
        except LimitExceeded:
            return taken


def test_uids_of_slots_do_not_touch_and_stay_below_those_of_systemd() -> None:
    assert uid_base(0) == 0x7000_0000
    assert uid_base(1) - uid_base(0) == 65_536
    assert uid_base(SLOTS_MAX) == 0x7FFE_0000
    assert slot_of_uid(uid_base(7) + 65_535) == 7
    assert slot_of_uid(uid_base(SLOTS_MAX)) is None


def test_yards_get_blocks_of_their_own(make: MakeSlots) -> None:
    one, two = make("one"), make("two")
    one.open()
    two.open()
    assert {one.take() for _ in range(BLOCK_SLOTS)} == set(range(BLOCK_SLOTS))
    assert two.take() // BLOCK_SLOTS == 1
    assert one.take() // BLOCK_SLOTS == 2
    one.close()
    two.close()


def test_a_yard_finds_its_blocks_again_and_spares_slots_in_use(make: MakeSlots) -> None:
    before = make("yard")
    before.open()
    used = before.take()
    before.close()
    after = make("yard")
    after.open()
    after.keep({used})
    assert used in after.owned()
    assert used not in {after.take() for _ in range(BLOCK_SLOTS - 1)}
    after.close()


def test_a_block_without_sandboxes_is_given_back_on_close(make: MakeSlots, tmp_path: Path) -> None:
    slots = make("yard")
    slots.open()
    slots.give_back(slots.take())
    slots.close()
    assert not list((tmp_path / "claims").glob("*.json"))


def test_a_block_of_a_dead_yard_is_taken_over(make: MakeSlots) -> None:
    """Its edge's lock is free and no process runs in the block: the uids are nobody's."""
    dead = make("dead")
    dead.open()
    for _ in range(SLOTS_MAX):
        dead.take()
    heir = make("heir")
    heir.open()
    with pytest.raises(LimitExceeded, match="dead"):
        heir.take()
    dead.close()
    taken = heir.take()
    assert taken not in live_slots()
    heir.close()


def test_a_block_is_not_taken_over_while_a_process_runs_in_it(make: MakeSlots) -> None:
    dead = make("dead")
    dead.open()
    last = [dead.take() for _ in range(SLOTS_MAX)][-1]
    dead.close()
    uid = uid_base(last)
    with subprocess.Popen(["sleep", "60"], user=uid, group=uid, stdin=subprocess.DEVNULL) as survivor:
        heir = make("heir")
        heir.open()
        try:
            assert last in live_slots()
            assert last not in all_that_are_free(heir)
        finally:
            survivor.kill()
            heir.close()


def test_one_edge_at_a_time_has_a_state_directory(make: MakeSlots) -> None:
    first, second = make("yard"), make("yard")
    first.open()
    with pytest.raises(Conflict, match="Another edge"):
        second.open()
    first.close()
    second.open()
    second.close()


@pytest.mark.parametrize(
    ("line", "overlaps"),
    [
        ("me:100000:65536", False),
        ("me:1879048191:1", False),
        ("me:1879048191:2", True),
        ("me:2147352575:1", True),
        ("me:2147352576:65536", False),
        ("not a line", False),
    ],
)
def test_a_range_in_subuid_that_overlaps_ours_is_refused(tmp_path: Path, line: str, overlaps: bool) -> None:
    subuid = tmp_path / "subuid"
    subuid.write_text(line + "\n")
    slots = Slots(tmp_path / "yard", claims=tmp_path / "claims", subids=(subuid,))
    if overlaps:
        with pytest.raises(Unsupported, match="me"):
            slots.open()
    else:
        slots.open()
        slots.close()


def test_a_claim_that_cannot_be_read_is_named(make: MakeSlots, tmp_path: Path) -> None:
    (tmp_path / "claims/03.json").write_text("{")
    with pytest.raises(CloudyardError, match=r"03\.json"):
        make("yard").open()
