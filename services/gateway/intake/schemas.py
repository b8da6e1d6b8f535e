"""Request bodies, as OpenAI defines them, with the extensions that vLLM made common.

A field that is null counts as not given. Fields of OpenAI's API that this server does not have are
declared too, so that they can be refused by name (see `validation.py`) and not as if they were typing
errors; any other field is refused as unknown.
"""

from typing import Any, Literal

import msgspec

from services.gateway.tool_calls.schemas import (
    CalledFunction,
    FunctionDefinition,
    FunctionName,
    Tool,
    ToolCall,
    ToolChoice,
)


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format.json_schema`."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """Without effect: a schema is always held to the letter, or refused."""


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`: `text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of these."""

    json: str | dict[str, Any] | None = None
    """A JSON Schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In Lark's notation, or GBNF."""
    json_object: bool | None = None


GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's older names of the same."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Chunks are padded where it is true, and are not where it is left out."""
    continuous_usage_stats: bool | None = None
    """vLLM's: usage so far in every chunk."""


class CacheBreakpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a prefix that will come again. Every prefix is cached here, so it asks for what is done anyway."""

    mode: Literal["explicit"]
    ttl: Any = None
    """Refused: what is evicted, and when, is a matter of room."""


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content: a text, or an assistant's refusal. Any other field that is given is refused."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation; what a client echoes back of an answer is allowed where it is empty.

    `name` and `tool_call_id` go to the chat template.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    refusal: str | None = None
    audio: Any = None
    annotations: Any = None
    reasoning_content: str | None = None
    """DeepSeek's and vLLM's extension: what the model thought, for templates that show it."""


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer is expected to be."""

    type: Literal["content"]
    content: str | list[ContentPart]


class GenerationFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What chat completions and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None

    # vLLM's extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    # vLLM's, ignored or refused
    length_penalty: Any = None
    early_stopping: Any = None
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None

    # OpenAI's, here for completions too
    response_format: ResponseFormat | None = None

    # OpenAI's, see `extra_fields.py`
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None


class ChatCompletionRequest(GenerationFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    prompt_cache_retention: str | None = None
    verbosity: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: str | FunctionName | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's extension: variables for the chat template."""

    include_reasoning: Any = None
    mm_processor_kwargs: Any = None

    # refused unless neutral
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    modalities: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    web_search_options: Any = None


class CompletionRequest(GenerationFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions. `prompt`: a string, strings, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    # refused unless neutral
    suffix: Any = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields of OpenAI's API and vLLM's that are not supported, with the values that ask for nothing (null always)."""

IGNORED: dict[str, tuple[Any, ...]] = {
    "early_stopping": (False,),
    "length_penalty": (1, 1.0),
    "mm_processor_kwargs": ({},),
    "spaces_between_special_tokens": (True,),
}
"""Fields of vLLM's that change nothing here, about beam search and images; see `extra_fields.py`."""

NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "annotations": ([],),
}
"""The same for a message."""
