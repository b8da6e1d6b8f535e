"""What comes before a request: the responses behind `previous_response_id`, or a conversation; and items by their id.

resp_3 ──previous──▶ resp_2 ──previous──▶ resp_1
items of 1, output of 1, items of 2, output of 2, items of 3, output of 3, and the new request's items
"""

import time
from collections.abc import Sequence

import msgspec

from services.gateway.core.errors import InvalidParameter, RouteError
from services.gateway.intake.responses import compaction
from services.gateway.intake.responses.items import Reference, identity_in
from services.gateway.lifecycle.answer import PREFIXES
from services.gateway.persistence.conversations import FORGOTTEN, Conversations, turn_of
from services.gateway.persistence.responses import Found, ResponseLookup
from services.gateway.streams.response_items import Item
from shared import limits
from shared.errors import ContextLengthExceeded

_LEAST_ROOM = 64 << 10


def room_of(context_length: int) -> int:
    """Bytes of items, as JSON, beyond which nothing of a conversation can be in the context."""
    return max(_LEAST_ROOM, limits.RESPONSE_HISTORY.value * context_length)


class History:
    def __init__(self, lookup: ResponseLookup, conversations: Conversations) -> None:
        self._lookup = lookup
        self._conversations = conversations

    async def of_conversation(
        self, public_id: str, tenant: str, context_length: int, *, newest: bool, response: str = ""
    ) -> list[Item]:
        """The items of a conversation, as `chain`. `response`: the identity of one that will be added to it."""
        try:
            await self.settle(public_id, tenant)
            if response:
                await self._conversations.begin(public_id, tenant, response)
            items, whole = await self._conversations.newest(public_id, tenant, room_of(context_length))
        except RouteError as error:
            raise InvalidParameter(error.message, param="conversation", reason=error.reason) from None
        if not whole and not newest:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {context_length} tokens, and the items of the conversation "
                "are too long for it; use 'truncation': 'auto', or begin a new conversation "
                f"({limits.RESPONSE_HISTORY.cited()}).",
                param="conversation",
            )
        return items

    async def settle(self, public_id: str, tenant: str) -> None:
        """Adds the turns of responses that have ended, wherever, and forgets those that have never been. Raises
        `RouteError` where there is no such conversation."""
        head = await self._conversations.get(public_id, tenant)
        for identity, since in head.begun.items():
            try:
                found = await self._lookup.find(PREFIXES["responses"] + identity, tenant)
            except RouteError:
                if time.time() > since + FORGOTTEN:
                    await self._conversations.end(public_id, tenant, identity, ())
                continue
            items, shown = await self._lookup.items(found)
            if shown["status"] not in ("queued", "in_progress"):
                added = turn_of(items, shown)
                await self._conversations.end(public_id, tenant, identity, added)

    async def chain(
        self, previous: str, tenant: str, context_length: int, *, newest: bool = False
    ) -> list[Item]:
        """All items up to the end of the response `previous`; with `newest` no more responses than a context of
        `context_length` tokens can hold. Raises `InvalidParameter` where one is missing or has not ended,
        `ContextLengthExceeded` where there are more without `newest`, `BrokerUnavailable`."""
        turns: list[list[Item]] = []
        identity: str | None = previous
        room = room_of(context_length)
        while identity:
            if len(turns) >= limits.RESPONSE_CHAIN.value:
                raise InvalidParameter(
                    "Invalid 'previous_response_id': the conversation has too many responses; begin a new one with "
                    f"its items as 'input' ({limits.RESPONSE_CHAIN.cited()}).",
                    param="previous_response_id",
                    reason="invalid_value",
                )
            found = await self._find(identity, tenant)
            room -= len(found.record.response.items) if found.record.response else 0
            if room < 0:
                if newest:
                    break
                raise ContextLengthExceeded(
                    f"This model's maximum context length is {context_length} tokens, and the items behind "
                    f"'previous_response_id' are too long for it; use 'truncation': 'auto', or begin a new "
                    f"conversation ({limits.RESPONSE_HISTORY.cited()}).",
                    param="previous_response_id",
                )
            items, shown = await self._lookup.items(found)
            room -= len(msgspec.json.encode(shown["output"]))
            if shown["status"] in ("queued", "in_progress"):
                raise InvalidParameter(
                    f"Invalid 'previous_response_id': the response '{shown['id']}' is {shown['status']}; wait until "
                    "it has ended, or cancel it.",
                    param="previous_response_id",
                    reason="response_not_ended",
                )
            turns.append([*items, *shown["output"]])
            await self._lookup.refresh(found)
            if any(item["type"] == compaction.KIND for item in turns[-1]):
                break  # it stands for all before it
            response = found.record.response
            identity = PREFIXES["responses"] + response.previous if response and response.previous else None
        return [item for turn in reversed(turns) for item in turn]

    async def _find(self, public_id: str, tenant: str) -> Found:
        try:
            return await self._lookup.find(public_id, tenant)
        except RouteError:
            raise InvalidParameter(
                f"Previous response with id '{public_id[:64]}' not found.",
                param="previous_response_id",
                reason="previous_response_not_found",
            ) from None

    async def resolve(self, items: Sequence[Item | Reference], tenant: str) -> list[Item]:
        """`items` with what they refer to in its place. Raises `InvalidParameter`, `BrokerUnavailable`."""
        wanted = {
            identity for item in items if isinstance(item, Reference) and (identity := identity_in(item.id))
        }
        named = {item.id for item in items if isinstance(item, Reference)}
        known: dict[str, Item] = {}
        for identity in wanted:  # one at a time: each may be as large as a body
            found = await self._items_of(identity, tenant)
            known |= {item["id"]: item for item in found if item["id"] in named}
        return [_resolved(item, known) for item in items]

    async def _items_of(self, identity: str, tenant: str) -> list[Item]:
        try:
            items, shown = await self._lookup.items(
                await self._lookup.find(PREFIXES["responses"] + identity, tenant)
            )
        except RouteError:
            return []
        return [*items, *shown["output"]]


def _resolved(item: Item | Reference, known: dict[str, Item]) -> Item:
    if not isinstance(item, Reference):
        return item
    if item.id not in known:
        raise InvalidParameter(
            f"Item with id '{item.id[:64]}' not found; send the item itself.",
            param=item.path,
            reason="item_not_found",
        )
    return known[item.id]
