"""What vLLM has beside OpenAI's API: /tokenize, /detokenize, /tokenizer_info, and one path for all bodies."""

import asyncio
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.api import shapes
from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.dialect import Dialect
from services.gateway.api.generating import completions
from services.gateway.api.openapi.operation import Operation, generating
from services.gateway.intake.prompts.chat import rendered
from services.gateway.intake.rules import OneOf, Ruled
from services.gateway.intake.sampling.params import check_token_ids
from services.gateway.intake.schemas import CONTINUES, ChatCompletionRequest, Messages, TokenId
from services.gateway.intake.validation import check_chat, check_fields
from services.gateway.tokenizer.encoding import INLINE
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.schemas import Tool
from shared.messages import ModelCard


class TokenizeRequest(Ruled, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A `prompt` or `messages`, not both."""

    model: str | None = None  # may be left out where one model alone is served
    prompt: str | None = None
    messages: Messages | None = None
    # With `prompt`: whether the model's special tokens stand around it; true where it is left out.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    rules = (
        OneOf(
            ways=(("messages",), ("prompt",)),
            kinds={"prompt": {"type": "string"}, "messages": {"type": "array"}},
            lacks="Give either 'prompt' or 'messages'.",
            param="prompt",
        ),
        CONTINUES,
    )


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class OptionalModelQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: (
        Annotated[str, Meta(description="The model's name; it may be left out where one model alone is served.")] | None
    ) = None


class TokenizerInfo(msgspec.Struct, frozen=True):
    """And whatever else its tokenizer_config.json says."""

    tokenizer_class: str
    chat_template: Any = None
    omitted_fields: list[str] | msgspec.UnsetType = msgspec.UNSET  # those that are too large to be told


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


_tokens = partial(Operation, tag="Tokens", errors=(404,))
TOKENIZE = tuple(
    _tokens(
        f"POST {prefix}/tokenize",
        name,
        "The tokens of a prompt or a conversation, as in vLLM.",
        request=TokenizeRequest,
        example={"model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time"},
        response=Tokenized,
    )
    for prefix, name in (("", "tokenize"), ("/v1", "createTokens"))
)
DETOKENIZE = tuple(
    _tokens(
        f"POST {prefix}/detokenize",
        name,
        "The text of tokens, as in vLLM.",
        request=DetokenizeRequest,
        example={"model": "SmolLM2-135M-Instruct", "tokens": [1, 2]},
        response=Detokenized,
    )
    for prefix, name in (("", "detokenize"), ("/v1", "createText"))
)
TOKENIZER_INFO = tuple(
    _tokens(
        f"GET {prefix}/tokenizer_info",
        name,
        "The configuration of a model's tokenizer, as in vLLM.",
        response=TokenizerInfo,
        query=OptionalModelQuery,
    )
    for prefix, name in (("", "tokenizerInfo"), ("/v1", "retrieveTokenizer"))
)


async def tokenize(ask: RequestContext) -> Tokenized:
    intake = await ask.counted()
    request = await ask.decoded(TokenizeRequest, ask.settings.body_limit)
    check_fields(request)
    card, tokenizer = await intake.processor.speaker(request.model, ask.tenant)
    tokens = await _tokens_of(request, card, tokenizer)
    strings: list[str] | None = None
    if request.return_token_strs:
        few = len(tokens) <= INLINE
        strings = tokenizer.token_strings(tokens) if few else await asyncio.to_thread(tokenizer.token_strings, tokens)
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


async def detokenize(ask: RequestContext) -> Detokenized:
    intake = await ask.counted()
    request = await ask.decoded(DetokenizeRequest, ask.settings.body_limit)
    card, tokenizer = await intake.processor.speaker(request.model, ask.tenant)
    check_token_ids("tokens", request.tokens, card.vocab_size)
    return Detokenized(await tokenizer.decode_many(request.tokens, skip_special_tokens=False))


async def tokenizer_info(ask: RequestContext) -> bytes:
    intake = await ask.counted()
    _, tokenizer = await intake.processor.speaker(ask.query(OptionalModelQuery).model, ask.tenant)
    return tokenizer.info


INVOCATIONS = generating(
    "POST /invocations",
    "invoke",
    "Dispatches by the fields of the body, as in SageMaker and vLLM.",
    "`messages`: a chat; `prompt`: a completion; `query`: a reranking; `queries` or `text_1`: scores; `input`: "
    "embeddings. Each as at its own path.",
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


VLLM = Dialect(
    "vllm",
    (
        completions("invocations", INVOCATIONS),
        routes_of(
            *((one, tokenize) for one in TOKENIZE),
            *((one, detokenize) for one in DETOKENIZE),
            *((one, tokenizer_info) for one in TOKENIZER_INFO),
        ),
    ),
)
