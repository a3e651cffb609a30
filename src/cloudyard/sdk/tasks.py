"""Errors of tasks come out as themselves, and pieces are fetched ahead but taken in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from cloudyard.model import CHUNK_BYTES_MAX, STREAM_WINDOW


@asynccontextmanager
async def plain_task_group() -> AsyncIterator[TaskGroup]:
    """A task group whose first error is raised as itself: users catch NotFound, not a group of them."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def pull(
    fetch: Callable[[int, int], Awaitable[bytes]],
    take: Callable[[bytes], Awaitable[None]],
    *,
    start: int,
    end: int,
) -> None:
    """Fetch every byte from `start` to `end`, STREAM_WINDOW pieces at a time, and hand the pieces over in
    order.

    Args:
        fetch: gives the bytes at an offset, exactly as many as asked.
        take: called with one piece after the other; the next waits for it.
        start: offset of the first byte.
        end: offset behind the last byte.
    """
    offsets = iter(range(start, end, CHUNK_BYTES_MAX))
    turns: defaultdict[int, anyio.Event] = defaultdict(anyio.Event)
    turns[start].set()

    async def worker() -> None:
        for offset in offsets:
            piece = await fetch(offset, min(CHUNK_BYTES_MAX, end - offset))
            await turns[offset].wait()
            del turns[offset]
            await take(piece)
            turns[offset + CHUNK_BYTES_MAX].set()

    async with plain_task_group() as tasks:
        for _ in range(STREAM_WINDOW):
            tasks.start_soon(worker)
