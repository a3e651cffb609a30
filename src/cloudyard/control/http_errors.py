"""Every error of the HTTP API in its one JSON shape: `{"error": {kind, code, message, hint, retry_safe}}`."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException, ValidationException
from msgspec import structs

from cloudyard.errors import CloudyardError, InvalidRequest, LimitExceeded, NotFound
from cloudyard.model import ErrorBody
from cloudyard.wire.messages import error_body

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1


class ErrorAnswer(msgspec.Struct, frozen=True):
    """What comes back instead of a result."""

    error: ErrorBody


def encode_error(error: CloudyardError, *, status: int = 0) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body for an error."""
    status = status or error.status
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    # Every field is there, also those that have nothing to say: readers in other languages expect one shape.
    return status, headers, msgspec.json.encode({"error": structs.asdict(error_body(error))})


def _answer(error: CloudyardError, *, status: int = 0) -> Response[bytes]:
    status, headers, body = encode_error(error, status=status)
    return Response(body, status_code=status, headers=headers, media_type=MediaType.JSON)


def on_cloudyard_error(request: Request[Any, Any, Any], error: CloudyardError) -> Response[bytes]:
    """An error of ours, as it is."""
    return _answer(error)


def on_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What the framework refuses: no such route or method, a body too large or of the wrong shape."""
    where = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            ours: CloudyardError = NotFound(
                f"There is nothing at {where}.", code="no_such_route", hint="See /schema for what there is."
            )
        case 405:
            ours = InvalidRequest(
                f"{where} is not possible.",
                code="method_not_allowed",
                hint="See /schema for what is.",
            )
        case 413:
            ours = LimitExceeded(
                f"The body of {where} is too large.",
                code="body_too_large",
                hint="Send large files with PUT .../files, which takes any size, and a call in parts.",
            )
        case 400 if _lacks_body(request, error):
            ours = InvalidRequest(
                f"{where} needs a body, and there is none.",
                code="body_missing",
                hint="Send JSON, with Content-Type: application/json; /schema shows its fields.",
            )
        case _ if error.status_code < 500:
            ours = InvalidRequest(f"{where}: {_details(error)}.", code="bad_request", hint="See /schema.")
        case _:
            return on_bug(request, error)
    return _answer(ours, status=error.status_code)


def on_deep_body(request: Request[Any, Any, Any], error: RecursionError) -> Response[bytes]:
    """A body nested so deep that no decoder follows."""
    where = f"{request.method} {request.url.path}"
    return _answer(InvalidRequest(f"{where}: {error}.", code="bad_request", hint="See /schema."))


def on_bug(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """What nobody foresaw. The details go to the log, the name of the error to the caller."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(CloudyardError(f"The yard failed: {type(error).__name__}.", code="bug"))


def _lacks_body(request: Request[Any, Any, Any], error: HTTPException) -> bool:
    sent = "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"
    extra = error.extra if isinstance(error, ValidationException) and isinstance(error.extra, list) else []
    return not sent and any(item.get("key") == "data" for item in extra)


def _details(error: HTTPException) -> str:
    if isinstance(error, ValidationException) and isinstance(error.extra, list) and error.extra:
        parts = [(str(item.get("key") or ""), str(item.get("message", ""))) for item in error.extra]
        return "; ".join(f"{key}: {message}" if key else message for key, message in parts)
    return error.detail.rstrip(".")
