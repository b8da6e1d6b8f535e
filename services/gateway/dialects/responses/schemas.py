"""Bodies of /v1/responses, as OpenAI defines them (API reference, "Responses"), and what is checked of them alone.

Annotations say what a field may be, as in `services/gateway/intake/schemas.py`. The rest is checked as the chat
completion that a request becomes.
"""

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from services.gateway.core.errors import InvalidParameter, check_range, empty_array, unsupported
from services.gateway.dialects.responses.conversation.compaction import ContextManagement
from services.gateway.dialects.responses.tools import placed_tools
from services.gateway.intake.rules import (
    GIVEN,
    NOT_FALSE,
    NULL,
    TEXT,
    TRUE,
    Rule,
    Ruled,
    Rules,
    ignored,
    neutral,
    some_of,
)
from services.gateway.intake.schemas import (
    MAX_COUNT,
    ONLY_STREAMED,
    CacheBreakpoint,
    CacheOptions,
    CacheSalt,
    LogitBias,
    LogprobCount,
    Metadata,
    MinP,
    ModelName,
    Penalty,
    PositiveCount,
    Priority,
    ReasoningEffort,
    RepetitionPenalty,
    RequestId,
    Retention,
    Seed,
    ServiceTier,
    SparseAttentionField,
    StopField,
    StreamOptions,
    Temperature,
    TopK,
    TopP,
    User,
    Verbosity,
)
from services.gateway.intake.validation import check_fields
from shared import limits

LOGPROBS = "message.output_text.logprobs"
# What `include` may name. There is nothing here of all but the first, so they add nothing: no reasoning is encrypted,
# and no response has a call of OpenAI's tools, or an image.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


No = Annotated[bool, Meta(extra_json_schema={"enum": [False]})]


class ResponseStreamOptions(StreamOptions, frozen=True, forbid_unknown_fields=True):
    """The last event of a response always has its usage: true is refused."""

    include_usage: No | None = None

    rules = ()


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None


Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None  # its older name
    # Whose reasoning the chat template gets: of all turns, or of the one that is going on.
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Annotated[Any, neutral("standard")] = None


class ConversationName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str


_SOME_INPUT = some_of(
    {"input": GIVEN, "previous_response_id": TEXT, "conversation": GIVEN}, "a text or an array of items"
)
_ONE_PAST = Rule(
    field="conversation",
    needs={"previous_response_id": NULL},
    error="Invalid 'conversation': 'previous_response_id' already says what comes before; send one of the two.",
)


