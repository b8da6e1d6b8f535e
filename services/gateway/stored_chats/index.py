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
from shared import subjects
from shared.bus import Bus
from shared.records import StoredChat, StoredResponse
from shared.stores import Bucket


class ChatIndex:
    """Opened by `start`. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, ttl: float) -> None:
        """`ttl`: seconds that an entry is kept after its last change."""
        self._bus = bus
        self._ttl = ttl
        self._opened: Bucket[StoredChat] | None = None

    async def start(self) -> None:
        self._opened = await Bucket.open(self._bus, subjects.CHATS_BUCKET, StoredChat, ttl=self._ttl)

    @property
    def _bucket(self) -> Bucket[StoredChat]:
        assert self._opened is not None, "not started"
        return self._opened

    async def add(self, chat: StoredChat) -> None:
        """Unless there is an entry of it."""
        await self._bucket.create(chat.identity, chat)

    async def get(self, identity: str) -> StoredChat | None:
        entry = await self._bucket.get(identity)
        return None if entry is None else entry.value

    async def of(self, tenant: str) -> list[StoredChat]:
        """Those of a tenant, in no order."""
        return [chat for chat in (await self._bucket.items()).values() if chat.tenant == tenant]

    async def change(self, identity: str, metadata: dict[str, str]) -> StoredChat | None:
        """None where there is no entry."""
        while (entry := await self._bucket.get(identity)) is not None:
            changed = msgspec.structs.replace(entry.value, metadata=metadata)
            if await self._bucket.update(identity, changed, entry.revision) is not None:
                return changed
        return None

    async def remove(self, identity: str) -> None:
        await self._bucket.delete(identity)


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
        if not await self._store.is_deleted(answer.identity):
            await self._index.add(_entry(answer))

    async def has(self, identity: str) -> bool:
        return await self._index.get(identity) is not None or await self._store.is_deleted(identity)


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
