"""The commands of one sandbox that are under way: started, fed, read, timed and ended over the guest link.

Everything a frame causes is done at once, in place, without a task: an exec costs one frame down, three
up and two records. The end of a command is on record before anybody hears of it, and only then may the
guest forget it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from cloudyard.core.reconcile import Settlement
from cloudyard.edge.clock import Clock, Timers
from cloudyard.edge.command import Command
from cloudyard.edge.config import KILL_WAIT_S, SAID_MAX_CHARS, SENT_AGAIN_MAX
from cloudyard.edge.deadlines import Deadlines
from cloudyard.edge.endings import Endings
from cloudyard.edge.guest_link import GuestLink
from cloudyard.edge.history import History
from cloudyard.edge.journal import Journal
from cloudyard.edge.listing import Listing
from cloudyard.edge.records import Intent, Stalled
from cloudyard.edge.refusals import Counters, Refused, refused_so_far
from cloudyard.edge.resumption import end_stranger, fates_of, go_on
from cloudyard.edge.steps import Step, StepBook
from cloudyard.edge.translate import exec_frame, signal_frame
from cloudyard.edge.verdict import SIGKILL, Bounds
from cloudyard.errors import CloudyardError, Conflict, InvalidRequest, LimitExceeded, YardUnavailable
from cloudyard.model import CommandSpec, parse_size
from cloudyard.wire.guest import Frame, FrameError, Kind, Tag

log = logging.getLogger(__name__)
_KINDS = frozenset(Kind)


class Commands:
    """Commands under way in one sandbox. Receives the frames of its guest link."""

    def __init__(
        self,
        journal: Journal,
        *,
        steps: StepBook,
        history: History,
        directory: Path,
        clock: Clock,
        timers: Timers,
        counters: Counters,
        on_idle: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        spec = journal.head.spec
        self._journal = journal
        self._history = history
        self._directory = directory
        self._clock = clock
        self._timers = timers
        self._counters = counters
        self._on_broken = on_broken
        self.link: GuestLink | None = None
        """The way to the guest; None while there is none."""
        self._ends = Endings(
            steps=steps,
            history=history,
            clock=clock,
            timers=timers,
            counters=counters,
            bounds=Bounds(parse_size(spec.memory, what="memory"), spec.pids),
            send=self.send,
            on_idle=on_idle,
        )
        self.live = self._ends.live
        """Commands under way."""
        self._places = self._ends.places
        self._forgets = self._ends.forgets
        self._lingering = self._ends.lingering
        self._deadlines = Deadlines(clock, timers, self.kill)
        self._unacknowledged: dict[int, Command] = {}
        self._listing = Listing()
        self._resumed_at = 0.0

    # --- starting, feeding, killing ---------------------------------------------------------------------

    def begin(self, step: Step, spec: CommandSpec, *, waits: bool, cause: str = "") -> Command:
        """Take up a command whose intent is on record. It runs once it is launched."""
        command = Command(step, spec, self._directory, waits=waits, cause=cause)
        self.live[command.id] = command
        return command

    def take_up(self, step: Step, intent: Intent) -> None:
        """Take up a command that an earlier edge started; `resume` finds out what became of it."""
        assert intent.command is not None, "the intent of a command carries it"
        command = self.begin(step, intent.command, waits=intent.op == "exec")
        if intent.op == "command":  # its start was answered, only its end is open
            step.result = command.info
        command.sent = command.placed = True
        command.superseded = self._journal.superseded(intent)
        command.started_at = intent.at
        command.refused_before = intent.refused
        command.stalled_s = self._journal.stalled.get(command.id, 0.0)

    async def launch(self, command: Command) -> None:
        """Have the guest start it, as soon as the guest has a place.

        Raises:
            LimitExceeded: there was none for QUEUE_WAIT_S, or too many wait already.
        """
        began = self._clock.monotonic()
        if not self._places.take_nowait():
            await self._places.take()
            command.stalled_s = self._clock.monotonic() - began
        if command.id not in self.live:  # cancelled, or the sandbox ended meanwhile
            self._places.give_back()
            return
        if command.stalled_s:
            self._note_late_start(command)
        command.placed = True
        command.started_at = began
        if self.link is not None:  # else `resume` does it
            self._send_exec(command)

    def _start_late(self, command: Command) -> bool:
        """It has a place at last, or a link; gives whether it still wants them."""
        if command.id not in self.live:
            return False
        command.placed = True
        if self.link is None:
            return True  # `resume` comes here again
        command.stalled_s = self._clock.monotonic() - command.started_at
        with suppress(LimitExceeded):  # then another restart counts this time to the timeout
            self._note_late_start(command)
        self._send_exec(command)
        return True

    def _note_late_start(self, command: Command) -> None:
        """It was made to wait, and nothing that happened meanwhile is its doing."""
        command.refused_before = self.refused()
        self._journal.append(Stalled(command.id, command.stalled_s, *(command.refused_before or ())))

    def _send_exec(self, command: Command) -> None:
        self._ends.note_sent(command)
        data = exec_frame(command.id, command.spec, self._journal.head)
        if command.stdin is not None:
            data += command.stdin.frames()
        self.send(data)
        self._deadlines.arm(command)

    def give_up(self, command: Command, error: CloudyardError) -> None:
        """It could not even be handed to the guest."""
        self._ends.give_up(command, error)

    def refused(self) -> Refused | None:
        """What the kernel has refused the sandbox so far; None when it is gone."""
        return refused_so_far(self._counters)

    def find(self, command_id: int) -> Command:
        """A command that is under way.

        Raises:
            Conflict: it has ended.
            NotFound: there is none.
        """
        command = self.live.get(command_id)
        if command is None:
            self._history.find(command_id)
            hint = "Its result and output are kept: wait for it, or read them."
            raise Conflict(f"Command {command_id} has ended.", code="command_ended", hint=hint)
        return command

    def send(self, data: bytes) -> None:
        """Frames to the guest. While the link is down they go nowhere; `resume` makes up for it."""
        if self.link is not None:
            self.link.send(self._forgets.before(data))

    def kill(self, command: Command, why: str) -> None:
        """Kill it with its tree. It ends soon, or is given up after KILL_WAIT_S."""
        if not command.killed:
            command.killed = why
        if not command.sent:
            self._ends.finish(command)
        elif not command.dying:
            self.send(signal_frame(command.id, SIGKILL))
            command.kill_timer = self._timers.at(
                self._clock.monotonic() + KILL_WAIT_S,
                partial(
                    self._ends.finish,
                    command,
                    lost=f"the guest reported no end within {KILL_WAIT_S:g} s of SIGKILL",
                ),
            )

    def cancel(self, cause: str, *, key: str = "") -> bool:
        """Kill the command that the request of this id, or of this step key, waits for, if there is one."""
        for command in self.live.values():
            if command.waits and (command.cause == cause or (key and command.step.key == key)):
                self.kill(command, "its request was cancelled")
                return True
        return False

    def signal(self, command_id: int, number: int) -> None:
        """Signal a command's tree.

        Raises:
            NotFound: there is no such command.
            YardUnavailable: the link to the guest is being made anew.
        """
        command = self.live.get(command_id)
        if command is None:
            self._history.find(command_id)  # it has ended; what it left behind is still of its tree
        if command is not None and number == SIGKILL and not command.killed:
            command.killed = "SIGKILL was sent to it by request"
        if command is not None and not command.sent:
            self._ends.finish(command)
            return
        self.tell(signal_frame(command_id, number))

    def tell(self, data: bytes) -> None:
        """Frames that `resume` does not make up for.

        Raises:
            YardUnavailable: the link to the guest is being made anew.
        """
        if self.link is None:
            raise YardUnavailable(
                f"The connection to the guest of {self._journal.head.sandbox} is being made anew.",
                code="guest_reconnecting",
            )
        self.link.send(data)

    def feed(self, command: Command, offset: int, data: bytes, *, eof: bool) -> None:
        """Bytes for its stdin.

        Raises:
            Conflict: bytes before the offset are missing, or stdin was closed.
            InvalidRequest: it was started without stdin.
        """
        if command.stdin is None:
            raise InvalidRequest(
                f"Command {command.id} was started without stdin.",
                code="no_stdin",
                hint="Start it with stdin=True.",
            )
        command.stdin.offer(offset, data, eof=eof)
        if command.sent:
            self.send(command.stdin.frames())

    def end_all(self, *, killed: str = "", expired: bool = False, lost: str = "") -> None:
        """The sandbox has ended: so have its commands, by our doing or for a reason of their own."""
        for command in list(self.live.values()):
            if not command.killed:
                command.killed, command.expired = killed, expired
            self._ends.finish(command, lost=lost)
        self._places.open()
        self.let_go("the sandbox has ended")

    def let_go(self, why: str) -> None:
        """Close the link. The guest holds what is under way for whoever connects next."""
        self._forgets.drop()
        if self.link is not None:
            self.link.close(why)
            self.link = None

    # --- the link ---------------------------------------------------------------------------------------

    async def resume(self, link: GuestLink, *, fresh: bool = False, stalled_s: float = 0.0) -> None:
        """Take a greeted link into use and go on with every command that was under way.

        Args:
            link: the new link.
            fresh: the guest is new and holds nothing.
            stalled_s: time in which no edge was there to serve the commands.

        Raises:
            SandboxUnavailable: the link broke meanwhile.
        """
        self.link = link
        self._resumed_at = self._clock.monotonic()
        if fresh:
            return
        asked = [command for command in self.live.values() if command.sent]
        known = await self._listing.ask(link)
        unheard: list[Command] = []
        fates = fates_of(asked, known)
        for command in asked:
            if command.id not in self.live:
                continue  # it was given up meanwhile
            match fates[command.id]:
                case Settlement.GO_ON:
                    self._go_on(command, known.pop(command.id), stalled_s)
                case Settlement.START if command.unsent < SENT_AGAIN_MAX:
                    command.unsend()
                    unheard.append(command)
                case _:
                    self._ends.finish(command, lost="the guest knows nothing of it")
        self._lingering.clear()
        for number, state in known.items():
            self._end_stranger(number, state)
        self._places.recount(len(self._lingering) + sum(command.placed for command in self.live.values()))
        for command in [command for command in self.live.values() if command.placed and not command.sent]:
            self._start_late(command)
        for command in unheard:
            if command.killed:
                self._ends.finish(command)
            else:
                self._places.take_when_free(partial(self._start_late, command))

    def _end_stranger(self, number: int, state: Frame) -> None:
        if number in self._journal.intents:  # its end could not be put on record: it may not be forgotten
            self._lingering.add(number)
            return
        self.send(end_stranger(number, state))
        if state.number(Tag.RUNNING, 0):
            self._lingering.add(number)

    def _go_on(self, command: Command, state: Frame, stalled_s: float) -> None:
        command.note_started(state)
        if not command.waits and not command.step.done and command.info.pid:
            self._answer_start(command)
        frames = go_on(command, state)
        if not state.number(Tag.RUNNING, 0):
            command.absence_s = stalled_s  # how much of it the command took is known with its end
        else:
            if stalled_s:
                command.stalled_s += stalled_s
                with suppress(LimitExceeded):  # then another restart counts this one to the timeout
                    self._journal.append(Stalled(command.id, command.stalled_s))
            self._deadlines.arm(command)
        self.send(frames)

    def on_frame(self, frame: Frame) -> None:
        """Do what a frame asks for."""
        command = self.live.get(frame.command)
        match frame.kind:
            case Kind.OUTPUT if command is not None:
                self._take_output(command, frame)
            case Kind.STARTED if command is not None:
                self._started(command, frame)
            case Kind.EXITED if command is not None:
                self._ends.exited(command, frame, resumed_at=self._resumed_at)
            case Kind.NOT_STARTED if command is not None:
                self._ends.not_started(command, frame)
            case Kind.STDIN_ACK if command is not None and command.stdin is not None:
                command.stdin.acknowledge(frame.number(Tag.OFFSET), closed=bool(frame.number(Tag.EOF, 0)))
                self.send(command.stdin.frames())
            case Kind.TREE_GONE if command is not None and command.exit is not None:
                command.tree_gone = True
                self._ends.finish(command)
            case Kind.TREE_GONE if frame.command in self._lingering:
                self._ends.tree_gone(frame.command)
            case Kind.EXITED if frame.command in self._lingering:
                self._ends.exited_late(frame.command, tree_lives=bool(frame.number(Tag.TREE_ALIVE, 0)))
            case Kind.STATE:
                self._listing.note(frame)
            case Kind.LISTED:
                self._listing.end()
            case Kind.ERROR:
                said = frame.text(Tag.TEXT)[:SAID_MAX_CHARS]
                log.warning("%s: the guest complains: %s", self._journal.head.sandbox, said)
            case kind:
                if kind not in _KINDS:
                    raise FrameError(f"a frame of the unknown kind {kind}")

    def on_quiet(self) -> None:
        """Acknowledge all that came together at once."""
        if not self._unacknowledged:
            return
        for number, command in self._unacknowledged.items():
            if number in self.live:
                self.send(command.acknowledgements())
        self._unacknowledged.clear()

    def on_broken(self, why: str) -> None:
        """The link broke: somebody has to look whether the guest lives."""
        self.link = None
        self._forgets.drop()
        self._listing.end()
        self._on_broken(why)

    # --- what frames cause ------------------------------------------------------------------------------

    def _take_output(self, command: Command, frame: Frame) -> None:
        stream = command.stream_of(frame)
        stream.take(frame.number(Tag.OFFSET), frame.data(Tag.DATA))
        self._deadlines.heard(command)
        if stream.spilled:
            self._unacknowledged[command.id] = command

    def _started(self, command: Command, frame: Frame) -> None:
        command.note_started(frame)
        if not command.waits and not command.step.done:
            self._answer_start(command)

    def _answer_start(self, command: Command) -> None:
        if not self._ends.answer_start(command):
            self.kill(command, "its start could not be put on record")
