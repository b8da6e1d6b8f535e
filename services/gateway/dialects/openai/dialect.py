"""OpenAI's chats and completions, which are what other APIs' requests are translated into."""

import msgspec

from services.gateway.api.dialect import Dialect
from services.gateway.dialects.openai.routes import chat_routes
from services.gateway.intake import validation
from services.gateway.intake.endpoint import BodyEndpoint
from services.gateway.intake.headers import IgnoredFields
from services.gateway.intake.processor import InputProcessor, decoded_chat, decoded_completion
from services.gateway.intake.record import Context
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.intake.validation import ignored_fields
from services.gateway.streams.formats import ChatFormat, CompletionFormat
from services.gateway.streams.stream_reader import StreamReader


class ChatEndpoint(BodyEndpoint):
    """/v1/chat/completions."""

    name = "chat.completions"
    presentation = ChatFormat
    invoked_by = ("messages",)

    def decode(self, body: bytes | msgspec.Raw, ignored: IgnoredFields) -> ChatCompletionRequest:
        return decoded_chat(body, ignored)

    def check(self, request: ChatCompletionRequest, ignored: IgnoredFields) -> None:
        ignored.tell(ignored_fields(request))
        validation.check_chat(request)

    async def prepare(
        self, processor: InputProcessor, request: ChatCompletionRequest, context: Context
    ) -> StreamReader:
        return await processor.chat(request, context)


class CompletionEndpoint(BodyEndpoint):
    """/v1/completions."""

    name = "completions"
    presentation = CompletionFormat
    invoked_by = ("prompt",)

    def decode(self, body: bytes | msgspec.Raw, ignored: IgnoredFields) -> CompletionRequest:
        return decoded_completion(body)

    def check(self, request: CompletionRequest, ignored: IgnoredFields) -> None:
        ignored.tell(ignored_fields(request))
        validation.check_completion(request)

    async def prepare(self, processor: InputProcessor, request: CompletionRequest, context: Context) -> StreamReader:
        return await processor.completion(request, context)


OPENAI = Dialect(
    "openai",
    chat_routes,
    endpoints=(ChatEndpoint(), CompletionEndpoint()),
    absent={"/v1/moderations": "no model here judges texts; ask a classifier (/v1/classify), or a language model"},
)
