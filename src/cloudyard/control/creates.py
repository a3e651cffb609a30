"""Creating a sandbox once, however often it is asked for with the same key.

A key is claimed in the KV bucket `create_keys` together with the sandbox id, which names the edge, before
anything is sent. From then on the claim says where the sandbox is or will be: whoever comes with the key,
through this gateway or another, now or after a restart, asks that edge for that id, and the edge makes it or
gives what it has.

The claim moves to another edge only when its edge refuses, by compare-and-swap. Somebody who followed a claim
and was served writes the claim again: were it moving at that moment, one of the two writes fails, and its
writer follows the other.
"""

from __future__ import annotations

import logging
import secrets
import time
from hashlib import sha256
from typing import NamedTuple

import msgspec
from anyio.abc import TaskGroup
from msgspec import Raw, Struct

from cloudyard.control.edges import Edges
from cloudyard.control.placer import Placer
from cloudyard.core.placement import Reservation, demand_of
from cloudyard.errors import CloudyardError, Conflict, LimitExceeded, NotFound, YardUnavailable
from cloudyard.fabric import Fabric
from cloudyard.model import (
    EdgeId,
    GetSandbox,
    ProjectId,
    SandboxId,
    SandboxSpec,
    StopSandbox,
    check_key,
    edge_of,
    normalised,
)
from cloudyard.wire.messages import CallCreate, CallOp, raw

log = logging.getLogger(__name__)

BUCKET = "create_keys"
CLAIM_TTL_S = 24 * 3600.0
BEGIN_WITHIN_S = 15.0  # an edge that has not begun by then was given up: it is silent for EDGE_SILENT_S
WANTED_S = 320.0  # no client waits longer for a sandbox: 300 s for its creation, 10 s for a yard that is away
ROUNDS_MAX = 32  # edges asked and claims followed for one create
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


