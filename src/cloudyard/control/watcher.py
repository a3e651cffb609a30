"""What the yard knows of its edges: the last heartbeat of each. Rebuilt from nothing within a second of a
start.

An edge that has gone silent, was started again or lost its connection for a moment will not answer what was
asked of it before, so those calls are failed here and their callers send them again. That holds for an edge
that is heard for the first time, too: we may have been started while it was being started again.
"""

from __future__ import annotations

import logging
import math

import anyio
from anyio.abc import TaskStatus

from cloudyard.core.placement import Fleet
from cloudyard.errors import YardUnavailable
from cloudyard.fabric import Fabric
from cloudyard.model import EDGE_SILENT_S, HEARTBEAT_S, EdgeId, Heartbeat
from cloudyard.wire.messages import UNREADABLE, beat_subject, call_subject, heartbeat_decoder

log = logging.getLogger(__name__)

CHECK_S = 0.5  # between looks for edges that have gone silent
SETTLE_S = 1.25 * HEARTBEAT_S  # after so long every edge that lives has been heard
TRAVEL_S = 0.1  # a heartbeat that comes so soon after a moment may have been made before it
FORGET_S = 24 * 3600.0  # an edge that is silent for so long is no longer listed


class Watcher:
    """Hears every edge. `fleet` is the view that the placer decides on."""

    def __init__(self, fabric: Fabric, fleet: Fleet) -> None:
        self._fabric = fabric
        self._fleet = fleet
        self._silent: set[EdgeId] = set()
        self._unheard: dict[EdgeId, float] = {}
        self._heard = anyio.Event()
        self._settled = anyio.Event()
        self._first = anyio.Event()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled."""
        async with self._fabric.subscribe(beat_subject("*")) as beats, anyio.create_task_group() as tasks:
            tasks.start_soon(self._notice_silence)
            tasks.start_soon(self._settle)
            task_status.started()
            async for message in beats:
                try:
                    self.hear(heartbeat_decoder.decode(message.data))
                except UNREADABLE as exc:
                    log.warning("a heartbeat on %s cannot be read: %s", message.subject, exc)

    def hear(self, beat: Heartbeat) -> None:
        """Take in one heartbeat."""
        edge = EdgeId(beat.edge)
        known = self._fleet.nodes.get(edge)
        now = anyio.current_time()
        silent_s = now - known.heard_at if known is not None else math.inf
        if known is None:
            log.info("edge %s is heard (boot %s)", edge, beat.boot)
        elif known.beat.boot != beat.boot:
            log.info("edge %s has started again (boot %s)", edge, beat.boot)
        self._fleet.hear(beat, now)
        self._silent.discard(edge)
        self._unheard.pop(edge, None)
        self._first.set()
        self._heard.set()
        self._heard = anyio.Event()
        if beat.listening_s < silent_s + TRAVEL_S:
            reason = f"Edge {edge} was started again, or lost its connection, before it answered."
            self._fail_calls(edge, reason, older_s=beat.listening_s)

    def check(self, edge: EdgeId) -> None:
        """Do nothing if a call to the edge has a chance. An edge not heard yet has: we may have just started.

        Raises:
            YardUnavailable: it has gone silent.
        """
        if edge in self._silent:
            raise YardUnavailable(
                f"Edge {edge} has not been heard for {EDGE_SILENT_S:.0f} s.",
                code="edge_silent",
                hint="Its node may be down or overloaded; its sandboxes are reachable again when it is back.",
            )
        if edge not in self._fleet.nodes:
            self._unheard.setdefault(edge, anyio.current_time())

    def alive(self) -> list[EdgeId]:
        """Edges that are heard, sorted."""
        return sorted(edge for edge in self._fleet.nodes if edge not in self._silent)

    def silent(self) -> list[EdgeId]:
        """Edges that were heard once, within FORGET_S, and are no more."""
        return sorted(self._silent)

    def heartbeats(self) -> list[Heartbeat]:
        """The last heartbeat of each edge that is heard."""
        return [self._fleet.nodes[edge].beat for edge in self.alive()]

    async def first(self) -> None:
        """Return once an edge is heard, or has had the time to be."""
        await self._first.wait()

    async def settled(self) -> None:
        """Return once every edge that lives has had the time to be heard: about a second after the start."""
        await self._settled.wait()

    async def image(self, name: str) -> None:
        """Return once an edge has the image, or each has beaten since and said that it has not: an image may
        be asked for right after it was built.
        """
        begun = anyio.current_time()
        with anyio.move_on_after(SETTLE_S):
            while not self._has_image(name) and any(
                self._fleet.nodes[edge].heard_at <= begun + TRAVEL_S for edge in self.alive()
            ):
                await self._heard.wait()

    def _has_image(self, name: str) -> bool:
        return any(name in self._fleet.nodes[edge].beat.images for edge in self.alive())

    async def _settle(self) -> None:
        await anyio.sleep(SETTLE_S)
        self._settled.set()
        self._first.set()

    async def _notice_silence(self) -> None:
        while True:
            await anyio.sleep(CHECK_S)
            if not self._fabric.connected:
                continue  # it is we who are deaf
            now = anyio.current_time()
            for edge, asked_at in list(self._unheard.items()):
                if now - asked_at > EDGE_SILENT_S:
                    del self._unheard[edge]
                    self._fail_calls(edge, f"Edge {edge} has not been heard yet.")
            for edge, node in list(self._fleet.nodes.items()):
                silent_s = now - node.heard_at
                if silent_s > EDGE_SILENT_S and edge not in self._silent:
                    self._silent.add(edge)
                    log.warning("edge %s is silent", edge)
                    self._fail_calls(edge, f"Edge {edge} has not been heard for {EDGE_SILENT_S:.0f} s.")
                elif silent_s > FORGET_S:
                    self._fleet.forget(edge)
                    self._silent.discard(edge)

    def _fail_calls(self, edge: EdgeId, reason: str, *, older_s: float = 0.0) -> None:
        if failed := self._fabric.abandon(call_subject(edge), reason, older_s=older_s):
            log.info("%d calls to edge %s are failed: %s", failed, edge, reason)
