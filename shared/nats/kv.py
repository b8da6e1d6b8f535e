"""Typed views of NATS KV buckets."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec
import structlog
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, KeyValueConfig, StorageType, StreamConfig
from nats.js.errors import APIError, BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from shared.errors import BrokerFull, BrokerUnavailable, InternalError
from shared.nats.bus import Bus, encode
from shared.nats.errors import BROKER_ERRORS, reason_of, translated
from shared.nats.streams import (
    StreamWatch,
    create_replicated,
    ensure_stream,
    made_by_others,
    messages_in,
    read_stream,
    when_led,
)
from shared.nats.subjects import escape, unescape

T = TypeVar("T", bound=msgspec.Struct)

log = structlog.get_logger(__name__)

READ_TIMEOUT = 10.0  # seconds to read a whole bucket: nats-py waits for ever for a part that is lost
SCAN_KEPT = 5.0  # seconds after which the broker forgets a reading in pages that nobody goes on with
# Of a bucket whose keys are written faster than it is read, before what was seen is taken for all.
READINGS = 10
LEAST_BYTES = 1 << 20  # with less room than that a bucket is of no use
WATCH_PAUSE = 0.2  # seconds before a lost watcher is opened again
TRIES = 100  # of a change that others overtake: each time one of theirs has been made
_SIZE, _OPERATION = "Nats-Msg-Size", "KV-Operation"
# Of a deletion by the server itself, once a value has lived for as long as it may.
_MARKER = "Nats-Marker-Reason"
_WRONG_LAST_SEQUENCE = 10071  # error code of the JetStream API


class KvEntry(msgspec.Struct, Generic[T], frozen=True):
    """A value of a bucket, with the revision that a compare-and-set needs."""

    key: str
    value: T
    revision: int


class Contention:
    """Of a change by compare-and-set, which is tried again where others were first, but not for ever."""

    def __init__(self, what: str) -> None:
        """`what` others change, as the error calls it."""
        self._what = what
        self._lost = 0

    def lost(self) -> None:
        """Others were first. Raises `BrokerUnavailable` where they were `TRIES` times."""
        self._lost += 1
        if self._lost >= TRIES:
            raise BrokerUnavailable(f"Others change {self._what} too often; try again.", retry_after=1)


class KvChange(msgspec.Struct, Generic[T], frozen=True):
    """What a key had before a change and has since; None: nothing."""

    before: KvEntry[T] | None
    after: KvEntry[T] | None


class Bucket(Generic[T]):
    """A KV bucket of values of one message type. Keys may be any non-empty names; in a bucket of tenants
    (`shared/nats/tenants.py`) they are those of NATS, as they stand.

    Every method raises `BrokerUnavailable` when the broker does not answer or will not do it. A value
    that cannot be decoded is logged and taken for one that is not there. Before `ensure` they raise `InternalError`.
    """

    def __init__(
        self,
        bus: Bus,
        name: str,
        value_type: type[T],
        *,
        ttl: float | None = None,
        max_bytes: int = 0,
        plain: bool = False,
    ) -> None:
        """Asks nothing of the broker before `ensure`. `ttl` in seconds; `max_bytes`: of what may be dropped, the
        oldest values make room once there are so many, or as many as the broker has room for; `plain`: keys are
        those of NATS."""
        self._bus = bus
        self._name = name
        self._ttl = ttl
        self._max_bytes = max_bytes
        self._plain = plain
        self._decoder = msgspec.msgpack.Decoder(value_type)
        self._opened: KeyValue | None = None

    @classmethod
    async def open(cls, bus: Bus, name: str, value_type: type[T], **options: Any) -> "Bucket[T]":
        """One that is there (`ensure`); `options` as of the constructor."""
        bucket = cls(bus, name, value_type, **options)
        await bucket.ensure()
        return bucket

    async def ensure(self) -> None:
        """Creates it where it does not exist, or waits for it where this user may not; one with `max_bytes` gets these
        limits though it exists."""
        bus, name = self._bus, self._name
        if self._max_bytes:
            await self._bound()
        with translated(f"open the bucket {name}"):
            if self._max_bytes or await made_by_others(bus, f"KV_{name}"):
                self._opened = await _existing(bus, name)
            else:
                self._opened = await when_led(bus, lambda: _find_or_create(bus, name, self._ttl))

    @property
    def _store(self) -> KeyValue:
        if self._opened is None:
            raise InternalError(f"The bucket {self._name} was not opened; await its ensure first.")
        return self._opened

    async def _bound(self) -> None:
        """Creates the stream of one with `max_bytes`, which NATS' own buckets do not know to drop from."""
        config = StreamConfig(
            name=f"KV_{self._name}",
            subjects=[f"$KV.{self._name}.>"],
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,
            max_age=self._ttl,
            max_msgs_per_subject=1,
            allow_direct=True,
            allow_rollup_hdrs=True,
            deny_delete=True,
            duplicate_window=min(self._ttl or 120.0, 120.0),
        )
        config.max_bytes = self._max_bytes
        try:
            await ensure_stream(self._bus, config)
        except BrokerFull:
            await _fit(self._bus, config)

    async def get(self, key: str) -> KvEntry[T] | None:
        with translated(f"read from the bucket {self._name}"):
            try:
                found = await self._store.get(self._token(key))
            except KeyNotFoundError:
                return None
        value = self._decode(key, found.value)
        return None if value is None else KvEntry(key, value, found.revision or 0)

    async def put(self, key: str, value: T) -> int:
        """Writes without condition; returns the revision."""
        with self._writing():
            return await self._store.put(self._token(key), encode(value))

    async def create(self, key: str, value: T) -> int | None:
        """Writes if the key does not exist; None when somebody was first."""
        with self._writing():
            try:
                return await self._store.create(self._token(key), encode(value))
            except KeyWrongLastSequenceError:
                return None

    async def update(self, key: str, value: T, revision: int) -> int | None:
        """Writes if the key still has `revision`; None when somebody was first."""
        with self._writing():
            try:
                return await self._store.update(self._token(key), encode(value), last=revision)
            except KeyWrongLastSequenceError:
                return None

    async def delete(self, key: str, revision: int | None = None) -> bool:
        """Deletes the key, with `revision` only if it still has that one; False when somebody was first."""
        with self._writing():
            try:
                await self._store.delete(self._token(key), last=revision)
            except APIError as error:  # nats-py translates it for puts alone
                if error.err_code != _WRONG_LAST_SEQUENCE:
                    raise
                return False
        return True

    async def change(self, key: str, made: Callable[[KvEntry[T] | None], T | None]) -> KvChange[T]:
        """Has the key hold what `made` makes of its newest entry, where both may be None: nothing is there, or is to
        be. Whenever somebody else was first `made` is called again, and what it raises ends the change. Writes nothing
        where nothing changes. Raises `BrokerUnavailable`, where others are first `TRIES` times too."""
        contention = Contention(f"{key[:200]!r} in the bucket {self._name}")
        while True:
            known = await self.get(key)
            value = made(known)
            if value == (None if known is None else known.value):
                return KvChange(known, known)
            if value is None:
                if known is not None and await self.delete(key, known.revision):
                    return KvChange(known, None)
                given = None
            elif known is None:
                given = await self.create(key, value)
            else:
                given = await self.update(key, value, known.revision)
            if value is not None and given is not None:
                return KvChange(known, KvEntry(key, value, given))
            contention.lost()

    async def items(self, before: datetime | None = None) -> dict[str, T]:
        """All keys and values; `before`: those that were written before then alone.

        A watcher says that all has been shown while what changed in the meantime is still to come, so a key that
        is being written could be missing. The stream has one message for each key, deleted ones too: while fewer
        keys were seen, it is read again.
        """
        found: dict[str, T] = {}
        seen: set[str] = set()
        with translated(f"read the bucket {self._name}"):
            for _ in range(READINGS):
                held = (await self._store.status()).values
                await self._read(found, seen, before)
                if len(seen) >= held:
                    break
        return found

    async def _read(self, found: dict[str, T], seen: set[str], before: datetime | None) -> None:
        """Adds what a new watcher shows: values to `found`, keys to `seen`."""
        async with asyncio.timeout(READ_TIMEOUT), self._watcher() as watcher:
            async for update in watcher:
                if update is None:
                    return
                key = self._key_of(update)
                seen.add(key)
                left_out = before is not None and update.metadata.timestamp >= before
                value = None if left_out or _deleted(update) else self._decode(key, update.data)
                if value is None:
                    found.pop(key, None)
                else:
                    found[key] = value

    async def scan(self, keys: str = ">") -> AsyncGenerator[KvEntry[T], None]:
        """The entries whose NATS keys match `keys` (`*`: one token, `>`: all that follow), page by page, in the
        order of their writing: each page has a time-out of its own, so that many entries take long and do not fail."""
        async for key, message in self._pages(keys, headers_only=False):
            value = self._decode(key, message.data)
            if value is not None:
                yield KvEntry(key, value, message.metadata.sequence.stream)

    async def sizes(self, keys: str = ">") -> AsyncGenerator[tuple[str, int], None]:
        """As `scan`, but each entry's key and size in bytes alone: values stay where they are."""
        async for key, message in self._pages(keys, headers_only=True):
            yield key, int((message.headers or {}).get(_SIZE, 0))

    async def purge(self, key: str, before: int = 0) -> None:
        """Removes the key and leaves no mark of it, so that watchers hear nothing; `before`: only what was written
        before that revision."""
        with self._writing():
            await self._bus.jetstream().purge_stream(
                f"KV_{self._name}", seq=before or None, subject=self._subject(self._token(key))
            )

    async def _pages(self, keys: str, *, headers_only: bool) -> AsyncGenerator[tuple[str, Msg], None]:
        """The messages of entries that are not deleted."""
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE, inactive_threshold=SCAN_KEPT, mem_storage=True, headers_only=headers_only or None
        )
        subject = self._subject(keys)
        reading = read_stream(self._bus, f"KV_{self._name}", subject, config, timeout=READ_TIMEOUT)
        with translated(f"read the bucket {self._name}"):
            async with contextlib.aclosing(reading) as messages:
                async for message in messages:
                    if not _deleted(message):
                        yield self._key_of(message), message

    async def watch(self) -> AsyncIterator[tuple[str, T | None] | None]:
        """Yields every present (key, value), then None once, then each change; a value of None is a deletion.

        Goes on for ever, over lost watchers and connections."""
        async with contextlib.aclosing(self.watch_revisions()) as updates:
            async for update in updates:
                yield None if update is None else update[:2]

    async def follow(
        self, note: Callable[[str, T | None], object], caught_up: Callable[[], object] = lambda: None
    ) -> None:
        """Tells `note` what `watch` yields, and `caught_up` in place of its None. Runs until it is cancelled."""
        await self.follow_revisions(lambda key, value, _: note(key, value), caught_up)

    async def follow_revisions(
        self, note: Callable[[str, T | None, int], object], caught_up: Callable[[], object] = lambda: None
    ) -> None:
        """As `follow`, with revisions as `watch_revisions` has them."""
        async with contextlib.aclosing(self.watch_revisions()) as updates:
            async for update in updates:
                if update is None:
                    caught_up()
                else:
                    note(*update)

    async def watch_revisions(self, keys: str = ">") -> AsyncGenerator[tuple[str, T | None, int] | None, None]:
        """As `watch`, with the revision of each value; 0: not known. `keys`: as of `scan`.

        A watcher is opened again when it is lost or the connection was: everything
        present is yielded anew, and what was deleted meanwhile as a deletion.
        """
        known: set[str] = set()
        first = True
        while True:
            present: set[str] | None = set()
            try:
                async with self._watcher(keys) as watcher:
                    async for update in watcher:
                        if update is None:  # all that was there has been yielded
                            for key in known - (present or set()):
                                yield key, None, 0
                            known, present = present or set(), None
                            if first:
                                first = False
                                yield None
                            continue
                        key, deleted = self._key_of(update), _deleted(update)
                        value = None if deleted else self._decode(key, update.data)
                        if value is None and not deleted:
                            continue
                        current = known if present is None else present
                        (current.discard if deleted else current.add)(key)
                        yield key, value, update.metadata.sequence.stream
            except BROKER_ERRORS as error:
                log.debug("watch_lost", bucket=self._name, error=reason_of(error))
            known |= present or set()
            await asyncio.sleep(WATCH_PAUSE)

    def _watcher(self, keys: str = ">") -> contextlib.AbstractAsyncContextManager[StreamWatch]:
        return StreamWatch.open(self._bus, f"KV_{self._name}", self._subject(keys))

    def _subject(self, keys: str) -> str:
        return f"$KV.{self._name}.{keys}"

    def _key_of(self, message: Msg) -> str:
        return self._key(message.subject.removeprefix(self._subject("")))

    def _token(self, key: str) -> str:
        return key if self._plain else escape(key)

    def _key(self, token: str) -> str:
        return token if self._plain else unescape(token)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return translated(f"write to the bucket {self._name}")

    def _decode(self, key: str, payload: bytes | None) -> T | None:
        try:
            return self._decoder.decode(payload or b"")
        except msgspec.DecodeError as error:
            log.warning("undecodable_value", bucket=self._name, key=key, error=str(error))
            return None


