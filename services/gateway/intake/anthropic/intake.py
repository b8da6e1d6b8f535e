"""From the body of /v1/messages to a `Run`: translated, then the way of a chat completion."""

from functools import partial
from typing import TypeVar

import msgspec

from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.anthropic.schemas import CountTokensRequest, MessagesRequest
from services.gateway.intake.anthropic.translation import (
    NAMES,
    chat_request,
    own_words,
    reasoning_fields,
)
from services.gateway.intake.chat import Chat
from services.gateway.intake.decoding import decode
from services.gateway.intake.extra_fields import checked_fields
from services.gateway.intake.headers import tell_ignored
from services.gateway.intake.record import Context
from services.gateway.intake.rules import streamed
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.streams.run import Run

T = TypeVar("T", bound=CountTokensRequest)


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
            request = streamed(request)
        with own_words():
            chat = await self._translated(request, context)
            return await self._chat.chat_run(chat, msgspec.structs.replace(context, endpoint="messages"))

    def check(self, body: bytes | msgspec.Raw) -> MessagesRequest:
        """The request in `body`, as far as it can be checked by itself. Raises `InvalidParameter`."""
        request = self._decoded(body, self._request, {})
        with own_words():
            chat_request(request, {})
        return request

    async def count(self, body: bytes, context: Context) -> int:
        """Tokens of the input that `body` describes. Raises as `prepare`, but for the length of the context."""
        decoded = partial(self._decoded, decoder=self._count, headers=context.answer_headers)
        request = self._chat.of_some_model(decoded, body)
        with own_words():
            return await self._chat.chat_tokens(await self._translated(request, context), context.tenant)

    def _decoded(
        self, body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], headers: dict[str, str]
    ) -> T:
        request = decode(body, decoder, names=NAMES)
        names = checked_fields(request)
        if request.thinking is not None:
            names += checked_fields(request.thinking, "thinking.")
        for index, tool in enumerate(request.tools or ()):
            names += checked_fields(tool, f"tools[{index}].")
        if names:
            tell_ignored(names, headers, strict=self._strict)
        return request

    async def _translated(self, request: CountTokensRequest, context: Context) -> ChatCompletionRequest:
        if request.thinking is None and (request.output_config is None or not request.output_config.effort):
            return chat_request(request, {})
        card = await self._chat.loaded(request, context)
        _, tokenizer = await self._chat.tokenizer(card.model)
        reasoning, ignored = reasoning_fields(request, card, tokenizer.traits)
        tell_ignored(ignored, context.answer_headers, strict=self._strict)
        return chat_request(request, reasoning)
