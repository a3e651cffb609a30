"""This program's terminal joined to one in a sandbox: raw mode, resizing, detaching."""

from __future__ import annotations

import os
import select
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum

import anyio

from cloudyard.errors import CloudyardError
from cloudyard.sdk.process import Process
from cloudyard.sdk.tasks import plain_task_group

STDIN, STDOUT, STDERR = 0, 1, 2
DETACH = b"\x1d"  # ctrl-]
READ_BYTES = 64 * 1024
WRITE_BYTES = 4096  # what a terminal or a pipe that is ready takes without blocking


class Parting(Enum):
    """How a conversation came to its end."""

    ENDED = "the process ended"
    DETACHED = "ctrl-] was pressed"
    HUNG_UP = "the terminal went away"


async def converse(process: Process) -> Parting:
    """Pass keys to the process and its output to the screen until one of the three leaves."""
    parting = Parting.ENDED
    with _raw_mode():
        async with plain_task_group() as tasks:

            async def keys() -> None:
                nonlocal parting
                parting = await _send_keys(process)
                tasks.cancel_scope.cancel()

            tasks.start_soon(keys)
            tasks.start_soon(_follow_size, process)
            async for piece in process.stdout():
                try:
                    await put(STDOUT, piece)
                except OSError:
                    parting = Parting.HUNG_UP
                    break
            tasks.cancel_scope.cancel()
    return parting


async def _send_keys(process: Process) -> Parting:
    """Until ctrl-] or the end of stdin."""
    while True:
        await anyio.wait_readable(STDIN)
        try:
            keys = os.read(STDIN, READ_BYTES)
        except OSError:
            return Parting.HUNG_UP
        before, found, _ = keys.partition(DETACH)
        if before:
            try:
                await process.write(before)
            except CloudyardError:
                await anyio.sleep_forever()  # it has ended: its last output is still to come
        if found:
            return Parting.DETACHED
        if not keys:
            return Parting.HUNG_UP


async def _follow_size(process: Process) -> None:
    with anyio.open_signal_receiver(signal.SIGWINCH) as resizes:
        await _resize(process)  # it may have changed since the process was started
        async for _ in resizes:
            await _resize(process)


async def _resize(process: Process) -> None:
    try:
        size = os.get_terminal_size(STDIN)
        await process.resize(max(size.lines, 1), max(size.columns, 1))
    except (CloudyardError, OSError):
        return  # it has ended, or the terminal went away


async def put(sink: int, piece: bytes) -> None:
    """Write to a file of any kind and never block the event loop for a reader that is slow.

    Raises:
        OSError: it cannot be written to; BrokenPipeError where nobody reads any more.
    """
    view = memoryview(piece)
    while view:
        if not select.select([], [sink], [], 0)[1]:
            await anyio.wait_writable(sink)
        view = view[os.write(sink, view[:WRITE_BYTES]) :]


@contextmanager
def _raw_mode() -> Iterator[None]:
    before = termios.tcgetattr(STDIN)
    tty.setraw(STDIN, termios.TCSADRAIN)  # what was typed ahead is kept
    try:
        yield
    finally:
        with suppress(termios.error):  # it may have gone away
            termios.tcsetattr(STDIN, termios.TCSADRAIN, before)
