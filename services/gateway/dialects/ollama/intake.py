"""From a body of Ollama's API to a `StreamReader`: then as a chat completion, a completion or embeddings."""

import msgspec

from services.gateway.core.errors import unsupported
from services.gateway.dialects.ollama.formats import OllamaChatFormat, OllamaGenerateFormat
from services.gateway.dialects.ollama.schemas import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from services.gateway.dialects.ollama.translation import (
    Asked,
    chat_of,
    checked,
    completion_of,
    embedding_of,
    own_words,
    thinking_of,
)
from services.gateway.intake.endpoint import Endpoint
from services.gateway.intake.headers import tell_ignored
from services.gateway.intake.intake import Intake
from services.gateway.intake.prompts.chat import reasoning_of
from services.gateway.intake.record import Context
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.intake.validation import checked_fields
from services.gateway.lifecycle.idempotency import fingerprint
from services.gateway.streams.stream_reader import StreamReader

Embedded = OllamaEmbedRequest | OllamaEmbeddingsRequest


class OllamaChatEndpoint(Endpoint):
    """Of what is begun by /api/chat."""

    name = "ollama.chat"
    presentation = OllamaChatFormat
    nameless = True


class GenerateEndpoint(Endpoint):
    """Of what is begun by /api/generate."""

    name = "ollama.generate"
    presentation = OllamaGenerateFormat
    nameless = True


class OllamaIntake:
    """Takes requests in whose `model` is the name that the model has here."""

    def __init__(self, intake: Intake, *, strict: bool) -> None:
        """`strict`: fields that change nothing are refused."""
        self._intake = intake
        self._strict = strict

    async def generation(self, request: Asked, body: bytes, context: Context) -> StreamReader:
        """Raises as `Intake.prepare`."""
        if ignored := checked(request):
            tell_ignored(ignored, context.answer_headers, strict=self._strict)
        endpoint = "ollama.generate"
        if isinstance(request, OllamaChatRequest):
            endpoint = "ollama.chat"
        context.endpoint, context.capped = endpoint, True
        print_ = fingerprint(body) if context.key else ""
        with own_words(request):
            made = await self._translated(request, context)
            return await self._intake.prepare_decoded(endpoint, made, context, print_)

    async def vectors(self, request: Embedded, body: bytes, context: Context) -> StreamReader:
        """Raises as `Intake.prepare`."""
        tell_ignored(checked_fields(request.options, "options."), context.answer_headers, strict=self._strict)
        print_ = fingerprint(body) if context.key else ""
        name = "ollama.embed" if isinstance(request, OllamaEmbedRequest) else "ollama.embeddings"
        return await self._intake.prepare_decoded(name, embedding_of(request, request.model), context, print_)

    async def _translated(self, request: Asked, context: Context) -> ChatCompletionRequest | CompletionRequest:
        if isinstance(request, OllamaGenerateRequest) and request.raw:
            for name in ("system", "think"):
                if getattr(request, name):
                    raise unsupported(name, "a raw prompt says all that the model is told; leave out one of them")
            return completion_of(request, request.model)
        chat = chat_of(request, request.model)
        if request.think is None and isinstance(request, OllamaChatRequest):
            return chat
        card = await self._intake.processor.loaded(chat, context)
        _, tokenizer = await self._intake.processor.tokenizer(card.model)
        if isinstance(request, OllamaGenerateRequest) and not tokenizer.chats:
            return completion_of(request, request.model)
        if request.think is None:
            return chat
        reasons = bool(reasoning_of(card, tokenizer.traits))
        thinking = thinking_of(request.think, request.model, tokenizer.traits, reasons=reasons)
        return msgspec.structs.replace(chat, **thinking)
