"""A yard as its users see it: connect, create sandboxes, list and stop them, make stateless calls."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack
from uuid import uuid4

import anyio
import msgspec
from anyio.abc import TaskGroup

from cloudyard.errors import CloudyardError, InvalidRequest, NotFound, SandboxUnavailable, YardUnavailable
from cloudyard.model import (
    CREATE_MANY_MAX,
    BackendName,
    CallResult,
    CallSpec,
    CpuClass,
    CreateRequest,
    SandboxInfo,
    SandboxSpec,
    check_key,
    normalised,
)
from cloudyard.sdk import calls, config
from cloudyard.sdk.calls import CallOptions
from cloudyard.sdk.http import HttpTransport
from cloudyard.sdk.mux import MuxTransport
from cloudyard.sdk.sandbox import Sandbox
from cloudyard.sdk.transport import Caller, Transport, text_only, wait_out_restarts
from cloudyard.wire.messages import ImageRow

FIRST_CONNECT_PATIENCE_S = 3.0
CREATES_IN_FLIGHT = 64
STOPS_IN_FLIGHT = 64
CLEAN_UP_WITHIN_S = 30.0
CLOSE_WITHIN_S = 2.0

TransportName = Literal["mux", "http"]


class SandboxOptions(TypedDict, total=False):
    """What may be said of a sandbox besides its image; see `SandboxSpec` for meanings and defaults."""

    backend: BackendName
    cpu: float
    cpu_weight: int
    cpu_class: CpuClass
    memory: int | str
    swap: int | str
    disk: int | str
    pids: int
    open_files: int
    user_namespaces: bool
    lxcfs: bool
    env: dict[str, str]
    cwd: str
    user: str
    hostname: str
    idle_ttl_s: float | None
    max_ttl_s: float | None
    labels: dict[str, str]


def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    transport: TransportName = "mux",
    client_file: str | Path | None = None,
) -> Yard:
    """A client of a yard, to be opened with `async with`.

    Args:
        url: the yard's address; else CLOUDYARD_URL; else the local yard, by the file that `cloudyard up`
            writes.
        token: a token of your project; else CLOUDYARD_TOKEN; else that of the local yard.
        transport: `mux` carries operations over one WebSocket, `http` makes a request of each.
        client_file: another place for the local yard's file than CLOUDYARD_CLIENT_FILE or the usual one.

    Raises:
        YardUnavailable: no yard is named anywhere.
        InvalidRequest: the address cannot be right.
    """
    return Yard(config.find(url, token, client_file=client_file), transport=transport)


class Yard:
    """A connection to a yard. Open it with `async with`; it closes what it opened and stops no sandbox."""

    def __init__(self, where: config.Config, *, transport: TransportName = "mux") -> None:
        if transport not in ("mux", "http"):
            raise InvalidRequest(
                f"transport is {transport!r}.", code="bad_transport", hint="Either mux or http."
            )
        self._config = where
        self._transport = transport
        self._caller = Caller()
        self._tasks: TaskGroup | None = None
        self._http: HttpTransport | None = None
        self._mux: MuxTransport | None = None

    def __repr__(self) -> str:
        return f"<Yard {self._config.url} {self._caller.state.value}>"

    @property
    def url(self) -> str:
        """The address of its gateway."""
        return self._config.url

    async def __aenter__(self) -> Self:
        self._caller.check_unopened()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            self._http = HttpTransport(self._config)
            chosen: Transport = self._http
            if self._transport == "mux":
                chosen = self._mux = MuxTransport(self._config, self._tasks)
                await wait_out_restarts(self._mux.open, patience_s=FIRST_CONNECT_PATIENCE_S)
            else:
                await wait_out_restarts(self._http.images, patience_s=FIRST_CONNECT_PATIENCE_S)
        except BaseException:
            await self._close()
            raise
        self._caller.open(chosen)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._close(error)

    async def create(self, image: str, *, key: str = "", **options: Unpack[SandboxOptions]) -> Sandbox:
        """Make a sandbox. Returns once a command has run inside.

        Args:
            image: name of an image of the yard.
            key: create key: the same key gives the same sandbox, however often it is sent.
            **options: cpu (cores), memory, swap and disk (bytes or "512MiB"), pids, open_files, cpu_weight,
                cpu_class, user_namespaces, lxcfs, env, cwd, user, hostname, idle_ttl_s, max_ttl_s (seconds),
                labels, backend; see `SandboxSpec`.

        Raises:
            InvalidRequest: an option is misspelt or out of range.
            NotFound: there is no such image.
            LimitExceeded: nothing has room for it.
            YardUnavailable: the yard could not be reached for RESTART_PATIENCE_S.
        """
        return await self._create(_spec(image, options), key=key)

    async def create_many(
        self, count: int, image: str, *, key: str = "", **options: Unpack[SandboxOptions]
    ) -> list[Sandbox]:
        """Make `count` sandboxes of one kind at once: all of them or none.

        Args:
            count: how many, at most CREATE_MANY_MAX.
            key: the sandboxes' own keys derive from it, so that repeating the call after a crash gives the
                same ones. After a failure the sandboxes of this key are stopped for good: use another.

        Raises:
            CloudyardError: the first failure, saying how many failed. Those that were made have been stopped.
        """
        if not 1 <= count <= CREATE_MANY_MAX:
            raise InvalidRequest(
                f"count is {count}.", code="out_of_range", hint=f"Between 1 and {CREATE_MANY_MAX}."
            )
        with text_only():
            check_key(f"{key}-{count}" if key else "")
        spec = _spec(image, options)
        made: dict[int, Sandbox] = {}
        failures: list[CloudyardError] = []
        slots = anyio.Semaphore(CREATES_IN_FLIGHT)

        async def one(index: int) -> None:
            async with slots:
                if failures:
                    return
                try:
                    made[index] = await self._create(spec, key=f"{key}-{index}" if key else "")
                except CloudyardError as error:
                    failures.append(error)

        try:
            async with anyio.create_task_group() as tasks:
                for index in range(count):
                    tasks.start_soon(one, index)
        except BaseException:
            await self._stop_all(list(made.values()))
            raise
        if failures:
            await self._stop_all(list(made.values()))
            raise _all_or_none(failures, count) from failures[0]
        return [made[index] for index in range(count)]

    @asynccontextmanager
    async def sandbox(
        self, image: str, *, key: str = "", **options: Unpack[SandboxOptions]
    ) -> AsyncIterator[Sandbox]:
        """A sandbox for the length of a block: made as by `create`, stopped on leaving it for any reason."""
        box = await self._create(_spec(image, options), key=key)
        try:
            yield box
        except BaseException:
            await self._stop_all([box])  # what went wrong in the block is what its caller must hear of
            raise
        with anyio.fail_after(CLEAN_UP_WITHIN_S, shield=True):
            await box.stop()

    async def call(self, code: str | None = None, **options: Unpack[CallOptions]) -> CallResult:
        """Run code once, in a new process that sees nothing of any other call, and wait for its end.
        Cancelling it kills the call.

        Args:
            code: the program's text; or give `file`.
            **options: file (a local one, instead of code), language (python, shell or c; guessed from the
                file's suffix, else python), stdin (bytes or text), files (relative path to bytes or text, or
                a local directory; laid into the working directory), args, env, preload (Python modules that
                are imported already), image, timeout_s (of each run, seconds), memory (bytes or "256MiB"),
                output_limit_bytes (kept of each stream), cases (test cases to judge it on: `Case`, pairs of
                stdin and expected output, or dicts), compare (lines or exact), stop_at_first.

        Returns:
            How it ended. What the code did wrong is a result, not an exception.

        Raises:
            InvalidRequest: an option is misspelt or out of range.
            NotFound: there is no such image, or no such local file.
            Unsupported: the image has no Python or no compiler; the hint says how to build one that has.
            LimitExceeded: it is too large to send, or every edge was busy for BUSY_PATIENCE_S.
            SandboxUnavailable: it failed through our fault, each of INFRA_TRIES times.
            YardUnavailable: the yard could not be reached for RESTART_PATIENCE_S.
        """
        spec = calls.spec_of(code, options)
        return await calls.send(self._caller.check_open, spec)

    async def call_many(
        self,
        batch: Iterable[CallSpec | Mapping[str, Any] | str],
        *,
        at_once: int = 64,
        **shared: Unpack[CallOptions],
    ) -> Sequence[CallResult]:
        """Make many calls; see `call`. Results come in the order of the batch.

        All calls are checked before the first is made. One that fails through our fault is made again, and
        after INFRA_TRIES its result has the fault label `infra`: no other call is lost for it.

        Args:
            batch: of each call its code, or a dict with `code` and options as of `call`, or a CallSpec; at
                most CALL_MANY_MAX.
            at_once: calls under way at a time.
            **shared: options of every call that is given as code or a dict, which goes first.

        Raises:
            CloudyardError: as `call`, for the first call that the yard refuses for what it asks.
        """
        specs = calls.specs_of(batch, shared)
        return await calls.send_many(self._caller.check_open, specs, at_once=at_once)

    async def list(self, *, stopped: bool = False, partial: bool = False) -> Sequence[SandboxInfo]:
        """The project's sandboxes, all of them.

        Args:
            stopped: those that have stopped and are still remembered, too.
            partial: where a node does not answer, those of all others instead of an error.

        Raises:
            YardUnavailable: the yard, or a node of it (`list_incomplete`), could not be reached for
                RESTART_PATIENCE_S.
        """
        http = self._open_http()
        return await wait_out_restarts(lambda: http.sandboxes(stopped=stopped, partial=partial))

    async def get(self, sandbox_id: str) -> Sandbox:
        """A handle on a sandbox by its id.

        Raises:
            NotFound: there is none of this id.
            InvalidRequest: it is no sandbox id.
        """
        box = Sandbox(self._caller, sandbox_id)
        await box.info()
        return box

    async def stop(self, sandbox_id: str) -> SandboxInfo:
        """Stop a sandbox by its id. Stopping a stopped one is no error."""
        return await Sandbox(self._caller, sandbox_id).stop()

    async def images(self) -> Sequence[ImageRow]:
        """The images that sandboxes can be made from."""
        return await wait_out_restarts(self._open_http().images)

    async def _create(self, spec: SandboxSpec, *, key: str) -> Sandbox:
        transport = self._caller.check_open()
        request = CreateRequest(spec=spec, key=key or uuid4().hex)
        with text_only():
            check_key(key)
            msgspec.msgpack.encode(request)
        try:
            info = await wait_out_restarts(lambda: transport.create(request))
        except anyio.get_cancelled_exc_class():
            if not key:  # nobody else knows the key, so nobody else can have meant this sandbox
                await self._undo(transport, request)
            raise
        if info.state != "running":
            raise SandboxUnavailable(
                f"Sandbox {info.id} of the key {key!r} is {info.state}: {info.reason or 'nobody says why'}.",
                code="not_running",
                hint="A key names one sandbox for 24 hours: use another key for a new one.",
                fault="policy",
            )
        return Sandbox(self._caller, info.id)

    async def _undo(self, transport: Transport, request: CreateRequest) -> None:
        """Stop the sandbox of a create whose answer nobody waited for. The key says which one it is."""
        with anyio.move_on_after(CLEAN_UP_WITHIN_S, shield=True):
            try:
                info = await wait_out_restarts(lambda: transport.create(request))
            except CloudyardError:
                return  # it was never made
            await self._stop_all([Sandbox(self._caller, info.id)])

    async def _stop_all(self, boxes: Sequence[Sandbox]) -> None:
        """Stop sandboxes while an error is on its way up, which a second one must not hide."""
        slots = anyio.Semaphore(STOPS_IN_FLIGHT)

        async def one(box: Sandbox) -> None:
            async with slots:
                with suppress(NotFound, SandboxUnavailable, YardUnavailable):
                    await box.stop()

        with anyio.move_on_after(CLEAN_UP_WITHIN_S, shield=True):
            async with anyio.create_task_group() as tasks:
                for box in boxes:
                    tasks.start_soon(one, box)

    def _open_http(self) -> HttpTransport:
        self._caller.check_open()
        assert self._http is not None
        return self._http

    async def _close(self, error: BaseException | None = None) -> bool | None:
        """Close connections and end their tasks. The block's own error passes by untouched, in no group."""
        self._caller.close()
        with anyio.move_on_after(CLOSE_WITHIN_S, shield=True):
            if self._mux is not None:
                await self._mux.close()
            if self._http is not None:
                await self._http.close()
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        if isinstance(error, anyio.get_cancelled_exc_class()):
            return await self._tasks.__aexit__(type(error), error, error.__traceback__)
        await self._tasks.__aexit__(None, None, None)
        return None


def _spec(image: str, options: SandboxOptions) -> SandboxSpec:
    known = SandboxSpec.__struct_fields__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"Options are {', '.join(sorted(known))}."
            raise InvalidRequest(f"A sandbox has no option {name!r}.", code="unknown_field", hint=meant)
    try:
        return normalised(msgspec.convert({"image": image, **options}, SandboxSpec))
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"The sandbox cannot be made: {exc}.", code="bad_spec") from exc


def _all_or_none(failures: list[CloudyardError], count: int) -> CloudyardError:
    first = failures[0]
    return type(first)(
        f"{len(failures)} of {count} sandboxes could not be made; those that were made have been stopped. "
        f"The first failure: {first.message}",
        code=first.code,
        hint=first.hint,
        retry_safe=False,
    )
