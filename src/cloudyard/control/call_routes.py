"""The HTTP route for stateless calls. One whose client hangs up is killed: nobody could fetch its result."""

from __future__ import annotations

import anyio
from litestar import Router
from litestar.params import JSONBody

from cloudyard.control.api import Call, TheYard, post
from cloudyard.errors import CloudyardError, YardUnavailable
from cloudyard.model import MIB, CallResult, CallSpec, normalised_call
from cloudyard.wire.messages import call_result_decoder, raw

BODY_BYTES_MAX = 8 * MIB  # of JSON: CALL_BYTES_MAX in base64, and what JSON escapes


@post(
    "/calls",
    status_code=200,
    request_max_body_size=BODY_BYTES_MAX,
    summary="Run code once in a new process of a warm pool, or judge it on cases; hanging up kills it",
)
async def make_call(yard: TheYard, request: Call, data: JSONBody[CallSpec]) -> CallResult:
    spec = raw(normalised_call(data))
    result: CallResult | None = None
    failure: CloudyardError | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_when_left, request, tasks.cancel_scope)
        try:
            result = call_result_decoder.decode(await yard.call(request.auth, spec))
        except CloudyardError as error:  # raised outside: a task group would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if result is None:
        raise YardUnavailable("The client has left before the call ended.", code="client_left")
    return result


async def _cancel_when_left(request: Call, scope: anyio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def router() -> Router:
    """All routes of this file."""
    return Router("/", route_handlers=[make_call])
