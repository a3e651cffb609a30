"""Where a sandbox goes: filter, sample a few edges by their size, take the least loaded.

A `Fleet` is one placer's view of the edges: what their heartbeats said, and on top of it what this placer has
promised since and no heartbeat can know yet. Several placers work side by side without talking to each other;
the edge has the last word. Time and randomness come in with each call.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection
from itertools import accumulate

from msgspec import Struct

from cloudyard.errors import CloudyardError, LimitExceeded, NotFound, Unsupported, YardUnavailable
from cloudyard.model import EDGE_SILENT_S, GIB, MIB, EdgeId, EdgeLoad, Heartbeat, SandboxSpec

SAMPLE = 3  # edges compared for one placement
DRAWS_MAX = 4 * SAMPLE  # draws for them, before every edge is looked at
ROUNDING = 1e-6  # cores
FADE = 0.99  # how much of what was learnt of other placers is kept from one heartbeat to the next
CROWD_KNOWN = 8.0  # placements of ours before other placers are judged
CROWD_MAX = 64.0  # the most that is believed of them
MEMORY_SPARE_BYTES = 256 * MIB  # with less than this really free on an edge nothing more is placed there


class Demand(Struct, frozen=True, kw_only=True):
    """What a sandbox needs of its edge."""

    image: str
    backend: str
    cpu: float
    memory_bytes: int


class Reservation(Struct, frozen=True):
    """Room that a placer has promised on an edge and not yet settled."""

    edge: EdgeId
    demand: Demand


class Node(Struct):
    """An edge as one placer sees it. `cpu`, `memory_bytes`, `count`: promised here, on top of what the
    heartbeat counts.
    """

    beat: Heartbeat
    heard_at: float
    cpu: float = 0.0
    memory_bytes: int = 0
    count: int = 0
    settled: list[Demand] = []
    """Admitted by the edge: its next heartbeat counts them, and then they leave the overlay."""

    def fits(self, demand: Demand, now: float) -> bool:
        """Whether the edge may be asked to take it."""
        beat, load = self.beat, self.beat.load
        return (
            now - self.heard_at <= EDGE_SILENT_S
            and not beat.draining
            and demand.backend in beat.backends
            and demand.image in beat.images
            and load.cpu_promised + self.cpu + demand.cpu <= load.cpu_total + ROUNDING
            and load.memory_promised_bytes + self.memory_bytes + demand.memory_bytes
            <= load.memory_total_bytes
            and (not load.sandboxes_max or load.sandboxes + self.count < load.sandboxes_max)
            and (not load.memory_available_bytes or load.memory_available_bytes > MEMORY_SPARE_BYTES)
        )

    def load_with(self, demand: Demand, crowd: float) -> float:
        """The fuller of CPU and memory, as a share of what the edge has, if it took the demand.

        `crowd`: for each promise made here, how many all placers together have made meanwhile.
        """
        load = self.beat.load
        cpu = (load.cpu_promised + crowd * self.cpu + demand.cpu) / load.cpu_total
        memory = load.memory_promised_bytes + crowd * self.memory_bytes + demand.memory_bytes
        memory /= load.memory_total_bytes
        return cpu if cpu > memory else memory

    def add(self, demand: Demand, sign: int) -> None:
        """Put a demand into the overlay, or take it out with sign -1."""
        self.cpu += sign * demand.cpu
        self.memory_bytes += sign * demand.memory_bytes
        self.count += sign


class Fleet:
    """The edges as one placer sees them, and the one place where an edge is chosen."""

    def __init__(self) -> None:
        self.nodes: dict[EdgeId, Node] = {}
        self._order: list[Node] = []
        self._weights: list[float] = []
        self._grown = 0.0
        self._grown_by_us = 0.0

    def hear(self, beat: Heartbeat, now: float) -> None:
        """Take in a heartbeat."""
        node = self.nodes.get(EdgeId(beat.edge))
        if node is None:
            node = self.nodes[EdgeId(beat.edge)] = Node(beat, now)
            self._weigh()
            return
        resized = _size(beat.load) != _size(node.beat.load)
        self._grown = FADE * self._grown + max(0, beat.load.sandboxes - node.beat.load.sandboxes)
        self._grown_by_us = FADE * self._grown_by_us + len(node.settled)
        if beat.boot != node.beat.boot:
            node.cpu, node.memory_bytes, node.count, node.settled = 0.0, 0, 0, []
        node.beat, node.heard_at = beat, now
        for demand in node.settled:
            node.add(demand, -1)
        node.settled.clear()
        if resized:
            self._weigh()

    def forget(self, edge: EdgeId) -> None:
        """Drop an edge that has been silent for long."""
        if self.nodes.pop(edge, None) is not None:
            self._weigh()

    def place(
        self, demand: Demand, *, now: float, random: Callable[[], float], exclude: Collection[str] = ()
    ) -> Reservation:
        """Choose an edge and reserve the room there; `settle` it with what the edge said.

        Args:
            demand: what is needed.
            now: the time, on the clock of `hear`.
            random: gives numbers from 0 up to 1.
            exclude: edges that have refused this very sandbox.

        Raises:
            YardUnavailable: no edge is heard from.
            NotFound: no edge has the image.
            Unsupported: no edge offers the backend.
            LimitExceeded: none has room for it now (`no_capacity`), or none is large enough (`too_large`).
        """
        chosen = self._sample(demand, now, random, exclude)
        if not chosen:
            chosen = [
                node for edge, node in self.nodes.items() if edge not in exclude and node.fits(demand, now)
            ]
        if not chosen:
            raise self._why_not(demand, now)
        best = chosen[0]
        if len(chosen) > 1:
            crowd = self._crowd()
            best = min(chosen, key=lambda node: node.load_with(demand, crowd))
        best.add(demand, 1)
        return Reservation(EdgeId(best.beat.edge), demand)

    def settle(self, reservation: Reservation, *, held: bool) -> None:
        """The edge has answered. Held (or unknown): its next heartbeat counts it. Refused: the room is free
        again.
        """
        node = self.nodes.get(reservation.edge)
        if node is None or node.count == 0:  # forgotten, or started again since
            return
        if held:
            node.settled.append(reservation.demand)
        else:
            node.add(reservation.demand, -1)

    def draw(self, random: Callable[[], float]) -> Node:
        """Any edge, a large one more often. There must be one."""
        order, weights = self._order, self._weights
        return order[min(bisect(weights, random() * weights[-1]), len(order) - 1)]

    def _sample(
        self, demand: Demand, now: float, random: Callable[[], float], exclude: Collection[str]
    ) -> list[Node]:
        """Up to SAMPLE edges that fit, drawn by size: a large edge should be asked more often, for it must
        take more.
        """
        order, weights = self._order, self._weights
        found: list[Node] = []
        if not order:
            return found
        total, last = weights[-1], len(order) - 1
        for _ in range(DRAWS_MAX):
            node = order[min(bisect(weights, random() * total), last)]
            if node not in found and node.beat.edge not in exclude and node.fits(demand, now):
                found.append(node)
                if len(found) == SAMPLE or len(found) > last:
                    break
        return found

    def _crowd(self) -> float:
        """How much faster the edges fill than by us alone, from their heartbeats: other placers are at work
        too, and what they do within one heartbeat is seen by nobody. Without this, all would pour into the
        same edges until the next one.
        """
        if self._grown_by_us < CROWD_KNOWN:
            return 1.0
        return min(max(self._grown / self._grown_by_us, 1.0), CROWD_MAX)

    def _weigh(self) -> None:
        self._order = list(self.nodes.values())
        self._weights = list(accumulate(_size(node.beat.load) for node in self._order))

    def _why_not(self, demand: Demand, now: float) -> CloudyardError:
        alive = [node.beat for node in self.nodes.values() if now - node.heard_at <= EDGE_SILENT_S]
        if not alive:
            return YardUnavailable(
                "No edge of this yard is heard from.",
                code="no_edge",
                hint="It may be starting; if it stays so, `cloudyard doctor` on the node says why.",
            )
        offering = [beat for beat in alive if demand.backend in beat.backends]
        if not offering:
            backends = sorted({name for beat in alive for name in beat.backends})
            return Unsupported(
                f"No edge offers the backend {demand.backend}.",
                code="backend_not_offered",
                hint=f"Offered here: {', '.join(backends) or 'none'}.",
            )
        if not any(demand.image in beat.images for beat in offering):
            images = sorted({name for beat in offering for name in beat.images})
            return NotFound(
                f"There is no image {demand.image} for backend {demand.backend} on this yard.",
                code="image_not_found",
                hint=f"There are: {', '.join(images)}."
                if images
                else "Build one: cloudyard image build debian.",
            )
        if not any(_large_enough(beat.load, demand) for beat in offering):
            largest = max(offering, key=lambda beat: _size(beat.load)).load
            return LimitExceeded(
                f"No edge is large enough for {demand.cpu:g} cores and {_shown(demand.memory_bytes)}.",
                code="too_large",
                hint=f"The largest can promise {largest.cpu_total:g} cores and "
                f"{_shown(largest.memory_total_bytes)}: ask for less.",
            )
        return LimitExceeded(
            "No edge has room for another sandbox now.",
            code="no_capacity",
            fault="infra",
            hint="Stop sandboxes that are no longer needed, or try again later.",
            retry_safe=True,
        )


def demand_of(spec: SandboxSpec) -> Demand:
    """What a normalised spec needs."""
    assert isinstance(spec.memory, int)
    return Demand(image=spec.image, backend=spec.backend, cpu=spec.cpu, memory_bytes=spec.memory)


def _large_enough(load: EdgeLoad, demand: Demand) -> bool:
    return demand.cpu <= load.cpu_total and demand.memory_bytes <= load.memory_total_bytes


def _shown(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / GIB:.4g} GiB" if size >= GIB else f"{size / MIB:.4g} MiB"


def _size(load: EdgeLoad) -> float:
    """How large an edge is, CPU and memory counting alike."""
    return float((load.cpu_total * load.memory_total_bytes) ** 0.5)
