"""The steps of one sandbox: their numbers, their keys, and what a repeated key brings.

A step's intent is on record before it is done and its result before it is answered. A key that comes
again joins the step under way or brings back the recorded result; a key that comes again with another
operation is refused.
"""

from __future__ import annotations

import hashlib

import anyio
import msgspec
from msgspec.structs import replace

from cloudyard.edge.config import RESULT_RECORDED_MAX_BYTES
from cloudyard.edge.journal import Journal
from cloudyard.edge.records import Answer, Ended, Intent, Reserved
from cloudyard.edge.refusals import Refused
from cloudyard.errors import CloudyardError, Conflict
from cloudyard.model import AnyOp, AnyResult, Exec, Start
from cloudyard.wire.messages import encode, error_body, error_of, result_decoder

NUMBERS_RESERVED = 256  # step numbers noted on disk at once for steps that leave no record
_canonical = msgspec.msgpack.Encoder(order="deterministic").encode


class Step:
    """A step under way. Those who repeat its key wait for the one result."""

    __slots__ = ("_done", "digest", "error", "key", "number", "recorded", "result")

    def __init__(self, number: int, key: str, digest: bytes, *, recorded: bool) -> None:
        self.number = number
        self.key = key
        self.digest = digest
        self.recorded = recorded
        self.result: AnyResult | None = None
        self.error: CloudyardError | None = None
        self._done: anyio.Event | None = None

    @property
    def done(self) -> bool:
        """It has a result or an error."""
        return self.result is not None or self.error is not None

    def wake(self) -> None:
        """Let those go on who wait for it."""
        if self._done is not None:
            self._done.set()

    async def wait(self) -> AnyResult:
        """Its result, once it is there.

        Raises:
            CloudyardError: what it ended with.
        """
        if not self.done:
            if self._done is None:
                self._done = anyio.Event()
            await self._done.wait()
        if self.error is not None:
            raise self.error
        assert self.result is not None, "a step that is done has a result or an error"
        return self.result


def digest_of(op: AnyOp) -> bytes:
    """What tells one operation from another under the same key."""
    return hashlib.blake2b(_canonical(op), digest_size=16).digest()


class StepBook:
    """Numbers, keys and results of one sandbox's steps, over its journal."""

    __slots__ = ("_journal", "_under_way")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._under_way: dict[str, Step] = {}

    @property
    def count(self) -> int:
        """Steps so far."""
        return self._journal.next_step - 1

    def repeated(self, key: str, digest: bytes) -> Step | Ended | AnyResult | None:
        """The step under way, the end of its command or the recorded result; None when the key is new.

        Raises:
            Conflict: the key was used for another operation.
            CloudyardError: the error that is on record for it.
        """
        step = self._under_way.get(key)
        if step is not None:
            _check_same(key, step.number, step.digest, digest)
            return step
        known = self._journal.keys.get(key)
        if known is None:
            return None
        _check_same(key, known.step, known.digest, digest)
        match self._journal.read(known.place):
            case Ended() as ended:
                return ended
            case Answer(result=raw) if raw:
                return result_decoder.decode(raw)
            case Answer(error=body) if body is not None:
                raise error_of(body)
            case _:
                return None

    def open(
        self,
        op: AnyOp,
        *,
        name: str,
        key: str,
        digest: bytes,
        at: float,
        reads: bool,
        refused: Refused | None = None,
    ) -> Step:
        """Number a step and write its intent. A read without a key leaves no record of its own.

        Raises:
            LimitExceeded: the record cannot be written; nothing may be done.
        """
        journal = self._journal
        number = journal.next_step
        recorded = bool(key) or not reads
        if recorded:
            command = op.command if isinstance(op, (Exec, Start)) else None
            journal.append(Intent(number, key, digest, name, at, command, *(refused or ())))
        elif number > journal.reserved:
            journal.append(Reserved(number + NUMBERS_RESERVED))
        journal.next_step = number + 1
        step = Step(number, key, digest, recorded=recorded)
        if key:
            self._under_way[key] = step
        return step

    def resume(self, intent: Intent) -> Step:
        """Take up a step that an earlier edge began."""
        step = Step(intent.step, intent.key, intent.digest, recorded=True)
        if intent.key:
            self._under_way[intent.key] = step
        return step

    def answer(self, step: Step, result: AnyResult) -> AnyResult:
        """Record a step's result and give it to all who wait for it.

        Raises:
            LimitExceeded: the record cannot be written; the step ended with that error.
        """
        result = replace(result, step=step.number)
        if step.recorded:
            raw = encode(result) if step.key else b""
            if len(raw) > RESULT_RECORDED_MAX_BYTES:
                self._record(step, Answer(step.number, "", b""))
            else:
                self._record(step, Answer(step.number, step.key, step.digest, raw))
        self.settle(step, result)
        return result

    def fail(self, step: Step, error: CloudyardError) -> None:
        """Record that a step ended with an error. One that a retry may cure frees the key instead."""
        if step.recorded:
            kept = step.key if not error.retry_safe else ""
            self._record(step, Answer(step.number, kept, step.digest, b"", error_body(error)))
        self.settle(step, error)

    def settle(self, step: Step, outcome: AnyResult | CloudyardError) -> None:
        """Give an outcome that is on record already to all who wait for it."""
        if isinstance(outcome, CloudyardError):
            step.error = outcome
        else:
            step.result = outcome
        self._under_way.pop(step.key, None)
        step.wake()

    def _record(self, step: Step, answer: Answer) -> None:
        try:
            self._journal.append(answer)
        except CloudyardError as exc:
            self.settle(step, exc)
            raise


def _check_same(key: str, number: int, digest: bytes, other: bytes) -> None:
    if digest != other:
        raise Conflict(
            f"The key {key[:80]!r} was used for another operation, step {number}.",
            code="key_reused",
            hint="Give each operation a key of its own; repeat a key only with the same operation.",
        )