class InputFields(Ruled, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request and the counting of its tokens have in common."""

    model: ModelName
    input: str | Annotated[list[msgspec.Raw], limits.ITEMS.length(extra_json_schema={"minItems": 1})] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's, as a chat's: variables for the chat template

    conversation: str | ConversationName | None = None

    # refused unless neutral
    chat_template: Annotated[Any, neutral()] = None

    rules: ClassVar[Rules] = (_SOME_INPUT, _ONE_PAST)


def conversation_of(request: InputFields) -> str:
    """The id of the conversation that it belongs to; empty: none."""
    given = request.conversation
    return given.id if isinstance(given, ConversationName) else given or ""


class CompactRequest(InputFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses/compact."""

    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Retention | None = None
    service_tier: ServiceTier | None = None
    image: Annotated[Any, neutral({}, {"context_compression": "auto"}, {"context_compression": "disabled"})] = None


class InputTokensRequest(InputFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses/input_tokens."""

    personality: Annotated[Any, neutral()] = None


class ResponseCacheOptions(CacheOptions, frozen=True, forbid_unknown_fields=True):
    prewarm: bool | None = None  # only the prompt is computed, for later requests that begin as it does


class ResponseRequest(InputFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses."""

    background: bool | None = None
    context_management: Annotated[list[ContextManagement], limits.CONTEXT_MANAGEMENT.length()] | None = None
    include: list[Annotated[str, Meta(extra_json_schema={"enum": INCLUDABLE})]] | None = None
    max_output_tokens: PositiveCount | None = None
    max_tool_calls: PositiveCount | None = None
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    prompt_cache_retention: Retention | None = None
    safety_identifier: User | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: Temperature | None = None
    top_logprobs: LogprobCount | None = None
    top_p: TopP | None = None
    user: User | None = None

    # vLLM's, as a chat's
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: StopField | None = None
    top_k: TopK | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    sparse_attention: SparseAttentionField | None = None
    close_objects: bool | None = None
    request_id: RequestId | None = None

    # OpenAI's, ignored
    client_metadata: Annotated[Any, ignored({})] = None  # what Codex says of itself

    # vLLM's, ignored
    early_stopping: Annotated[Any, ignored(False)] = None
    length_penalty: Annotated[Any, ignored(1, 1.0)] = None
    mm_processor_kwargs: Annotated[Any, ignored({})] = None
    spaces_between_special_tokens: Annotated[Any, ignored(True)] = None
    vllm_xargs: Annotated[Any, ignored({})] = None

    # refused unless neutral
    access_programs: Annotated[Any, neutral()] = None
    image: Annotated[Any, neutral({}, {"context_compression": "auto"}, {"context_compression": "disabled"})] = None
    moderation: Annotated[Any, neutral()] = None
    prompt: Annotated[Any, neutral()] = None

    rules = (
        *InputFields.rules,
        Rule(
            field="background",
            when=TRUE,
            needs={"store": NOT_FALSE},
            error="Invalid value for 'store': a background response is asked for by its id, so it is kept; leave out "
            "'store', or 'background'.",
            param="store",
        ),
        Rule(
            field="conversation",
            needs={"store": NOT_FALSE},
            error="Invalid value for 'store': a response that is added to a conversation is kept; leave out 'store', "
            "or 'conversation'.",
            param="store",
        ),
        ONLY_STREAMED,
    )


def is_prewarm(request: InputFields) -> bool:
    """Whether it wants its prompt in the cache and no output."""
    options = request.prompt_cache_options if isinstance(request, ResponseRequest) else None
    return options is not None and bool(options.prewarm)


def check_input_fields(request: InputFields) -> None:
    """Raises `InvalidParameter` for the first thing wrong in `request`."""
    check_fields(request)
    if request.input == [] and request.previous_response_id is None and request.conversation is None:
        raise empty_array("input")
    for _ in placed_tools(request.tools):
        pass  # each is checked


def check_request(request: ResponseRequest) -> None:
    """As `check_input_fields`, for a request that generates."""
    check_input_fields(request)
    check_include(request.include)
    _check_compaction(request)
    options = request.stream_options
    if options is not None and options.include_usage:
        raise unsupported("stream_options.include_usage", "the last event of a response always has its usage")


def _check_compaction(request: ResponseRequest) -> None:
    for index, entry in enumerate(request.context_management or ()):
        path = f"context_management[{index}]"
        if entry.type != "compaction":
            raise InvalidParameter(
                f"Invalid value: '{entry.type[:64]}'. Supported value is: 'compaction'.", param=f"{path}.type"
            )
        if entry.compact_threshold is not None:
            check_range(f"{path}.compact_threshold", entry.compact_threshold, 1, MAX_COUNT)


def wants_logprobs(request: ResponseRequest) -> bool:
    return LOGPROBS in (request.include or ()) or bool(request.top_logprobs)


def check_include(include: Collection[str] | None) -> None:
    """Raises `InvalidParameter` for what can never be included here."""
    for name in include or ():
        if name not in INCLUDABLE:
            raise InvalidParameter(
                f"Unsupported parameter: 'include' may not have '{name[:64]}' on this server; supported are: "
                f"{', '.join(INCLUDABLE)}.",
                param="include",
                reason="unsupported_parameter",
            )


# --- input items ---------------------------------------------------------------------------------


class AnyItem(msgspec.Struct, frozen=True):
    """What tells the kind of an item."""

    type: str | None = None
    role: str | None = None


Status = Literal["in_progress", "completed", "incomplete"]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a content. What an answer's part brings besides its text is taken without effect."""

    type: Literal["input_text", "output_text", "text", "refusal", "input_file"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: Any = None

    # of a file
    # How the pages of a PDF are looked at; a text has none.
    detail: Literal["auto", "low", "high"] | None = None
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None

    # refused where they are given
    file_url: Any = None
    image_url: Any = None
    input_audio: Any = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class MessageItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[Part]
    type: str | None = None
    id: str | None = None
    status: Status | None = None
    # What an answer was: said on the way, or the last word. It is kept, and listed again.
    phase: Literal["commentary", "final_answer"] | None = None


class Caller(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who has called: the model itself, for nothing else calls here."""

    type: Literal["direct"]
    caller_id: msgspec.UnsetType = msgspec.UNSET  # of a program


class CallItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What calls of functions and of custom tools have in common."""

    type: str
    call_id: str
    name: str
    id: str | None = None
    status: Status | None = None
    caller: Caller | None = None

    namespace: str | None = None  # of the function: the model reads it before the name

    # refused where they are given
    async_: Any = msgspec.field(default=None, name="async")
    created_by: Any = None


class FunctionCallItem(CallItem, frozen=True, forbid_unknown_fields=True, kw_only=True):
    arguments: str


class CustomToolCallItem(CallItem, frozen=True, forbid_unknown_fields=True, kw_only=True):
    input: str


class CallOutputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a function or of a custom tool."""

    type: str
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    caller: Caller | None = None

    namespace: str | None = None

    # refused where they are given
    created_by: Any = None


class ReasoningText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    type: str = "reasoning_text"


class CompactionItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    encrypted_content: str
    id: str | None = None
    created_by: Any = None


class TriggerItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """It is not listed again, so its id is of no use."""

    type: str
    id: str | None = None


class ReasoningItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model thought; templates show it or not. `summary` and `encrypted_content` are taken without effect."""

    type: str
    id: str | None = None
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class ItemReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    type: str | None = None
