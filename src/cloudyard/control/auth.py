"""Bearer tokens: looked up by hash in the KV bucket `projects`, with a short cache so that a request costs no
round trip.

Tokens are never logged and never kept; a lookup that failed is not cached.
"""

from __future__ import annotations

import secrets
import time

import anyio
import msgspec

from cloudyard.core.iam import (
    TOKEN_PREFIX,
    Grant,
    bearer_token,
    check_grant,
    check_project,
    hash_token,
    unknown_token,
)
from cloudyard.errors import NotFound
from cloudyard.fabric import Fabric

CACHE_S = 5.0  # a token that was revoked works at most this much longer
CACHE_MAX = 10_000  # grants
BUCKET = "projects"

_decoder = msgspec.json.Decoder(Grant)


def new_token() -> str:
    """A fresh token, 256 bits of randomness."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


class Tokens:
    """The grants of this yard."""

    def __init__(self, fabric: Fabric) -> None:
        self._bucket = fabric.bucket(BUCKET)
        self._cache: dict[str, tuple[float, Grant]] = {}

    async def grant(self, authorization: str | None) -> Grant:
        """What the token in an Authorization header allows.

        Raises:
            Unauthorized: there is no token, nobody issued it, or it has expired.
            YardUnavailable: it cannot be looked up now.
        """
        token_hash = hash_token(bearer_token(authorization))
        cached = self._cache.get(token_hash)
        if cached is None or cached[0] < anyio.current_time():
            cached = (anyio.current_time() + CACHE_S, await self._look_up(token_hash))
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            self._cache[token_hash] = cached
        return check_grant(cached[1], token_hash, now=time.time())

    async def issue(self, grant: Grant) -> None:
        """Make a grant valid, whatever was there under its token's hash."""
        check_project(grant.project)
        await self._bucket.put(_key(grant.token_hash), msgspec.json.encode(grant))

    async def revoke(self, token_hash: str) -> None:
        """Take a grant back; other gateways follow within CACHE_S."""
        self._cache.pop(token_hash, None)
        await self._bucket.delete(_key(token_hash))

    async def _look_up(self, token_hash: str) -> Grant:
        try:
            return _decoder.decode((await self._bucket.get(_key(token_hash))).value)
        except NotFound as exc:
            raise unknown_token() from exc


def _key(token_hash: str) -> str:
    return f"token.{token_hash}"
