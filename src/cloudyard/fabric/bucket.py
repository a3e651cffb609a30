"""A key-value bucket over JetStream: claim a key, change it if nobody else did, read it, drop it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from nats.js.kv import KeyValue

from cloudyard.errors import Conflict, LimitExceeded, NotFound, YardUnavailable
from cloudyard.fabric.store import StoreHealth

ASK_S = 2.0  # JetStream answers within this, or is not there
BUCKET_BYTES_MAX = 256 * 1024 * 1024
VALUE_BYTES_MAX = 64 * 1024
PROBE_KEY = "probe"
SERVER_ERROR = 500  # codes of JetStream from here on are its own failures


class Entry(NamedTuple):
    """A value and the revision to name when changing it."""

    value: bytes
    revision: int


class Bucket:
    """One bucket. Keys are letters, digits and `-_/=.`; values are bytes, at most VALUE_BYTES_MAX.

    Every method raises YardUnavailable when NATS or JetStream does not answer; those that write do so at once
    (`store_unavailable`) while the bucket is suspect.
    """

    def __init__(
        self, present: Callable[[], Client], name: str, *, ttl_s: float, health: StoreHealth
    ) -> None:
        self._present = present
        self._name = name
        self._health = health
        self._ttl_s = ttl_s
        self._opened: tuple[Client, KeyValue] | None = None

    async def get(self, key: str) -> Entry:
        """The value of a key.

        Raises:
            NotFound: there is none.
        """
        async with self._store(key) as store:
            return _entry(await store.get(key))

    async def create(self, key: str, value: bytes) -> int:
        """Claim a key that has no value; gives its revision. Of several that claim it at once, one succeeds.

        Raises:
            Conflict: it has a value.
        """
        async with self._store(key, writes=True) as store:
            return await store.create(key, value)

    async def update(self, key: str, value: bytes, *, revision: int) -> int:
        """Change a value that is still at `revision`; gives its new revision.

        Raises:
            Conflict: it was changed or deleted since.
        """
        async with self._store(key, writes=True) as store:
            return await store.update(key, value, last=revision)

    async def put(self, key: str, value: bytes) -> int:
        """Set a value whatever was there; gives its revision."""
        async with self._store(key, writes=True) as store:
            return await store.put(key, value)

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        """Drop a key; with `revision`, only if it is still there.

        Raises:
            Conflict: it was changed since.
        """
        async with self._store(key, writes=True) as store:
            await store.delete(key, last=revision)

    async def keys(self) -> list[str]:
        """Every key that has a value, sorted."""
        async with self._store("") as store:
            try:
                return sorted(await store.keys())
            except nats.js.errors.NoKeysError:
                return []

    async def probe(self) -> None:
        """Write and drop a key of ours, though the bucket be suspect; then it no longer is.

        Raises:
            YardUnavailable: it still takes no writes.
        """
        async with self._store(PROBE_KEY) as store:
            await store.put(PROBE_KEY, b"")
            await store.delete(PROBE_KEY)
        self._health.clear(self._name)

    @asynccontextmanager
    async def _store(self, key: str, *, writes: bool = False) -> AsyncIterator[KeyValue]:
        """The store on the present connection, and the one table from JetStream's errors to ours."""
        what = f"key {key!r} of bucket {self._name}"
        if writes:
            self._health.check(self._name, what)
        try:
            yield await self._open()
        except nats.js.errors.KeyNotFoundError as exc:
            raise NotFound(f"There is no {what}.", code="key_not_found") from exc
        except nats.js.errors.KeyWrongLastSequenceError as exc:
            raise Conflict(f"The {what} was written by somebody else.", code="key_changed") from exc
        except nats.js.errors.APIError as exc:
            if exc.err_code in (_BYTES_EXCEEDED, _TOO_LARGE):
                raise LimitExceeded(
                    f"Writing {what} failed: {exc.description}.", code="bucket_full", fault="infra"
                ) from exc
            if writes and (exc.code or 0) >= SERVER_ERROR:
                raise self._suspect(what, exc.description or str(exc)) from exc
            raise YardUnavailable(f"JetStream refused {what}: {exc}.", code="store_unavailable") from exc
        except (nats.errors.Error, OSError) as exc:
            if writes and isinstance(exc, nats.errors.TimeoutError | nats.js.errors.NoStreamResponseError):
                raise self._suspect(what, f"no answer in {ASK_S:g} s") from exc
            raise YardUnavailable(
                f"JetStream did not answer for {what}: {str(exc) or type(exc).__name__}.",
                code="store_unavailable",
            ) from exc

    def _suspect(self, what: str, reason: str) -> YardUnavailable:
        self._health.suspect(self._name, reason, self.probe)
        return self._health.error(what, reason)

    async def _open(self) -> KeyValue:
        client = self._present()
        if self._opened is None or self._opened[0] is not client:
            stream = client.jetstream(timeout=ASK_S)
            try:
                store = await stream.key_value(self._name)
            except nats.js.errors.BucketNotFoundError:
                store = await stream.create_key_value(
                    KeyValueConfig(
                        bucket=self._name,
                        ttl=self._ttl_s or None,
                        max_bytes=BUCKET_BYTES_MAX,
                        max_value_size=VALUE_BYTES_MAX,
                        direct=False,  # a claim is read back where it was written, never from a replica
                    )
                )
            self._opened = (client, store)
        return self._opened[1]


_BYTES_EXCEEDED, _TOO_LARGE = 10077, 10054  # JetStream: the stream is full; the message is over its bound


def _entry(entry: KeyValue.Entry) -> Entry:
    assert entry.revision is not None
    return Entry(entry.value or b"", entry.revision)
