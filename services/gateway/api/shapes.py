"""What the answers look like, as types: for the document alone.

Answers are put together from prepared pieces (`formats.py`), because a token's way is short; that they look as
it says here is what `tests/integration/gateway/api/test_openapi.py` holds.
"""

from typing import Literal

import msgspec

from services.gateway.streams.formats import Usage

# vLLM's: the stop string or the client's stop token id that has ended the text; null: neither has.
StopReason = str | int | None
TokenIds = list[int]  # where `return_token_ids` asks for them
FinishReason = Literal["stop", "length", "tool_calls", "function_call", "content_filter"]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    """Of every token of the text."""

    content: list[ContentLogprob] | None
    refusal: list[ContentLogprob] | None


class ShownFunction(msgspec.Struct):
    """What a call has; in a stream its pieces come one after the other."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ShownCall(msgspec.Struct):
    function: ShownFunction
    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class AssistantMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ShownCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: ShownFunction | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None  # null while it goes on
    stop_reason: StopReason = None
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: "PromptLogprobs | msgspec.UnsetType | None" = msgspec.UNSET
    prompt_token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    refusal: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ShownCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: ShownFunction | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason | msgspec.UnsetType = msgspec.UNSET  # with the finish reason
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class TypedEvent(msgspec.Struct):
    """The data of an event of a response or of a message of Anthropic's API."""

    type: str


class ChatCompletionChunk(msgspec.Struct):
    """The data of an event. The one with `usage` has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | None = None
    prompt_token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET  # in each choice's first chunk


class CompletionLogprobs(msgspec.Struct):
    """With `echo` of the prompt's tokens too; of its first one nothing is known."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int  # 1: the most likely token at its place
    decoded_token: str


# Of each token of a prompt, by token id: its own, then the most likely ones. null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET
    stop_reason: StopReason | msgspec.UnsetType = msgspec.UNSET  # in a chunk: with the finish reason
    # In a stream: in each choice's first chunk.
    prompt_token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """A whole answer, or the data of an event: a chunk has the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | None = None


class Embedding(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """A vector for each input; base64 of float32, little-endian, where that was asked for."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
