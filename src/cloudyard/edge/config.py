"""What an edge is told when it starts, and the bounds it keeps. Knows the model and nothing that runs."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from cloudyard.model import KIB, MIB
from cloudyard.wire.messages import MESSAGE_BYTES_MAX

CALLS_MAX = 8192  # calls under way in one edge
CREATES_AT_ONCE = 16  # launches under way; further creates wait their turn
SENT_AGAIN_MAX = 8  # that a command goes to a guest anew whose link broke before it had started it
COMPLAINTS_MAX = 1000  # ERROR frames of one link to a guest, each of which is a line in our log
SAID_MAX_CHARS = 200  # of what a guest complains of, in that line
GUEST_ANSWER_S = 10.0  # a guest that does not greet within this is taken for dead
LEAVE_S = 10.0  # tear-downs under way may take so long when the edge leaves; the next start goes on with them
RECONNECT_S = 10.0  # a lost connection is tried again for so long while PID 1 lives
PROBE_S = 30.0  # the image's probe may take so long
STOP_S = 60.0  # a backend may take so long to tear an instance down before it is logged and tried again
KILL_WAIT_S = 10.0  # from SIGKILL to the end of a command; a guest that says nothing by then has lost it
TREE_WAIT_S = 2.0  # from a killed command's end to the end of the last process of its tree

COMMANDS_LIVE_MAX = 248  # commands under way in one guest; the guest holds GUEST_COMMANDS_MAX
COMMANDS_QUEUED_MAX = 4096  # commands that wait for a place in one guest
QUEUE_WAIT_S = 60.0  # for a place, before the command is refused
COMMANDS_KEPT_MAX = 10_000  # finished commands of one sandbox whose results are kept
OUTPUT_KEPT_MAX_BYTES = 256 * MIB  # output of finished commands of one sandbox
SPILL_AT_BYTES = 64 * KIB  # a stream longer than this goes to a file; half of the guest's window
STDIN_PENDING_MAX_BYTES = 1 * MIB  # bytes of a command's stdin held in the edge
LINK_PENDING_MAX_BYTES = 64 * MIB  # bytes for a guest that does not read; then the link is given up
JOURNAL_MAX_BYTES = 64 * MIB  # a sandbox's record file is rewritten past this
JOURNAL_RESULTS_MAX = 2 * COMMANDS_KEPT_MAX  # or past so many results in it
JOURNAL_KEPT_BYTES = 32 * MIB  # what is left of it then: the newest results
RESULT_RECORDED_MAX_BYTES = (
    256 * KIB
)  # a larger result of a read is not recorded; a repeat of its key reads again
LISTED_COMMANDS_MAX = 1000  # in one CommandList: those that run, then the newest of the rest
REPLY_BYTES_MAX = MESSAGE_BYTES_MAX - 4 * KIB  # the rest is for what carries it
FORGET_DELAY_S = 0.05  # that a guest may forget a command is told it with the next frame, or so late
FORGET_S = 30.0  # how often ended sandboxes that are past their time are looked for
ALIVE_STAMP_S = 0.5  # how often the edge notes on disk that it lives


class EdgeConfig(Struct, frozen=True, kw_only=True):
    """One edge: its name, where it keeps its state, and what it may promise."""

    edge: str
    """Its id, which the ids of its sandboxes carry."""
    state_dir: Path
    """The yard's; the edge's own files are in `edge/` below it."""
    cpu_total: float
    """Cores of this node that sandboxes may be promised, before overcommit."""
    memory_total_bytes: int
    """Memory of this node that sandboxes may be promised, before overcommit."""
    cpu_overcommit: float = 10.0
    """Most sandboxes wait for their model most of the time: about 90% use at most 5% of what they asked
    for.
    """
    memory_overcommit: float = 2.0
    sandboxes_max: int = 4096
    creates_at_once: int = CREATES_AT_ONCE

    @property
    def edge_dir(self) -> Path:
        return self.state_dir / "edge"

    @property
    def records_dir(self) -> Path:
        return self.edge_dir / "records"

    @property
    def output_dir(self) -> Path:
        return self.edge_dir / "output"
