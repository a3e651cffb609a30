"""The shell around `core.lifecycle`: carries out what it decides, and holds all sandboxes of the edge.

Each event is decided, put on the sandbox's record and carried out here and nowhere else. Launches,
tear-downs and reconnects are tasks of the edge's one task group; times to live are deadlines.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup

from cloudyard.core.lifecycle import (
    Command,
    CreateAdmitted,
    CreateFailed,
    Event,
    GuestGone,
    Life,
    Ready,
    StopReason,
    StopWanted,
    TornDown,
    decide,
    transition,
)
from cloudyard.edge.admission import Admission
from cloudyard.edge.backends.base import Backend, Instance
from cloudyard.edge.clock import Clock, Timers
from cloudyard.edge.config import RECONNECT_S, STOP_S, EdgeConfig
from cloudyard.edge.guest_link import GuestLink
from cloudyard.edge.journal import Journal
from cloudyard.edge.operations import check
from cloudyard.edge.poller import Poller
from cloudyard.edge.records import AnyRecord, Head, Moved, Placed
from cloudyard.edge.remembered import Ended, Remembered
from cloudyard.edge.sandbox import EXPIRED, Sandbox, describe, unavailable
from cloudyard.errors import (
    CloudyardError,
    Conflict,
    NotFound,
    SandboxUnavailable,
    Unsupported,
    YardUnavailable,
)
from cloudyard.model import Image, KeepAlive, SandboxId, SandboxInfo, SandboxSpec

RECONNECT_PAUSE_S = 0.05  # between two tries to connect to a guest that should live
TEAR_DOWN_PAUSE_S = 1.0  # after a tear-down that failed; doubled with each
TEAR_DOWN_PAUSE_MAX_S = 60.0

log = logging.getLogger(__name__)


class Yard:
    """All sandboxes of this edge, and what is done to them."""

    def __init__(
        self,
        config: EdgeConfig,
        *,
        backends: Mapping[str, Backend],
        images: Callable[[str], Image],
        clock: Clock,
        timers: Timers,
        poller: Poller,
        tasks: TaskGroup,
    ) -> None:
        self.config = config
        self.backends = backends
        self.clock = clock
        self.timers = timers
        self.poller = poller
        self.sandboxes: dict[str, Sandbox] = {}
        self.ended = Remembered(clock)
        capacity = sum(backend.capacity() for backend in backends.values())
        self.admission = Admission(config, min(config.sandboxes_max, capacity))
        self._images = images
        self._tasks = tasks
        self._launches = anyio.Semaphore(config.creates_at_once)

    # --- what is asked ----------------------------------------------------------------------------------

    def find(self, sandbox: str, project: str) -> Sandbox | Ended:
        """A sandbox of a project, living or remembered.

        Raises:
            NotFound: there is none; one of another project is none either.
        """
        found = self.sandboxes.get(sandbox)
        if found is not None and found.project == project:
            return found
        ended = self.ended.get(sandbox)
        if ended is not None and ended.info.project == project:
            return ended
        raise NotFound(
            f"There is no sandbox {sandbox}.",
            code="sandbox_not_found",
            hint="Ended sandboxes are remembered for an hour; list shows those that live.",
        )

    async def create(
        self,
        sandbox: str,
        spec: SandboxSpec,
        *,
        project: str,
        cause: str,
        begin_by: float = 0.0,
        expires_at: float = 0.0,
    ) -> SandboxInfo:
        """Make a sandbox and wait until a command has run in it. The same id again gives the same sandbox.

        Args:
            sandbox: its id.
            spec: normalised.
            project: whose it is.
            cause: the id of the request.
            begin_by: refuse to begin after this moment, in seconds since 1970; 0 for never.
            expires_at: tear it down when it is not ready by this moment; 0 for never. Of several calls for
                one sandbox the last moment holds.

        Raises:
            YardUnavailable: the call came after `begin_by`.
            NotFound: there is no such image.
            Unsupported: this edge does not have the backend.
            LimitExceeded: it does not fit.
            Conflict: the id was used for another sandbox.
            SandboxUnavailable: it was made and does not work; nothing of it is left.
        """
        known = self.sandboxes.get(sandbox) or self.ended.get(sandbox)
        if known is None:
            self._check_begins(begin_by)
            known = self._admit(sandbox, spec, project=project, cause=cause)
        elif isinstance(known, Ended):
            self._check_same(known.info.project, Journal.peek(known.path), project, spec)
            if known.info.state == "failed":
                raise known.error or unavailable(sandbox, Life("failed", known.info.reason))
            return known.info
        else:
            self._check_same(known.project, known.journal, project, spec)
        known.wanted_until = max(known.wanted_until, expires_at or math.inf)
        await known.settled.wait()
        if known.create_error is not None:
            raise known.create_error
        return known.info()

    def _check_begins(self, begin_by: float) -> None:
        late_s = self.clock.wall() - begin_by
        if begin_by and late_s > 0:
            raise YardUnavailable(
                f"The call to create a sandbox came to edge {self.config.edge} {late_s:.1f} s too late to "
                "begin.",
                code="create_expired",
                hint="Send it again. When this stays, look at the clocks of the yard's machines.",
            )

    async def stop(self, sandbox: Sandbox, *, reason: StopReason = "asked", cause: str) -> SandboxInfo:
        """End a sandbox, and return when nothing of it is left, or when that takes longer than it may."""
        self.apply(sandbox, StopWanted(cause=cause, at=self.clock.wall(), reason=reason))
        with anyio.move_on_after(STOP_S):
            await sandbox.gone.wait()
        ended = self.ended.get(sandbox.id)
        return ended.info if ended is not None else sandbox.info()

    def _admit(self, sandbox: str, spec: SandboxSpec, *, project: str, cause: str) -> Sandbox:
        backend = self.backends.get(spec.backend)
        if backend is None:
            raise Unsupported(
                f"This edge has no backend {spec.backend!r}.",
                code="no_such_backend",
                hint=f"It has {', '.join(sorted(self.backends)) or 'none'}.",
            )
        image = self._images(spec.image)
        self.admission.admit(sandbox, spec)
        head = Head(sandbox, project, spec, image.config, self.clock.wall(), self.clock.monotonic())
        made = self.hold(Journal(self.config.records_dir / f"{sandbox}.log", head), backend)
        event = CreateAdmitted(cause=cause, at=head.created_at)
        made.life = decide(made.life, event).life
        made.journal.transitions.append(transition(event, made.life))  # on disk with the first record
        self._tasks.start_soon(self._launch, made, image)
        return made

    def hold(self, journal: Journal, backend: Backend) -> Sandbox:
        """Take a sandbox into the edge's hands."""
        sandbox = Sandbox(
            journal,
            backend=backend,
            edge=self.config.edge,
            output_dir=self.config.output_dir,
            clock=self.clock,
            timers=self.timers,
            on_broken=self.on_broken,
        )
        self.sandboxes[sandbox.id] = sandbox
        return sandbox

    @staticmethod
    def _check_same(owner: str, journal: Journal | None, project: str, spec: SandboxSpec) -> None:
        if owner != project or journal is None or journal.head.spec != spec:
            raise Conflict(
                "The sandbox id was used for another sandbox.", code="sandbox_exists", hint="Use a new id."
            )

    # --- what happens -----------------------------------------------------------------------------------

    def apply(self, sandbox: Sandbox, event: Event) -> None:
        """Decide what an event means, put it on record, and do it."""
        decision = decide(sandbox.life, event)
        if decision.life != sandbox.life or decision.commands:
            sandbox.life = decision.life
            try:
                sandbox.journal.append(Moved(transition(event, decision.life)))
            except CloudyardError as exc:  # what has happened has happened; a restart finds it out anew
                log.error("%s: %s", sandbox.id, exc)
        for command in decision.commands:
            match command:
                case Command.LAUNCH:
                    raise AssertionError("a launch follows its admission")
                case Command.GIVE_UP_LAUNCH:
                    if sandbox.launch is not None:
                        sandbox.launch.cancel()
                case Command.ARM_TIMERS:
                    self.check_ttl(sandbox, cause=event.cause)
                case Command.END_COMMANDS:
                    self._end_commands(sandbox)
                case Command.TEAR_DOWN:
                    self._tasks.start_soon(self._tear_down, sandbox)
                case Command.GIVE_BACK:
                    self._give_back(sandbox)

    def keep_alive(self, sandbox: Sandbox, op: KeepAlive) -> None:
        """Count as use, and change the times to live. Whether this or a deadline comes first decides it.

        Raises:
            InvalidRequest: a time is out of range.
            SandboxUnavailable: it has ended.
        """
        check(op)
        sandbox.check_running()
        sandbox.keep_alive(op)
        self.check_ttl(sandbox)

    def check_ttl(self, sandbox: Sandbox, *, cause: str = "ttl") -> None:
        """Stop a sandbox whose time has come, or look again when it may have."""
        if sandbox.ttl_timer is not None:
            sandbox.ttl_timer.cancel()
            sandbox.ttl_timer = None
        if sandbox.life.state != "running":
            return
        now = self.clock.monotonic()
        expiry = sandbox.expiry(now)
        if expiry is None:
            return
        moment, reason = expiry
        if now >= moment:
            self.apply(sandbox, StopWanted(cause=cause, at=self.clock.wall(), reason=reason))
        else:
            sandbox.ttl_timer = self.timers.at(moment, lambda: self.check_ttl(sandbox))

    def on_broken(self, sandbox: Sandbox, why: str) -> None:
        """The link to a guest broke."""
        if sandbox.life.state == "running" and not sandbox.reconnecting:
            sandbox.reconnecting = True
            self._tasks.start_soon(self._reconnect, sandbox, why)

    def _end_commands(self, sandbox: Sandbox) -> None:
        if sandbox.ttl_timer is not None:
            sandbox.ttl_timer.cancel()
        why = str(unavailable(sandbox.id, sandbox.life))
        if sandbox.life.state == "failed":
            sandbox.commands.end_all(lost=why)
        else:
            expired = sandbox.life.reason in EXPIRED
            sandbox.commands.end_all(killed=why, expired=expired)

    def _give_back(self, sandbox: Sandbox) -> None:
        self.admission.release(sandbox.id)
        self.sandboxes.pop(sandbox.id, None)
        sandbox.history.discard()
        sandbox.settled.set()
        try:
            sandbox.journal.close(self.clock.wall())
        except (CloudyardError, OSError) as exc:
            log.error("%s: its end could not be put on record: %s", sandbox.id, exc)
        self.remember(sandbox.journal, sandbox.life, sandbox.create_error)
        sandbox.gone.set()

    def remember(self, journal: Journal, life: Life, error: CloudyardError | None = None) -> None:
        """Keep what is known of a sandbox that has ended."""
        at = journal.gone.at if journal.gone is not None else self.clock.wall()
        info = describe(journal, edge=self.config.edge, life=life)
        self.ended.add(Ended(info, journal.file.path, at, error))

    # --- what takes time --------------------------------------------------------------------------------

    async def _launch(self, sandbox: Sandbox, image: Image) -> None:
        evidence = ""
        try:
            with anyio.CancelScope() as scope:
                sandbox.launch = scope
                await self._raise_up(sandbox, image)
                self._check_wanted(sandbox)
            if scope.cancelled_caught:
                evidence = "given up: it was to be stopped"
                sandbox.create_error = unavailable(sandbox.id, Life("stopped", "asked"))
        except CloudyardError as exc:
            sandbox.create_error = exc
            evidence = str(exc)
        except Exception as exc:
            trouble = uuid4().hex[:12]
            log.exception("Creating %s failed through a fault of ours (%s).", sandbox.id, trouble)
            sandbox.create_error = CloudyardError(
                f"Creating {sandbox.id} failed through a fault of ours ({trouble}): {exc}.", code="internal"
            )
            evidence = repr(exc)
        except (
            BaseException
        ):  # the edge is leaving: whoever asked will ask again, and finds nothing half-made
            with anyio.move_on_after(STOP_S, shield=True):
                await self._stop_instance(sandbox)
            raise
        finally:
            sandbox.launch = None
        at = self.clock.wall()
        if evidence:
            self.apply(sandbox, CreateFailed(cause="launch", at=at, evidence=evidence))
        else:
            self.apply(sandbox, Ready(cause="launch", at=at))
            sandbox.settled.set()

    async def _raise_up(self, sandbox: Sandbox, image: Image) -> None:
        journal = sandbox.journal
        first: list[AnyRecord] = [journal.head, *(Moved(step) for step in journal.transitions)]
        await anyio.to_thread.run_sync(journal.file.create, first)
        async with self._launches:
            sandbox.instance = await sandbox.backend.create(SandboxId(sandbox.id), journal.head.spec, image)
            journal.append(Placed(sandbox.instance.facts))
            link = GuestLink(self.poller, sandbox.instance.connect(), sandbox.commands)
            try:
                await link.greet()
                await sandbox.commands.resume(link, fresh=True)
            except BaseException:
                link.close("the launch failed")
                raise
        sandbox.last_used = self.clock.monotonic()

    def _check_wanted(self, sandbox: Sandbox) -> None:
        late_s = self.clock.wall() - sandbox.wanted_until
        if late_s > 0:
            raise SandboxUnavailable(
                f"Sandbox {sandbox.id} was ready {late_s:.1f} s after all had given up who wanted it, and is "
                "removed.",
                code="create_expired",
                fault="infra",
                hint="Create a new one.",
            )

    async def _tear_down(self, sandbox: Sandbox) -> None:
        pause_s = TEAR_DOWN_PAUSE_S
        while True:
            try:
                with anyio.fail_after(STOP_S):
                    await self._stop_instance(sandbox)
                break
            except Exception:
                # it keeps its promise: what may still be there is not given to another
                log.exception("%s: tearing it down failed; the next try is in %g s.", sandbox.id, pause_s)
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, TEAR_DOWN_PAUSE_MAX_S)
        self.apply(sandbox, TornDown(cause="teardown", at=self.clock.wall()))

    async def _stop_instance(self, sandbox: Sandbox) -> None:
        if sandbox.instance is not None:
            await sandbox.instance.stop()
            sandbox.instance = None

    async def _reconnect(self, sandbox: Sandbox, why: str) -> None:
        if sandbox.instance is not None:
            with anyio.move_on_after(
                RECONNECT_PAUSE_S
            ):  # most often it is the guest that went, and this tells
                await sandbox.instance.wait_gone()
        await self.connect(sandbox, why)

    async def connect(self, sandbox: Sandbox, why: str, *, stalled_s: float = 0.0) -> bool:
        """Connect to a guest that should live, or find that it does not; gives whether it did.

        Args:
            sandbox: whose guest.
            why: what happened to the link before.
            stalled_s: time in which no edge was there.
        """
        sandbox.reconnecting = True
        instance = sandbox.instance
        gone = instance is None
        with anyio.move_on_after(RECONNECT_S):
            while instance is not None and not gone:
                why = await self._try_to_connect(sandbox, instance, stalled_s)
                if not why:
                    sandbox.reconnecting = False
                    return True
                with anyio.move_on_after(RECONNECT_PAUSE_S):
                    await instance.wait_gone()
                    gone = True
        sandbox.reconnecting = False
        if sandbox.life.state == "running":
            evidence = f"PID 1 has ended ({why})" if gone else f"no connection for {RECONNECT_S:g} s ({why})"
            self.apply(sandbox, GuestGone(cause="link", at=self.clock.wall(), evidence=evidence))
        return False

    async def _try_to_connect(self, sandbox: Sandbox, instance: Instance, stalled_s: float) -> str:
        """Why it did not work; empty when it did."""
        try:
            link = GuestLink(self.poller, instance.connect(), sandbox.commands)
        except (CloudyardError, OSError) as exc:
            return str(exc)
        try:
            await link.greet()
            await sandbox.commands.resume(link, stalled_s=stalled_s)
            if sandbox.instance is not instance:  # it was stopped meanwhile
                sandbox.commands.let_go("the sandbox has ended")
        except Exception as exc:
            if not isinstance(exc, SandboxUnavailable):
                log.exception("%s: taking up its commands failed.", sandbox.id)
            link.close(str(exc))
            return str(exc)
        except BaseException:
            link.close("connecting was given up")
            raise
        return link.broken
