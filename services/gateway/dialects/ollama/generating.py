"""Ollama's POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

import time
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.routing import Route

from services.gateway.api.backend import GatewayBackend, RequestContext, route
from services.gateway.api.generating import context_of, reading, stream, wants_positions
from services.gateway.api.openapi.operation import GENERATING, GENERATING_HEADERS, POSITIONS, ApiRoute, Operation
from services.gateway.core.asgi import disconnected, send_json
from services.gateway.core.errors import unsupported
from services.gateway.dialects.ollama import shapes
from services.gateway.dialects.ollama.formats import OllamaVectorFormat, OneVectorFormat, rfc3339
from services.gateway.dialects.ollama.residency import load_or_unload, named, staying
from services.gateway.dialects.ollama.schemas import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from services.gateway.dialects.ollama.translation import (
    NAMES,
    Asked,
    Embedded,
    chat_of,
    checked,
    completion_of,
    embedding_of,
    own_words,
    thinking_of,
)
from services.gateway.intake.decoding import decode
from services.gateway.intake.headers import tell_ignored
from services.gateway.intake.processor import InputProcessor
from services.gateway.intake.prompts.chat import reasoning_of
from services.gateway.intake.record import Context
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.intake.validation import checked_fields
from services.gateway.lifecycle.idempotency import fingerprint
from services.gateway.streams.stream_reader import StreamReader
from shared.service.endpoints import Receive, Scope, Send

ollama_operation = partial(Operation, tag="Ollama", error=shapes.OllamaError)
CHAT_PATH, GENERATE_PATH = "/api/chat", "/api/generate"
_STREAMS = (
    "As in Ollama it is streamed, a line of JSON each, unless `stream` is false. The answer's "
    "`x-ryzanstein-generation` names the generation."
)
CHAT = ollama_operation(
    f"POST {CHAT_PATH}",
    "ollamaChat",
    "Messages in, an answer out, as in Ollama.",
    _STREAMS + " Without messages the model is loaded, or with `keep_alive` 0 unloaded.",
    request=OllamaChatRequest,
    example={"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Why is the sky blue?"}]},
    response=shapes.ChatLine,
    lines=(shapes.ChatLine,),
    parameters=(*GENERATING_HEADERS, POSITIONS),
    errors=(*GENERATING, 409),
)
GENERATE = ollama_operation(
    f"POST {GENERATE_PATH}",
    "ollamaGenerate",
    "A prompt in, an answer out, as in Ollama.",
    _STREAMS + " With `raw` the prompt is completed as it stands. Without a prompt: as /api/chat without messages.",
    request=OllamaGenerateRequest,
    example={"model": "SmolLM2-135M-Instruct", "prompt": "Why is the sky blue?"},
    response=shapes.GenerateLine,
    lines=(shapes.GenerateLine,),
    parameters=(*GENERATING_HEADERS, POSITIONS),
    errors=(*GENERATING, 409),
)
EMBED = ollama_operation(
    "POST /api/embed",
    "ollamaEmbed",
    "Texts in, vectors out, as in Ollama.",
    request=OllamaEmbedRequest,
    example={"model": "SmolLM2-135M-Instruct", "input": ["One text.", "Another."]},
    response=shapes.Embeddings,
    parameters=GENERATING_HEADERS,
    errors=(*GENERATING, 409),
)
EMBEDDINGS = ollama_operation(
    "POST /api/embeddings",
    "ollamaEmbeddings",
    "One text in, its vector out, as in older Ollamas.",
    request=OllamaEmbeddingsRequest,
    example={"model": "SmolLM2-135M-Instruct", "prompt": "One text."},
    response=shapes.SingleEmbedding,
    parameters=GENERATING_HEADERS,
    errors=(*GENERATING, 409),
)

_chat = msgspec.json.Decoder(OllamaChatRequest)
_generate = msgspec.json.Decoder(OllamaGenerateRequest)
_embed = msgspec.json.Decoder(OllamaEmbedRequest)
_embeddings = msgspec.json.Decoder(OllamaEmbeddingsRequest)
AskedT = TypeVar("AskedT", OllamaChatRequest, OllamaGenerateRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest)


class AnswerRoute:
    """/api/chat or /api/generate. One coroutine from the application to the stream, for each of them is resumed with
    every token."""

    def __init__(
        self,
        decoder: msgspec.json.Decoder[OllamaChatRequest] | msgspec.json.Decoder[OllamaGenerateRequest],
        nothing: dict[str, object],
        backend: GatewayBackend,
    ) -> None:
        """`nothing`: what an empty answer has."""
        self._decoder: Any = decoder
        self._nothing = nothing
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ask, positions = (RequestContext(self._backend, scope, receive, send), wants_positions(scope))
        request, body, context = await _taken(ask, self._decoder)
        if not (request.messages if isinstance(request, OllamaChatRequest) else request.prompt):
            reason = await load_or_unload(ask, request.model, request.keep_alive)
            head = {"model": request.model, "created_at": rfc3339(time.time())}
            await send_json(send, 200, head | self._nothing | {"done": True, "done_reason": reason})
            return
        async with staying(ask, request.model, request.keep_alive):
            run = await _generation(ask, request, body, context)
            with reading(run, scope, receive):
                await run.begin()
                if run.stream:
                    await stream(run, ask.scope, send, positions=positions)
                else:
                    await send_json(send, 200, await run.collect())


async def embed(ask: RequestContext) -> object:
    request, body, context = await _taken(ask, _embed)
    if request.input is None or request.input == []:
        await load_or_unload(ask, request.model, request.keep_alive)
        return {
            "model": request.model,
            "embeddings": [],
            "total_duration": 1,
            "load_duration": 0,
            "prompt_eval_count": 0,
        }
    context.view = OllamaVectorFormat
    await _vectors(ask, request, body, context)
    return None


async def embeddings(ask: RequestContext) -> object:
    request, body, context = await _taken(ask, _embeddings)
    if not request.prompt:
        await load_or_unload(ask, request.model, request.keep_alive)
        return {"embedding": []}
    context.view = OneVectorFormat
    await _vectors(ask, request, body, context)
    return None


async def _taken(ask: RequestContext, decoder: msgspec.json.Decoder[AskedT]) -> tuple[AskedT, bytes, Context]:
    """The request, with the model by the name that it has here, as it came, and what its headers say."""
    parts = ask.parts
    context = context_of(ask.scope, ask.settings, gone=partial(disconnected, ask.receive))
    body = await ask.body(ask.settings.body_limit)
    request = decode(body, decoder, names=NAMES)
    return (msgspec.structs.replace(request, model=named(parts.catalog, request.model, context.tenant)), body, context)


async def _generation(ask: RequestContext, request: Asked, body: bytes, context: Context) -> StreamReader:
    """As a chat completion or a completion. Raises as `Intake.prepare`."""
    if ignored := checked(request):
        tell_ignored(ignored, context.answer_headers, strict=ask.settings.strict_fields)
    endpoint = "ollama.chat" if isinstance(request, OllamaChatRequest) else "ollama.generate"
    context.endpoint, context.capped = endpoint, True
    print_ = fingerprint(body) if context.key else ""
    intake = ask.parts.intake
    with own_words(request):
        made = await _translated(intake.processor, request, context)
        return await intake.prepare_decoded(endpoint, made, context, print_)


async def _translated(
    processor: InputProcessor, request: Asked, context: Context
) -> ChatCompletionRequest | CompletionRequest:
    if isinstance(request, OllamaGenerateRequest) and request.raw:
        for name in ("system", "think"):
            if getattr(request, name):
                raise unsupported(name, "a raw prompt says all that the model is told; leave out one of them")
        return completion_of(request, request.model)
    chat = chat_of(request, request.model)
    if request.think is None and isinstance(request, OllamaChatRequest):
        return chat
    card = await processor.loaded(chat, context)
    _, tokenizer = await processor.tokenizer(card.model)
    if isinstance(request, OllamaGenerateRequest) and not tokenizer.chats:
        return completion_of(request, request.model)
    if request.think is None:
        return chat
    reasons = bool(reasoning_of(card, tokenizer.traits))
    thinking = thinking_of(request.think, request.model, tokenizer.traits, reasons=reasons)
    return msgspec.structs.replace(chat, **thinking)


async def _vectors(ask: RequestContext, request: Embedded, body: bytes, context: Context) -> None:
    async with staying(ask, request.model, request.keep_alive):
        ignored = checked_fields(request.options, "options.")
        tell_ignored(ignored, context.answer_headers, strict=ask.settings.strict_fields)
        print_ = fingerprint(body) if context.key else ""
        name = "ollama.embed" if isinstance(request, OllamaEmbedRequest) else "ollama.embeddings"
        made = embedding_of(request, request.model)
        run = await ask.parts.intake.prepare_decoded(name, made, context, print_)
        with reading(run, ask.scope, ask.receive):
            await run.begin()
            await send_json(ask.send, 200, await run.collect())


def generating_routes(backend: GatewayBackend) -> list[Route]:
    message: dict[str, object] = {"message": {"role": "assistant", "content": ""}}
    chat = AnswerRoute(_chat, message, backend)
    generate = AnswerRoute(_generate, {"response": ""}, backend)
    return [
        ApiRoute(chat, CHAT, direct=chat),
        ApiRoute(generate, GENERATE, direct=generate),
        route(backend, (EMBED, embed)),
        route(backend, (EMBEDDINGS, embeddings)),
    ]
