"""The control process: fabric, watcher, placer and gateway, wired together and served."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Iterator, Sequence

import anyio
import uvicorn
from anyio.abc import TaskGroup, TaskStatus
from msgspec import Struct

from cloudyard.control.auth import Tokens
from cloudyard.control.calls import Calls
from cloudyard.control.creates import Creates
from cloudyard.control.edges import Edges
from cloudyard.control.gateway import Gateway
from cloudyard.control.placer import Placer
from cloudyard.control.store_keeper import OwnStore, keep_store
from cloudyard.control.watcher import Watcher
from cloudyard.control.yard import Yard
from cloudyard.core.iam import Grant
from cloudyard.core.placement import Fleet
from cloudyard.errors import Conflict, InvalidRequest
from cloudyard.fabric import Credentials, Fabric
from cloudyard.wire.messages import MUX_FRAME_MAX

log = logging.getLogger(__name__)

BACKLOG = 2048  # connections that wait to be accepted
GRACE_S = 3  # requests under way may end, then they are cut off: their clients come again with the same keys
STOP_S = 6.0  # bound of the whole stop
KEEP_ALIVE_S = 75  # an idle HTTP connection
PING_S = 20.0  # on idle mux sockets


class ControlConfig(Struct, frozen=True, kw_only=True):
    """All that the control process is told."""

    nats_url: str
    credentials: Credentials
    host: str = "127.0.0.1"
    port: int = 8470
    """0: any free port; `serve_control` says which."""
    grants: list[Grant] = []
    """Made valid at the start: the local yard's own token."""


class Address(Struct, frozen=True):
    """Where the gateway listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The base of every route."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


async def serve_control(
    config: ControlConfig,
    own_store: OwnStore | None = None,
    *,
    task_status: TaskStatus[Address] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Run the control part of a yard until cancelled; ready when `task_status` gives the address.

    Args:
        config: what it is told.
        own_store: the NATS server, where it is this yard's own and may be started again.
        task_status: told the address.

    Waits for NATS for as long as it takes. Stops within STOP_S: no new requests, a grace for those under way,
    then the end.

    Raises:
        Conflict: the port is in use.
        InvalidRequest: the address cannot be listened on.
        Unauthorized: NATS refuses the credentials.
    """
    with _listen(config.host, config.port) as listener:
        async with (
            Fabric.connect(config.nats_url, config.credentials, name="control") as fabric,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(keep_store, fabric, own_store)
            yard = await open_yard(fabric, tasks, config.grants)
            host, port = listener.getsockname()[:2]
            await _serve(Gateway(yard), listener, Address(host, port), task_status)
            tasks.cancel_scope.cancel()


async def open_yard(fabric: Fabric, tasks: TaskGroup, grants: Sequence[Grant]) -> Yard:
    """Everything behind the gateway, wired together; its watcher runs in `tasks`."""
    fleet = Fleet()
    watcher = Watcher(fabric, fleet)
    edges = Edges(fabric, watcher)
    tokens = Tokens(fabric)
    creates = Creates(fabric, edges, Placer(fleet), tasks)
    for grant in grants:
        await tokens.issue(grant)
    await tasks.start(watcher.run)
    return Yard(
        store=fabric.store,
        tokens=tokens,
        watcher=watcher,
        edges=edges,
        creates=creates,
        calls=Calls(fleet, watcher, edges),
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise Conflict(
                f"Listening on {host} port {port} failed: the port is in use.",
                code="port_in_use",
                hint="Choose another port, or stop what uses it: `ss -ltnp` shows it.",
            ) from exc
        raise InvalidRequest(
            f"Listening on {host} port {port} failed: {exc.strerror or exc}.",
            code="bad_listen_address",
            hint="Give an address of this machine, such as 127.0.0.1.",
        ) from exc


async def _serve(
    gateway: Gateway, listener: socket.socket, address: Address, task_status: TaskStatus[Address]
) -> None:
    server = _Server(
        uvicorn.Config(
            gateway,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="websockets-sansio",
            ws_max_size=MUX_FRAME_MAX,
            ws_per_message_deflate=False,  # costs more than it saves on a fast network
            ws_ping_interval=PING_S,
            ws_ping_timeout=PING_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        ),
        address,
        task_status,
    )
    ended = anyio.Event()

    async def run() -> None:
        with anyio.CancelScope(shield=True):
            try:
                await server.serve(sockets=[listener])
            finally:
                ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        try:
            await ended.wait()
        finally:
            server.should_exit = True
            with anyio.move_on_after(STOP_S, shield=True):
                await ended.wait()
            server.force_exit = True


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers (cancelling stops it), and telling when it is ready."""

    def __init__(self, config: uvicorn.Config, address: Address, task_status: TaskStatus[Address]) -> None:
        super().__init__(config)
        self._address = address
        self._task_status = task_status

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("the gateway listens on %s", self._address.url)
        self._task_status.started(self._address)
