"""From the body of /v1/messages to a `Run`: translated, then the way of a chat completion."""

from typing import Any, Protocol, TypeVar

import msgspec

from services.gateway.core.settings import GatewaySettings
from services.gateway.intake import extra_fields
from services.gateway.intake.anthropic.schemas import CountTokensRequest, InputFields, MessagesRequest
from services.gateway.intake.anthropic.translation import (
    NAMES,
    asks_for_reasoning,
    chat_request,
    own_words,
    reasoning_fields,
)
from services.gateway.intake.decoding import decode
from services.gateway.intake.headers import tell_ignored
from services.gateway.intake.record import Context
from services.gateway.intake.rules import check_neutral, check_streamed
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.streams.run import Run
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages import ModelCard

T = TypeVar("T", bound=InputFields)


class Chat(Protocol):
    """The way of a chat completion."""

    async def chat_run(self, request: ChatCompletionRequest, context: Context) -> Run:
        """Raises as `Intake.prepare`."""
        ...

    async def loaded(self, request: MessagesRequest, context: Context) -> ModelCard:
        """The card of its model, once there is one. Raises as `chat_run`."""
        ...

    async def tokenizer(self, model: str) -> tuple[ModelCard, Tokenizer]:
        """Raises `UnknownModel`, `Unavailable`."""
        ...

    async def chat_tokens(self, request: ChatCompletionRequest) -> int:
        """Tokens of the prompt. Raises as `chat_run`, but for the length of the context."""
        ...


class MessagesIntake:
    """Takes messages in; the same for REST, WebSocket and batches."""

    def __init__(self, chat: Chat, settings: GatewaySettings) -> None:
        self._chat = chat
        self._strict = settings.strict_fields
        self._request = msgspec.json.Decoder(MessagesRequest)
        self._count = msgspec.json.Decoder(CountTokensRequest)

    async def prepare(self, body: bytes | msgspec.Raw, context: Context, *, always_streamed: bool) -> Run:
        """Raises as `Intake.prepare`."""
        request = self._decoded(body, self._request, context.answer_headers)
        if always_streamed:
            check_streamed(request)
            request = msgspec.structs.replace(request, stream=True)
        reasoning: dict[str, Any] = {}
        if asks_for_reasoning(request):
            await self._chat.loaded(request, context)
            reasoning = await self._reasoning(request, context.answer_headers)
        with own_words():
            chat = chat_request(request, reasoning)
            return await self._chat.chat_run(chat, msgspec.structs.replace(context, endpoint="messages"))

    def check(self, body: bytes | msgspec.Raw) -> MessagesRequest:
        """The request in `body`, as far as it can be checked by itself. Raises `InvalidParameter`."""
        request = self._decoded(body, self._request, {})
        with own_words():
            chat_request(request, {})
        return request

    async def count(self, body: bytes, headers: dict[str, str]) -> int:
        """Tokens of the input that `body` describes. Raises as `prepare`, but for the length of the context."""
        request = self._decoded(body, self._count, headers)
        reasoning = await self._reasoning(request, headers) if asks_for_reasoning(request) else {}
        with own_words():
            return await self._chat.chat_tokens(chat_request(request, reasoning))

    def _decoded(
        self, body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], headers: dict[str, str]
    ) -> T:
        request = decode(body, decoder, names=NAMES)
        check_neutral(request)
        names = extra_fields.ignored_fields(request)
        if request.thinking is not None:
            names += [f"thinking.{name}" for name in extra_fields.ignored_fields(request.thinking)]
            names += ["thinking.budget_tokens"] if request.thinking.budget_tokens else []
        if names:
            tell_ignored(names, headers, strict=self._strict)
        return request

    async def _reasoning(self, request: InputFields, headers: dict[str, str]) -> dict[str, Any]:
        card, tokenizer = await self._chat.tokenizer(request.model)
        fields, ignored = reasoning_fields(request, card, tokenizer.traits)
        tell_ignored(ignored, headers, strict=self._strict)
        return fields
