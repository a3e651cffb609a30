"""How a new link goes on with commands: what becomes of each, and the frames for those that the guest holds,
made from what LIST told of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cloudyard.core.reconcile import OpenStep, Settlement, settle
from cloudyard.edge.command import Command
from cloudyard.edge.translate import acknowledgement, signal_frame
from cloudyard.edge.verdict import SIGKILL
from cloudyard.wire.guest import STDERR, STDOUT, Frame, Kind, Tag, encode


def fates_of(asked: Iterable[Command], known: Mapping[int, Frame]) -> dict[int, Settlement]:
    """What becomes of commands that the guest was asked to start."""
    return settle((OpenStep(one.id, command=True, repeatable=False, begun=one.begun) for one in asked), known)


def go_on(command: Command, state: Frame) -> bytes:
    """Have the guest send on where the command's streams are here, and feed its stdin from where that is
    there.
    """
    frames: list[bytes] = []
    streams = [(STDOUT, command.stdout, Tag.STDOUT_ACKED), (STDERR, command.stderr, Tag.STDERR_ACKED)]
    for number, stream, tag in streams[: 1 if command.spec.pty else 2]:  # a terminal has only one
        offset = stream.total or stream.resume(state.number(tag, 0))
        frames.append(encode(Kind.RESUME, command.id, (Tag.STREAM, number), (Tag.OFFSET, offset)))
        if stream.spilled:
            frames.append(acknowledgement(command.id, number, offset))
    if command.stdin is not None:
        command.stdin.resume(state.number(Tag.STDIN_TAKEN, 0))
        frames.append(command.stdin.frames())
    if command.dying:
        frames.append(signal_frame(command.id, SIGKILL))
    return b"".join(frames)


def end_stranger(number: int, state: Frame) -> bytes:
    """Have the guest end a command that nobody waits for: its end is on record, or it was given up."""
    if not state.number(Tag.RUNNING, 0):
        return encode(Kind.FORGET, number)
    frames = [signal_frame(number, SIGKILL)]
    for stream, tag in ((STDOUT, Tag.STDOUT_TOTAL), (STDERR, Tag.STDERR_TOTAL)):
        offset = state.number(tag, 0)  # nothing of its output is wanted, only the word of its end
        frames.append(encode(Kind.RESUME, number, (Tag.STREAM, stream), (Tag.OFFSET, offset)))
    return b"".join(frames)
