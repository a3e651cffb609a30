"""What a caller can ask of the yard, whatever way the request came: create, list, images, operations on a
sandbox, and stateless calls.
"""

from __future__ import annotations

import secrets
from itertools import count

import anyio
from msgspec import Raw

from cloudyard.control.auth import Tokens
from cloudyard.control.calls import Calls
from cloudyard.control.creates import Creates
from cloudyard.control.edges import Edges
from cloudyard.control.watcher import Watcher
from cloudyard.core.iam import Grant, action_of, allow
from cloudyard.errors import CloudyardError, YardUnavailable
from cloudyard.fabric import StoreHealth
from cloudyard.model import AnyOp, AnyResult, CreateRequest, EdgeId, SandboxInfo, check_key
from cloudyard.wire.messages import (
    CallList,
    CallOp,
    ImageRow,
    SandboxPage,
    page_decoder,
    raw,
    result_decoder,
)

LIST_S = 10.0  # an edge that has not listed its sandboxes by then is named as missing


class Yard:
    """The yard, to those who may use it."""

    def __init__(
        self,
        *,
        store: StoreHealth,
        tokens: Tokens,
        watcher: Watcher,
        edges: Edges,
        creates: Creates,
        calls: Calls,
    ) -> None:
        self._store = store
        self.tokens = tokens
        self.edges = edges
        self._watcher = watcher
        self._creates = creates
        self._calls = calls
        self._me = secrets.token_hex(4)
        self._count = count(1)

    def new_cause(self) -> str:
        """A name for a request, by which an edge can be told that nobody waits for it any more."""
        return f"{self._me}-{next(self._count)}"

    async def create(self, grant: Grant, request: CreateRequest) -> SandboxInfo:
        """Make a sandbox, or give the one that the request's key made. Raises as `Creates.create` does."""
        allow(grant, "sandbox.create")
        await self._watcher.first()
        await self._watcher.image(request.spec.image)
        result = result_decoder.decode(
            await self._creates.create(grant.project, request.spec, key=request.key, cause=self.new_cause())
        )
        assert isinstance(result, SandboxInfo)
        return result

    async def op(self, grant: Grant, sandbox: str, op: AnyOp, *, key: str = "") -> AnyResult:
        """Do an operation. Raises as `Edges.op` does."""
        allow(grant, action_of(str(type(op).__struct_config__.tag)))
        check_key(key)
        call = CallOp(project=grant.project, cause=self.new_cause(), sandbox=sandbox, op=raw(op), key=key)
        return result_decoder.decode(await self.edges.op(call))

    async def call(self, grant: Grant, spec: Raw) -> Raw:
        """Make a stateless call; an encoded CallSpec in, an encoded CallResult out. Raises as `Calls.call`
        does.
        """
        allow(grant, "function.call")
        return await self._calls.call(grant.project, spec, cause=self.new_cause())

    async def cancel(self, grant: Grant, sandbox: str, *, key: str) -> None:
        """Kill the command that the call with this step key waits for, if there is one."""
        allow(grant, "sandbox.use")
        check_key(key)
        cause = self.new_cause()
        await self.edges.cancel(
            CallOp(project=grant.project, cause=cause, sandbox=sandbox, op=Raw(), key=key)
        )

    async def sandboxes(self, grant: Grant, *, stopped: bool) -> SandboxPage:
        """The project's sandboxes on every edge, oldest first, and the edges that were known and are silent.

        Raises:
            YardUnavailable: no edge is heard from.
        """
        allow(grant, "sandbox.read")
        await self._watcher.settled()
        edges = self._watcher.alive()
        if not edges:
            raise YardUnavailable(
                "No edge of this yard is heard from.", code="no_edge", hint="It may be starting."
            )
        found: list[SandboxInfo] = []
        missing: list[str] = [*self._watcher.silent()]

        async def ask(edge: EdgeId) -> None:
            call = CallList(project=grant.project, cause=self.new_cause(), stopped=stopped)
            try:
                with anyio.fail_after(LIST_S):
                    found.extend(page_decoder.decode(await self.edges.call(edge, call)).sandboxes)
            except (CloudyardError, TimeoutError):
                missing.append(edge)

        async with anyio.create_task_group() as tasks:
            for edge in edges:
                tasks.start_soon(ask, edge)
        found.sort(key=lambda info: (info.created_at, info.id))
        return SandboxPage(found, sorted(missing))

    async def images(self, grant: Grant) -> list[ImageRow]:
        """Images that some edge can make sandboxes from, by name."""
        allow(grant, "image.read")
        await self._watcher.settled()
        names = {name for beat in self._watcher.heartbeats() for name in beat.images}
        return [ImageRow(name=name) for name in sorted(names)]

    def health(self) -> list[EdgeId]:
        """Edges that are heard."""
        return self._watcher.alive()

    def store_works(self) -> bool:
        """Whether keys of creates and tokens can be written, as far as is known."""
        return not self._store.suspects
