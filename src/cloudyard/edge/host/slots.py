"""Slots: numbers that every sandbox on a machine has for itself, whichever yard it belongs to. A slot's
number gives its uids.

Slot N owns the uids and gids from 0x70000000 + N * 65536 on: below 0x80000000, outside what systemd hands out
(0x00080000 to 0x6FFFFFFF, and 0x7FFE0000 on) and, which is checked, outside /etc/subuid and /etc/subgid.
Yards share the machine by blocks of
64 slots: a file per block in /run/cloudyard-slots names the yard that has it. All changes there are made
under one lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from msgspec import DecodeError, Struct, json

from cloudyard.errors import CloudyardError, Conflict, LimitExceeded, Unsupported

UID_FIRST, UID_END = 0x7000_0000, 0x7FFE_0000
UIDS_PER_SLOT = 65_536
SLOTS_MAX = (UID_END - UID_FIRST) // UIDS_PER_SLOT
BLOCK_SLOTS = 64
BLOCKS = -(-SLOTS_MAX // BLOCK_SLOTS)  # the last is short
LOCK_WAIT_S, LOCK_POLL_S = 2.0, 0.02
CLAIMS_DIR = Path("/run/cloudyard-slots")


def uid_base(slot: int) -> int:
    """The uid and gid on this machine that are 0 in the slot's sandbox."""
    return UID_FIRST + slot * UIDS_PER_SLOT


def slot_of_uid(uid: int) -> int | None:
    """The slot that a uid belongs to, if it is one of ours."""
    return (uid - UID_FIRST) // UIDS_PER_SLOT if UID_FIRST <= uid < UID_END else None


class Claim(Struct, frozen=True):
    """What a block's file says."""

    state: str
    """The yard's state directory."""
    lock: str
    """The file that the yard's edge holds a lock on while it runs."""


