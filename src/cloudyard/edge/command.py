"""One command that is under way: what is known of it so far, and its result once it has ended.

Holds state and answers questions; sends nothing. `Commands` moves it.
"""

from __future__ import annotations

from pathlib import Path

import anyio
from msgspec.structs import replace

from cloudyard.edge.backends.base import DiskUse
from cloudyard.edge.clock import Timer
from cloudyard.edge.history import output_name
from cloudyard.edge.output import Stream
from cloudyard.edge.records import Ended
from cloudyard.edge.refusals import Refused
from cloudyard.edge.stdin import Stdin
from cloudyard.edge.steps import Step
from cloudyard.edge.translate import acknowledgement, command_info
from cloudyard.edge.verdict import Bounds, Ending, NotStarted, Verdict
from cloudyard.model import CommandInfo, CommandSpec, ExecResult, StreamName
from cloudyard.wire.guest import STDERR, STDOUT, Frame, Tag

MICRO = 1e-6


class Command:
    """A command from its intent to its result."""

    __slots__ = (
        "_ended",
        "absence_s",
        "cause",
        "company",
        "exit",
        "expired",
        "heard_at",
        "id",
        "info",
        "kill_timer",
        "killed",
        "placed",
        "refused_before",
        "sent",
        "silent",
        "spec",
        "stalled_s",
        "started_at",
        "stderr",
        "stdin",
        "stdout",
        "step",
        "superseded",
        "timed_out",
        "timer",
        "tree_gone",
        "unsent",
        "waits",
    )

    def __init__(
        self, step: Step, spec: CommandSpec, directory: Path, *, waits: bool, cause: str = ""
    ) -> None:
        self.id = step.number
        self.step = step
        self.spec = spec
        self.cause = cause
        """The id of the request that started it."""
        self.waits = waits
        """The step that started it waits for its end."""
        self.info = command_info(self.id, spec)
        self.stdout = Stream(directory, output_name(self.id, "stdout"), spec.output_limit_bytes)
        self.stderr = Stream(directory, output_name(self.id, "stderr"), spec.output_limit_bytes)
        self.stdin = (
            Stdin(self.id, spec.stdin, eof=not spec.keep_stdin) if spec.stdin or spec.keep_stdin else None
        )
        self.placed = False
        """It has a place in the guest."""
        self.sent = False
        """The guest was asked to start it."""
        self.unsent = 0
        """How often the guest was asked and turned out never to have got it."""
        self.started_at = 0.0
        """The monotonic clock when it was asked for."""
        self.stalled_s = 0.0
        """Time since then in which it could not run: queued, or while no edge was there."""
        self.absence_s = 0.0
        """How long no edge was there, where it ended in that time."""
        self.superseded = False
        """A later step has the same key."""
        self.refused_before: Refused | None = None
        """What the kernel had refused the sandbox when it started; None where that is not known."""
        self.company: int | None = None
        """Commands that had been started in the sandbox when this one was; None when others ran then."""
        self.timer: Timer | None = None
        self.timed_out: float | None = None
        """Its timeout in seconds, where that struck."""
        self.heard_at = 0.0
        """The monotonic clock when it last wrote something, where silence is bounded."""
        self.silent: float | None = None
        """That bound in seconds, where it struck."""
        self.killed = ""
        self.expired = False
        """Why it was killed through us."""
        self.kill_timer: Timer | None = None
        self.exit: Frame | None = None
        """The guest's word on its end."""
        self.tree_gone = False
        self._ended: anyio.Event | None = None

    @property
    def dying(self) -> bool:
        """It was killed by us and has to end soon."""
        return self.kill_timer is not None

    @property
    def begun(self) -> bool:
        """It is known to have run, or a later step may have run in its place."""
        return self.superseded or self.step.done or bool(self.info.pid)

    def unsend(self) -> None:
        """The guest never got it: neither the command nor its stdin."""
        self.sent = self.placed = False
        self.unsent += 1
        if self.stdin is not None:
            self.stdin.resume(0)

    @property
    def tree_lives(self) -> bool:
        """Something of it may be left, as far as the guest has said."""
        if self.exit is None:
            return self.sent
        return not self.tree_gone and bool(self.exit.number(Tag.TREE_ALIVE, 0))

    def stream(self, name: StreamName) -> Stream:
        """One of its two streams."""
        return self.stdout if name == "stdout" else self.stderr

    def stream_of(self, frame: Frame) -> Stream:
        """The stream that a frame is about."""
        return self.stderr if frame.number(Tag.STREAM) == STDERR else self.stdout

    def now(self) -> CommandInfo:
        """It, as it runs."""
        return replace(self.info, stdout_total=self.stdout.total, stderr_total=self.stderr.total)

    def note_started(self, frame: Frame) -> None:
        """The guest says which process it is."""
        self.info = replace(
            self.info,
            step=self.step.number,
            pid=frame.number(Tag.PID, 0),
            pid_start=frame.number(Tag.PID_START, 0),
        )

    def note_exit(self, frame: Frame, *, resumed_at: float) -> None:
        """The guest says how it ended. `resumed_at`: when the link to the guest was made."""
        self.exit = frame
        if self.absence_s:
            ended_at = self.started_at + frame.number(Tag.DURATION_US, 0) * MICRO
            away_at = resumed_at - self.absence_s
            self.stalled_s += min(max(0.0, ended_at - away_at), self.absence_s)
        self.stdout.total = max(self.stdout.total, frame.number(Tag.STDOUT_TOTAL, 0))
        self.stderr.total = max(self.stderr.total, frame.number(Tag.STDERR_TOTAL, 0))

    def acknowledgements(self) -> bytes:
        """Frames by which the guest forgets the output that is in files here."""
        frames: list[bytes] = []
        for number, stream in ((STDOUT, self.stdout), (STDERR, self.stderr)):
            offset = stream.to_acknowledge()
            if offset is not None:
                frames.append(acknowledgement(self.id, number, offset))
        return b"".join(frames)

    def stop_timers(self) -> None:
        """It needs no deadline any more."""
        for timer in (self.timer, self.kill_timer):
            if timer is not None:
                timer.cancel()
        self.timer = self.kill_timer = None

    @property
    def ended_badly(self) -> bool:
        """The guest says that it failed."""
        return self.exit is not None and self.exit.number(Tag.EXIT_CODE, 1) != 0

    def ending(
        self, refused: Refused, *, disk: DiskUse | None, shared: bool, lost: str, limits: Bounds
    ) -> Ending:
        """What was seen of its end, together with what the kernel's counters say."""
        exit_ = self.exit
        return Ending(
            exit_code=exit_.maybe_number(Tag.EXIT_CODE) if exit_ else None,
            signal=exit_.maybe_number(Tag.SIGNAL) if exit_ else None,
            timed_out=self.timed_out,
            silent=self.silent,
            killed=self.killed,
            expired=self.expired,
            lost=lost,
            oom_kills=refused.oom_kills,
            shared=shared,
            forks_refused=refused.forks,
            disk=disk,
            output_cut=self.stdout.over_limit or self.stderr.over_limit,
            output_error=self.stdout.error or self.stderr.error,
            limits=limits,
        )

    def result(self, verdict: Verdict) -> ExecResult:
        """How it ended, without output that lies in files."""
        exit_ = self.exit
        out, err = self.stdout, self.stderr
        facts = ExecResult(
            step=self.step.number,
            command_id=self.id,
            fault=verdict.fault,
            oom="oom" in verdict.limits_hit,
            limits_hit=verdict.limits_hit,
            stdout=out.inline() or b"",
            stderr=err.inline() or b"",
            stdout_kept=out.kept,
            stderr_kept=err.kept,
            stdout_total=out.total,
            stderr_total=err.total,
            truncated=out.total > out.kept or err.total > err.kept,
            timed_out=self.timed_out is not None or self.silent is not None,
            stalled_s=self.stalled_s,
        )
        if exit_ is None:
            return facts
        return replace(
            facts,
            exit_code=exit_.maybe_number(Tag.EXIT_CODE),
            signal=exit_.maybe_number(Tag.SIGNAL),
            duration_s=exit_.number(Tag.DURATION_US, 0) * MICRO,
            cpu_s=exit_.number(Tag.CPU_US, 0) * MICRO,
            peak_memory_bytes=exit_.number(Tag.PEAK_BYTES, 0),
        )

    def result_not_started(self, why: NotStarted) -> ExecResult:
        """That it never ran."""
        return ExecResult(
            step=self.step.number,
            command_id=self.id,
            exit_code=why.exit_code,
            fault=why.fault,
            error=why.error,
            error_code=why.name,
            stalled_s=self.stalled_s,
        )

    def record(self, result: ExecResult) -> Ended:
        """Its end, for the journal."""
        info = replace(
            self.now(), running=False, exit_code=result.exit_code, signal=result.signal, step=self.step.number
        )
        key, digest = (self.step.key, self.step.digest) if self.waits else ("", b"")
        return Ended(self.id, key, digest, info, result, self.stdout.spilled, self.stderr.spilled)

    async def wait_ended(self) -> None:
        """Return once its end is on record."""
        if self._ended is None:
            self._ended = anyio.Event()
        await self._ended.wait()

    def wake(self) -> None:
        """Its end is on record: let everyone go on who waits for anything of it."""
        self.stdout.wake()
        self.stderr.wake()
        if self.stdin is not None:
            self.stdin.wake()
        if self._ended is not None:
            self._ended.set()
