"""The endpoint of /v1/responses: a conversation is put together, and becomes a chat."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import msgspec

from services.gateway.core.errors import unsupported
from services.gateway.dialects.responses.conversation import compaction
from services.gateway.dialects.responses.conversation.history import History, room_of
from services.gateway.dialects.responses.conversation.items import Reference, droppable, read_input
from services.gateway.dialects.responses.schemas import (
    CompactRequest,
    InputFields,
    InputTokensRequest,
    ResponseRequest,
    check_input_fields,
    check_request,
    conversation_of,
    is_prewarm,
)
from services.gateway.dialects.responses.stream.items import Item
from services.gateway.dialects.responses.stream.reader import ResponseEventReader
from services.gateway.dialects.responses.tools import ignored_in_tools
from services.gateway.dialects.responses.translation import MakeResponse, chat_request, own_words
from services.gateway.intake.decoding import decode
from services.gateway.intake.endpoint import BodyEndpoint
from services.gateway.intake.headers import IgnoredFields
from services.gateway.intake.processor import InputProcessor
from services.gateway.intake.record import Context
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.intake.validation import ignored_fields
from services.gateway.lifecycle.request_state import new_identity
from services.gateway.persistence.budget import HistoryBudget, beside_loop
from services.gateway.persistence.items import encoded_array
from services.gateway.streams.stream_reader import StreamReader
from shared import limits
from shared.errors import ContextLengthExceeded

MANY_ITEMS = 64  # so many items, or more, are read beside the event loop


_request = msgspec.json.Decoder(ResponseRequest)
_count = msgspec.json.Decoder(InputTokensRequest)
_compact = msgspec.json.Decoder(CompactRequest)


class ResponsesEndpoint(BodyEndpoint):
    """POST /v1/responses; the same for REST, WebSocket and batches."""

    name = "responses"
    presentation = ResponseEventReader
    conversation_field = "input"

    def decode(self, body: bytes | msgspec.Raw, ignored: IgnoredFields) -> ResponseRequest:
        return decode(body, _request)

    def check(self, request: ResponseRequest, ignored: IgnoredFields) -> None:
        check_request(request)
        ignored.tell([*ignored_fields(request), *ignored_in_tools(request.tools)])

    async def prepare(self, processor: InputProcessor, request: ResponseRequest, context: Context) -> StreamReader:
        self.check(request, processor.ignored(context.answer_headers))
        await processor.loaded(request, context)
        with processor.stored.budget(context.tenant) as budget:
            return await _Turn(processor, context, budget).run(request)

    async def conversation(self, processor: InputProcessor, body: bytes, context: Context) -> ChatCompletionRequest:
        with processor.stored.budget(context.tenant) as budget:
            return (await _Turn(processor, context, budget).input(body))[1]


async def count_tokens(processor: InputProcessor, body: bytes, context: Context) -> int:
    """Tokens of the input that `body` describes. Raises as `Intake.prepare`, but for the length of the context."""
    context.body_bytes = len(body)
    with processor.stored.budget(context.tenant) as budget:
        request, chat = await _Turn(processor, context, budget).input(body)
        with own_words(request):
            return await processor.chat_tokens(chat, context.tenant)


async def compacted(
    processor: InputProcessor, body: bytes, context: Context, budget: HistoryBudget
) -> ChatCompletionRequest:
    """The chat whose answer is the summary of the conversation that `body` describes. Raises as `Intake.prepare`."""
    context.body_bytes = len(body)
    request = processor.of_some_model(partial(decode, decoder=_compact), body)
    check_input_fields(request)
    card = await processor.loaded(request, context)
    _, items, cost = await _Turn(processor, context, budget).items(request)
    if compaction.is_wanted(items):
        items = items[:-1]
    with own_words(request):
        return await beside_loop(cost, _summarizing, request, items, card.context_length)


class _Turn:
    """One request, and the conversation that it goes on with."""

    def __init__(self, processor: InputProcessor, context: Context, budget: HistoryBudget) -> None:
        self._processor = processor
        self._context = context
        self._budget = budget
        self._history = History(processor.stored)
        self._identity = new_identity(processor.parts.answers.writer, time.time())

    async def run(self, request: ResponseRequest) -> StreamReader:
        """The generation of a response."""
        own, items, cost = await self.items(request)
        if compacts := compaction.is_wanted(items):
            own = own[:-1]  # what asks for the summary is no part of the conversation
        else:
            with own_words(request):
                if (shorter := await self._shortened(request, items, cost)) is not None:
                    items = own = shorter
        make = MakeResponse(self._identity, request, await beside_loop(cost, encoded_array, own), compacts)
        self._go_on_in_background(request)
        with own_words(request):
            return await self._fitting(request, items, make, cost)

    async def input(self, body: bytes) -> tuple[InputTokensRequest, ChatCompletionRequest]:
        """What `body` describes, and the chat that it becomes."""
        request = self._processor.of_some_model(partial(decode, decoder=_count), body)
        check_input_fields(request)
        _, items, cost = await self.items(request)
        with own_words(request):
            return request, await beside_loop(cost, chat_request, request, items)

    async def items(self, request: InputFields) -> tuple[list[Item], list[Item], int]:
        """The items of this request, those of the conversation that the model reads, and the bytes of both."""
        tenant, budget, history = self._context.tenant, self._budget, self._history
        given = await self._read(request.input if request.input is not None else [])
        past: list[Item] = []
        if request.previous_response_id:
            context, newest = self._context_length(request), request.truncation == "auto"
            past = await history.chain(request.previous_response_id, tenant, context, budget, newest=newest)
        own = await history.resolve(given, tenant, budget)
        if conversation := conversation_of(request):
            context, newest = self._context_length(request), request.truncation == "auto"
            added = isinstance(request, ResponseRequest) and not is_prewarm(request)
            response = self._identity if added else ""
            past = await history.of_conversation(
                conversation, tenant, context, budget, newest=newest, response=response
            )
        return own, compaction.behind_last(past + own), self._context.body_bytes + budget.items.used

    async def _read(self, given: str | list[msgspec.Raw]) -> list[Item | Reference]:
        if isinstance(given, str) or len(given) < MANY_ITEMS:
            return read_input(given, self._identity)
        return await asyncio.to_thread(read_input, given, self._identity)

    def _context_length(self, request: InputFields) -> int:
        return self._processor.context_length(request.model, self._context.tenant)

    async def _shortened(self, request: ResponseRequest, items: list[Item], cost: int) -> list[Item] | None:
        """`items` with a summary in the place of those before the user's last message, where they have more tokens than
        the request wants; None: as they are."""
        for entry in request.context_management or ():
            context_length = self._context_length(request)
            most = entry.compact_threshold or context_length // 2
            before, answered = compaction.split(items)
            chat = await beside_loop(cost, chat_request, request, items)
            if before and await self._processor.chat_tokens(chat, self._context.tenant) > most:
                asked = await beside_loop(cost, _summarizing, request, before, context_length)
                summary = await self._processor.whole_answer(asked, self._context)
                return [compaction.item_of(summary), *answered]
        return None

    def _go_on_in_background(self, request: ResponseRequest) -> None:
        if not request.background:
            return
        limit = self._processor.parts.settings.background_limit
        if not limit:
            raise unsupported("background", "this server does not run generations without a connected client")
        self._context.background = self._context.background or limit

    async def _fitting(
        self, request: ResponseRequest, items: list[Item], make: MakeResponse, cost: int
    ) -> StreamReader:
        """With `truncation` auto the oldest items go until the rest fits: as few as possible, by bisection, for
        fewer items never have more tokens."""

        context_length = self._context_length(request)

        async def attempt(begin: int) -> StreamReader:
            chat = await beside_loop(cost, chat_request, request, items[begin:], stream=bool(request.stream))
            if make.compacts:
                chat = compaction.summarizing(chat, context_length, most=chat.max_completion_tokens)
            return await self._processor.chat(chat, self._context, make)

        if request.truncation != "auto":
            return await attempt(0)
        begins = [0, *droppable(items[:-1] if make.compacts else items)]
        begins = begins[await beside_loop(cost, _hopeless, items, begins, room_of(context_length)) :]
        try:
            return await attempt(begins.pop(0))
        except ContextLengthExceeded as error:
            too_long = error
        fitting: StreamReader | None = None
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
