"""POST /v1/messages and /v1/messages/count_tokens."""

from functools import partial
from typing import Any, Literal

import msgspec

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.generating import completions, context_of
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import GENERATING, Operation
from services.gateway.core.asgi import disconnected
from services.gateway.dialects.anthropic.endpoint import count_tokens as count
from services.gateway.dialects.anthropic.errors import MESSAGES, AnthropicError
from services.gateway.dialects.anthropic.schemas import CountTokensRequest, MessagesRequest

message_operation = partial(Operation, tag="Messages", error=AnthropicError)
EXAMPLE = {
    "model": "SmolLM2-135M-Instruct",
    "max_tokens": 32,
    "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
}


class MessageUsage(msgspec.Struct):
    """Tokens; those of the prompt that were found in the KV cache count apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]
    service_tier: Literal["standard", "batch"]
    # Where sparse attention has read them.
    input_tokens_details: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class AnthropicMessage(msgspec.Struct):
    """An answer: blocks of thinking, text and calls of tools."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct):
    """An event of a message's stream; the event's id is its number."""

    type: Literal[
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class TokenCount(msgspec.Struct, frozen=True):
    """What the counting of tokens answers."""

    input_tokens: int


CREATE = message_operation(
    f"POST {MESSAGES}",
    "createMessage",
    "Messages in, an answer out, as in Anthropic's API.",
    "With `stream: true` the answer comes as named events. The `id` of an event is its number: any gateway goes on "
    "behind it (`Last-Event-ID`).",
    request=MessagesRequest,
    example=EXAMPLE,
    response=AnthropicMessage,
    events=(MessageEvent,),
    parameters=operation.GENERATING_HEADERS,
    errors=GENERATING,
)
COUNT = message_operation(
    f"POST {MESSAGES}/count_tokens",
    "countMessageTokens",
    "How many tokens messages have, with their tools and instructions.",
    request=CountTokensRequest,
    example={name: EXAMPLE[name] for name in ("model", "messages")},
    response=TokenCount,
    errors=(404, 504),
)


async def count_tokens(ask: RequestContext) -> TokenCount:
    intake = await ask.counted()
    body = await ask.body(ask.settings.body_limit)
    context = context_of(ask.scope, ask.settings, gone=partial(disconnected, ask.receive))
    return TokenCount(await count(intake.processor, body, context))


message_routes = (completions("messages", CREATE, direct=True), routes_of((COUNT, count_tokens)))
