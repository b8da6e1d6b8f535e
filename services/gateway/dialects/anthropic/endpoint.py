"""The endpoint of /v1/messages: its requests become chats."""

from functools import partial
from typing import TypeVar

import msgspec

from services.gateway.dialects.anthropic.message_reader import MessageEventReader
from services.gateway.dialects.anthropic.schemas import CountTokensRequest, MessagesRequest
from services.gateway.dialects.anthropic.translation import NAMES, chat_request, own_words, reasoning_fields
from services.gateway.intake.decoding import decode
from services.gateway.intake.endpoint import BodyEndpoint
from services.gateway.intake.headers import IgnoredFields
from services.gateway.intake.processor import InputProcessor
from services.gateway.intake.record import Context
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.intake.validation import checked_fields
from services.gateway.streams.stream_reader import StreamReader

T = TypeVar("T", bound=CountTokensRequest)
_request = msgspec.json.Decoder(MessagesRequest)
_count = msgspec.json.Decoder(CountTokensRequest)


class MessagesEndpoint(BodyEndpoint):
    """POST /v1/messages; the same for REST, WebSocket and batches."""

    name = "messages"
    presentation = MessageEventReader

    def decode(self, body: bytes | msgspec.Raw, ignored: IgnoredFields) -> MessagesRequest:
        return _decoded(body, _request, ignored)

    def check(self, request: MessagesRequest, ignored: IgnoredFields) -> None:
        with own_words():
            chat_request(request, {})

    async def prepare(self, processor: InputProcessor, request: MessagesRequest, context: Context) -> StreamReader:
        with own_words():
            chat = await _translated(processor, request, context)
            context.endpoint, context.capped = "messages", True
            return await processor.chat(chat, context)


async def count_tokens(processor: InputProcessor, body: bytes, context: Context) -> int:
    """Tokens of the input that `body` describes. Raises as `Intake.prepare`, but for the length of the context."""
    decoded = partial(_decoded, decoder=_count, ignored=processor.ignored(context.answer_headers))
    request = processor.of_some_model(decoded, body)
    with own_words():
        return await processor.chat_tokens(await _translated(processor, request, context), context.tenant)


def _decoded(body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], ignored: IgnoredFields) -> T:
    request = decode(body, decoder, names=NAMES)
    names = checked_fields(request)
    if request.thinking is not None:
        names += checked_fields(request.thinking, "thinking.")
    for index, tool in enumerate(request.tools or ()):
        names += checked_fields(tool, f"tools[{index}].")
    if names:
        ignored.tell(names)
    return request


async def _translated(
    processor: InputProcessor, request: CountTokensRequest, context: Context
) -> ChatCompletionRequest:
    if request.thinking is None and (request.output_config is None or not request.output_config.effort):
        return chat_request(request, {})
    card = await processor.loaded(request, context)
    _, tokenizer = await processor.tokenizer(card.model)
    reasoning, ignored = reasoning_fields(request, card, tokenizer.traits)
    processor.ignored(context.answer_headers).tell(ignored)
    return chat_request(request, reasoning)
