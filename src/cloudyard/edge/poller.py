"""One wait for all sockets of an edge.

An edge holds thousands of idle connections. A task for each would cost kilobytes and a wake-up through
the event loop's own registry for each frame; here an idle connection costs one entry in an epoll set, and
one task waits for the set.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress

import anyio

READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
WRITABLE = select.EPOLLOUT
SCRATCH_BYTES = 256 * 1024  # received at once; the level-triggered set comes back for the rest
READY_MAX = 256  # sockets served before other work of the event loop gets its turn

Handler = Callable[[int], None]


class Poller:
    """Calls a plain function, with epoll's bits, whenever its socket is ready. The function may not wait."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        """Where handlers receive to: one for all, since they take turns."""

    def add(self, fd: int, handler: Handler) -> None:
        """Watch a descriptor for bytes to read."""
        self._epoll.register(fd, READABLE)
        self._handlers[fd] = handler

    def want_write(self, fd: int, *, wanted: bool) -> None:
        """Watch a descriptor for room to write as well, or no longer."""
        self._epoll.modify(fd, READABLE | WRITABLE if wanted else READABLE)

    def remove(self, fd: int) -> None:
        """Watch it no longer. Call it before the descriptor is closed."""
        if self._handlers.pop(fd, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(fd)

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await anyio.wait_readable(self._epoll.fileno())
            for fd, bits in self._epoll.poll(0, READY_MAX):
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler(bits)

    def close(self) -> None:
        """Give the set back."""
        self._epoll.close()
