"""What comes before a request: the responses behind `previous_response_id`, or a conversation; and items by their id.

resp_3 ──previous──▶ resp_2 ──previous──▶ resp_1
items of 1, output of 1, items of 2, output of 2, items of 3, output of 3, and the new request's items
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from services.gateway.core.errors import InvalidField, InvalidParameter, RouteError
from services.gateway.dialects.responses.conversation import compaction
from services.gateway.dialects.responses.conversation.items import Reference, identity_in
from services.gateway.dialects.responses.stream.items import Item
from services.gateway.lifecycle.request_state import PREFIXES
from services.gateway.persistence.budget import ByteBudget, HistoryBudget, beside_loop
from services.gateway.persistence.conversations import FORGOTTEN
from services.gateway.persistence.items import StoredItem, decoded, size_of
from services.gateway.persistence.responses import Found, StoredTurns
from shared import limits
from shared.errors import ContextLengthExceeded

_LEAST_ROOM = 64 << 10


def room_of(context_length: int) -> int:
    """Bytes of items, as JSON, beyond which nothing of a conversation can be in the context."""
    return max(_LEAST_ROOM, limits.RESPONSE_HISTORY.value * context_length)


def _room(context_length: int, items: ByteBudget) -> tuple[int, str]:
    """Bytes that a conversation may bring, and the limit that says so."""
    room = room_of(context_length)
    return (room, limits.RESPONSE_HISTORY.cited()) if room <= items.left else (items.left, items.cited)


class History:
    """Of one gateway's tenants."""

    def __init__(self, stored: StoredTurns) -> None:
        self._lookup = stored.responses
        self._conversations = stored.conversations

    async def of_conversation(
        self,
        public_id: str,
        tenant: str,
        context_length: int,
        budget: HistoryBudget,
        *,
        newest: bool,
        response: str = "",
    ) -> list[Item]:
        """The items of a conversation, as `chain`. `response`: the identity of one that will be added to it."""
        room, cited = _room(context_length, budget.items)
        try:
            await self.settle(public_id, tenant, budget)
            if response:
                await self._conversations.begin(public_id, tenant, response)
            items, whole = await self._conversations.newest(public_id, tenant, room)
        except RouteError as error:
            raise InvalidParameter(error.message, param="conversation", reason=error.reason) from None
        if not whole and not newest:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {context_length} tokens, and the items of the conversation "
                f"are too long for it; use 'truncation': 'auto', or begin a new conversation ({cited}).",
                param="conversation",
            )
        return await _used(items, budget)

    async def settle(self, public_id: str, tenant: str, budget: HistoryBudget) -> None:
        """Adds the turns of responses that have ended, wherever, and forgets those that have never been. Raises
        `RouteError` where there is no such conversation."""
        head = await self._conversations.get(public_id, tenant)
        for identity, since in head.begun.items():
            try:
                found = await self._lookup.find(PREFIXES["responses"] + identity, tenant, budget.reads)
            except RouteError:
                if time.time() > since + FORGOTTEN:
                    await self._conversations.end(public_id, tenant, identity, ())
                continue
            turn = await self._lookup.turn(found)
            if turn.is_over:
                await self._conversations.end(public_id, tenant, identity, turn.added)

    async def chain(
        self, previous: str, tenant: str, context_length: int, budget: HistoryBudget, *, newest: bool = False
    ) -> list[Item]:
        """All items up to the end of the response `previous`; with `newest` no more responses than a context of
        `context_length` tokens can hold. Raises `InvalidParameter` where one is missing or has not ended,
        `ContextLengthExceeded` where there are more without `newest`, `PayloadTooLarge`, `BrokerUnavailable`."""
        turns: list[list[Item]] = []
        identity: str | None = previous
        room, cited = _room(context_length, budget.items)
        while identity:
            if len(turns) >= limits.RESPONSE_CHAIN.value:
                raise InvalidField(
                    "previous_response_id",
                    "the conversation has too many responses; begin a new one with "
                    f"its items as 'input' ({limits.RESPONSE_CHAIN.cited()}).",
                )
            found = await self._find(identity, tenant, budget.reads)
            response = found.record.response
            if response is not None and len(response.items) > room:
                if newest:
                    break
                raise ContextLengthExceeded(
                    f"This model's maximum context length is {context_length} tokens, and the items behind "
                    f"'previous_response_id' are too long for it; use 'truncation': 'auto', or begin a new "
                    f"conversation ({cited}).",
                    param="previous_response_id",
                )
            turn = await self._lookup.turn(found)
            if not turn.is_over:
                raise InvalidField(
                    "previous_response_id",
                    f"the response '{turn.id}' is {turn.status}; wait until it has ended, or cancel it.",
                    reason="response_not_ended",
                )
            room -= size_of(turn.items)
            turns.append(await _used(turn.items, budget))
            await self._lookup.refresh(found)
            if any(item.type == compaction.KIND for item in turn.items):
                break  # it stands for all before it
            identity = PREFIXES["responses"] + response.previous if response and response.previous else None
        return [item for turn in reversed(turns) for item in turn]

    async def _find(self, public_id: str, tenant: str, reads: ByteBudget) -> Found:
        try:
            return await self._lookup.find(public_id, tenant, reads)
        except RouteError:
            raise InvalidParameter(
                f"Previous response with id '{public_id[:64]}' not found.",
                param="previous_response_id",
                reason="previous_response_not_found",
            ) from None

    async def resolve(self, items: Sequence[Item | Reference], tenant: str, budget: HistoryBudget) -> list[Item]:
        """`items` with what they refer to in its place, each time that they do. Raises `InvalidParameter`,
        `PayloadTooLarge`, `BrokerUnavailable`."""
        references = [item for item in items if isinstance(item, Reference)]
        if not references:
            return [item for item in items if not isinstance(item, Reference)]
        param = references[0].path.partition("[")[0]
        uses = Counter(reference.id for reference in references)
        known: dict[str, Item] = {}
        for identity in _identities(uses, param):  # one at a time: each may be as large as a body
            found = {item.id: item for item in await self._items_of(identity, tenant, budget) if item.id in uses}
            for item in found.values():
                budget.items.charge(len(item.json) * uses[item.id], param)
            read = await beside_loop(size_of(found.values()), decoded, [*found.values()])
            known |= dict(zip(found, read, strict=True))
        return [_resolved(item, known) for item in items]

    async def _items_of(self, identity: str, tenant: str, budget: HistoryBudget) -> list[StoredItem]:
        try:
            found = await self._lookup.find(PREFIXES["responses"] + identity, tenant, budget.reads)
            return (await self._lookup.turn(found)).items
        except RouteError:
            return []


async def _used(items: list[StoredItem], budget: HistoryBudget) -> list[Item]:
    size = size_of(items)
    budget.items.use(size)
    return await beside_loop(size, decoded, items)


def _identities(ids: Iterable[str], param: str) -> list[str]:
    """The responses to whose items `ids` belong. Raises `InvalidParameter` where there are too many."""
    identities = [*dict.fromkeys(identity for one in ids if (identity := identity_in(one)))]
    if len(identities) > limits.RESPONSE_CHAIN.value:
        raise InvalidField(
            param,
            f"its references are to items of {len(identities):,} responses; send the items "
            f"themselves, or use 'previous_response_id' ({limits.RESPONSE_CHAIN.cited()}).",
        )
    return identities


def _resolved(item: Item | Reference, known: dict[str, Item]) -> Item:
    if not isinstance(item, Reference):
        return item
    if item.id not in known:
        raise InvalidParameter(
            f"Item with id '{item.id[:64]}' not found; send the item itself.", param=item.path, reason="item_not_found"
        )
    return known[item.id]
