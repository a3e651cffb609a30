"""Stateless calls on their way to an edge: the least busy one that has the image, and the next when it
refuses.

A call leaves nothing behind, so one whose answer was lost is simply made again elsewhere. One that nobody
waits for any more is killed.
"""

from __future__ import annotations

import logging
import random
from collections import Counter

import anyio
from msgspec import Raw

from cloudyard.control.edges import Edges
from cloudyard.control.watcher import Watcher
from cloudyard.core.call_placement import choose
from cloudyard.core.placement import Fleet
from cloudyard.errors import CloudyardError, LimitExceeded, SandboxUnavailable, Unsupported, YardUnavailable
from cloudyard.model import EdgeId, ProjectId, call_limit_s
from cloudyard.wire.messages import CallCancel, CallFunction, decode_call_head

log = logging.getLogger(__name__)

ANSWER_GRACE_S = 10.0  # how much later than a call's own limits its answer may come
EDGES_MAX = 8  # asked for one call


class Calls:
    """Makes calls on edges that it chooses."""

    def __init__(self, fleet: Fleet, watcher: Watcher, edges: Edges) -> None:
        self._fleet = fleet
        self._watcher = watcher
        self._edges = edges
        self._under_way: Counter[EdgeId] = Counter()
        self._random = random.Random().random

    async def call(self, project: ProjectId, spec: Raw, *, cause: str) -> Raw:
        """Make a call and give its encoded CallResult. Cancelling it kills the call on its edge.

        Raises:
            InvalidRequest: the spec cannot be read, or is out of range.
            NotFound: no edge has the image.
            LimitExceeded: every edge that has it is busy.
            YardUnavailable: no answer came within the call's own limits (`call_unanswered`), or its edges
            are away.
            CloudyardError: whatever else the edge says.
        """
        head = decode_call_head(spec)
        await self._watcher.first()
        await self._watcher.image(head.image)
        limit_s = call_limit_s(head.timeout_s, len(head.cases)) + ANSWER_GRACE_S
        message = CallFunction(project=project, cause=cause, spec=spec)
        try:
            with anyio.fail_after(limit_s):
                return await self._on_some_edge(message, head.image)
        except TimeoutError as exc:
            raise YardUnavailable(
                f"The call was not answered within {limit_s:g} s.",
                code="call_unanswered",
                hint="The edge is overloaded or stuck; its log says more.",
                retry_safe=False,
            ) from exc

    async def _on_some_edge(self, message: CallFunction, image: str) -> Raw:
        refused: dict[EdgeId, CloudyardError] = {}
        while True:
            try:
                edge = choose(
                    self._fleet,
                    image,
                    under_way=self._under_way,
                    now=anyio.current_time(),
                    random=self._random,
                    exclude=refused,
                )
            except CloudyardError as error:
                raise (_last(refused) if refused else error) from error
            try:
                return await self._on(edge, message)
            except CloudyardError as error:
                if not _worth_another_edge(error):
                    raise
                refused[edge] = error
                if len(refused) == EDGES_MAX:
                    raise

    async def _on(self, edge: EdgeId, message: CallFunction) -> Raw:
        self._under_way[edge] += 1
        cancel = CallCancel(project=message.project, cause=message.cause)
        try:
            return await self._edges.call(edge, message)
        except anyio.get_cancelled_exc_class():
            await self._edges.tell(edge, cancel)
            raise
        except YardUnavailable as error:
            if error.code == "answer_lost":  # it may run on there, and is about to be made again
                await self._edges.tell(edge, cancel)
            raise
        finally:
            self._under_way[edge] -= 1
            if not self._under_way[edge]:
                del self._under_way[edge]


def _worth_another_edge(error: CloudyardError) -> bool:
    """Whether the same call may do better elsewhere: this edge is busy, broken, away, or takes no calls."""
    match error:
        case LimitExceeded() | YardUnavailable():
            return error.retry_safe
        case SandboxUnavailable():
            return True
        case Unsupported():
            return error.code == "no_functions"
        case _:
            return False


def _last(refused: dict[EdgeId, CloudyardError]) -> CloudyardError:
    """The newest refusal, for its reason is the one that still holds."""
    return next(reversed(refused.values()))
