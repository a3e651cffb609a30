"""This program's terminal joined to one in a sandbox: raw mode, resizing, detaching."""

from __future__ import annotations

import os
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from cloudyard.errors import CloudyardError
from cloudyard.sdk.process import Process
from cloudyard.sdk.tasks import plain_task_group

STDIN, STDOUT = 0, 1
DETACH = b"\x1d"  # ctrl-]
READ_BYTES = 64 * 1024
WRITE_BYTES = 4096  # what a terminal that is ready takes without blocking


async def converse(process: Process) -> bool:
    """Pass keys to the process and its output to the screen until it ends or ctrl-] is pressed.

    Returns:
        Whether it was detached from.
    """
    detached = False
    with _raw_mode():
        async with plain_task_group() as tasks:

            async def keys() -> None:
                nonlocal detached
                detached = await _send_keys(process)
                tasks.cancel_scope.cancel()

            tasks.start_soon(keys)
            tasks.start_soon(_follow_size, process)
            async for piece in process.stdout():
                await _show(piece)
            tasks.cancel_scope.cancel()
    return detached


async def _send_keys(process: Process) -> bool:
    """Until ctrl-] (True) or the end of stdin (False)."""
    while True:
        await anyio.wait_readable(STDIN)
        keys = os.read(STDIN, READ_BYTES)
        before, found, _ = keys.partition(DETACH)
        if before:
            try:
                await process.write(before)
            except CloudyardError:
                await anyio.sleep_forever()  # it has ended: its last output is still to come
        if found:
            return True
        if not keys:
            return False


async def _follow_size(process: Process) -> None:
    with anyio.open_signal_receiver(signal.SIGWINCH) as resizes:
        await _resize(process)  # it may have changed since the process was started
        async for _ in resizes:
            await _resize(process)


async def _resize(process: Process) -> None:
    size = os.get_terminal_size(STDIN)
    try:
        await process.resize(max(size.lines, 1), max(size.columns, 1))
    except CloudyardError:
        return  # it has ended


async def _show(piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        await anyio.wait_writable(STDOUT)
        view = view[os.write(STDOUT, view[:WRITE_BYTES]) :]


@contextmanager
def _raw_mode() -> Iterator[None]:
    before = termios.tcgetattr(STDIN)
    tty.setraw(STDIN, termios.TCSADRAIN)  # what was typed ahead is kept
    try:
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSADRAIN, before)
