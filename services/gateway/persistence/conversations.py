"""Conversations: items under one id that responses read and add to, in the bucket `conversations`.

    <tenant>.<identity>           the head: what turns there are, by compare-and-set
    <tenant>.<identity>-<turn>    the items of a turn: written first, never changed

A turn is what one request brings: the items of a response and its output, or items that a client has added. A turn of a
response has its name, so that whoever keeps the response, twice perhaps, adds it once. A response that fails or is
cancelled adds nothing. Until its turn is there a response stands among `begun`: whoever reads the conversation first
adds it then (`dialects/responses/conversation/history.py`).
"""

import secrets
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from services.gateway.core.errors import InvalidField, QuotaExceeded, RouteError
from services.gateway.persistence.budget import ByteBudget, beside_loop
from services.gateway.persistence.items import StoredItem, joined, size_of, split
from services.gateway.persistence.store import deflated, inflated
from shared import limits
from shared.errors import PayloadTooLarge
from shared.messages.records import ConversationEntry, ConversationTurn
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from shared.nats.kv import KvEntry
from shared.nats.tenants import Quota, TenantBucket, Trimmed

log = structlog.get_logger(__name__)

PREFIX = "conv_"
ROOM = 4096  # bytes of a message that are not a turn's items
FORGOTTEN = 60.0  # seconds after which a response that began and is not known has never been


def unknown(public_id: str) -> RouteError:
    """The error for an id of which there is no conversation, or another tenant's."""
    return RouteError(f"Conversation with id '{public_id[:64]}' not found.", reason="conversation_not_found")


