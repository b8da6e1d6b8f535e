"""From the body of /v1/responses to a `Run`: its conversation put together, then the way of a chat completion."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import msgspec

from services.gateway.core.errors import unsupported
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake import extra_fields
from services.gateway.intake.chat import Chat
from services.gateway.intake.decoding import decode
from services.gateway.intake.headers import tell_ignored
from services.gateway.intake.record import Context
from services.gateway.intake.responses import compaction
from services.gateway.intake.responses.history import History, room_of
from services.gateway.intake.responses.items import Reference, droppable, read_input
from services.gateway.intake.responses.schemas import (
    CompactRequest,
    InputFields,
    InputTokensRequest,
    ResponseRequest,
    check_input_fields,
    check_request,
    conversation_of,
    is_prewarm,
)
from services.gateway.intake.responses.tools import ignored_in_tools
from services.gateway.intake.responses.translation import MakeResponse, chat_request, own_words
from services.gateway.intake.rules import streamed
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.lifecycle.answer import new_identity
from services.gateway.persistence.budget import HistoryBudget, beside_loop
from services.gateway.persistence.items import encoded_array
from services.gateway.streams.response_items import Item
from services.gateway.streams.run import Run
from shared import limits
from shared.errors import ContextLengthExceeded

MANY_ITEMS = 64
"""So many items, or more, are read beside the event loop."""


class ResponseIntake:
    """Takes responses in; the same for REST and WebSocket."""

    def __init__(self, chat: Chat, history: History, settings: GatewaySettings, writer: str) -> None:
        """`writer`: the gateway's short name, see `lifecycle/answer.py`."""
        self._chat = chat
        self.history = history
        self._settings = settings
        self._writer = writer
        self._request = msgspec.json.Decoder(ResponseRequest)
        self._count = msgspec.json.Decoder(InputTokensRequest)
        self._compact = msgspec.json.Decoder(CompactRequest)

    async def prepare(self, body: bytes | msgspec.Raw, context: Context, *, always_streamed: bool) -> Run:
        """Raises as `Intake.prepare`."""
        request = self.check(body, context.answer_headers, always_streamed=always_streamed)
        await self._chat.loaded(request, context)
        with self.history.budget(context.tenant) as budget:
            return await self._prepared(request, body, context, budget)

    async def _prepared(
        self, request: ResponseRequest, body: bytes | msgspec.Raw, context: Context, budget: HistoryBudget
    ) -> Run:
        identity = new_identity(self._writer, time.time())
        past, own, cost = await self._items(request, identity, context.tenant, body, budget)
        items = compaction.behind_last(past + own)
        if compacts := compaction.is_wanted(items):
            own = own[:-1]  # what asks for the summary is no part of the conversation
        else:
            with own_words(request):
                if (shorter := await self._shortened(request, items, context, cost)) is not None:
                    items = own = shorter
        make = MakeResponse(identity, request, await beside_loop(cost, encoded_array, own), compacts)
        context = self._in_background(request, context)
        with own_words(request):
            return await self._fitting(request, items, context, make, cost)

    async def compact(self, body: bytes, context: Context, budget: HistoryBudget) -> ChatCompletionRequest:
        """The chat whose answer is the summary of the conversation that `body` describes. Raises as `prepare`."""
        request = self._chat.of_some_model(partial(decode, decoder=self._compact), body)
        check_input_fields(request)
        card = await self._chat.loaded(request, context)
        identity = new_identity(self._writer, time.time())
        past, own, cost = await self._items(request, identity, context.tenant, body, budget)
        items = compaction.behind_last(past + own)
        if compaction.is_wanted(items):
            items = items[:-1]
        with own_words(request):
            return await beside_loop(cost, _summarizing, request, items, card.context_length)

    async def _shortened(
        self, request: ResponseRequest, items: list[Item], context: Context, cost: int
    ) -> list[Item] | None:
        """`items` with a summary in the place of those before the user's last message, where they have more tokens than
        the request wants; None: as they are."""
        for entry in request.context_management or ():
            context_length = self._chat.context_length(request.model, context.tenant)
            most = entry.compact_threshold or context_length // 2
            before, answered = compaction.split(items)
            chat = await beside_loop(cost, chat_request, request, items)
            if before and await self._chat.chat_tokens(chat, context.tenant) > most:
                asked = await beside_loop(cost, _summarizing, request, before, context_length)
                summary = await self._chat.whole_answer(asked, context)
                return [compaction.item_of(summary), *answered]
        return None

    def check(
        self, body: bytes | msgspec.Raw, answer_headers: dict[str, str], *, always_streamed: bool = False
    ) -> ResponseRequest:
        """The request in `body`, as far as it can be checked by itself; `answer_headers` name what of it changes
        nothing. Raises `InvalidParameter`."""
        request = decode(body, self._request)
        if always_streamed:
            request = streamed(request)
        check_request(request)
        if ignored := [*extra_fields.ignored_fields(request), *ignored_in_tools(request.tools)]:
            tell_ignored(ignored, answer_headers, strict=self._settings.strict_fields)
        return request

    async def count(self, body: bytes, tenant: str) -> int:
        """Tokens of the input that `body` describes. Raises as `prepare`, but for the length of the context."""
        with self.history.budget(tenant) as budget:
            request, chat = await self._input(body, tenant, budget)
            with own_words(request):
                return await self._chat.chat_tokens(chat, tenant)

    async def chat_of(self, body: bytes, tenant: str, budget: HistoryBudget) -> ChatCompletionRequest:
        """The conversation that `body` describes, as the messages of a chat. Raises as `count`."""
        return (await self._input(body, tenant, budget))[1]

    async def _input(
        self, body: bytes, tenant: str, budget: HistoryBudget
    ) -> tuple[InputTokensRequest, ChatCompletionRequest]:
        request = self._chat.of_some_model(partial(decode, decoder=self._count), body)
        check_input_fields(request)
        identity = new_identity(self._writer, time.time())
        past, own, cost = await self._items(request, identity, tenant, body, budget)
        with own_words(request):
            chat = await beside_loop(cost, chat_request, request, compaction.behind_last(past + own))
            return request, chat

    async def _items(
        self,
        request: InputFields,
        identity: str,
        tenant: str,
        body: bytes | msgspec.Raw,
        budget: HistoryBudget,
    ) -> tuple[list[Item], list[Item], int]:
        """The conversation so far, the items of this request, and the bytes of both."""
        given = await self._read(request.input if request.input is not None else [], identity)
        past: list[Item] = []
        if request.previous_response_id:
            context, newest = self._chat.context_length(request.model, tenant), request.truncation == "auto"
            past = await self.history.chain(
                request.previous_response_id, tenant, context, budget, newest=newest
            )
        own = await self.history.resolve(given, tenant, budget)
        if conversation := conversation_of(request):
            context, newest = self._chat.context_length(request.model, tenant), request.truncation == "auto"
            added = isinstance(request, ResponseRequest) and not is_prewarm(request)
            past = await self.history.of_conversation(
                conversation, tenant, context, budget, newest=newest, response=identity if added else ""
            )
        return past, own, len(body) + budget.items.used

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
        self, request: ResponseRequest, items: list[Item], context: Context, make: MakeResponse, cost: int
    ) -> Run:
        """With `truncation` auto the oldest items go until the rest fits: as few as possible, by bisection, for
        fewer items never have more tokens."""

        context_length = self._chat.context_length(request.model, context.tenant)

        async def attempt(begin: int) -> Run:
            chat = await beside_loop(cost, chat_request, request, items[begin:], stream=bool(request.stream))
            if make.compacts:
                chat = compaction.summarizing(chat, context_length, most=chat.max_completion_tokens)
            return await self._chat.chat_run(chat, context, make)

        if request.truncation != "auto":
            return await attempt(0)
        begins = [0, *droppable(items[:-1] if make.compacts else items)]
        begins = begins[await beside_loop(cost, _hopeless, items, begins, room_of(context_length)) :]
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


def _summarizing(request: InputFields, items: Sequence[Item], context_length: int) -> ChatCompletionRequest:
    return compaction.summarizing(chat_request(request, [*items, compaction.question()]), context_length)


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
