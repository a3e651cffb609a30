"""The same client with plain calls, for scripts and notebooks: `with cloudyard.blocking.connect() as yard:`.

Every class here is the async one seen through a portal to an event loop in a thread of its own. A method is
one line: it has the signature and the docstring of the async method. Handles may be used from any thread.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from cloudyard.model import CommandInfo
from cloudyard.sdk import client, process, sandbox, session
from cloudyard.sdk.client import TransportName

P = ParamSpec("P")
A = TypeVar("A")  # the async object
R = TypeVar("R")  # what a method of it gives
F = TypeVar("F")  # the facade of what it gives


class _Facade(Generic[A]):
    """An async object and the portal to its event loop."""

    def __init__(self, behind: A, portal: BlockingPortal) -> None:
        self._behind = behind
        self._portal = portal

    def __repr__(self) -> str:
        return repr(self._behind)


_Method = Callable[Concatenate[Any, P], R]
_Wrap = Callable[[A, BlockingPortal], F]


def _wait(portal: BlockingPortal, work: Callable[[], Awaitable[R]]) -> R:
    """Run it in the event loop. Interrupting this thread cancels it there."""
    future = portal.start_task_soon(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _call(method: _Method[P, Awaitable[R]]) -> _Method[P, R]:
    """A method as a plain call."""

    @functools.wraps(method)
    def call(self: _Facade[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return _wait(self._portal, functools.partial(method, self._behind, *args, **kwargs))

    return call


def _call_for(facade: _Wrap[R, F], method: _Method[P, Awaitable[R]]) -> _Method[P, F]:
    """A method that gives a handle."""

    @functools.wraps(method)
    def call(self: _Facade[Any], /, *args: P.args, **kwargs: P.kwargs) -> F:
        handle = _wait(self._portal, functools.partial(method, self._behind, *args, **kwargs))
        return facade(handle, self._portal)

    return call


def _block_for(
    facade: _Wrap[R, F], method: _Method[P, AbstractAsyncContextManager[R]]
) -> _Method[P, AbstractContextManager[F]]:
    """A method that gives an async context manager for a handle."""

    @contextmanager
    @functools.wraps(method)
    def block(self: _Facade[Any], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[F]:
        with self._portal.wrap_async_context_manager(method(self._behind, *args, **kwargs)) as handle:
            yield facade(handle, self._portal)

    return block


def _stream(method: _Method[P, AsyncGenerator[bytes, None]]) -> _Method[P, Iterator[bytes]]:
    """A method that gives an async iterator, as one that gives a plain one."""

    @functools.wraps(method)
    def stream(self: _Facade[Any], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[bytes]:
        pieces = method(self._behind, *args, **kwargs)
        try:
            while (piece := _wait(self._portal, lambda: anext(pieces, None))) is not None:
                yield piece
        finally:
            _wait(self._portal, pieces.aclose)

    return stream


class Process(_Facade[process.Process]):
    """A command in a sandbox; see `cloudyard.Process`."""

    @property
    def id(self) -> int:
        """Its number in its sandbox."""
        return self._behind.id

    @property
    def pid(self) -> int:
        """Process id inside the sandbox."""
        return self._behind.pid

    @property
    def pid_start(self) -> int:
        """Start time of that process, in clock ticks since boot."""
        return self._behind.pid_start

    @property
    def info(self) -> CommandInfo:
        """What was known of it when this handle was made."""
        return self._behind.info

    stdout = _stream(process.Process.stdout)
    stderr = _stream(process.Process.stderr)
    write = _call(process.Process.write)
    close_stdin = _call(process.Process.close_stdin)
    signal = _call(process.Process.signal)
    kill = _call(process.Process.kill)
    resize = _call(process.Process.resize)
    wait = _call(process.Process.wait)


class Session(_Facade[session.Session]):
    """A stateful shell in a sandbox; see `cloudyard.Session`. It is open already; `with` closes it."""

    run = _call(session.Session.run)
    close = _call(session.Session.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sandbox(_Facade[sandbox.Sandbox]):
    """A handle on one sandbox; see `cloudyard.Sandbox`."""

    @property
    def id(self) -> str:
        """Its id, which names its edge."""
        return self._behind.id

    info = _call(sandbox.Sandbox.info)
    stop = _call(sandbox.Sandbox.stop)
    keep_alive = _call(sandbox.Sandbox.keep_alive)
    run = _call(sandbox.Sandbox.run)
    start = _call_for(Process, sandbox.Sandbox.start)
    attach = _call_for(Process, sandbox.Sandbox.attach)
    shell = _call_for(Process, sandbox.Sandbox.shell)
    session = _call_for(Session, sandbox.Sandbox.session)
    commands = _call(sandbox.Sandbox.commands)
    kill_all = _call(sandbox.Sandbox.kill_all)
    read = _call(sandbox.Sandbox.read)
    write = _call(sandbox.Sandbox.write)
    upload = _call(sandbox.Sandbox.upload)
    download = _call(sandbox.Sandbox.download)
    listdir = _call(sandbox.Sandbox.listdir)
    stat = _call(sandbox.Sandbox.stat)
    remove = _call(sandbox.Sandbox.remove)
    mkdir = _call(sandbox.Sandbox.mkdir)


def _sandboxes(boxes: list[sandbox.Sandbox], portal: BlockingPortal) -> list[Sandbox]:
    return [Sandbox(box, portal) for box in boxes]


class Yard(_Facade[client.Yard]):
    """A yard; see `cloudyard.Yard`. Inside its `with` block an event loop runs in a thread."""

    def __init__(self, behind: client.Yard) -> None:
        self._behind = behind
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """The address of its gateway."""
        return self._behind.url

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name="cloudyard"))
            stack.enter_context(self._portal.wrap_async_context_manager(self._behind))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    create = _call_for(Sandbox, client.Yard.create)
    create_many = _call_for(_sandboxes, client.Yard.create_many)
    sandbox = _block_for(Sandbox, client.Yard.sandbox)
    call = _call(client.Yard.call)
    call_many = _call(client.Yard.call_many)
    get = _call_for(Sandbox, client.Yard.get)
    list = _call(client.Yard.list)
    stop = _call(client.Yard.stop)
    images = _call(client.Yard.images)


@functools.wraps(client.connect)
def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    transport: TransportName = "mux",
    client_file: str | Path | None = None,
) -> Yard:
    return Yard(client.connect(url, token, transport=transport, client_file=client_file))
