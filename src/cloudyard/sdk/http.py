"""The yard's HTTP API: creating, listing and images for every client, and operations and calls where the
transport is `http`.

This is the one door to `httpx`: its errors become ours here, by the table below.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio
import httpx
import msgspec

from cloudyard.errors import CloudyardError, YardUnavailable
from cloudyard.model import AnyOp, AnyResult, CallResult, CallSpec, CreateRequest, Exec, SandboxInfo
from cloudyard.sdk.config import Config
from cloudyard.sdk.transport import (
    ANSWER_GRACE_S,
    CREATE_WITHIN_S,
    error_of_response,
    lost,
    no_answer,
    unreachable,
)
from cloudyard.wire.messages import ImageRow, SandboxPage

CONNECT_WITHIN_S = 5.0
POOL_CONNECTIONS = 8  # of one pool: httpx looks at each of them for every request
POOLS_MAX, POOLS_KEPT = 128, 8  # those beyond POOLS_KEPT go when they are idle
STEP_KEY_HEADER = "Step-Key"
CANCEL_WITHIN_S = 5.0
# A long command has no time limit of its own: the kernel's keep-alive notices a peer that is gone.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_result = msgspec.json.Decoder(AnyResult)


class _Images(msgspec.Struct, frozen=True):
    images: list[ImageRow]


class _Pool:
    """A few connections, and how many requests use them now."""

    def __init__(self, config: Config, tls: ssl.SSLContext) -> None:
        self.in_flight = 0
        self.client = httpx.AsyncClient(
            base_url=config.url,
            headers={"Authorization": f"Bearer {config.token}"},
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(
                    max_connections=POOL_CONNECTIONS, max_keepalive_connections=POOL_CONNECTIONS
                ),
                socket_options=_KEEP_ALIVE,
                verify=tls,
                trust_env=False,
            ),
            trust_env=False,
        )


class HttpTransport:
    """Connections to a yard's gateway, in pools that are small: one large pool of httpx spends its time on
    itself.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        # Reading the system's certificates takes 20 ms: once, and only where they are needed.
        secure = config.url.startswith("https:")
        self._tls = ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._pools: list[_Pool] = []
        self._slots = anyio.Semaphore(POOLS_MAX * POOL_CONNECTIONS, fast_acquire=True)

    async def ask(self, sandbox: str, op: AnyOp, *, key: str, within_s: float | None) -> AnyResult:
        """See `Transport.ask`."""
        headers = {"Content-Type": "application/json"}
        if key:
            headers[STEP_KEY_HEADER] = key
        path = f"/v1/sandboxes/{sandbox}"
        try:
            content = await self._send(
                "POST", f"{path}/ops", within_s=within_s, content=_encode(op), headers=headers
            )
        except anyio.get_cancelled_exc_class():
            if isinstance(op, Exec):  # a connection that breaks kills nothing: it may be only the network
                with anyio.CancelScope(shield=True), suppress(CloudyardError):
                    await self._send(
                        "POST", f"{path}/cancel", within_s=CANCEL_WITHIN_S, headers={STEP_KEY_HEADER: key}
                    )
            raise
        return _decoded(_result, content)

    async def create(self, request: CreateRequest) -> SandboxInfo:
        """See `Transport.create`."""
        content = await self._send(
            "POST",
            "/v1/sandboxes",
            within_s=CREATE_WITHIN_S,
            content=_encode(request),
            headers={"Content-Type": "application/json"},
        )
        return _decoded(_sandbox, content)

    async def call(self, spec: CallSpec, *, within_s: float) -> CallResult:
        """See `Transport.call`. When it is cancelled its connection breaks, by which the yard knows."""
        content = await self._send(
            "POST",
            "/v1/calls",
            within_s=within_s,
            content=_encode(spec),
            headers={"Content-Type": "application/json"},
        )
        return _decoded(_call_result, content)

    async def sandboxes(self, *, stopped: bool, partial: bool) -> list[SandboxInfo]:
        """The project's sandboxes; with `partial` those that could be asked for.

        Raises:
            YardUnavailable: there may be more, on edges that do not answer.
        """
        query = {"stopped": "true"} if stopped else {}
        content = await self._send("GET", "/v1/sandboxes", within_s=ANSWER_GRACE_S, params=query)
        page = _decoded(_page, content)
        if page.missing and not partial:
            raise YardUnavailable(
                f"The list of sandboxes is not whole: {', '.join(page.missing)} did not answer.",
                code="list_incomplete",
                hint="partial=True (--partial) gives those of all other nodes.",
            )
        return page.sandboxes

    async def images(self) -> list[ImageRow]:
        """Images that sandboxes can be made from."""
        return _decoded(_images, await self._send("GET", "/v1/images", within_s=ANSWER_GRACE_S)).images

    async def close(self) -> None:
        """Close every connection."""
        while self._pools:
            await self._pools.pop().client.aclose()

    async def _send(self, method: str, path: str, *, within_s: float | None, **request: Any) -> bytes:
        timeout = httpx.Timeout(within_s, connect=CONNECT_WITHIN_S, pool=None)
        try:
            async with self._slots, self._pool() as client:
                response = await client.request(method, path, timeout=timeout, **request)
        except httpx.HTTPError as exc:
            raise translated(exc, url=self._config.url, within_s=within_s or 0) from exc
        if response.is_success:
            return response.content
        raise error_of_response(response.status_code, response.content, url=self._config.url)

    @asynccontextmanager
    async def _pool(self) -> AsyncIterator[httpx.AsyncClient]:
        """The first pool with a free connection."""
        pool = next((pool for pool in self._pools if pool.in_flight < POOL_CONNECTIONS), None)
        if pool is None:
            pool = _Pool(self._config, self._tls)
            self._pools.append(pool)
        pool.in_flight += 1
        try:
            yield pool.client
        finally:
            pool.in_flight -= 1
            while len(self._pools) > POOLS_KEPT and self._pools[-1].in_flight == 0:
                with anyio.CancelScope(shield=True):
                    await self._pools.pop().client.aclose()


_sandbox = msgspec.json.Decoder(SandboxInfo)
_call_result = msgspec.json.Decoder(CallResult)
_page = msgspec.json.Decoder(SandboxPage)
_images = msgspec.json.Decoder(_Images)


def translated(error: httpx.HTTPError, *, url: str, within_s: float) -> CloudyardError:
    """Our error for one of httpx. The most specific class that fits decides."""
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return unreachable(url, str(error) or "no answer in time")
        case httpx.ReadTimeout() | httpx.WriteTimeout():
            return no_answer(url, within_s)
        case httpx.NetworkError() | httpx.RemoteProtocolError():
            return lost(url, str(error) or type(error).__name__)
        case _:
            return YardUnavailable(
                f"The call to the yard at {url} failed: {str(error) or type(error).__name__}.",
                code="http_client",
                retry_safe=False,
            )


def _decoded(decoder: msgspec.json.Decoder[T], content: bytes) -> T:
    try:
        return decoder.decode(content)
    except msgspec.MsgspecError as exc:
        raise CloudyardError(
            f"The yard's answer cannot be read: {exc}.",
            code="unexpected_answer",
            hint="Client and yard may be of different versions.",
        ) from exc
