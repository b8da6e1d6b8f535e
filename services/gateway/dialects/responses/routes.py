"""GET and DELETE /v1/responses/{id}, POST .../cancel, GET .../input_items, POST /v1/responses/input_tokens."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.generating import completions, context_of, positions_of, reading, stream
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import GENERATING, Operation
from services.gateway.core.errors import InvalidField, InvalidParameter
from services.gateway.core.pagination import ListPage, Order, PageQuery, shown_raw
from services.gateway.dialects.responses.conversation import compaction
from services.gateway.dialects.responses.endpoint import compacted
from services.gateway.dialects.responses.endpoint import count_tokens as count
from services.gateway.dialects.responses.schemas import (
    INCLUDABLE,
    CompactRequest,
    InputTokensRequest,
    ResponseRequest,
    check_include,
)
from services.gateway.dialects.responses.stream.items import Item
from services.gateway.dialects.responses.translation import own_words
from services.gateway.intake.processor import answer_text
from services.gateway.intake.record import Context
from services.gateway.lifecycle.idempotency import fingerprint
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.persistence.budget import ByteBudget, HistoryBudget
from services.gateway.persistence.items import StoredItem
from services.gateway.persistence.responses import Found, ResponseLookup
from services.gateway.streams.progress import tell_progress
from shared.errors import RyzansteinError
from shared.messages.records import StoredResponse

Include = Annotated[
    list[Annotated[str, Meta(extra_json_schema={"enum": INCLUDABLE})]], Meta(description="What to show besides.")
]


class Retrieval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of GET /v1/responses/{id}."""

    include: Include = []
    stream: Annotated[bool, Meta(description="Whether to send its events.")] = False
    # Not None: in a URL null is a text.
    starting_after: (
        Annotated[
            int, Meta(ge=0, le=2**31 - 1, description="With `stream`: the number of the last event that you have.")
        ]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    include_obfuscation: Annotated[
        bool, Meta(description="With `stream`: whether deltas are padded to even lengths.")
    ] = False


class ItemsQuery(PageQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    include: Include = []
    order: Order = "desc"


class ItemList(ListPage):
    """What GET /v1/responses/{id}/input_items answers."""

    data: Sequence[Item]


def item_list(items: Sequence[StoredItem], *, more: bool) -> dict[str, Any]:
    """An `ItemList` of a page of items."""
    return shown_raw([(item.id, item.json) for item in items], more)


def page_of(items: Sequence[StoredItem], wanted: ItemsQuery, budget: ByteBudget) -> tuple[list[StoredItem], bool]:
    """A page of `items`, of one at least and of what is left of `budget` at most, and whether there are more. Raises
    `InvalidParameter` when `after` is none of them."""
    ordered = list(items) if wanted.order == "asc" else list(reversed(items))
    if wanted.after:
        ids = [item.id for item in ordered]
        if wanted.after not in ids:
            raise InvalidField("after", f"no item '{wanted.after[:64]}' is among the input items of this response.")
        ordered = ordered[ids.index(wanted.after) + 1 :]
    data: list[StoredItem] = []
    for item in ordered[: wanted.limit]:
        if data and len(item.json) > budget.left:
            break
        budget.use(len(item.json))
        data.append(item)
    return data, len(ordered) > len(data)


PATH = "/v1/responses"
_operation = partial(Operation, tag="Responses")
READING = (504,)  # beside what follows from the path: no token came in time


class Response(msgspec.Struct):
    """A response; what its request said stands in it too."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class ResponseEvent(msgspec.Struct):
    """An event of a response's stream; `sequence_number` is its id."""

    type: str
    sequence_number: int


class ResponseDeleted(msgspec.Struct, frozen=True):
    """What DELETE answers."""

    id: str
    object: str
    deleted: bool


class InputTokens(msgspec.Struct, frozen=True):
    """What the counting of tokens answers."""

    object: str
    input_tokens: int


CREATE = _operation(
    f"POST {PATH}",
    "createResponse",
    "Input items in, a response out.",
    "With `stream: true` its events; with `background: true` the response at once, and its text in time.",
    request=ResponseRequest,
    example={"model": "SmolLM2-135M-Instruct", "input": "What is the capital of Japan?", "max_output_tokens": 32},
    response=Response,
    events=(ResponseEvent,),
    parameters=operation.GENERATING_HEADERS,
    errors=GENERATING,
)
COUNT = _operation(
    f"POST {PATH}/input_tokens",
    "countInputTokens",
    "How many tokens an input has.",
    request=InputTokensRequest,
    example={"model": "SmolLM2-135M-Instruct", "input": "What is the capital of Japan?"},
    response=InputTokens,
    errors=(404, 504),
)
RETRIEVE = _operation(
    f"GET {PATH}/{{response}}",
    "retrieveResponse",
    "A response, or its events from a position on.",
    "With `stream` a `Last-Event-ID` says the same as `starting_after`.",
    response=Response,
    events=(ResponseEvent,),
    query=Retrieval,
    errors=READING,
)
DELETE = _operation(
    f"DELETE {PATH}/{{response}}",
    "deleteResponse",
    "Cancels and deletes a response.",
    response=ResponseDeleted,
    errors=READING,
)
CANCEL = _operation(
    f"POST {PATH}/{{response}}/cancel",
    "cancelResponse",
    "Cancels a response; one that has ended is returned unchanged.",
    response=Response,
    errors=READING,
)
ITEMS = _operation(
    f"GET {PATH}/{{response}}/input_items",
    "listInputItems",
    "The items that its request brought, page by page.",
    response=ItemList,
    query=ItemsQuery,
    errors=READING,
)


class CompactedResponse(msgspec.Struct):
    """A conversation as its summary."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


COMPACT = _operation(
    f"POST {PATH}/compact",
    "compactResponse",
    "A summary of a conversation, which a later request has in its place.",
    "The model itself writes it. `encrypted_content` is opaque, and no secret.",
    request=CompactRequest,
    example={"model": "SmolLM2-135M-Instruct", "input": "My name is Ada, and I live in Rome."},
    response=CompactedResponse,
    errors=GENERATING,
)
# Seconds to wait until a response that was cancelled has ended; then it is shown as it is.
CANCEL_TIMEOUT = 5.0


async def retrieve(ask: RequestContext) -> bytes | None:
    """The object, or its events."""
    responses = ask.parts.responses
    wanted = ask.query(Retrieval)
    check_include(wanted.include)
    if wanted.starting_after is not msgspec.UNSET and not wanted.stream:
        raise InvalidParameter(
            "The 'starting_after' parameter is only allowed when 'stream' is true.", param="starting_after"
        )
    with ask.history_budget() as budget:
        found = await _found(ask, budget)
        if not wanted.stream:
            return await responses.response_json(found)
        after = positions_of(ask.scope) if wanted.starting_after is msgspec.UNSET else [wanted.starting_after]
        run = await responses.read(found, after, obfuscated=wanted.include_obfuscation)
        with reading(run, ask.scope, ask.receive):
            await stream(run, ask.scope, ask.send)
    return None


async def delete(ask: RequestContext) -> ResponseDeleted:
    responses, public_id = ask.parts.responses, ask.named("response")
    with ask.history_budget() as budget:
        await responses.delete(await responses.find(public_id, ask.tenant, budget.reads))
    return ResponseDeleted(public_id, "response", True)


async def cancel(ask: RequestContext) -> bytes:
    """Ends a response, for everybody. One that has ended is shown as it is."""
    with ask.history_budget() as budget:
        return await _cancelled(ask.parts.responses, await _found(ask, budget))


async def _found(ask: RequestContext, budget: HistoryBudget) -> Found:
    found = await ask.parts.responses.find(ask.named("response"), ask.tenant, budget.reads)
    ask.of_model(found.record.requests[0].model)
    if isinstance(found, RequestState):
        tell_progress(ask.answer_headers, found, time.time())
    return found


async def _cancelled(responses: ResponseLookup, found: Found) -> bytes:
    """The object once it has ended: another gateway's end comes through the log."""
    if isinstance(found, StoredResponse):
        return found.response
    run = await responses.read(found, None)
    try:
        responses.cancel(found)
        with contextlib.suppress(RyzansteinError):
            async with asyncio.timeout(CANCEL_TIMEOUT):
                async for _ in run.chunks():
                    pass
    except TimeoutError:
        pass
    finally:
        run.close()
    return run.snapshot()


async def list_items(ask: RequestContext) -> dict[str, Any]:
    responses, wanted = ask.parts.responses, ask.query(ItemsQuery)
    check_include(wanted.include)
    await ask.counted()
    with ask.history_budget() as budget:
        items = await responses.items(await responses.find(ask.named("response"), ask.tenant, budget.reads))
        page, more = page_of(items, wanted, budget.items)
        return item_list(page, more=more)


async def count_tokens(ask: RequestContext) -> InputTokens:
    intake = await ask.counted()
    context = Context(ask.request_id, tenant=ask.tenant)
    body = await ask.body(ask.settings.body_limit)
    return InputTokens("response.input_tokens", await count(intake.processor, body, context))


async def compact(ask: RequestContext) -> CompactedResponse:
    """The conversation, summarized by a chat completion."""
    intake, context = ask.parts.intake, context_of(ask.scope, ask.settings)
    body = await ask.body(ask.settings.body_limit)
    with ask.history_budget() as budget:
        chat = await compacted(intake.processor, body, context, budget)
        with own_words():
            run = await intake.prepare_decoded("responses.compact", chat, context, fingerprint(body))
    with reading(run, ask.scope, ask.receive):
        await run.begin()
        answer = await run.collect()
    told, identity = msgspec.json.decode(answer), run.answer.identity
    usage, details = told["usage"], told["usage"].get("prompt_tokens_details") or {}
    return CompactedResponse(
        id=f"resp_{identity}",
        object="response.compaction",
        created_at=told["created"],
        output=[compaction.item_of(answer_text(answer), f"cmp_{identity}")],
        usage={
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": details.get("cached_tokens", 0), "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    )


response_routes = (
    completions("responses", CREATE),
    routes_of(
        (COUNT, count_tokens),
        (COMPACT, compact),
        (RETRIEVE, retrieve),
        (DELETE, delete),
        (CANCEL, cancel),
        (ITEMS, list_items),
    ),
)
