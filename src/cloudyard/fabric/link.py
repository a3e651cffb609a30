"""One connection of the NATS library, from its making to its end, and what of the library has to be worked
around.

The library reconnects by itself, but gives up for ever on some errors and keeps sending what it had queued.
So its reconnecting is off: a link is used once, and `Fabric` makes a new one when it is lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import anyio
import nats.errors
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from cloudyard.errors import InvalidRequest, Unsupported

CONNECT_TIMEOUT_S = 2  # one attempt to connect, and each of its steps
PING_S = 5  # a peer that misses two pings is gone
CLOSE_S = 2.0  # bound of closing
FAILURES = (nats.errors.Error, OSError, TimeoutError)  # what a connection fails with

OnMessage = Callable[[Msg], Awaitable[None]]


class Credentials(Struct, frozen=True):
    """Who we are to NATS: a user and a password, or the path of a credentials file. All empty: what the URL
    says.
    """

    user: str = ""
    password: str = ""
    creds_file: str = ""

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r}, password=<secret>, creds_file={self.creds_file!r})"


class Listener(Struct, eq=False):
    """A subscription that outlives links. `now` is what it is on the present one, `since` (seconds of the
    event loop's clock) when the server had taken it there.
    """

    subject: str
    on_message: OnMessage
    now: Subscription | None = None
    refused: bool = False
    since: float = 0.0


class Link:
    """One connection, and whether it is lost."""

    def __init__(self, on_error: Callable[[Exception], bool]) -> None:
        self.client = Client()
        self.lost = anyio.Event()
        self._on_error = on_error

    @classmethod
    async def open(
        cls, url: str, credentials: Credentials, *, name: str, on_error: Callable[[Exception], bool]
    ) -> Self:
        """Connect.

        Args:
            url: where NATS is.
            credentials: who we are.
            name: how the connection is called there.
            on_error: told what the library reports outside of any call; says whether the link lives on.

        Raises:
            FAILURES: it is away, or does not let us in.
        """
        link = cls(on_error)
        try:
            await link.client.connect(
                servers=[url],
                name=name,
                user=credentials.user or None,
                password=credentials.password or None,
                user_credentials=credentials.creds_file or None,
                error_cb=link._error,
                closed_cb=link._closed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=CONNECT_TIMEOUT_S,
                ping_interval=PING_S,
                max_outstanding_pings=2,
                inbox_prefix=f"_INBOX_{credentials.user or 'any'}",
            )
        except BaseException:
            with anyio.CancelScope(shield=True):
                await link.close(())
            raise
        return link

    @property
    def alive(self) -> bool:
        """Whether messages can be sent. Some failures of the library end it without any callback."""
        return self.client.is_connected and not self.lost.is_set()

    async def hear(self, listener: Listener) -> None:
        """Subscribe, and return when the server has taken it, or `listener.refused` says that it has not."""
        # No bound on what waits in the library: past one it drops messages. Ours are bounded by who asked, by
        # `limit` in serve, which refuses, and by `limit` in subscribe, which says so.
        listener.now = await self.client.subscribe(
            listener.subject, cb=listener.on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )
        # The library's ping overtakes what is queued. Its answer shows that the queue has been written since;
        # the answer to the second one shows that the server has taken, or refused, what was in it.
        # Shielded: the answer to a ping that was given up makes the library lose all that came with it.
        with anyio.CancelScope(shield=True):
            for _ in range(2):
                await self.client.flush(timeout=CONNECT_TIMEOUT_S)
        listener.since = anyio.current_time()

    async def close(self, listeners: Sequence[Listener]) -> None:
        """End it, within CLOSE_S."""
        with anyio.move_on_after(CLOSE_S), suppress(Exception):  # a broken client fails to close in many ways
            await self.client.close()
        for listener in listeners:
            if listener.now is not None and (task := listener.now._wait_for_msgs_task) is not None:
                task.cancel()  # the library leaves it behind when its own closing fails

    async def _error(self, error: Exception) -> None:
        if not self._on_error(error):
            await self._closed()

    async def _closed(self) -> None:
        # What was not sent yet is dropped: closing would try to write it, and its askers are told that it
        # failed.
        self.client._pending = []
        self.client._pending_data_size = 0
        self.lost.set()


def check_address(url: str, credentials: Credentials) -> None:
    """Refuse what no waiting will make better.

    Raises:
        InvalidRequest: the URL is none of NATS, or the credentials file cannot be read.
        Unsupported: credentials files need a package that is not here.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("nats", "tls", "ws", "wss") or not parts.hostname:
        raise InvalidRequest(
            f"{shown(url)!r} is no address of NATS.",
            code="bad_nats_url",
            hint="Write it like nats://host:4222.",
        )
    if not credentials.creds_file:
        return
    try:
        Path(credentials.creds_file).read_bytes()
    except OSError as exc:
        raise InvalidRequest(
            f"Reading the credentials file {credentials.creds_file} failed: {exc.strerror}.",
            code="bad_credentials_file",
            hint="It is the .creds file that the operator of NATS gave you.",
        ) from exc
    if find_spec("nkeys") is None:
        raise Unsupported(
            "Credentials files of NATS need the package nkeys.", code="no_nkeys", hint="pip install nkeys"
        )


def shown(url: str) -> str:
    """The URL without its password."""
    return url.rsplit("@", 1)[-1]
