"""Typed views of NATS KV buckets and object stores."""

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import msgspec
import nats.errors
import structlog
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.errors import (
    BadRequestError,
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoKeysError,
    ObjectNotFoundError,
)
from nats.js.errors import NotFoundError as StreamNotFoundError
from nats.js.kv import KeyValue

from shared.bus import Bus, encode
from shared.subjects import escape, unescape

T = TypeVar("T", bound=msgspec.Struct)

log = structlog.get_logger(__name__)


class Entry(msgspec.Struct, Generic[T], frozen=True):
    """A value of a bucket, with the revision that a compare-and-set needs."""

    key: str
    value: T
    revision: int


class Bucket(Generic[T]):
    """A KV bucket of values of one message type. Keys may be any non-empty names."""

    def __init__(self, store: KeyValue, value_type: type[T]) -> None:
        self._store = store
        self._decoder = msgspec.msgpack.Decoder(value_type)

    @classmethod
    async def open(cls, bus: Bus, name: str, value_type: type[T], *, ttl: float | None = None) -> "Bucket[T]":
        """Opens the bucket `name`, creating it where it does not exist. `ttl` in seconds."""
        jetstream = bus.jetstream()
        try:
            store = await jetstream.key_value(name)
        except BucketNotFoundError:
            store = await _create(jetstream, name, ttl)
        return cls(store, value_type)

    async def get(self, key: str) -> Entry[T] | None:
        try:
            found = await self._store.get(escape(key))
        except KeyNotFoundError:
            return None
        return Entry(key, self._decoder.decode(found.value or b""), found.revision or 0)

    async def put(self, key: str, value: T) -> int:
        """Writes without condition; returns the revision."""
        return await self._store.put(escape(key), encode(value))

    async def create(self, key: str, value: T) -> int | None:
        """Writes if the key does not exist; None when somebody was first."""
        try:
            return await self._store.create(escape(key), encode(value))
        except KeyWrongLastSequenceError:
            return None

    async def update(self, key: str, value: T, revision: int) -> int | None:
        """Writes if the key still has `revision`; None when somebody was first."""
        try:
            return await self._store.update(escape(key), encode(value), last=revision)
        except KeyWrongLastSequenceError:
            return None

    async def delete(self, key: str) -> None:
        await self._store.delete(escape(key))

    async def items(self) -> dict[str, T]:
        """All keys and values."""
        try:
            keys = await self._store.keys()
        except NoKeysError:
            return {}
        found = await asyncio.gather(*(self.get(unescape(key)) for key in keys))
        return {entry.key: entry.value for entry in found if entry is not None}

    async def watch(self) -> AsyncIterator[tuple[str, T | None] | None]:
        """Yields every present (key, value), then None once, then each change; a value of None is a deletion.

        Goes on for ever. A lost watcher is opened again: everything present is yielded anew, and what
        was deleted meanwhile as a deletion. A value that cannot be decoded is logged and left out.
        """
        known: set[str] = set()
        first = True
        while True:
            present: set[str] | None = set()
            try:
                async for update in await self._store.watchall():
                    if update is None:  # all that was there has been yielded
                        for key in known - (present or set()):
                            yield key, None
                        known, present = present or set(), None
                        if first:
                            first = False
                            yield None
                        continue
                    key = unescape(update.key)
                    deleted = update.operation is not None
                    value = None if deleted else self._decode(key, update.value)
                    if value is None and not deleted:
                        continue
                    current = known if present is None else present
                    (current.discard if deleted else current.add)(key)
                    yield key, value
            except (nats.errors.Error, TimeoutError) as error:
                log.debug("watch_lost", error=str(error))
            await asyncio.sleep(0.2)

    def _decode(self, key: str, payload: bytes | None) -> T | None:
        try:
            return self._decoder.decode(payload or b"")
        except msgspec.DecodeError as error:
            log.warning("undecodable_value", key=key, error=str(error))
            return None


async def _create(jetstream: JetStreamContext, name: str, ttl: float | None) -> KeyValue:
    try:
        return await jetstream.create_key_value(KeyValueConfig(bucket=name, history=1, ttl=ttl))
    except BadRequestError:  # another service was first, with another time to live
        return await jetstream.key_value(name)


class ObjectStore:
    """Large values under names of our choice."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._name = name

    async def put(self, key: str, data: bytes) -> None:
        """Stores `data`; the store is created where it does not exist."""
        jetstream = self._bus.jetstream()
        try:
            store = await jetstream.object_store(self._name)
        except (BucketNotFoundError, StreamNotFoundError):
            try:
                store = await jetstream.create_object_store(self._name)
            except BadRequestError:
                store = await jetstream.object_store(self._name)
        await store.put(escape(key), data)

    async def get(self, key: str) -> bytes | None:
        """The data under `key`, or None."""
        try:
            store = await self._bus.jetstream().object_store(self._name)
            result = await store.get(escape(key))
        except (BucketNotFoundError, ObjectNotFoundError, StreamNotFoundError):
            return None
        return result.data
