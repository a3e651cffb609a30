"""Sandboxes that run already and belong to nobody yet: a create that finds one of its shape takes it.

A launcher that waits (`pool`) has done what does not depend on the image. What is left, the root file system,
bubblewrap and the start of the guest, is most of the time that a create takes; so a few sandboxes are raised
as far as the guest's answer, of those shapes that were asked for lately. What was asked for last is the only
forecast there is, so the stock mirrors it: of the last `size` sandboxes taken, as many as had the shape.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

import anyio
from anyio import Event, create_task_group

from cloudyard.edge.backends.container.site import Site
from cloudyard.edge.host.processes import Process
from cloudyard.edge.host.seccomp import Profile
from cloudyard.errors import CloudyardError
from cloudyard.model import CpuClass

PATIENCE_S = 0.03  # before one is replaced, while most of its shape are still there
_log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """What cannot be changed once a sandbox runs, and how its image is proved."""

    image: str
    """The image's name."""
    layers: tuple[str, ...]
    """Its layers' places in the template, from the lowest up."""
    hostname: str
    probe: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    cpu_class: CpuClass = "latency"
    lxcfs: int = 0
    """Pid of the daemon that shows it its own /proc; 0 for none."""
    profile: Profile = "sandbox"
    """What its system calls may do, and with it its root."""


class Raised(NamedTuple):
    """A sandbox in which the image's probe has run, and when its PID 1 started, in clock ticks since boot."""

    site: Site
    process: Process
    started: int


class Stock:
    """Keeps sandboxes of the shapes in demand while `run` runs.

    Args:
        raise_one: makes one; leaves nothing if it fails.
        drop: ends one that is of no use any more.
        size: how many are kept at most, of all shapes together.
        at_once: how many are raised at the same time.
    """

    def __init__(
        self,
        raise_one: Callable[[Shape], Awaitable[Raised]],
        drop: Callable[[Raised], Awaitable[None]],
        *,
        size: int,
        at_once: int,
    ) -> None:
        self._raise_one = raise_one
        self._drop = drop
        self._size = size
        self._at_once = at_once
        self._asked: deque[Shape] = deque(maxlen=size)
        self._ready: dict[Shape, deque[Raised]] = {}
        self._under_way: Counter[Shape] = Counter()
        self._changed = Event()

    async def run(self) -> None:
        """Keep it so until cancelled."""
        async with create_task_group() as tasks:
            for _ in range(min(self._at_once, self._size)):
                tasks.start_soon(self._fill)

    async def take(self, shape: Shape) -> Raised:
        """A sandbox of that shape, which is the caller's from then on.

        Raises:
            CloudyardError: none was ready and none could be raised.
        """
        raised = await self._ready_one(shape) or await self._raise_one(shape)
        self._asked.append(shape)
        self._changed.set()
        return raised

    async def forget(self, layers: Collection[str]) -> None:
        """End those of images with one of these layers, and raise no more of them."""
        gone = {shape for shape in [*self._asked, *self._ready] if not set(layers).isdisjoint(shape.layers)}
        self._asked = deque((shape for shape in self._asked if shape not in gone), maxlen=self._size)
        for raised in [raised for shape in gone for raised in self._ready.pop(shape, ())]:
            await self._drop(raised)

    def drain(self) -> list[Raised]:
        """All that are ready; they are the caller's from then on."""
        drained = [raised for ready in self._ready.values() for raised in ready]
        self._ready.clear()
        return drained

    async def _ready_one(self, shape: Shape) -> Raised | None:
        ready = self._ready.get(shape)
        while ready:
            raised = ready.popleft()
            if not raised.process.has_ended():
                return raised
            await self._drop(raised)
        return None

    async def _fill(self) -> None:
        while True:
            wanted = Counter(self._asked)
            if (surplus := self._surplus(wanted)) is not None:
                await self._drop(surplus)
            elif (shape := self._missing(wanted)) is not None:
                if len(self._ready.get(shape, ())) * 2 > wanted[shape]:
                    await anyio.sleep(PATIENCE_S)  # whoever took one is still busy with it, on the same cores
                await self._add(shape)
            else:
                self._changed = Event() if self._changed.is_set() else self._changed
                await self._changed.wait()

    def _missing(self, wanted: Counter[Shape]) -> Shape | None:
        """The shape of which most is missing."""
        lack = {
            shape: count - len(self._ready.get(shape, ())) - self._under_way[shape]
            for shape, count in wanted.items()
        }
        most = max(lack, key=lambda shape: lack[shape], default=None)
        return most if most is not None and lack[most] > 0 else None

    def _surplus(self, wanted: Counter[Shape]) -> Raised | None:
        """One that is not wanted any more, where there are more than may be kept."""
        if sum(map(len, self._ready.values())) + self._under_way.total() <= self._size:
            return None
        for shape, ready in self._ready.items():
            if len(ready) > wanted[shape]:
                return ready.popleft()
        return None

    async def _add(self, shape: Shape) -> None:
        self._under_way[shape] += 1
        try:
            raised = await self._raise_one(shape)
            if shape in self._asked:
                self._ready.setdefault(shape, deque()).append(raised)
            else:  # it was forgotten meanwhile
                await self._drop(raised)
        except CloudyardError as exc:
            _log.warning("Raising a sandbox ahead of need, which nobody waits for, failed: %s", exc)
            for asked in [asked for asked in self._asked if asked == shape]:
                self._asked.remove(asked)  # until somebody gets one of this shape again
        finally:
            self._under_way[shape] -= 1
