"""Records that are too large for the journal, which all tenants share: in the bucket `records`, with a quota for each.

    records.<writer>.<second>       what is read of every record: whose it is, how many parts it has, its first request
                                    without its prompt
    <tenant>.<identity>-<part>      the record itself, beside the journal, and for as long

So a tenant that sends large requests pushes its own old ones out, and neither records nor frames of the others.
"""

from collections.abc import Sequence

import msgspec
import nats.errors
import structlog

from services.gateway.life.answer import merged
from services.gateway.settings import GatewaySettings
from shared.errors import BrokerUnavailable
from shared.messages import SamplingParams
from shared.messages.records import GenerationRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.tenants import Quota, TenantBucket, Trimmed, tenant_key

log = structlog.get_logger(__name__)

LARGE = 32 << 10
"""Bytes of a record from which on it lies beside the journal."""
MOST_PARTS = 100_000
"""Of a tenant: each has LARGE bytes or more but for the last of a record, so its bytes are the nearer bound."""


class LargeRecords:
    """Opened by `start`."""

    def __init__(self, bus: Bus, settings: GatewaySettings) -> None:
        self._bus = bus
        self._ttl, self._max_bytes = settings.journal_max_age, settings.records_max_bytes
        self._quota = Quota(settings.tenant_record_bytes, MOST_PARTS)
        self._opened: TenantBucket[GenerationRecord] | None = None

    async def start(self) -> None:
        """Raises `BrokerUnavailable`, `ConfigurationError`."""
        self._opened = await TenantBucket.open_bounded(
            self._bus, subjects.RECORDS_BUCKET, GenerationRecord, ttl=self._ttl, max_bytes=self._max_bytes
        )
        self._trimmed = Trimmed(self._opened, self._quota)

    @property
    def _bucket(self) -> TenantBucket[GenerationRecord]:
        assert self._opened is not None, "not started"
        return self._opened

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
                entry = await self._bucket.get(outline.tenant, _name(outline.identity, number))
            except BrokerUnavailable as error:
                raise nats.errors.Error(error.message) from error
            if entry is not None:
                parts.append(entry.value)
        record = merged(parts)
        if record is None:
            log.info("large_record_gone", generation_id=outline.identity)
        return record

    async def trimmed(self) -> None:
        """Waits until what is beyond a quota has gone, as far as it is being looked for."""
        await self._trimmed.looked()


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