class Conversations:
    """Methods raise `BrokerUnavailable`, and `RouteError` where there is no conversation of that id and tenant."""

    def __init__(self, bus: Bus, ttl: float, quota: Quota) -> None:
        """`ttl`: seconds that a turn is kept; `quota`: of each tenant, whose oldest turns make room."""
        self._bus = bus
        self.bucket = TenantBucket(bus, subjects.CONVERSATIONS_BUCKET, ConversationEntry, ttl=ttl)
        self._trimmed = Trimmed(self.bucket, quota)

    async def create(self, tenant: str, metadata: dict[str, str], items: Sequence[StoredItem]) -> tuple[str, float]:
        """Its id, and when it began."""
        identity, now = secrets.token_hex(16), time.time()
        turns = [await self._written(identity, tenant, secrets.token_hex(16), items)] if items else []
        head = ConversationEntry(now, metadata, turns)
        await self.bucket.put(tenant, identity, head)
        self._trimmed.wrote(tenant, len(encode(head)))
        return PREFIX + identity, now

    async def get(self, public_id: str, tenant: str) -> ConversationEntry:
        return (await self._head(public_id, tenant)).value

    async def describe(self, public_id: str, tenant: str, metadata: dict[str, str]) -> ConversationEntry:
        """Gives it other metadata."""
        return await self._change(public_id, tenant, lambda head: msgspec.structs.replace(head, metadata=metadata))

    async def delete(self, public_id: str, tenant: str) -> None:
        """Its items too."""
        head = await self._head(public_id, tenant)
        await self.bucket.purge(head.key)
        for turn in head.value.turns:
            part = await self.bucket.get(tenant, f"{_identity(public_id)}-{turn.name}")
            if part is not None:
                await self.bucket.purge(part.key)

    async def add(self, public_id: str, tenant: str, items: Sequence[StoredItem]) -> None:
        """Items of a client. Raises `QuotaExceeded`, `PayloadTooLarge`."""
        await self._head(public_id, tenant)
        await self._append(public_id, tenant, secrets.token_hex(16), items)

    async def remove(self, public_id: str, tenant: str, item_id: str) -> ConversationEntry:
        """Raises `RouteError` where there is no such item."""

        def without(head: ConversationEntry) -> ConversationEntry:
            if not any(item_id in turn.ids for turn in head.turns):
                raise unknown_item(item_id)
            turns = [
                msgspec.structs.replace(turn, ids=[one for one in turn.ids if one != item_id]) for turn in head.turns
            ]
            return msgspec.structs.replace(head, turns=turns)  # an empty one says that it has been there

        return await self._change(public_id, tenant, without)

    async def item(self, public_id: str, tenant: str, item_id: str) -> StoredItem:
        """Raises `RouteError` where there is no such item."""
        head = await self.get(public_id, tenant)
        for turn in head.turns:
            if item_id in turn.ids:
                for item in await self._items_of(public_id, tenant, turn):
                    if item.id == item_id:
                        return item
        raise unknown_item(item_id)

    async def page(
        self, public_id: str, tenant: str, budget: ByteBudget, *, after: str | None, limit: int, ascending: bool
    ) -> tuple[list[StoredItem], bool]:
        """`limit` items behind the item `after`, fewer where the turns that have them are larger than what is left of
        `budget`, and whether there are more. Raises `InvalidParameter` where there is no item `after`."""
        head, found = await self.get(public_id, tenant), list[StoredItem]()
        for turn, begin in turns_behind(head.turns, after, ascending=ascending):
            if found and (len(found) >= limit or turn.size > budget.left):
                return found[:limit], True
            items = await self._items_of(public_id, tenant, turn)
            budget.use(turn.size if items else 0)
            found += (items if ascending else items[::-1])[begin:]
        return found[:limit], len(found) > limit

    async def newest(self, public_id: str, tenant: str, room: int) -> tuple[list[StoredItem], bool]:
        """The newest turns that have `room` bytes of items at most, and whether those are all."""
        head, turns = await self.get(public_id, tenant), list[ConversationTurn]()
        for turn in reversed(head.turns):
            room -= turn.size
            if room < 0:
                break
            turns.insert(0, turn)
        found = [item for turn in turns for item in await self._items_of(public_id, tenant, turn)]
        return found, len(turns) == len(head.turns)

    # --- responses -------------------------------------------------------------------------------

    async def begin(self, public_id: str, tenant: str, response: str) -> ConversationEntry:
        """The response of that identity will add its turn. Raises `QuotaExceeded` where it could not."""

        def begun(head: ConversationEntry) -> ConversationEntry:
            if len(head.begun) >= limits.CONVERSATION_RESPONSES.value:
                raise QuotaExceeded(
                    f"The conversation '{public_id}' has {len(head.begun)} responses that have not ended; wait for one "
                    f"({limits.CONVERSATION_RESPONSES.cited()})."
                )
            _check_room(head, 1)
            return msgspec.structs.replace(head, begun=head.begun | {response: time.time()})

        return await self._change(public_id, tenant, begun)

    async def end(self, public_id: str, tenant: str, response: str, items: Sequence[StoredItem]) -> None:
        """The response has ended: its turn is added, once. None where it has failed. A conversation that was deleted
        meanwhile stays so."""
        try:
            head = await self.get(public_id, tenant)
            if items and not any(turn.name == response for turn in head.turns):
                await self._append(public_id, tenant, response, items)
            elif response in head.begun:
                await self._change(public_id, tenant, lambda head: _ended(head, response))
        except RouteError:
            log.info("conversation_gone", response=response)
        except (QuotaExceeded, PayloadTooLarge) as error:  # trying again would not help
            log.warning("conversation_full", response=response, error=str(error))
            await self._change(public_id, tenant, lambda head: _ended(head, response))

    # --- inside ----------------------------------------------------------------------------------

    async def _append(self, public_id: str, tenant: str, name: str, items: Sequence[StoredItem]) -> None:
        turn = await self._written(_identity(public_id), tenant, name, items)

        def appended(head: ConversationEntry) -> ConversationEntry:
            head = _ended(head, name)
            if any(one.name == name for one in head.turns):
                return head
            _check_room(head, len(items))
            return msgspec.structs.replace(head, turns=[*head.turns, turn])

        await self._change(public_id, tenant, appended)

    async def _written(self, identity: str, tenant: str, name: str, items: Sequence[StoredItem]) -> ConversationTurn:
        size = size_of(items)
        written = await beside_loop(size, joined, items)
        data = await deflated(written)
        if len(data) > self._bus.max_payload - ROOM:
            raise PayloadTooLarge(
                f"These items have {len(data):,} bytes, deflated, and a turn of a conversation may have "
                f"{self._bus.max_payload - ROOM:,} (NATS' max_payload); add fewer at a time."
            )
        await self.bucket.put(tenant, f"{identity}-{name}", ConversationEntry(time.time(), items=data))
        self._trimmed.wrote(tenant, len(data))
        return ConversationTurn(name, [item.id for item in items], len(written))

    async def _items_of(self, public_id: str, tenant: str, turn: ConversationTurn) -> list[StoredItem]:
        entry = await self.bucket.get(tenant, f"{_identity(public_id)}-{turn.name}")
        if entry is None:  # it has made room for newer ones
            return []
        data, ids = await inflated(entry.value.items), frozenset(turn.ids)
        return [item for item in await beside_loop(len(data), split, data) if item.id in ids]

    async def _head(self, public_id: str, tenant: str) -> KvEntry[ConversationEntry]:
        identity = _identity(public_id)
        entry = await self.bucket.get(tenant, identity) if identity else None
        if entry is None:
            raise unknown(public_id)
        return entry

    async def _change(
        self, public_id: str, tenant: str, change: Callable[[ConversationEntry], ConversationEntry]
    ) -> ConversationEntry:
        """By compare-and-set. Raises `RouteError` where there is none."""
        identity, what = _identity(public_id), f"the conversation '{public_id}'"
        changed = await self.bucket.change(tenant, identity, change, what) if identity else None
        if changed is None:
            raise unknown(public_id)
        self._trimmed.wrote(tenant, len(encode(changed)))
        return changed


