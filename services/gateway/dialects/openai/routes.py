"""Chats, completions, and what a model would read of either, as vLLM tells it."""

import msgspec
from starlette.routing import BaseRoute

from services.gateway.api import shapes
from services.gateway.api.backend import GatewayBackend, RequestContext, route, routes_of
from services.gateway.api.generating import CompletionsRoute, completions
from services.gateway.api.openapi.operation import Operation, generating
from services.gateway.dialects.openai import stored_chats
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest


class RenderedPrompt(msgspec.Struct, frozen=True):
    """What a model would read of a request."""

    request_id: str
    model: str
    token_ids: list[int]


CHAT = generating(
    "POST /v1/chat/completions",
    "createChatCompletion",
    "Messages in, an answer out.",
    "With `stream: true` the answer comes as server-sent events, the last of them `data: [DONE]`. The `id` of an "
    "event is a position in the generation's log: any gateway goes on behind it (`Last-Event-ID`).",
    request=ChatCompletionRequest,
    example={
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
        "max_tokens": 32,
    },
    response=shapes.ChatCompletion,
    events=(shapes.ChatCompletionChunk,),
    tag="Chat",
)
COMPLETIONS = generating(
    "POST /v1/completions",
    "createCompletion",
    "A prompt in, its continuation out.",
    "`prompt` is a text, texts, token ids, or lists of token ids.",
    request=CompletionRequest,
    example={"model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time", "max_tokens": 32},
    response=shapes.Completion,
    events=(shapes.Completion,),
    tag="Completions",
)
RENDER_CHAT = Operation(
    "POST /v1/chat/completions/render",
    "renderChatCompletion",
    "The tokens that the model would read of a chat, as in vLLM.",
    request=ChatCompletionRequest,
    example=CHAT.example,
    response=RenderedPrompt,
    errors=(404,),
    tag="Tokens",
)
RENDER_COMPLETION = Operation(
    "POST /v1/completions/render",
    "renderCompletion",
    "The tokens that the model would read of each prompt, as in vLLM.",
    request=CompletionRequest,
    example=COMPLETIONS.example,
    response=list[RenderedPrompt],
    errors=(404,),
    tag="Tokens",
)


async def render_chat(ask: RequestContext) -> RenderedPrompt:
    intake = await ask.counted()
    model, tokens = await intake.processor.chat_rendered(await ask.body(ask.settings.body_limit), ask.tenant)
    return RenderedPrompt(ask.request_id, model, tokens)


async def render_completion(ask: RequestContext) -> list[RenderedPrompt]:
    intake = await ask.counted()
    model, prompts = await intake.processor.completion_rendered(await ask.body(ask.settings.body_limit), ask.tenant)
    return [RenderedPrompt(ask.request_id, model, tokens) for tokens in prompts]


def _chats(backend: GatewayBackend) -> list[BaseRoute]:
    """Their making, and the list of those that are stored, which have one path."""
    create = CompletionsRoute("chat.completions", backend)

    async def created(ask: RequestContext) -> None:
        await create(ask.scope, ask.receive, ask.send)

    return [route(backend, (CHAT, created), (stored_chats.LIST, stored_chats.list_chats), direct=create)]


chat_routes = (
    routes_of((RENDER_CHAT, render_chat)),  # before the stored chats: it is no id
    _chats,
    stored_chats.one_chat_routes,
    routes_of((RENDER_COMPLETION, render_completion)),
    completions("completions", COMPLETIONS, direct=True),
)
