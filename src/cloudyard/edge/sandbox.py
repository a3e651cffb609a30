"""One sandbox as the edge holds it: its life, its record, its link, its commands, and when it was last of
use.

Holds the parts together and answers what is asked of the whole. What happens to it is decided in
`core.lifecycle` and done in `life`; what is done in it is in `operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
from msgspec import UNSET
from msgspec.structs import replace

from cloudyard.core.lifecycle import Life, StopReason
from cloudyard.edge.backends.base import Backend, DiskUse, Instance
from cloudyard.edge.clock import Clock, Timer, Timers
from cloudyard.edge.commands import Commands
from cloudyard.edge.history import History
from cloudyard.edge.journal import Journal
from cloudyard.edge.records import Lives, Used
from cloudyard.edge.steps import StepBook
from cloudyard.errors import CloudyardError, LimitExceeded, SandboxUnavailable
from cloudyard.model import KeepAlive, SandboxInfo

USED_NOTED_SHARE = 8  # use is put on record when an eighth of the idle time has passed since it last was
REASONS = {
    "asked": "it was stopped by request",
    "idle_ttl": "it was stopped after idle_ttl_s without use",
    "max_ttl": "it was stopped at the end of max_ttl_s",
    "guest_gone": "its PID 1 has ended or answers no more",
    "lost": "it was gone when the edge came back",
    "create_failed": "it could not be created",
}

EXPIRED = ("idle_ttl", "max_ttl")


def unavailable(sandbox: str, life: Life) -> SandboxUnavailable:
    """The error for whoever wants something of a sandbox that does not run."""
    why = REASONS.get(life.reason, life.state)
    expired = life.reason in EXPIRED
    infra = life.reason in ("guest_gone", "lost", "create_failed")
    return SandboxUnavailable(
        f"Sandbox {sandbox} is {life.state}: {why}.",
        code="sandbox_failed" if infra else "sandbox_expired" if expired else f"sandbox_{life.state}",
        fault="infra" if infra else "policy",
        hint="Create a new one" + (", with a longer time to live or keep_alive." if expired else "."),
    )


class Sandbox:
    """A sandbox that lives on this edge, or is on its way in or out."""

    def __init__(
        self,
        journal: Journal,
        *,
        backend: Backend,
        edge: str,
        output_dir: Path,
        clock: Clock,
        timers: Timers,
        on_broken: Callable[[Sandbox, str], None],
    ) -> None:
        head = journal.head
        self.id = head.sandbox
        self.project = head.project
        self.journal = journal
        self.backend = backend
        self.life = journal.life
        self.instance: Instance | None = None
        self.settled = anyio.Event()
        """Its creation has come to an end, good or bad."""
        self.gone = anyio.Event()
        """Nothing of it is left."""
        self.create_error: CloudyardError | None = None
        self.wanted_until = 0.0
        """When the last who waits for its creation gives up: seconds since 1970, infinite for never."""
        self.launch: anyio.CancelScope | None = None
        self.ttl_timer: Timer | None = None
        self.reconnecting = False
        self.steps = StepBook(journal)
        directory = output_dir / head.sandbox
        self.history = History(journal, directory)
        self.commands = Commands(
            journal,
            steps=self.steps,
            history=self.history,
            directory=directory,
            clock=clock,
            timers=timers,
            counters=self,
            on_idle=self.touch,
            on_broken=lambda why: on_broken(self, why),
        )
        self._edge = edge
        self._clock = clock
        self._requests = 0
        self.last_used = journal.used_at

    # --- use and times to live --------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """A request is under way or a command runs, one in the background too: it is not idle."""
        return self._requests > 0 or bool(self.commands.live)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For as long as a request is under way."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self.touch()

    def touch(self) -> None:
        """It is of use now. Noted on disk now and then, so that a restart neither shortens nor prolongs
        its life.
        """
        now = self._clock.monotonic()
        self.last_used = now
        idle_ttl_s = self.journal.lives.idle_ttl_s
        if idle_ttl_s is not None and now - self.journal.used_at > idle_ttl_s / USED_NOTED_SHARE:
            with suppress(LimitExceeded, OSError):  # at worst it counts as idle a little longer
                self.journal.append(Used(now))

    def expiry(self, now: float) -> tuple[float, StopReason] | None:
        """When it is to be stopped for its times to live, as things are now, and why; None for never."""
        lives = self.journal.lives
        moments: list[tuple[float, StopReason]] = []
        if lives.max_ttl_s is not None:
            moments.append((self.journal.head.created_mono + lives.max_ttl_s, "max_ttl"))
        if lives.idle_ttl_s is not None:
            moments.append(((now if self.busy else self.last_used) + lives.idle_ttl_s, "idle_ttl"))
        return min(moments, default=None)

    def keep_alive(self, op: KeepAlive) -> None:
        """Count as use, and change its times to live.

        Raises:
            LimitExceeded: the change cannot be put on record; nothing has changed.
        """
        lives = self.journal.lives
        idle = lives.idle_ttl_s if op.idle_ttl_s is UNSET else op.idle_ttl_s
        longest = lives.max_ttl_s if op.max_ttl_s is UNSET else op.max_ttl_s
        self.last_used = self._clock.monotonic()
        if (idle, longest) != (lives.idle_ttl_s, lives.max_ttl_s):
            self.journal.append(Lives(idle, longest))
        self.journal.append(Used(self.last_used))

    # --- what it is -------------------------------------------------------------------------------------

    @property
    def tearing_down(self) -> bool:
        """Its end is under way."""
        return self.life.state in ("stopping", "failed") and not self.gone.is_set()

    def check_running(self) -> Instance:
        """Its instance.

        Raises:
            SandboxUnavailable: it does not run (any more).
        """
        if self.life.state != "running" or self.instance is None:
            raise self.create_error or unavailable(self.id, self.life)
        return self.instance

    def oom_kills(self) -> int:
        """Processes of it that the kernel has killed for memory.

        Raises:
            SandboxUnavailable: it is gone.
        """
        if self.instance is None:
            raise unavailable(self.id, self.life)
        return self.instance.oom_kills()

    def disk(self) -> DiskUse:
        """How full its disk is.

        Raises:
            SandboxUnavailable: it is gone.
        """
        if self.instance is None:
            raise unavailable(self.id, self.life)
        return self.instance.disk()

    def forks_refused(self) -> int:
        """Forks in it that its limit of processes refused.

        Raises:
            SandboxUnavailable: it is gone.
        """
        if self.instance is None:
            raise unavailable(self.id, self.life)
        return self.instance.forks_refused()

    def info(self) -> SandboxInfo:
        """What a user may know of it."""
        return describe(self.journal, edge=self._edge, life=self.life, commands=len(self.commands.live))

    def info_with_usage(self) -> SandboxInfo:
        """The same with the kernel's counters, which take a look at several files."""
        info = self.info()
        if self.instance is None:
            return info
        try:
            usage, disk = self.instance.usage(), self.instance.disk()
        except SandboxUnavailable:  # it has ended, and its end is not noted yet
            return info
        return replace(
            info,
            memory_used_bytes=usage.memory_bytes,
            disk_used_bytes=disk.used_bytes if disk.limit_bytes else None,
            cpu_used_s=usage.cpu_s,
        )


def describe(journal: Journal, *, edge: str, life: Life, commands: int = 0) -> SandboxInfo:
    """A sandbox as its record tells it."""
    head = journal.head
    assert isinstance(head.spec.memory, int), "the spec is normalised"
    assert life.state != "absent", "a sandbox that is described exists"
    return SandboxInfo(
        id=head.sandbox,
        project=head.project,
        edge=edge,
        image=head.spec.image,
        backend=head.spec.backend,
        state=life.state,
        created_at=head.created_at,
        cpu=head.spec.cpu,
        memory_bytes=head.spec.memory,
        labels=head.spec.labels,
        idle_ttl_s=journal.lives.idle_ttl_s,
        max_ttl_s=journal.lives.max_ttl_s,
        stopped_at=journal.gone.at if journal.gone is not None else None,
        reason=life.reason,
        steps=journal.next_step - 1,
        commands=commands,
    )
