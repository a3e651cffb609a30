"""The gateway: the HTTP API under /v1, its description under /schema, and the mux socket, as one ASGI
application.
"""

from __future__ import annotations

from typing import Any, cast

from litestar import Litestar, Router
from litestar.connection import ASGIConnection
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult, DefineMiddleware
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, OpenAPIType, Schema, SecurityScheme
from litestar.plugins import OpenAPISchemaPlugin
from litestar.types import ASGIApp
from litestar.typing import FieldDefinition

import cloudyard
from cloudyard.control import call_routes, file_routes, http_errors, routes
from cloudyard.control.api import refuse_unknown_parameters
from cloudyard.control.mux import Mux, Receive, Scope, Send, refuse
from cloudyard.control.schema_page import SchemaPage
from cloudyard.control.yard import Yard
from cloudyard.errors import CloudyardError, NotFound
from cloudyard.wire.messages import MUX_PATH

BODY_BYTES_MAX = 4 * 1024 * 1024  # of a JSON request; calls have a bound of their own, and files none

DESCRIPTION = f"""\
Sandboxes for agents. Every call but `/v1/health` needs `Authorization: Bearer TOKEN`.

Fields of bytes are base64 (RFC 4648, with padding); file routes carry plain bytes.
Sizes are bytes, times are seconds.
An unknown field is refused and named. Every error has one shape,
`{{"error": {{kind, code, message, hint, retry_safe}}}}`: programs look at `kind` and `code`.

A request with a `Step-Key` may be sent again: what was done is not done twice, and the answer says
`replayed`. `POST /v1/calls` keeps nothing, needs no key and may always be sent again.
The fast way is the WebSocket at `{MUX_PATH}`: msgpack frames, many operations at a time.
"""


class Gateway:
    """The ASGI application."""

    def __init__(self, yard: Yard) -> None:
        self._mux = Mux(yard)
        self._http = _http(yard)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await cast(Any, self._http)(scope, receive, send)
        elif scope["path"] == MUX_PATH:
            await self._mux(scope, receive, send)
        else:
            await receive()
            await refuse(
                scope,
                send,
                NotFound(
                    f"There is no WebSocket at {scope['path']}.",
                    code="no_such_route",
                    hint=f"The mux is at {MUX_PATH}.",
                ),
            )


class _BytesAreBase64(OpenAPISchemaPlugin):
    """Bytes in JSON, as msgspec writes and reads them."""

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        return field_definition.annotation is bytes

    def to_openapi_schema(self, field_definition: FieldDefinition, schema_creator: Any) -> Schema:
        return Schema(type=OpenAPIType.STRING, content_encoding="base64")


class _Authentication(AbstractAuthenticationMiddleware):
    def __init__(self, app: ASGIApp, *, yard: Yard) -> None:
        super().__init__(app, exclude=["^/schema"])
        self._yard = yard

    async def authenticate_request(
        self, connection: ASGIConnection[Any, Any, Any, Any]
    ) -> AuthenticationResult:
        grant = await self._yard.tokens.grant(connection.headers.get("Authorization"))
        return AuthenticationResult(user=grant.principal, auth=grant)


def _http(yard: Yard) -> Litestar:
    return Litestar(
        route_handlers=[
            Router(
                "/v1",
                route_handlers=[routes.router(), call_routes.router(), file_routes.router()],
                before_request=refuse_unknown_parameters,
            )
        ],
        plugins=[_BytesAreBase64()],
        dependencies={"yard": Provide(lambda: yard, sync_to_thread=False)},
        middleware=[DefineMiddleware(_Authentication, yard=yard)],
        exception_handlers={
            CloudyardError: http_errors.on_cloudyard_error,
            HTTPException: http_errors.on_http_error,
            RecursionError: http_errors.on_deep_body,
            Exception: http_errors.on_bug,
        },
        openapi_config=OpenAPIConfig(
            title="Cloudyard",
            version=cloudyard.__version__,
            description=DESCRIPTION,
            components=Components(security_schemes={"token": SecurityScheme(type="http", scheme="bearer")}),
            security=[{"token": []}],
            use_handler_docstrings=False,
            render_plugins=[SchemaPage(), JsonRenderPlugin()],
        ),
        request_max_body_size=BODY_BYTES_MAX,
        logging_config=None,
    )