class Slots:
    """A yard's slots. One edge at a time has them: it holds a lock in the state directory from `open` to
    `close`."""

    def __init__(
        self, state: Path, *, claims: Path = CLAIMS_DIR, subids: tuple[Path, ...] | None = None
    ) -> None:
        """`state`: the yard's state directory. `subids`: files like /etc/subuid whose ranges must not overlap
        ours."""
        self._claims = claims
        self._subids = (Path("/etc/subuid"), Path("/etc/subgid")) if subids is None else subids
        self._claim = Claim(state=str(state.absolute()), lock=str(state.absolute() / "slots.lock"))
        self._lock = -1
        self._blocks: set[int] = set()
        self._free: deque[int] = (
            deque()
        )  # first in, first out: what a slot's last sandbox left in the kernel is gone by then
        self._taken: set[int] = set()

    def open(self) -> None:
        """Take the yard's lock and find the blocks it has claimed before. May wait LOCK_WAIT_S: for a thread.

        Raises:
            Conflict: another edge runs on this state directory.
            Unsupported: our uids are handed out to somebody on this machine.
        """
        for path in self._subids:
            _refuse_overlap(path)
        os.makedirs(self._claim.state, mode=0o700, exist_ok=True)
        self._lock = os.open(self._claim.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock_soon(self._lock)
        except BlockingIOError as exc:
            os.close(self._lock)
            raise Conflict(
                f"Another edge runs on the state directory {self._claim.state}.",
                code="state_in_use",
                hint="Stop it with: cloudyard down, or give this one a directory of its own.",
            ) from exc
        with self._machine_lock():
            for block in range(BLOCKS):
                if self._read(block) == self._claim:
                    self._add(block)

    def keep(self, slots: set[int]) -> None:
        """Count these slots as taken: sandboxes of an earlier edge live in them."""
        self._taken |= slots
        self._free = deque(slot for slot in self._free if slot not in slots)

    def take(self) -> int:
        """A free slot.

        Raises:
            LimitExceeded: this machine has no more.
        """
        if not self._free:
            with self._machine_lock():
                self._claim_block()
        slot = self._free.popleft()
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """The slot is free again: nothing of its sandbox is left."""
        if slot in self._taken:
            self._taken.remove(slot)
            self._free.append(slot)

    def owned(self) -> set[int]:
        """All slots of the blocks this yard has."""
        return {slot for block in self._blocks for slot in _slots(block)}

    def close(self) -> None:
        """Give back blocks that no sandbox lives in, and the yard's lock."""
        with self._machine_lock():
            for block in sorted(self._blocks):
                if self._taken.isdisjoint(_slots(block)):
                    self._path(block).unlink(missing_ok=True)
        self._blocks.clear()
        os.close(self._lock)

    def _claim_block(self) -> None:
        """Claim the first block that nobody has, or whose yard is dead."""
        owners: set[str] = set()
        live = live_slots()
        for block in range(BLOCKS):
            path = self._path(block)
            owner = self._read(block)
            if block in self._blocks or (owner is not None and _alive(owner, block, live)):
                owners.add(owner.state if owner is not None else self._claim.state)
                continue
            fresh = path.with_suffix(".new")  # never a half-written claim under its real name
            fresh.write_bytes(json.encode(self._claim))
            fresh.rename(path)
            self._add(block)
            return
        raise LimitExceeded(
            f"All uids of this machine for sandboxes are taken, by the yards {', '.join(sorted(owners))}.",
            code="no_slot",
            fault="infra",
            hint="Stop sandboxes that are no longer needed.",
        )

    def _add(self, block: int) -> None:
        self._blocks.add(block)
        self._free.extend(slot for slot in _slots(block) if slot not in self._taken)

    def _path(self, block: int) -> Path:
        return self._claims / f"{block:02}.json"

    def _read(self, block: int) -> Claim | None:
        try:
            return json.decode(self._path(block).read_bytes(), type=Claim)
        except FileNotFoundError:
            return None
        except DecodeError as exc:
            raise CloudyardError(
                f"The claim {self._path(block)} on a block of slots cannot be read: {exc}.",
                code="bad_claim",
                hint="Remove the file if no yard runs on this machine.",
            ) from exc

    @contextlib.contextmanager
    def _machine_lock(self) -> Iterator[None]:
        self._claims.mkdir(mode=0o755, exist_ok=True)
        fd = os.open(self._claims / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # held for some file operations only
            yield
        finally:
            os.close(fd)


def _lock_soon(fd: int) -> None:
    """Lock it within LOCK_WAIT_S.

    The descriptors of an edge that is killed while it starts a process are that process's, too, until its
    exec: for a moment a lock outlives its edge.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOCK_POLL_S)


def _slots(block: int) -> range:
    return range(block * BLOCK_SLOTS, min((block + 1) * BLOCK_SLOTS, SLOTS_MAX))


def _alive(claim: Claim, block: int, live: set[int]) -> bool:
    """Whether the yard that claimed the block may still use it: its edge runs, or one of its processes
    does."""
    try:
        fd = os.open(claim.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        pass
    else:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return not live.isdisjoint(_slots(block))


def live_slots() -> set[int]:
    """Slots in which some process runs, whoever's they are. One that waits to be reaped holds nothing."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/status").read_text()
            except OSError:
                continue  # it has ended
            if "\nState:\tZ" in status:
                continue
            uids = next((line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")), [])
            found |= {slot for uid in uids if (slot := slot_of_uid(int(uid))) is not None}
    return found


def _refuse_overlap(path: Path) -> None:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        name, *range_ = line.split(":")
        if len(range_) != 2 or not all(part.isdigit() for part in range_):
            continue
        first, number = (int(part) for part in range_)
        if first < UID_END and first + number > UID_FIRST:
            raise Unsupported(
                f"{path} gives {name} {number} ids from {first} on, among those that sandboxes need: "
                f"{UID_FIRST} to {UID_END - 1}.",
                code="uid_range_taken",
                fault="infra",
                hint=f"Move that range in {path}, with usermod --del-subuids and --add-subuids.",
            )
