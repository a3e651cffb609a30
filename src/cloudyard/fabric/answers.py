"""Answers that `serve` gives by itself: a handler's error, too many requests; and the error of an answer that
was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from cloudyard.errors import CloudyardError, LimitExceeded, YardUnavailable
from cloudyard.wire.messages import EdgeReply, encode, error_body

log = logging.getLogger(__name__)

Handler = Callable[[bytes], Awaitable[bytes]]


async def handled(handler: Handler, data: bytes) -> bytes:
    """The handler's answer, or its error as one."""
    try:
        return await handler(data)
    except CloudyardError as exc:
        return error_reply(exc)
    except Exception as exc:
        # One request that meets a bug must not end the service of all the others.
        log.exception("a request failed in a way that nobody foresaw")
        return error_reply(CloudyardError(f"The yard failed: {type(exc).__name__}: {exc}.", code="bug"))


def busy(subject: str, limit: int) -> bytes:
    """The answer to a request past `limit`."""
    return error_reply(
        LimitExceeded(
            f"{limit} requests are under way on {subject}.",
            code="edge_busy",
            fault="infra",
            hint="Try again.",
            retry_safe=True,
        )
    )


def error_reply(error: CloudyardError) -> bytes:
    """An answer that is an error."""
    return encode(EdgeReply(error=error_body(error)))


def answer_lost(reason: str) -> YardUnavailable:
    """The error of a request that was sent and whose answer will not come."""
    return YardUnavailable(
        reason, code="answer_lost", hint="Send it again with the same key: what was done is not done twice."
    )
