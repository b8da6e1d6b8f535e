"""Responses that have ended, in the bucket `responses`: kept when the journal has dropped their tokens.

    <tenant>.<identity>      the first part, which says how many there are: written last
    <tenant>.<identity>-1    the others, of a response that is larger than a message may be

Each tenant has a quota: beyond it its own oldest make room. The bucket has a limit in bytes too, for all tenants
together. A response that was deleted is an entry of no parts, so that nobody takes it from the journal instead.
"""

import time
import zlib

import msgspec
import structlog

from services.gateway.persistence.budget import LARGE, ByteBudget, beside_loop
from shared.errors import PayloadTooLarge
from shared.limits import RESPONSE_BYTES
from shared.messages.records import ResponsePart, StoredResponse
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from shared.nats.kv import KvEntry
from shared.nats.tenants import Quota, TenantBucket, Trimmed, tenant_key

log = structlog.get_logger(__name__)

ROOM = 4096  # bytes of a message that are not the part's data
LEVEL = 1  # how hard: most of what can be won, quickly
_decoder = msgspec.msgpack.Decoder(StoredResponse)


class ResponseStore:
    """Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, ttl: float, max_bytes: int, quota: Quota) -> None:
        """`ttl`: seconds that a response is kept after it has ended or was continued last; `max_bytes`: of all
        tenants; `quota`: of each."""
        self.ttl = ttl
        self._bus = bus
        self.bucket = TenantBucket(bus, subjects.RESPONSES_BUCKET, ResponsePart, ttl=ttl, max_bytes=max_bytes)
        self._trimmed = Trimmed(self.bucket, quota)

    async def keep(self, stored: StoredResponse) -> None:
        """Writes it, unless it is there already or has been deleted."""
        record, whole = stored.record, encode(stored)
        await self._write(record.identity, record.tenant, await deflated(whole), len(whole))

    async def get(self, identity: str, tenant: str, reads: ByteBudget | None = None) -> StoredResponse | None:
        """What is kept, or None; see `is_deleted`. `reads` is charged with its bytes, decompressed, before they are."""
        head = await self.bucket.get(tenant, identity)
        if head is None or not head.value.parts:
            return None
        if reads is not None and head.value.size:
            reads.charge(head.value.size)
        data = await self._read(identity, tenant, head.value)
        if data is None:
            return None
        whole = await inflated(data)
        if reads is not None and not head.value.size:
            reads.charge(len(whole))
        return await beside_loop(len(whole), _decoder.decode, whole)

    async def is_known(self, identity: str, tenant: str) -> bool:
        """Whether it is kept, or has been deleted."""
        return await self.bucket.get(tenant, identity) is not None

    async def is_deleted(self, identity: str, tenant: str) -> bool:
        head = await self.bucket.get(tenant, identity)
        return head is not None and not head.value.parts

    async def refresh(self, identity: str, tenant: str) -> None:
        """Lets its time begin anew, at most once in half of it: a conversation does not forget its beginning."""
        head = await self.bucket.get(tenant, identity)
        if head is None or not head.value.parts or time.time() - head.value.kept_at < self.ttl / 2:
            return
        data = await self._read(identity, tenant, head.value)
        if data is not None:
            await self._write(identity, tenant, data, head.value.size, head)

    async def delete(self, identity: str, tenant: str) -> None:
        head = await self.bucket.get(tenant, identity)
        await self.bucket.put(tenant, identity, ResponsePart(b"", 0, time.time()))
        self._trimmed.wrote(tenant, 0)
        for number in range(1, head.value.parts if head else 0):
            part = await self.bucket.get(tenant, _name(identity, number))
            if part is not None:
                await self.bucket.purge(part.key)
        if head is not None and head.key != tenant_key(tenant, identity):  # a version before wrote it
            await self.bucket.purge(head.key)

    async def _read(self, identity: str, tenant: str, head: ResponsePart) -> bytes | None:
        parts = [head.data]
        for number in range(1, head.parts):
            entry = await self.bucket.get(tenant, _name(identity, number))
            if entry is None:  # the oldest parts have made room
                log.info("response_incomplete", response=identity, missing=number)
                return None
            parts.append(entry.value.data)
        return b"".join(parts)

    async def _write(
        self, identity: str, tenant: str, data: bytes, inflated_size: int, known: KvEntry[ResponsePart] | None = None
    ) -> None:
        """By compare-and-set: it may be deleted meanwhile. `known`: what is there."""
        size = self._bus.max_payload - ROOM
        parts = [data[begin : begin + size] for begin in range(0, len(data), size)]
        if len(parts) > 1 and known is None and await self.is_known(identity, tenant):
            return
        now = time.time()
        for number in range(1, len(parts)):
            await self.bucket.put(tenant, _name(identity, number), ResponsePart(parts[number], len(parts), now))
            self._trimmed.wrote(tenant, len(parts[number]))
        head = ResponsePart(parts[0], len(parts), now, inflated_size)
        if known is not None:
            await self.bucket.update(known.key, head, known.revision)
        else:
            await self.bucket.create(tenant, identity, head)
        self._trimmed.wrote(tenant, len(head.data))


async def deflated(data: bytes) -> bytes:
    """A large one is not deflated on the event loop (the library lets go of the interpreter)."""
    return await beside_loop(len(data), zlib.compress, data, LEVEL)


async def inflated(data: bytes) -> bytes:
    """What was deflated, 18 kB of which may be 4 MiB: only its beginning is inflated on the event loop. Raises
    `PayloadTooLarge` above the limit."""
    inflate = zlib.decompressobj()
    begin = inflate.decompress(data, LARGE)
    if inflate.eof or len(begin) < LARGE:
        return begin
    rest = await beside_loop(LARGE, inflate.decompress, inflate.unconsumed_tail, RESPONSE_BYTES.value - LARGE + 1)
    if len(begin) + len(rest) > RESPONSE_BYTES.value:
        raise PayloadTooLarge(f"A kept response is too large to be read ({RESPONSE_BYTES.cited()}).")
    return begin + rest


def _name(identity: str, number: int) -> str:
    return f"{identity}-{number}" if number else identity
