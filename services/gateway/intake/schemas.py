"""Request bodies, as OpenAI defines them, with the extensions that vLLM made common.

The annotation of a field is the one place that says its type, range, length and values: `decoding.py` refuses what is
beyond them, and the OpenAPI document shows them. What fields demand of each other are the struct's `rules`.

A field that is null counts as not given. Fields of OpenAI's API that this server does not have are declared too
(`neutral`), so that they are refused by name and not as if they were typing errors; any other field is refused as
unknown.
"""

import operator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from services.gateway.intake.rules import (
    ENTRIES,
    GIVEN,
    NOT_TRUE,
    TEXT,
    TRUE,
    OneOf,
    Rule,
    Ruled,
    Rules,
    at_least,
    equal,
    ignored,
    neutral,
    only_with,
    some_of,
)
from services.gateway.tool_calls.schemas import (
    CalledFunction,
    FunctionDefinition,
    FunctionName,
    Tool,
    ToolCall,
    ToolChoice,
)
from shared import limits, sparse_attention
from shared.messages import SparseKind

MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31


Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
# The last so many tokens; -1: as many as the context has room for.
LastTokens = Annotated[int, Meta(ge=-1, le=MAX_COUNT, extra_json_schema={"not": {"const": 0}})]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
LogprobCount = Annotated[int, limits.LOGPROBS.up_to(0)]
ModelName = Annotated[str, Meta(min_length=1)]
StopString = Annotated[str, limits.STOP_CHARACTERS.length(min_length=1)]
# Whether the model has the token is seen with its vocabulary.
TokenId = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
BadWord = Annotated[
    str,
    limits.BAD_WORD_CHARACTERS.length(
        pattern=r"\S", extra={"expected": "at least one character that is not a space", "reason": "empty_string"}
    ),
]
User = Annotated[str, limits.USER_CHARACTERS.length()]
CacheSalt = Annotated[str, limits.CACHE_SALT.length()]
RequestId = Annotated[
    str,
    Meta(
        pattern=r"^[!-~]{1,128}$(?!\n)",
        extra={"expected": "1 to 128 printable ASCII characters without spaces"},
        extra_json_schema={"maxLength": 128},
    ),
]
_MetadataValue = Annotated[str, limits.METADATA_VALUE.length()]
Metadata = Annotated[
    dict[Annotated[str, limits.METADATA_KEY.length()], _MetadataValue], limits.METADATA_ENTRIES.length()
]
# By which stored chats are listed: no key is empty.
NamedMetadata = Annotated[
    dict[Annotated[str, limits.METADATA_KEY.length(min_length=1)], _MetadataValue], limits.METADATA_ENTRIES.length()
]
ServiceTier = Annotated[
    Literal["auto", "default", "priority", "fast", "scale", "ultrafast", "flex"],
    Meta(extra={"reason": "unsupported_parameter"}),
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
Choices = Annotated[list[str], limits.GRAMMAR_CHOICES.length(min_length=1)]


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format.json_schema`."""

    name: Annotated[
        str,
        limits.SCHEMA_NAME.length(
            pattern=r"^[a-zA-Z0-9_-]+$(?!\n)",
            extra={"expected": "a string that matches the pattern '^[a-zA-Z0-9_-]+$'"},
        ),
    ]
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None  # without effect: a schema is always held to the letter, or refused


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`: `text`, `json_object` or `json_schema`; vLLM's `structural_tag`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None  # of `structural_tag`, as xgrammar has it
    # Of `structural_tag`, the older form: tags with `begin`, `schema` and `end`, beside `triggers`.
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of these."""

    json: str | dict[str, Any] | None = None  # a JSON Schema
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None  # in Lark's notation, or GBNF
    json_object: bool | None = None
    # As `response_format` has it, as an object or as its text.
    structural_tag: str | dict[str, Any] | None = None


GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")  # vLLM's older names of the same


ONLY_STREAMED = only_with("stream_options", "stream")


class StreamOptions(Ruled, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    # Chunks are padded where it is true, and are not where it is left out.
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk

    rules: ClassVar[Rules] = (
        Rule(
            field="continuous_usage_stats",
            when=TRUE,
            needs={"include_usage": TRUE},
            error="Invalid value for '{at}continuous_usage_stats': it needs '{at}include_usage'.",
        ),
    )


_Tokens = Annotated[int, Meta(ge=0, le=sparse_attention.MOST_TOKENS)] | None


class SparseAttentionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which earlier tokens a token reads; what is left out is as the model's entry says, else the default. Counted in
    tokens, and read in whole blocks of the KV cache."""

    # `pages` (the default): the pages that score best, too; `window`: what is neither first nor recent is never read
    # again.
    kind: SparseKind | None = None
    threshold: _Tokens = None  # tokens at positions below it read everything. 8192
    sinks: _Tokens = None  # first tokens, which are always read. 64
    recent: _Tokens = None  # last tokens, which are always read. 1024
    budget: _Tokens = None  # tokens in chosen pages at least. 2048
    # Part of the position that chosen pages have, where that is more than the budget. 0.125.
    share: Annotated[float, Meta(ge=0, le=1)] | None = None
    # First layers, in which everything is read. 2.
    dense_layers: Annotated[int, Meta(ge=0, le=sparse_attention.MOST_LAYERS)] | None = None


# true: as the model's entry says, else with the defaults; false: everything is read, whatever the entry says.
SparseAttentionField = bool | SparseAttentionOptions

CacheTtl = Literal["30m", "12h"]
Retention = Literal["in_memory", "in-memory", "24h"]


class CacheBreakpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a prefix that will come again. Every prefix is cached here, so it asks for what is done anyway; but
    for how long."""

    mode: Literal["explicit"]
    ttl: CacheTtl | None = None


class CacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a prompt is cached: every prefix always, and its session's blocks for `ttl` at least, while there is room."""

    # `explicit`: without a breakpoint in the request its session's blocks are not pinned.
    mode: Literal["implicit", "explicit"] | None = None
    ttl: CacheTtl | None = None

    # refused unless neutral
    comparison_response_id: Annotated[Any, neutral()] = None
    prewarm: Annotated[Any, neutral(False)] = None


class InputFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text: one that was uploaded, or its bytes in base64, as a data URL or without."""

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None  # what the model is told that it is called


PART_TYPES = ("text", "refusal", "file")


class ContentPart(Ruled, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content: a text, a file of text, or an assistant's refusal. Any other field that is given
    is refused."""

    type: Annotated[str, Meta(extra_json_schema={"enum": PART_TYPES})]
    text: str | None = None
    image_url: Annotated[Any, neutral()] = None
    input_audio: Annotated[Any, neutral()] = None
    file: InputFile | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    rules = (
        OneOf(
            ways=tuple((kind,) for kind in PART_TYPES),
            kinds={"text": {"type": "string"}, "refusal": {"type": "string"}},
            tag="type",
            lacks="Missing required parameter: '{at}{field}'.",
            repeats="Unsupported parameter: '{at}{field}' is not supported by this server; leave it out.",
            repeats_reason="unsupported_parameter",
        ),
    )


_PARTS = {"maxItems": limits.PARTS.value}
_CALLS = {"maxItems": limits.CALLS.value}  # all messages together have no more


class Message(Ruled, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation; what a client echoes back of an answer is allowed where it is empty.

    `name` and `tool_call_id` go to the chat template.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(min_length=1, extra_json_schema=_PARTS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(extra_json_schema=_CALLS)] | None = None
    function_call: CalledFunction | None = None
    refusal: str | None = None
    audio: Annotated[Any, neutral()] = None
    annotations: Annotated[Any, neutral([])] = None
    # DeepSeek's and vLLM's extension: what the model thought, for templates that show it.
    reasoning_content: str | None = None

    rules = (
        some_of(
            {"content": GIVEN, "tool_calls": ENTRIES, "function_call": GIVEN, "refusal": TEXT},
            "a string or an array of text parts",
        ),
    )

    @property
    def is_text(self) -> bool:
        """Whether it is a text that somebody says, and has nothing else, as nearly always: then there is nothing in it
        to be checked or translated."""
        return (
            type(self) is Message
            and type(self.content) is str
            and self.role in _SPEAKERS
            and _of_besides(self) == _NO_BESIDES
        )

    @property
    def text(self) -> str:
        """Its content as one text; parts are joined by line breaks. What was refused was said, too."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text or part.refusal or "" for part in content)
        return "\n".join(filter(None, (content, self.refusal)))


_SPEAKERS = frozenset(("system", "developer", "user", "assistant"))
_BESIDES = tuple(name for name in Message.__struct_fields__ if name not in ("role", "content"))
_of_besides = operator.attrgetter(*_BESIDES)
_NO_BESIDES = (None,) * len(_BESIDES)
IS_TEXT = operator.attrgetter("is_text")


Messages = Annotated[list[Message], limits.MESSAGES.length(min_length=1)]


class TrainedMessage(Message, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation that a model learns from."""

    weight: Literal[0, 1] | None = None  # of an assistant's: 0, it is context alone; otherwise it is trained


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer is expected to be."""

    type: Literal["content"]
    content: str | list[ContentPart]


Seed = Annotated[int, Meta(ge=-(2**63), extra_json_schema={"maximum": MAX_SEED})]
StopField = StopString | Annotated[list[StopString], limits.STOP_STRINGS.length()]
LogitBias = Annotated[
    dict[int, Annotated[float, Meta(ge=-100, le=100)]],
    limits.LOGIT_BIASES.length(
        extra_json_schema={"propertyNames": {"type": "string", "pattern": "^(0|[1-9][0-9]{0,8})$"}}
    ),
]
TopK = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]


class GenerationFields(Ruled, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What chat completions and completions have in common."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, limits.CHOICES.up_to(1)] | None = None
    stop: StopField | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    user: User | None = None
    prompt_cache_key: str | None = None

    # vLLM's extensions
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], limits.STOP_TOKENS.length()] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: LastTokens | None = None
    allowed_token_ids: Annotated[list[TokenId], limits.ALLOWED_TOKENS.length(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], limits.BAD_WORDS.length()] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    prompt_logprobs: LogprobCount | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    # llama.cpp's
    return_progress: bool | None = None

    # this server's own
    sparse_attention: SparseAttentionField | None = None
    # Whether objects of a schema without `additionalProperties` have the named properties alone; as the server's
    # settings say, where it is left out.
    close_objects: bool | None = None

    # vLLM's, about beam search and texts: ignored or refused
    length_penalty: Annotated[Any, ignored(1, 1.0)] = None
    early_stopping: Annotated[Any, ignored(False)] = None
    spaces_between_special_tokens: Annotated[Any, ignored(True)] = None
    use_beam_search: Annotated[
        Any, neutral(False, why="beams cannot be continued by another ring; use 'best_of' or 'n'")
    ] = None
    vllm_xargs: Annotated[Any, ignored({})] = None  # for plugins of vLLM's, of which there are none here

    # OpenAI's, here for completions too
    response_format: ResponseFormat | None = None

    # OpenAI's
    metadata: NamedMetadata | None = None
    safety_identifier: User | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None

    rules: ClassVar[Rules] = (
        ONLY_STREAMED,
        Rule(
            field="prompt_logprobs",
            needs={"stream": NOT_TRUE},
            error="Invalid value for 'prompt_logprobs': they are not streamed; leave out 'stream' (over gRPC set "
            "output.whole), or ask for a completion with 'echo' and 'logprobs'.",
        ),
    )


CONTINUES = Rule(
    field="continue_final_message",
    when=TRUE,
    needs={"add_generation_prompt": NOT_TRUE},
    error="Invalid value for 'continue_final_message': an answer either continues the last message or begins a new "
    "one; leave out 'add_generation_prompt'.",
)


class ChatCompletionRequest(GenerationFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    prediction: Prediction | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: CacheOptions | None = None
    verbosity: Verbosity | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], limits.TOOLS.length()] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], limits.TOOLS.length()] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's extension: variables for the chat template

    mm_processor_kwargs: Annotated[Any, ignored({})] = None

    # refused unless neutral
    audio: Annotated[Any, neutral()] = None
    chat_template: Annotated[Any, neutral()] = None
    documents: Annotated[Any, neutral([])] = None
    include_reasoning: Annotated[Any, neutral(True)] = None
    modalities: Annotated[Any, neutral(["text"])] = None
    moderation: Annotated[Any, neutral()] = None
    web_search_options: Annotated[Any, neutral()] = None

    rules = (*GenerationFields.rules, only_with("top_logprobs", "logprobs"), CONTINUES)


class CompletionRequest(GenerationFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions. `prompt`: a string, strings, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: LogprobCount | None = None
    best_of: Annotated[int, limits.CHOICES.up_to(1)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, neutral("")] = None  # no open model says how it was taught to fill in the middle

    rules = (
        *GenerationFields.rules,
        Rule(
            field="max_tokens",
            when=equal(0),
            needs_one={"echo": TRUE, "prompt_logprobs": GIVEN},
            error="Invalid 'max_tokens': integer below minimum value. Expected a value >= 1, but got 0 instead; "
            "max_tokens=0 requires 'echo' or 'prompt_logprobs'.",
            reason="integer_below_min_value",
        ),
        Rule(
            field="best_of",
            when=at_least(2),
            needs={"stream": NOT_TRUE},
            error="Invalid value for 'best_of': which candidates are the best is known at their end, so they cannot be "
            "streamed; leave out 'stream' or 'best_of'.",
        ),
    )