class Claim(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which sandbox a key stands for. `made`: it has been, so that nobody makes it again after its end."""

    sandbox: str
    project: str
    spec_hash: str
    made: bool = False


_encode = msgspec.msgpack.Encoder().encode
_encode_ordered = msgspec.msgpack.Encoder(order="deterministic").encode
_decoder = msgspec.msgpack.Decoder(Claim)


class _Made(NamedTuple):
    """A sandbox, and the revision of the claim under which it was made."""

    answer: Raw
    sandbox: SandboxId
    revision: int


class Creates:
    """Makes sandboxes on edges that the placer chooses."""

    def __init__(self, fabric: Fabric, edges: Edges, placer: Placer, tasks: TaskGroup) -> None:
        self._edges = edges
        self._placer = placer
        self._tasks = tasks
        self._claims = fabric.bucket(BUCKET, ttl_s=CLAIM_TTL_S)

    async def create(self, project: ProjectId, spec: SandboxSpec, *, key: str, cause: str) -> Raw:
        """Make a sandbox, or give the one that the key made; an encoded SandboxInfo.

        Raises:
            InvalidRequest: the spec is out of range.
            Conflict: the key made a sandbox of another spec (`key_reused`), or one that ended long ago
            (`key_spent`). LimitExceeded: no edge has room (`no_capacity`). CloudyardError: whatever else the
            placer or the edge says.
        """
        check_key(key)
        spec = normalised(spec)
        attempt = _Attempt(project, spec, cause, self._edges, self._placer)
        if not key:
            return await self._unclaimed(attempt)
        name = f"{project}.{sha256(key.encode()).hexdigest()}"
        for _ in range(ROUNDS_MAX):
            answer = await self._claim(attempt, name) or await self._follow(attempt, name, key)
            if answer is not None:
                return answer
        raise YardUnavailable(
            f"The sandbox of key {key!r} was moved {ROUNDS_MAX} times.",
            code="create_unsettled",
            hint="Try again.",
        )

    async def _unclaimed(self, attempt: _Attempt) -> Raw:
        for _ in range(ROUNDS_MAX):
            reservation = attempt.place()
            try:
                return await attempt.ask(_new_id(reservation.edge), reservation)
            except _Refused:
                continue
        raise attempt.crowded()

    async def _claim(self, attempt: _Attempt, name: str) -> Raw | None:
        """Claim a key that nobody has, and make its sandbox. None: somebody has it."""
        try:
            reservation = attempt.place()
        except CloudyardError:
            if await self._is_claimed(name):
                return None
            raise
        sandbox = _new_id(reservation.edge)
        try:
            revision = await self._claims.create(name, _encode(attempt.claim(sandbox)))
        except Conflict:
            attempt.release(reservation)
            return None
        except BaseException:
            attempt.release(reservation)
            raise
        made = await self._make(attempt, name, sandbox, revision, reservation)
        return self._done(attempt, name, made)

    async def _follow(self, attempt: _Attempt, name: str, key: str) -> Raw | None:
        """Ask the claim's edge for its sandbox. None: the claim is gone or has moved meanwhile."""
        try:
            entry = await self._claims.get(name)
        except NotFound:
            return None
        claim = _decoder.decode(entry.value)
        _same_spec(claim, attempt, key)
        if claim.made:
            return await attempt.look(claim.sandbox, key)
        sandbox = SandboxId(claim.sandbox)
        made = await self._make(attempt, name, sandbox, entry.revision, None)
        if made is None or made.sandbox != sandbox:
            return self._done(attempt, name, made)
        try:
            await self._claims.update(
                name, _encode(attempt.claim(sandbox, made=True)), revision=made.revision
            )
        except Conflict:
            if (await self._holder(name)) != sandbox:
                log.info("the claim on %s moved while it was made: stopping it", sandbox)
                await attempt.undo(sandbox)
                return None
        return made.answer

    async def _make(
        self, attempt: _Attempt, name: str, sandbox: SandboxId, revision: int, reservation: Reservation | None
    ) -> _Made | None:
        """Ask the claim's edge; when it refuses, move the claim on. None: somebody else has moved it."""
        try:
            for _ in range(ROUNDS_MAX):
                try:
                    return _Made(await attempt.ask(sandbox, reservation), sandbox, revision)
                except _Refused:
                    reservation = attempt.place()
                    sandbox = _new_id(reservation.edge)
                    claim = _encode(attempt.claim(sandbox))
                    try:
                        revision = await self._claims.update(name, claim, revision=revision)
                    except BaseException:
                        attempt.release(reservation)
                        raise
            raise attempt.crowded()
        except YardUnavailable:
            raise  # it may have been made: the claim stays, and the same key finds it
        except Conflict as exc:
            if exc.code == "key_changed":
                return None
            await self._give_up(name, revision)
            raise
        except CloudyardError:
            await self._give_up(name, revision)
            raise

    def _done(self, attempt: _Attempt, name: str, made: _Made | None) -> Raw | None:
        """Note in the background that the sandbox has been made: nobody needs to wait for that."""
        if made is None:
            return None
        self._tasks.start_soon(self._mark, attempt, name, made)
        return made.answer

    async def _mark(self, attempt: _Attempt, name: str, made: _Made) -> None:
        claim = _encode(attempt.claim(made.sandbox, made=True))
        try:
            await self._claims.update(name, claim, revision=made.revision)
        except CloudyardError as exc:  # somebody with the same key has just done it, or NATS is away
            log.debug("a claim is not marked as made: %s", exc)

    async def _is_claimed(self, name: str) -> bool:
        return await self._holder(name) != ""

    async def _holder(self, name: str) -> str:
        """The sandbox that a key stands for now, if any."""
        try:
            return _decoder.decode((await self._claims.get(name)).value).sandbox
        except NotFound:
            return ""

    async def _give_up(self, name: str, revision: int) -> None:
        """Free the key after a failure that leaves nothing behind, so that it can be used again."""
        try:
            await self._claims.delete(name, revision=revision)
        except CloudyardError as exc:
            log.info("a claim stays until it expires: %s", exc)


class _Refused(Exception):
    """The edge has no room after all."""


class _Attempt:
    """One create under way: what is asked, and which edges have refused it."""

    def __init__(
        self, project: ProjectId, spec: SandboxSpec, cause: str, edges: Edges, placer: Placer
    ) -> None:
        self._project = project
        self._spec = spec
        self._cause = cause
        self._edges = edges
        self._placer = placer
        self._refused_by: set[EdgeId] = set()
        self._refusal: CloudyardError | None = None
        self.spec_hash = sha256(_encode_ordered(spec)).hexdigest()

    def claim(self, sandbox: SandboxId, *, made: bool = False) -> Claim:
        return Claim(sandbox=sandbox, project=self._project, spec_hash=self.spec_hash, made=made)

    def place(self) -> Reservation:
        try:
            return self._placer.place(demand_of(self._spec), self._refused_by)
        except LimitExceeded as exc:
            raise (self.crowded() if self._refused_by else exc) from exc

    def release(self, reservation: Reservation) -> None:
        self._placer.settle(reservation, held=False)

    async def ask(self, sandbox: SandboxId, reservation: Reservation | None) -> Raw:
        """Ask the edge to make it.

        Raises:
            _Refused: it has no room, or takes no more.
            CloudyardError: anything else.
        """
        edge, held = edge_of(sandbox), True
        now = time.time()
        call = CallCreate(
            project=self._project,
            cause=self._cause,
            sandbox=sandbox,
            spec=self._spec,
            begin_by=now + BEGIN_WITHIN_S,
            expires_at=now + WANTED_S,
        )
        try:
            return await self._edges.call(edge, call)
        except (LimitExceeded, YardUnavailable) as exc:
            if isinstance(exc, YardUnavailable) and exc.code != "draining":
                raise
            held = False
            self._refused_by.add(edge)
            self._refusal = exc
            raise _Refused from exc
        except CloudyardError:
            held = False
            raise
        finally:
            if reservation is not None:
                self._placer.settle(reservation, held=held)

    async def look(self, sandbox: str, key: str) -> Raw:
        """The state of a sandbox that was made before, running or ended.

        Raises:
            Conflict: it ended so long ago that its edge has forgotten it.
        """
        call = CallOp(project=self._project, cause=self._cause, sandbox=sandbox, op=raw(GetSandbox()))
        try:
            return await self._edges.op(call)
        except NotFound as exc:
            raise Conflict(
                f"The key {key!r} made sandbox {sandbox}, which has ended.",
                code="key_spent",
                hint="Use a new key for a new sandbox.",
            ) from exc

    async def undo(self, sandbox: SandboxId) -> None:
        await self._edges.op(
            CallOp(project=self._project, cause=self._cause, sandbox=sandbox, op=raw(StopSandbox()))
        )

    def crowded(self) -> LimitExceeded:
        refusal, message = self._refusal, "No edge has room for another sandbox now."
        hint = "Stop sandboxes that are no longer needed, or try again later."
        if refusal is not None:
            message = f"{message} {len(self._refused_by)} refused it, the last one because: {refusal.message}"
            if refusal.code.endswith("disk_full"):
                hint = refusal.hint or "Free disk space on the node."
        return LimitExceeded(message, code="no_capacity", fault="infra", hint=hint, retry_safe=True)


def _same_spec(claim: Claim, attempt: _Attempt, key: str) -> None:
    if claim.spec_hash != attempt.spec_hash:
        raise Conflict(
            f"The key {key!r} has already made sandbox {claim.sandbox}, with another spec.",
            code="key_reused",
            hint="Use a new key for a new sandbox, or send the same spec to get that one.",
        )


def _new_id(edge: EdgeId) -> SandboxId:
    return SandboxId(f"sb-{edge}-{''.join(secrets.choice(_LETTERS) for _ in range(12))}")
