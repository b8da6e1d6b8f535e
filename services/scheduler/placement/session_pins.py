"""Session pins: which ring holds a session's KV cache, agreed among all schedulers by compare-and-set.

A pin is written once and cached: the common case costs no round trip. When its ring is gone the first
scheduler that notices moves it; the others lose the compare-and-set and adopt what the first one wrote.
Each follows the bucket, so that it does not go on with a pin that another one has moved.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from shared.errors import RyzansteinError
from shared.messages import SessionPin
from shared.nats.kv import Bucket

REFRESH_SHARE = 4
"""A pin in use is written anew once per this fraction of its time to live."""
_TRIES = 8

Outcome = Literal["created", "moved", "adopted", "unpinned"]

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Cached:
    pin: SessionPin
    revision: int
    written: float


class SessionPins:
    """Pins in the KV bucket `sessions`, behind a cache of the least recently used. Times are monotonic."""

    def __init__(self, bucket: Bucket[SessionPin], ttl: float, capacity: int) -> None:
        self._bucket = bucket
        self._ttl = ttl
        self._capacity = capacity
        self._cache: OrderedDict[str, _Cached] = OrderedDict()

    def cached(self, key: str, now: float) -> SessionPin | None:
        """The pin as this scheduler remembers it, without asking anybody."""
        cached = self._cache.get(key)
        if cached is None:
            return None
        if now - cached.written >= self._ttl:
            del self._cache[key]
            return None
        self._cache.move_to_end(key)
        return cached.pin

    async def follow(self) -> None:
        """Forgets cached pins that others have changed, for ever: the next request asks the bucket."""
        async for update in self._bucket.watch():
            if update is not None:
                self._changed(*update)

    def _changed(self, key: str, pin: SessionPin | None) -> None:
        cached = self._cache.get(key)
        if cached is not None and cached.pin != pin:
            del self._cache[key]

    async def claim(
        self, key: str, wanted: SessionPin, alive: Callable[[SessionPin], bool], now: float
    ) -> tuple[SessionPin, Outcome]:
        """Pins the session to `wanted` unless a living pin stands; returns the pin that holds.

        Without an answer from the broker the request goes unpinned: a miss in a cache, not a failure.
        """
        try:
            return await self._claim(key, wanted, alive, now)
        except RyzansteinError as error:
            log.warning("session_not_pinned", error=str(error))
            return wanted, "unpinned"

    async def _claim(
        self, key: str, wanted: SessionPin, alive: Callable[[SessionPin], bool], now: float
    ) -> tuple[SessionPin, Outcome]:
        known = self._cache.get(key)
        for _ in range(_TRIES):
            if known is not None and alive(known.pin):
                self._remember(key, known)
                return known.pin, "adopted"
            outcome: Outcome = "created" if known is None else "moved"
            if known is None:
                revision = await self._bucket.create(key, wanted)
            else:
                revision = await self._bucket.update(key, wanted, known.revision)
            if revision is not None:
                self._remember(key, _Cached(wanted, revision, now))
                return wanted, outcome
            entry = await self._bucket.get(key)
            known = None if entry is None else _Cached(entry.value, entry.revision, now)
        return wanted, "unpinned"

    def refresh_due(self, key: str, now: float) -> bool:
        """Whether the pin should be written anew, so that it outlives its time; true once per due time."""
        cached = self._cache.get(key)
        if cached is None or now - cached.written < self._ttl / REFRESH_SHARE:
            return False
        cached.written = now
        return True

    async def refresh(self, key: str, now: float) -> None:
        """Writes the pin anew, or adopts what another scheduler has made of it."""
        cached = self._cache.get(key)
        if cached is None:
            return
        try:
            revision = await self._bucket.update(key, cached.pin, cached.revision)
            if revision is not None:
                self._remember(key, _Cached(cached.pin, revision, now))
            elif (entry := await self._bucket.get(key)) is not None:
                self._remember(key, _Cached(entry.value, entry.revision, now))
            else:
                self._cache.pop(key, None)
        except RyzansteinError as error:
            log.debug("session_not_refreshed", error=str(error))

    def _remember(self, key: str, cached: _Cached) -> None:
        self._cache[key] = cached
        self._cache.move_to_end(key)
        if len(self._cache) > self._capacity:
            self._cache.popitem(last=False)
