"""vLLM's routes beside OpenAI's: /tokenize, /detokenize and /tokenizer_info, /version, /ping, /load."""

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.api.backend import Backend, BackendRoute
from services.gateway.core.asgi import read_body, send_json
from services.gateway.core.errors import InvalidParameter
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.chat import rendered
from services.gateway.intake.decoding import decode, read_query
from services.gateway.intake.intake import Intake
from services.gateway.intake.rules import check_chat, check_token_ids
from services.gateway.intake.schemas import ChatCompletionRequest, Messages, TokenId
from services.gateway.tokenizer.encoding import INLINE
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.schemas import Tool
from shared.messages import ModelCard
from shared.service.endpoints import Receive, Scope, Send

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A `prompt` or `messages`, not both."""

    model: str | None = None
    """May be left out where one model alone is served."""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """With `prompt`: whether the model's special tokens stand around it; true where it is left out."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class ModelQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: (
        Annotated[
            str, Meta(description="The model's name; it may be left out where one model alone is served.")
        ]
        | None
    ) = None


class TokenizerInfo(msgspec.Struct, frozen=True):
    """And whatever else its tokenizer_config.json says."""

    tokenizer_class: str
    chat_template: Any = None
    omitted_fields: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Those that are too large to be told."""


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(intake: Intake, body: bytes) -> Tokenized:
    """Raises `InvalidParameter`, `UnknownModel`, `Unavailable`."""
    request = decode(body, _tokenize_decoder)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidParameter(
            "Give either 'prompt' or 'messages'.", param="prompt", reason="missing_required_parameter"
        )
    card, tokenizer = await intake.speaker(request.model)
    tokens = await _tokens_of(request, card, tokenizer)
    strings: list[str] | None = None
    if request.return_token_strs:
        few = len(tokens) <= INLINE
        strings = (
            tokenizer.token_strings(tokens)
            if few
            else await asyncio.to_thread(tokenizer.token_strings, tokens)
        )
    return Tokenized(len(tokens), card.context_length, tokens, strings)


async def _tokens_of(request: TokenizeRequest, card: ModelCard, tokenizer: Tokenizer) -> list[int]:
    if request.prompt is not None:
        return await tokenizer.encode(request.prompt, special=request.add_special_tokens is not False)
    chat = ChatCompletionRequest(
        model=card.model,
        tools=request.tools,
        messages=request.messages or [],
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    check_chat(chat)
    return await tokenizer.encode_rendered((await rendered(chat, card, tokenizer)).prompt)


async def detokenize(intake: Intake, body: bytes) -> Detokenized:
    """Raises as `tokenize`."""
    request = decode(body, _detokenize_decoder)
    card, tokenizer = await intake.speaker(request.model)
    check_token_ids("tokens", request.tokens, card.vocab_size)
    return Detokenized(await tokenizer.decode_many(request.tokens, skip_special_tokens=False))


class TokenizerRoute:
    """One of the two."""

    def __init__(self, backend: Backend, settings: GatewaySettings, *, back: bool) -> None:
        """`back`: from tokens to text."""
        self._backend = backend
        self._settings = settings
        self._work = detokenize if back else tokenize

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        intake, state = self._backend.parts.intake, scope["state"]
        await intake.count(state["principal"], state["answer_headers"])
        body = await read_body(scope, receive, self._settings.body_limit, self._settings.body_timeout)
        await send_json(send, 200, await self._work(intake, body))


class TokenizerInfoRoute(BackendRoute):
    """The configuration of a model's tokenizer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        intake, state = self._backend.parts.intake, scope["state"]
        await intake.count(state["principal"], state["answer_headers"])
        model = read_query(scope["query_string"], ModelQuery).model
        _, tokenizer = await intake.speaker(model)
        await send_json(send, 200, tokenizer.info)


PING = "/ping"


class Version(msgspec.Struct, frozen=True):
    version: str


class Pong(msgspec.Struct, frozen=True):
    """Nothing: it is the status that counts."""


class Load(msgspec.Struct, frozen=True):
    server_load: int
    """Requests that this gateway is answering, without the one that asks, and generations on WebSockets."""


class SayRoute:
    """The same for everybody."""

    def __init__(self, answer: msgspec.Struct) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, self._answer)


class LoadRoute(BackendRoute):
    """How much is under way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, Load(self._backend.active_now - 1))
