"""The list of stored chat completions, in the bucket `chats`, and the shelf that fills it.

The answer lies among the responses (`responses/store.py`), which has room for large ones; here stands what
lists look at, and the metadata, which can be changed.

    put:     answer ──▶ entry      an entry without an answer is never shown
    delete:  tombstone of the answer ──▶ entry gone
"""

import msgspec

from services.gateway.life.answer import Answer
from services.gateway.readers.reading import Reading
from services.gateway.responses.store import ResponseStore
from shared.messages.records import GenerationRecord, StoredChat, StoredResponse
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from shared.nats.tenants import Quota, TenantBucket, Trimmed


class ChatIndex:
    """Opened by `start`. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, ttl: float, quota: Quota) -> None:
        """`ttl`: seconds that an entry is kept after its last change; `quota`: of a tenant, whose oldest make room."""
        self._bus = bus
        self._ttl = ttl
        self._quota = quota
        self._opened: TenantBucket[StoredChat] | None = None

    async def start(self) -> None:
        self._opened = await TenantBucket.open(
            self._bus, subjects.CHATS_BUCKET, StoredChat, lambda chat: chat.tenant, ttl=self._ttl
        )
        self._trimmed = Trimmed(self._opened, self._quota)

    @property
    def _bucket(self) -> TenantBucket[StoredChat]:
        assert self._opened is not None, "not started"
        return self._opened

    async def add(self, chat: StoredChat) -> None:
        """Unless there is an entry of it."""
        if await self._bucket.create(chat.tenant, chat.identity, chat) is not None:
            self._trimmed.wrote(chat.tenant, len(encode(chat)))

    async def get(self, identity: str, tenant: str) -> StoredChat | None:
        entry = await self._bucket.get(tenant, identity)
        return None if entry is None else entry.value

    async def of(self, tenant: str) -> list[StoredChat]:
        """Those of a tenant, in no order."""
        return [entry.value async for entry in self._bucket.of(tenant)]

    async def change(self, identity: str, tenant: str, metadata: dict[str, str]) -> StoredChat | None:
        """None where there is no entry."""
        while (entry := await self._bucket.get(tenant, identity)) is not None:
            changed = msgspec.structs.replace(entry.value, metadata=metadata)
            if await self._bucket.update(entry.key, changed, entry.revision) is not None:
                return changed
        return None

    async def remove(self, identity: str, tenant: str) -> None:
        entry = await self._bucket.get(tenant, identity)
        if entry is not None:
            await self._bucket.purge(entry.key)


class ChatShelf:
    """Chat completions that have ended."""

    def __init__(self, index: ChatIndex, store: ResponseStore, reading: Reading) -> None:
        self._index = index
        self._store = store
        self._reading = reading

    async def put(self, answer: Answer) -> None:
        """One that was cancelled or failed is not stored: it has no answer."""
        completion = await self._reading.finished(answer)
        if completion is None:
            return
        await self._store.keep(_stored(answer, completion))
        if not await self._store.is_deleted(answer.identity, answer.record.tenant):
            await self._index.add(_entry(answer))

    async def has(self, record: GenerationRecord) -> bool:
        name = record.identity, record.tenant
        return await self._index.get(*name) is not None or await self._store.is_deleted(*name)


def _stored(answer: Answer, completion: bytes) -> StoredResponse:
    """Its text is in `completion`: prompts and tokens are of no use any more."""
    requests = [
        msgspec.structs.replace(request, prompt=[], generated=[], attempt=0)
        for request in answer.record.requests
    ]
    return StoredResponse(msgspec.structs.replace(answer.record, requests=requests), [], completion)


def _entry(answer: Answer) -> StoredChat:
    record = answer.record
    return StoredChat(
        identity=answer.identity,
        id=answer.public_id,
        tenant=record.tenant,
        model=record.requests[0].model,
        created_at=record.created,
        metadata=record.metadata,
    )
