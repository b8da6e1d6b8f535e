"""From the body of /v1/responses to a `Run`: its conversation put together, then the way of a chat completion.

resp_3 ──previous──▶ resp_2 ──previous──▶ resp_1
items of 1, output of 1, items of 2, output of 2, items of 3, output of 3, and the new request's items
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import msgspec

from services.gateway.core.errors import InvalidParameter, RouteError, unsupported
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake import extra_fields
from services.gateway.intake.decoding import decode
from services.gateway.intake.headers import tell_ignored
from services.gateway.intake.record import Context
from services.gateway.intake.responses.items import Reference, droppable, identity_in, read_input
from services.gateway.intake.responses.schemas import (
    InputFields,
    InputTokensRequest,
    ResponseRequest,
    check_input_fields,
    check_request,
)
from services.gateway.intake.responses.translation import MakeResponse, chat_request, renamed
from services.gateway.intake.rules import check_streamed
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.lifecycle.answer import PREFIXES, new_identity
from services.gateway.persistence.responses import Found, ResponseLookup
from services.gateway.streams.response_items import Item
from services.gateway.streams.run import Run
from shared import limits
from shared.errors import ContextLengthExceeded
from shared.messages import ModelCard

_LEAST_ROOM = 64 << 10


def room_of(context_length: int) -> int:
    """Bytes of items, as JSON, beyond which nothing of a conversation can be in the context."""
    return max(_LEAST_ROOM, limits.RESPONSE_HISTORY.value * context_length)


class History:
    def __init__(self, lookup: ResponseLookup) -> None:
        self._lookup = lookup

    async def conversation(
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


MANY_ITEMS = 64
"""So many items, or more, are read beside the event loop."""


class Chat(Protocol):
    """The way of a chat completion."""

    async def chat_run(self, request: ChatCompletionRequest, context: Context, response: MakeResponse) -> Run:
        """Raises as `Intake.prepare`."""
        ...

    async def loaded(self, request: ResponseRequest, context: Context) -> ModelCard:
        """The card of its model, once there is one. Raises as `chat_run`."""
        ...

    def context_length(self, model: str) -> int:
        """Tokens that `model` reads at most. Raises `UnknownModel`."""
        ...

    async def chat_tokens(self, request: ChatCompletionRequest, tenant: str = "") -> int:
        """Tokens of the prompt. Raises as `chat_run`, but for the length of the context."""
        ...


class ResponseIntake:
    """Takes responses in; the same for REST and WebSocket."""

    def __init__(self, chat: Chat, history: History, settings: GatewaySettings, writer: str) -> None:
        """`writer`: the gateway's short name, see `lifecycle/answer.py`."""
        self._chat = chat
        self._history = history
        self._settings = settings
        self._writer = writer
        self._request = msgspec.json.Decoder(ResponseRequest)
        self._count = msgspec.json.Decoder(InputTokensRequest)

    async def prepare(self, body: bytes | msgspec.Raw, context: Context, *, always_streamed: bool) -> Run:
        """Raises as `Intake.prepare`."""
        request = self.check(body, always_streamed=always_streamed)
        await self._chat.loaded(request, context)
        identity = new_identity(self._writer, time.time())
        past, own = await self._items(request, identity, context.tenant)
        make = MakeResponse(identity, request, own)
        context = self._in_background(request, context)
        with renamed():
            return await self._fitting(request, past + own, context, make)

    def check(self, body: bytes | msgspec.Raw, *, always_streamed: bool = False) -> ResponseRequest:
        """The request in `body`, as far as it can be checked by itself. Raises `InvalidParameter`."""
        request = decode(body, self._request)
        if always_streamed:
            check_streamed(request)
            request = msgspec.structs.replace(request, stream=True)
        check_request(request)
        tell_ignored(extra_fields.ignored_fields(request), {}, strict=self._settings.strict_fields)
        return request

    async def count(self, body: bytes, tenant: str) -> int:
        """Tokens of the input that `body` describes. Raises as `prepare`, but for the length of the context."""
        request = decode(body, self._count)
        check_input_fields(request)
        past, own = await self._items(request, new_identity(self._writer, time.time()), tenant)
        with renamed():
            return await self._chat.chat_tokens(chat_request(request, past + own), tenant)

    async def _items(self, request: InputFields, identity: str, tenant: str) -> tuple[list[Item], list[Item]]:
        """The conversation so far, and the items of this request."""
        given = await self._read(request.input if request.input is not None else [], identity)
        past: list[Item] = []
        if request.previous_response_id:
            context, newest = self._chat.context_length(request.model), request.truncation == "auto"
            past = await self._history.conversation(
                request.previous_response_id, tenant, context, newest=newest
            )
        return past, await self._history.resolve(given, tenant)

    async def _read(self, given: str | list[msgspec.Raw], identity: str) -> list[Item | Reference]:
        if isinstance(given, str) or len(given) < MANY_ITEMS:
            return read_input(given, identity)
        return await asyncio.to_thread(read_input, given, identity)

    def _in_background(self, request: ResponseRequest, context: Context) -> Context:
        if not request.background:
            return context
        limit = self._settings.background_limit
        if not limit:
            raise unsupported("background", "this server does not run generations without a connected client")
        return msgspec.structs.replace(context, background=context.background or limit)

    async def _fitting(
        self, request: ResponseRequest, items: list[Item], context: Context, make: MakeResponse
    ) -> Run:
        """With `truncation` auto the oldest items go until the rest fits: as few as possible, by bisection, for
        fewer items never have more tokens."""

        async def attempt(begin: int) -> Run:
            chat = chat_request(request, items[begin:], stream=bool(request.stream))
            return await self._chat.chat_run(chat, context, make)

        if request.truncation != "auto":
            return await attempt(0)
        begins = [0, *droppable(items)]
        begins = begins[_hopeless(items, begins, room_of(self._chat.context_length(request.model))) :]
        try:
            return await attempt(begins.pop(0))
        except ContextLengthExceeded as error:
            too_long = error
        fitting: Run | None = None
        low, high = 0, len(begins)
        while low < high:
            middle = (low + high) // 2
            try:
                fitting, high = await attempt(begins[middle]), middle
            except ContextLengthExceeded as error:
                too_long, low = error, middle + 1
        if fitting is None:
            raise too_long
        return fitting


def _hopeless(items: Sequence[Item], begins: Sequence[int], room: int) -> int:
    """How many of `begins` leave more than `room` bytes of items, or more than a conversation may have: they need
    no attempt. Never all of them."""
    size, begin = 0, len(items)
    while begin and len(items) - begin < limits.MESSAGES.value - 1:  # instructions are one more
        size += len(msgspec.json.encode(items[begin - 1]))
        if size > room:
            break
        begin -= 1
    return min(bisect_left(begins, begin), len(begins) - 1)
