"""Records of generations in the journal: written before a client sees the first byte, found by their id.

    request ─┐                    ┌─ intake.<lane>.<model>          one publish per choice
    request ─┼─ one turn of the ──┤
    request ─┘  event loop        └─ records.<writer>.<second>      one publish for all

While one publish is under way the next records gather, so the busier the gateway is, the less a record
costs. Nobody waits for it but the first byte of the answer, which has a ring to wait for anyhow.

Records that are too large for the journal, which all tenants share, lie in the bucket `records`, with a quota for each:

    records.<writer>.<second>       what is read of every record: whose it is, how many parts it has, its first request
                                    without its prompt
    <tenant>.<identity>-<part>      the record itself, beside the journal, and for as long

So a tenant that sends large requests pushes its own old ones out, and neither records nor frames of the others.

`JournalLag` is the time that it takes to store what this gateway gives to keep:

    given ──── stored            a record's way: its length is the lag while it is among the last `WINDOW` seconds
    given ─────────────── now    one that is not stored yet counts with its age
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import nats.errors
import structlog

from services.gateway.core.settings import GatewaySettings
from services.gateway.lifecycle.request_state import RecordPosition, merged, place
from shared.errors import BrokerUnavailable, LinkLost, PayloadTooLarge
from shared.messages import SamplingParams
from shared.messages.records import GenerationRecord
from shared.nats import subjects
from shared.nats.bus import ELECTION, Bus, encode
from shared.nats.errors import BROKER_ERRORS, broker_error
from shared.nats.journal import JournalEnd, recorded_in, recorded_since
from shared.nats.tenants import Quota, TenantBucket, Trimmed, tenant_key
from shared.tasks import TaskSet

log = structlog.get_logger(__name__)

LARGE = 32 << 10  # bytes of a record from which on it lies beside the journal
# Of a tenant: each has LARGE bytes or more but for the last of a record, so its bytes are the nearer bound.
MOST_PARTS = 100_000


class LargeRecords:
    """The bucket `records`."""

    def __init__(self, bus: Bus, settings: GatewaySettings) -> None:
        self._bus = bus
        ttl, most = settings.journal_max_age, settings.records_max_bytes
        self.bucket = TenantBucket(bus, subjects.RECORDS_BUCKET, GenerationRecord, ttl=ttl, max_bytes=most)
        self._trimmed = Trimmed(self.bucket, Quota(settings.tenant_record_bytes, MOST_PARTS))

    async def put(self, record: GenerationRecord, parts: Sequence[bytes]) -> None:
        """Stores `record` in its encoded parts. Raises `BrokerUnavailable`, `LinkLost` among them."""
        for number, part in enumerate(parts):
            key = tenant_key(record.tenant, _name(record.identity, number))
            await self._bus.publish_durable(f"$KV.{subjects.RECORDS_BUCKET}.{key}", msgspec.Raw(part))
            self._trimmed.wrote(record.tenant, len(part))

    async def whole(self, outline: GenerationRecord) -> GenerationRecord | None:
        """The record of `outline`; None when it has made room, or its time is over. Raises one of `BROKER_ERRORS`."""
        parts = []
        for number in range(outline.aside):
            try:
                entry = await self.bucket.get(outline.tenant, _name(outline.identity, number))
            except BrokerUnavailable as error:
                raise nats.errors.Error(error.message) from error
            if entry is not None:
                parts.append(entry.value)
        record = merged(parts)
        if record is None:
            log.info("large_record_gone", generation_id=outline.identity)
        return record


def outline_of(record: GenerationRecord, parts: int) -> GenerationRecord:
    """What stands in the journal of a record that lies beside it in so many parts. Pure.

    It has no requests, so gateways of versions before take it for one of which parts are missing.
    """
    first = msgspec.structs.replace(
        record.requests[0],
        prompt=[],
        generated=[],
        prediction=[],
        stop_token_ids=[],
        grammar=None,
        sampling=SamplingParams(),
    )
    return GenerationRecord(
        identity=record.identity,
        endpoint=record.endpoint,
        created=record.created,
        requests=[],
        choices=record.choices,
        prompts=record.prompts,
        stop=[""] if record.stop else [],
        tenant=record.tenant,
        log_behind=record.log_behind,
        aside=parts,
        outline=first,
        prompt_tokens=sum(len(request.prompt) for request in record.requests),
    )


def _name(identity: str, number: int) -> str:
    return f"{identity}-{number}"


# Seconds for which a record that took long is told: longer than any scrape interval that is of use.
WINDOW = 10.0


class JournalLag:
    """Records are stored in the order in which they were given."""

    def __init__(self) -> None:
        self._waiting: deque[float] = deque()
        # (when it was stored, how long that took): of each second the slowest.
        self._slowest: deque[tuple[float, float]] = deque()

    def given(self, now: float) -> None:
        self._waiting.append(now)

    def stored(self, now: float) -> None:
        """The oldest that waits is stored, or never will be."""
        took = now - self._waiting.popleft()
        if self._slowest and now - self._slowest[-1][0] < 1:
            at, slowest = self._slowest.pop()
            self._slowest.append((at, max(took, slowest)))
        else:
            self._slowest.append((now, took))
            self._forget(now)

    def seconds(self, now: float) -> float:
        """0 when nothing was given lately."""
        self._forget(now)
        waits = now - self._waiting[0] if self._waiting else 0.0
        return max(waits, max((took for _, took in self._slowest), default=0.0))

    def _forget(self, now: float) -> None:
        while self._slowest and now - self._slowest[0][0] > WINDOW:
            self._slowest.popleft()


BATCH_BYTES = 256 << 10  # bytes of records in one message, unless one record alone has more
ROOM = 1024  # bytes of a message that are not records
SLOTS_AT_ONCE = 8  # readings of the journal at a time


class _Batch:
    """Records on their way to one subject."""

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self.payloads: list[msgspec.Raw] = []
        self.size = 0
        self.stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class RecordWriter:
    """Writes the records of one gateway."""

    def __init__(self, bus: Bus, writer: str, journal: JournalEnd, large: LargeRecords) -> None:
        """`journal` is told what it has come to; `large` has what is too large for it."""
        self._large = large
        self._aside = TaskSet("", lambda error: log.warning("large_record_write_failed", error=str(error)))
        self._bus = bus
        self._writer = writer
        self._journal = journal
        self.lag = JournalLag()
        self._batches: list[_Batch] = []
        self._task: asyncio.Task[None] | None = None

    def write(self, record: GenerationRecord) -> "asyncio.Future[None]":
        """Begins to store `record`; what is returned is done when the journal has it, or fails with
        `BrokerUnavailable`. Raises `PayloadTooLarge`."""
        parts = _parts(record, self._bus.max_payload - ROOM)
        if len(parts) == 1 and len(parts[0]) < LARGE:
            return self._add(record.identity, parts[0])
        return self._aside.spawn(self._put_aside(record, parts))

    async def _put_aside(self, record: GenerationRecord, parts: list[bytes]) -> None:
        """Its outline comes last: whatever the journal names is there."""
        try:
            await self._large.put(record, parts)
        except LinkLost:  # it may be there: the same again
            await self._large.put(record, parts)
        await asyncio.shield(self._add(record.identity, encode(outline_of(record, len(parts)))))

    def _add(self, identity: str, payload: bytes) -> "asyncio.Future[None]":
        batch = self._batch(place(identity).slot, len(payload))
        batch.payloads.append(msgspec.Raw(payload))
        batch.size += len(payload)
        if self._task is None:
            self._task = asyncio.create_task(self._send())
        return batch.stored

    def _batch(self, slot: str, size: int) -> _Batch:
        last = self._batches[-1] if self._batches else None
        if last is None or last.slot != slot or last.size + size > BATCH_BYTES:
            last = _Batch(slot)
            self._batches.append(last)
            self.lag.given(time.monotonic())
        return last

    async def stop(self) -> None:
        """Waits until everything is stored, or has failed."""
        await self._aside.finished()
        if self._task is not None:
            await self._task

    async def _send(self) -> None:
        while self._batches:
            batch = self._batches.pop(0)
            try:
                await self._store(batch)
            except Exception as error:  # whatever it is, whoever waits is told, and the next are written
                log.warning("records_write_failed", error=str(error) or repr(error), records=len(batch.payloads))
                batch.stored.set_exception(error)
                batch.stored.exception()  # a client that has gone does not ask
            else:
                batch.stored.set_result(None)
            finally:
                self.lag.stored(time.monotonic())
        self._task = None

    async def _store(self, batch: _Batch) -> None:
        """Again where it is not known whether it is there: read twice it is one record."""
        subject, message = subjects.records(self._writer, batch.slot), {"records": batch.payloads}
        give_up = time.monotonic() + ELECTION
        while True:
            try:
                number = await self._bus.publish_durable(subject, message)
                break
            except BrokerUnavailable as error:
                # A leader that is stopped or cut off answers nothing, for longer than one question is patient.
                silent = self._bus.clustered and isinstance(error.__cause__, TimeoutError)
                if not (silent or isinstance(error, LinkLost)) or time.monotonic() >= give_up:
                    raise
        self._journal.on_stored(number)


def _parts(record: GenerationRecord, limit: int) -> list[bytes]:
    """`record` in as few encoded parts as fit into messages of `limit` bytes. Raises `PayloadTooLarge`."""
    payload = encode(record)
    if len(payload) <= limit:
        return [payload]
    half = len(record.requests) // 2
    if not half:
        raise PayloadTooLarge(
            f"The request has {len(payload):,} bytes as a message, and NATS takes at most {limit:,}; "
            "shorten it, or raise max_payload of the NATS server."
        )
    first, texts = record.first_prompt, record.texts
    parts = (
        msgspec.structs.replace(record, requests=record.requests[:half], texts=texts[:half]),
        msgspec.structs.replace(record, requests=record.requests[half:], texts=texts[half:], first_prompt=first + half),
    )
    return [part for one in parts for part in _parts(one, limit)]


class RecordReader:
    """Finds records. Look-ups of the same second of the same gateway share one reading."""

    def __init__(self, bus: Bus, large: LargeRecords) -> None:
        self._bus = bus
        self._large = large
        self._waiting: dict[RecordPosition, list[tuple[str, asyncio.Future[GenerationRecord | None]]]] = {}
        self._gate = asyncio.Semaphore(SLOTS_AT_ONCE)
        self._tasks = TaskSet("records_not_read")

    async def find(self, identity: str) -> GenerationRecord | None:
        """The whole record, or None when the journal has none (any more). Raises `BrokerUnavailable`."""
        spot = place(identity)
        found: asyncio.Future[GenerationRecord | None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(spot)
        if waiting is None:
            self._waiting[spot] = [(identity, found)]
            self._tasks.spawn(self._read(spot))
        else:
            waiting.append((identity, found))
        return await found

    async def _read(self, spot: RecordPosition) -> None:
        async with self._gate:
            waiting = self._waiting.pop(spot)
            wanted = {identity for identity, _ in waiting}
            try:
                records = await self.collect(spot, wanted)
            except BROKER_ERRORS as error:
                for _, found in waiting:
                    if not found.done():
                        found.set_exception(broker_error("read the records of generations", error))
                return
        for identity, found in waiting:
            if not found.done():
                found.set_result(records.get(identity))

    async def collect(self, spot: RecordPosition, wanted: set[str]) -> dict[str, GenerationRecord]:
        """Those of `wanted` that are there, whole. Raises `BROKER_ERRORS`."""
        parts = _Parts()
        async with contextlib.aclosing(recorded_in(self._bus, spot.writer, spot.slot)) as messages:
            async for message in messages:
                parts.add(record for record in message.records if record.identity in wanted)
                if len(parts.whole) == len(wanted):
                    break
        return await self._filled(parts.whole)

    async def collect_since(self, writer: str, since: float) -> tuple[dict[str, GenerationRecord], dict[str, float]]:
        """Whole records of a gateway that were stored from `since` on, and when each was (unix seconds, the broker's
        clock). Raises `BROKER_ERRORS`."""
        parts, times = _Parts(), dict[str, float]()
        async for stored_at, message in recorded_since(self._bus, writer, since):
            parts.add(message.records)
            times.update((record.identity, stored_at) for record in message.records)
        return await self._filled(parts.whole), times

    async def _filled(self, found: dict[str, GenerationRecord]) -> dict[str, GenerationRecord]:
        """Whole records in place of outlines; without those that are gone."""
        for identity, record in list(found.items()):
            if record.aside:
                whole = await self._large.whole(record)
                if whole is None:
                    del found[identity]
                else:
                    found[identity] = whole
        return found


class Misses:
    """How many ids each tenant may still look for that are not there: each costs a question to the broker. Pure;
    `now` is seconds of a monotonic clock."""

    def __init__(self, per_minute: int) -> None:
        self._per_second = per_minute / 60
        self._most = float(per_minute)
        self._left: dict[str, tuple[float, float]] = {}  # (left, at) of those who do not have all

    def wait(self, tenant: str, now: float) -> float:
        """Seconds until it may look for one more; 0: now."""
        left, at = self._left.get(tenant, (self._most, now))
        return max(0.0, 1.0 - left - (now - at) * self._per_second) / self._per_second

    def missed(self, tenant: str, now: float) -> None:
        """It has looked for one."""
        for name, (left, at) in list(self._left.items()):
            if left + (now - at) * self._per_second >= self._most:
                del self._left[name]
        left, at = self._left.get(tenant, (self._most, now))
        self._left[tenant] = max(0.0, left + (now - at) * self._per_second - 1.0), now


class _Parts:
    """Records, put together from their parts."""

    def __init__(self) -> None:
        self.whole: dict[str, GenerationRecord] = {}
        self._parts: dict[str, list[GenerationRecord]] = {}

    def add(self, records: Iterable[GenerationRecord]) -> None:
        for record in records:
            if record.aside:
                self.whole[record.identity] = record
                continue
            known = self._parts.setdefault(record.identity, [])
            known.append(record)
            if (whole := merged(known)) is not None:
                self.whole[record.identity] = whole
