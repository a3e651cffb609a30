"""One sandbox's record as a whole: what its file says when it is loaded, and how the file is kept within
its bound.

Where results lie in the file is kept in memory as places, never the results themselves: an idle sandbox
with a long past costs little. A rewrite of the file moves the places; whoever holds one sees the new
position.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from cloudyard.core.lifecycle import Life, Transition
from cloudyard.edge.backends.base import InstanceFacts
from cloudyard.edge.config import JOURNAL_KEPT_BYTES, JOURNAL_MAX_BYTES, JOURNAL_RESULTS_MAX
from cloudyard.edge.records import (
    Answer,
    AnyRecord,
    Ended,
    Entry,
    Gone,
    Head,
    Intent,
    Lives,
    Moved,
    Placed,
    RecordFile,
    Reserved,
    Stalled,
    Used,
    pack,
    unpack,
)
from cloudyard.errors import LimitExceeded

PEEK_BYTES = 256 * 1024  # read of a file to see whether its sandbox has ended
TRANSITIONS_KEPT_MAX = 32  # a life has fewer; restarts of ours add one each


class Place:
    """Where an entry lies in the file."""

    __slots__ = ("offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size


class KeyPlace:
    """What became of a step key."""

    __slots__ = ("digest", "place", "step")

    def __init__(self, step: int, digest: bytes, place: Place) -> None:
        self.step = step
        self.digest = digest
        self.place = place


class OutputPlace:
    """A finished command: where its end lies, and how many bytes of its output are kept."""

    __slots__ = ("kept", "place", "stderr_in_file", "stdout_in_file")

    def __init__(self, ended: Ended, place: Place) -> None:
        self.place = place
        self.kept = ended.result.stdout_kept + ended.result.stderr_kept
        self.stdout_in_file = ended.stdout_in_file
        self.stderr_in_file = ended.stderr_in_file


class Journal:
    """The file of one sandbox, and the index of what is in it."""

    def __init__(self, path: Path, head: Head) -> None:
        self.file = RecordFile(path)
        self.head = head
        self.facts: InstanceFacts | None = None
        self.transitions: list[Transition] = []
        self.gone: Gone | None = None
        self.lives = Lives(head.spec.idle_ttl_s, head.spec.max_ttl_s)
        self.used_at = head.created_mono
        """The last moment of use that is on record."""
        self.next_step = 1
        self.reserved = 0
        self.intents: dict[int, Intent] = {}
        """Steps under way, or without a result on record."""
        self.stalled: dict[int, float] = {}
        self.keys: dict[str, KeyPlace] = {}
        """Oldest first."""
        self.ended: dict[int, OutputPlace] = {}
        """Finished commands whose results are kept, oldest first."""
        self.on_dropped: Callable[[int, OutputPlace], None] = lambda number, known: None
        """Told of each finished command that a rewrite leaves out."""
        self._rewrite_at = JOURNAL_MAX_BYTES

    @property
    def life(self) -> Life:
        """Where the sandbox is, by its record."""
        last = self.transitions[-1] if self.transitions else None
        return Life(last.state, last.reason) if last else Life()

    @classmethod
    def load(cls, path: Path) -> Journal | None:
        """What a file says; None when not even its first record is whole."""
        file = RecordFile(path)
        entries = file.load()
        if not entries or not isinstance(entries[0].record, Head):
            return None
        journal = cls(path, entries[0].record)
        journal.file = file
        for entry in entries[1:]:
            journal._index(entry)
        journal.next_step = max(journal.next_step, journal.reserved + 1)
        return journal

    @classmethod
    def peek(cls, path: Path) -> Journal | None:
        """The start of the file of a sandbox that has ended, without its results; None for any other."""
        with path.open("rb") as file:
            entries = list(unpack(file.read(PEEK_BYTES)))
        if not entries or not isinstance(entries[0].record, Head):
            return None
        journal = cls(path, entries[0].record)
        for entry in entries[1:]:
            journal._index(entry)
            if journal.gone is not None:
                return journal
        return None

    def append(self, record: AnyRecord) -> None:
        """Add a record to the file and the index. Rewrites the file when it has outgrown its bound.

        Raises:
            LimitExceeded: the disk is full or cannot be written; nothing has changed.
        """
        self._index(self.file.append(record))
        if self.file.size > self._rewrite_at or len(self.keys) > JOURNAL_RESULTS_MAX:
            with suppress(LimitExceeded):  # the record itself is safe; the next one tries again
                self.rewrite(JOURNAL_KEPT_BYTES, JOURNAL_RESULTS_MAX // 2)

    def close(self, at: float) -> None:
        """Note that nothing of the sandbox is left, where `peek` finds it: near the front of the file.

        Raises:
            LimitExceeded: the disk is full or cannot be written; nothing has changed.
        """
        gone = Gone(at, self.next_step - 1)
        if self.file.size + len(pack(gone)) <= PEEK_BYTES:
            self._index(self.file.append(gone))
            return
        self.intents.clear()
        self.gone = gone
        self.rewrite(JOURNAL_KEPT_BYTES, JOURNAL_RESULTS_MAX // 2)

    def rewrite(self, bytes_max: int, results_max: int) -> None:
        """Keep what describes the sandbox, the steps under way and the newest results within both bounds.

        Raises:
            LimitExceeded: the disk is full or cannot be written; nothing has changed.
        """
        places = {id(place): place for place in self._places()}
        kept: list[Place] = []
        total = 0
        for place in sorted(places.values(), key=lambda place: -place.offset)[:results_max]:
            total += place.size
            if total > bytes_max:
                break
            kept.append(place)
        kept.reverse()
        front = b"".join(pack(record) for record in self._front())
        moved: list[tuple[Place, int]] = []
        parts = [front]
        at = len(front)
        for place in kept:
            parts.append(self.file.slice(place.offset, place.size))
            moved.append((place, at))
            at += place.size
        parts += [pack(record) for record in self._under_way()]
        self.file.replace(b"".join(parts))
        for place, offset in moved:
            place.offset = offset
        alive = {id(place) for place in kept}
        self.keys = {key: known for key, known in self.keys.items() if id(known.place) in alive}
        for number, known in list(self.ended.items()):
            if id(known.place) not in alive:
                del self.ended[number]
                self.on_dropped(number, known)
        # what is under way is always kept: however much it is, appending stays cheap
        self._rewrite_at = max(JOURNAL_MAX_BYTES, 2 * self.file.size)

    def superseded(self, intent: Intent) -> bool:
        """Whether a later step has its key: the key was freed though its own end could not be recorded."""
        known = self.keys.get(intent.key)
        return bool(intent.key) and (
            (known is not None and known.step > intent.step)
            or any(other.key == intent.key and other.step > intent.step for other in self.intents.values())
        )

    def read(self, place: Place) -> AnyRecord:
        """The record at a place."""
        return self.file.read(place.offset, place.size)

    def _places(self) -> list[Place]:
        return [known.place for known in self.keys.values()] + [known.place for known in self.ended.values()]

    def _front(self) -> list[AnyRecord]:
        records: list[AnyRecord] = [self.head]
        if self.facts is not None:
            records.append(Placed(self.facts))
        self.transitions = self.transitions[:1] + self.transitions[1:][-TRANSITIONS_KEPT_MAX:]
        records += [Moved(transition) for transition in self.transitions]
        records.append(self.lives)
        if self.gone is not None:
            records.append(self.gone)
        records += [Used(self.used_at), Reserved(max(self.reserved, self.next_step - 1))]
        return records

    def _under_way(self) -> list[AnyRecord]:
        """Goes behind the results: the answer to a start is one, and its command goes on."""
        stalled = [Stalled(number, seconds) for number, seconds in self.stalled.items()]
        return [*self.intents.values(), *stalled]

    def _index(self, entry: Entry) -> None:
        match entry.record:
            case Head():
                self.head = entry.record
            case Placed(facts):
                self.facts = facts
            case Moved(transition):
                self.transitions.append(transition)
            case Gone():
                self.gone = entry.record
                self.intents.clear()
                self.next_step = max(self.next_step, entry.record.steps + 1)
            case Lives():
                self.lives = entry.record
            case Used(at):
                self.used_at = max(self.used_at, at)
            case Reserved(number):
                self.reserved = max(self.reserved, number)
            case Intent() as intent:
                self.intents[intent.step] = intent
                self.next_step = max(self.next_step, intent.step + 1)
                self.used_at = max(self.used_at, intent.at)
            case Stalled(number, seconds, oom_kills, forks):
                self.stalled[number] = seconds
                if oom_kills is not None and number in self.intents:
                    counted = {"oom_kills": oom_kills, "forks_refused": forks}
                    self.intents[number] = replace(self.intents[number], **counted)
            case Answer() as answer:
                self._index_answer(answer, Place(entry.offset, entry.size))
            case Ended() as ended:
                self._index_end(ended, Place(entry.offset, entry.size))

    def _index_answer(self, answer: Answer, place: Place) -> None:
        intent = self.intents.get(answer.step)
        if intent is not None and intent.op == "start" and answer.error is None:
            # the step is done and its command goes on: a restart needs to know how it was started
            self.intents[answer.step] = replace(intent, key="", op="command")
        else:
            self.intents.pop(answer.step, None)
        self.next_step = max(self.next_step, answer.step + 1)
        if answer.key:
            self.keys[answer.key] = KeyPlace(answer.step, answer.digest, place)

    def _index_end(self, ended: Ended, place: Place) -> None:
        self.intents.pop(ended.command_id, None)
        self.stalled.pop(ended.command_id, None)
        self.next_step = max(self.next_step, ended.command_id + 1)
        self.ended[ended.command_id] = OutputPlace(ended, place)
        if ended.key:
            self.keys[ended.key] = KeyPlace(ended.command_id, ended.digest, place)
