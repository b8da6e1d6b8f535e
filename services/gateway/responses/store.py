"""Responses that have ended, in the bucket `responses`: kept when the journal has dropped their tokens.

    <identity>      the first part, which says how many there are: written last
    <identity>-1    the others, of a response that is larger than a message may be

The bucket has a limit in bytes: where it is full, the oldest make room. A response that was deleted is an entry
of no parts, so that nobody takes it from the journal instead.
"""

import asyncio
import time
import zlib

import msgspec
import structlog

from shared import subjects
from shared.bus import Bus, encode
from shared.records import ResponsePart, StoredResponse
from shared.stores import Bucket

log = structlog.get_logger(__name__)

ROOM = 4096
"""Bytes of a message that are not the part's data."""
LARGE = 64 << 10
"""Bytes from which a response is deflated and inflated beside the event loop."""
LEVEL = 1
"""How hard: most of what can be won, quickly."""
_decoder = msgspec.msgpack.Decoder(StoredResponse)


class ResponseStore:
    """Opened by `start`. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, ttl: float, max_bytes: int) -> None:
        """`ttl`: seconds that a response is kept after it has ended or was continued last."""
        self.ttl = ttl
        self._bus = bus
        self._max_bytes = max_bytes
        self._opened: Bucket[ResponsePart] | None = None

    async def start(self) -> None:
        self._opened = await Bucket.open_bounded(
            self._bus, subjects.RESPONSES_BUCKET, ResponsePart, ttl=self.ttl, max_bytes=self._max_bytes
        )

    @property
    def _bucket(self) -> Bucket[ResponsePart]:
        assert self._opened is not None, "not started"
        return self._opened

    async def keep(self, stored: StoredResponse) -> None:
        """Writes it, unless it is there already or has been deleted."""
        identity = stored.record.identity
        await self._write(identity, await _deflated(encode(stored)), revision=0)

    async def get(self, identity: str) -> StoredResponse | None:
        """What is kept, or None; see `is_deleted`."""
        head = await self._bucket.get(identity)
        if head is None or not head.value.parts:
            return None
        data = await self._read(identity, head.value)
        return None if data is None else _decoder.decode(await _inflated(data))

    async def is_known(self, identity: str) -> bool:
        """Whether it is kept, or has been deleted."""
        return await self._bucket.get(identity) is not None

    async def is_deleted(self, identity: str) -> bool:
        head = await self._bucket.get(identity)
        return head is not None and not head.value.parts

    async def refresh(self, identity: str) -> None:
        """Lets its time begin anew, at most once in half of it: a conversation does not forget its beginning."""
        head = await self._bucket.get(identity)
        if head is None or not head.value.parts or time.time() - head.value.kept_at < self.ttl / 2:
            return
        data = await self._read(identity, head.value)
        if data is not None:
            await self._write(identity, data, revision=head.revision)

    async def delete(self, identity: str) -> None:
        head = await self._bucket.get(identity)
        await self._bucket.put(identity, ResponsePart(b"", 0, time.time()))
        for number in range(1, head.value.parts if head else 0):
            await self._bucket.delete(_key(identity, number))

    async def _read(self, identity: str, head: ResponsePart) -> bytes | None:
        parts = [head.data]
        for number in range(1, head.parts):
            entry = await self._bucket.get(_key(identity, number))
            if entry is None:  # the oldest parts have made room
                log.info("response_incomplete", response=identity, missing=number)
                return None
            parts.append(entry.value.data)
        return b"".join(parts)

    async def _write(self, identity: str, data: bytes, *, revision: int) -> None:
        """By compare-and-set: it may be deleted meanwhile. `revision` 0: nothing is there yet."""
        size = self._bus.max_payload - ROOM
        parts = [data[begin : begin + size] for begin in range(0, len(data), size)]
        if len(parts) > 1 and not revision and await self.is_known(identity):
            return
        now = time.time()
        for number in range(1, len(parts)):
            await self._bucket.put(_key(identity, number), ResponsePart(parts[number], len(parts), now))
        head = ResponsePart(parts[0], len(parts), now)
        if revision:
            await self._bucket.update(identity, head, revision)
        else:
            await self._bucket.create(identity, head)


async def _deflated(data: bytes) -> bytes:
    """A large one is not deflated on the event loop (the library lets go of the interpreter)."""
    if len(data) < LARGE:
        return zlib.compress(data, LEVEL)
    return await asyncio.to_thread(zlib.compress, data, LEVEL)


async def _inflated(data: bytes) -> bytes:
    return zlib.decompress(data) if len(data) < LARGE else await asyncio.to_thread(zlib.decompress, data)


def _key(identity: str, number: int) -> str:
    return f"{identity}-{number}" if number else identity