def turns_behind(
    turns: Sequence[ConversationTurn], after: str | None, *, ascending: bool
) -> list[tuple[ConversationTurn, int]]:
    """The turns that have items behind the item `after`, in the order in which they are read, and where in each those
    begin. Raises `InvalidParameter` where there is no item `after`. Pure."""
    ordered = [turn for turn in (turns if ascending else reversed(turns)) if turn.ids]
    if after is None:
        return [(turn, 0) for turn in ordered]
    for number, turn in enumerate(ordered):
        ids = turn.ids if ascending else turn.ids[::-1]
        if after in ids:
            rest = [(other, 0) for other in ordered[number + 1 :]]
            begin = ids.index(after) + 1
            return rest if begin == len(ids) else [(turn, begin), *rest]
    raise InvalidField("after", f"no item '{after[:64]}' is in this conversation.")


def unknown_item(item_id: str) -> RouteError:
    return RouteError(f"Item with id '{item_id[:64]}' not found in the conversation.", reason="item_not_found")


def _identity(public_id: str) -> str:
    """Empty where it is no id of ours."""
    identity = public_id.removeprefix(PREFIX)
    fine = public_id.startswith(PREFIX) and len(identity) == 32 and identity.isascii() and identity.isalnum()
    return identity if fine else ""


def _ended(head: ConversationEntry, response: str) -> ConversationEntry:
    begun = {name: since for name, since in head.begun.items() if name != response}
    return msgspec.structs.replace(head, begun=begun)


def _check_room(head: ConversationEntry, more: int) -> None:
    count = sum(len(turn.ids) or 1 for turn in head.turns) + more
    if count > limits.CONVERSATION_ITEMS.value:
        raise QuotaExceeded(
            f"With these the conversation has {count} items; delete some, or begin a new one "
            f"({limits.CONVERSATION_ITEMS.cited()})."
        )