async def _fit(bus: Bus, config: StreamConfig) -> None:
    """Creates a stream for which there is less room than was wanted, with a small part of it. NATS sets
    aside what its streams may come to, and others must fit beside it. One that exists stays as it is."""
    wanted = config.max_bytes or 0
    given = wanted
    while await messages_in(bus, config.name or "") is None:
        given //= 64
        config.max_bytes = given
        try:
            await ensure_stream(bus, config, change=False)
        except BrokerFull:
            if given < LEAST_BYTES:
                raise
    log.warning("stream_max_bytes_reduced", stream=config.name, set=wanted)


def _deleted(message: Msg) -> bool:
    headers = message.headers or {}
    return _OPERATION in headers or _MARKER in headers


async def _find_or_create(bus: Bus, name: str, ttl: float | None) -> KeyValue:
    def create(replicas: int) -> Awaitable[KeyValue]:
        config = KeyValueConfig(bucket=name, history=1, ttl=ttl, replicas=replicas)
        return bus.jetstream().create_key_value(config)

    try:
        return await bus.jetstream().key_value(name)
    except BucketNotFoundError:
        # None: another service was first, with another time to live
        return await create_replicated(bus, create) or await _existing(bus, name)


async def _existing(bus: Bus, name: str) -> KeyValue:
    return await when_led(bus, lambda: bus.jetstream().key_value(name), created=True)
