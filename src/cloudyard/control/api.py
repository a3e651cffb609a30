"""What every HTTP route has in common: its caller, its headers, and the errors that it may answer with."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import litestar
from litestar import Request
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.openapi import ResponseSpec
from litestar.params import FromPath, HeaderParameter, QueryParameter

from cloudyard.control.http_errors import ErrorAnswer
from cloudyard.control.yard import Yard
from cloudyard.core.iam import Grant
from cloudyard.errors import InvalidRequest

Call = Request[None, Grant, State]
TheYard = NamedDependency[Yard]
SandboxPath = FromPath[str]
StepKey = Annotated[
    str, HeaderParameter(name="Step-Key", description="Repeating a call with its key never does it twice.")
]
CreateKey = Annotated[
    str,
    HeaderParameter(name="Idempotency-Key", description="The same as `key` in the body, which goes first."),
]

_ERRORS = {
    400: "The request is wrong; the message names the field.",
    401: "There is no token, or nobody issued it.",
    403: "This token does not allow it.",
    404: "There is no such sandbox, command, file or image.",
    409: "It exists already, or its state does not allow this.",
    410: "The sandbox is gone, or never became usable.",
    429: "A bound was reached; Retry-After says when to try again.",
    501: "Nothing here can do it.",
    503: "A part of the yard is starting or away; Retry-After says when to try again.",
}
_RESPONSES = {
    status: ResponseSpec(ErrorAnswer, description=why, generate_examples=False)
    for status, why in _ERRORS.items()
}

get = partial(litestar.get, responses=_RESPONSES)
post = partial(litestar.post, responses=_RESPONSES)
put = partial(litestar.put, responses=_RESPONSES)
delete = partial(litestar.delete, responses=_RESPONSES)


def refuse_unknown_parameters(request: Request[Any, Any, Any]) -> None:
    """Do nothing if the route takes every parameter of the query: a misspelt one must not be passed over.

    Raises:
        InvalidRequest: it does not; the sentence names them.
    """
    if not request.query_params:
        return
    known = {
        field.kwarg_definition.name or name
        for name, field in request.route_handler.parsed_fn_signature.parameters.items()
        if isinstance(field.kwarg_definition, QueryParameter)
    }
    if unknown := sorted(set(request.query_params) - known):
        raise InvalidRequest(
            f"{request.method} {request.url.path} takes no parameter {', '.join(unknown)}.",
            code="unknown_parameter",
            hint=f"It takes: {', '.join(sorted(known))}." if known else "It takes none.",
        )
