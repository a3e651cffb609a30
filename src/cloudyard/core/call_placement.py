"""Where a stateless call goes: the edge with the fewest calls of ours for each core that it has.

Decides on the placer's view of the edges, and on how many calls this gateway has under way on each. Nothing
is promised: an edge that is too busy refuses, and its caller asks for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from cloudyard.core.placement import DRAWS_MAX, SAMPLE, Fleet, Node
from cloudyard.errors import CloudyardError, LimitExceeded, NotFound, Unsupported, YardUnavailable
from cloudyard.model import EDGE_SILENT_S, EdgeId

BACKEND = "function"  # what an edge that takes calls lists among its backends
BUILD_HINT = "Build one: cloudyard image build debian --package python3 --package gcc --package libc6-dev"


def choose(
    fleet: Fleet,
    image: str,
    *,
    under_way: Mapping[EdgeId, int],
    now: float,
    random: Callable[[], float],
    exclude: Collection[str] = (),
) -> EdgeId:
    """The edge to ask.

    Args:
        fleet: the edges as they were last heard.
        image: what the call runs in.
        under_way: calls of this gateway on each edge.
        now: the time, on the clock of `Fleet.hear`.
        random: gives numbers from 0 up to 1.
        exclude: edges that have refused this very call.

    Raises:
        YardUnavailable: no edge is heard from.
        Unsupported: no edge takes calls.
        NotFound: no edge that does has the image.
        LimitExceeded: those that have it take none now.
    """

    def load(node: Node) -> float:
        return (under_way.get(EdgeId(node.beat.edge), 0) + 1) / node.beat.load.cpu_total

    found: list[Node] = []
    for _ in range(min(DRAWS_MAX, 2 * len(fleet.nodes))):
        node = fleet.draw(random)
        if node not in found and node.beat.edge not in exclude and _takes(node, image, now):
            found.append(node)
            if len(found) == SAMPLE:
                break
    found = found or [
        node for edge, node in fleet.nodes.items() if edge not in exclude and _takes(node, image, now)
    ]
    if not found:
        raise _why_not(fleet, image, now)
    return EdgeId(min(found, key=load).beat.edge)


def _takes(node: Node, image: str, now: float) -> bool:
    beat = node.beat
    return (
        now - node.heard_at <= EDGE_SILENT_S
        and not beat.draining
        and BACKEND in beat.backends
        and image in beat.images
    )


def _why_not(fleet: Fleet, image: str, now: float) -> CloudyardError:
    alive = [node.beat for node in fleet.nodes.values() if now - node.heard_at <= EDGE_SILENT_S]
    if not alive:
        return YardUnavailable(
            "No edge of this yard is heard from.",
            code="no_edge",
            hint="It may be starting; if it stays so, `cloudyard doctor` on the node says why.",
        )
    offering = [beat for beat in alive if BACKEND in beat.backends]
    if not offering:
        return no_functions("No edge of this yard takes calls.")
    if not any(image in beat.images for beat in offering):
        images = sorted({name for beat in offering for name in beat.images})
        return NotFound(
            f"There is no image {image} for calls on this yard.",
            code="image_not_found",
            hint=f"There are: {', '.join(images)}." if images else BUILD_HINT,
        )
    return LimitExceeded(
        "No edge takes another call now.",
        code="no_capacity",
        fault="infra",
        hint="Try again later.",
        retry_safe=True,
    )


def no_functions(message: str) -> Unsupported:
    """The error of an edge, or a yard, that takes no calls."""
    return Unsupported(
        message, code="no_functions", hint="Run the code in a sandbox: yard.sandbox(...) and box.run(...)."
    )
