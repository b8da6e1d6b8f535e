"""Bodies of /v1/messages and /v1/messages/count_tokens, as Anthropic defines them.

As in `intake/schemas.py`: the annotation of a field says its type, range and values, null counts as not given, and
what is declared as `neutral` or `ignored` is refused or named. Blocks are told apart by their `type`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.intake.rules import ignored, neutral
from services.gateway.intake.schemas import (
    Count,
    ModelName,
    PositiveCount,
    SparseAttentionField,
    StopString,
    Temperature,
    TopP,
    User,
)
from shared import limits


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a prefix that will come again. Every prefix is cached here, so it asks for what is done anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None  # who shares it: as the server's settings have it


class _Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    cache_control: CacheControl | None = None


_PARTS = limits.PARTS.length()


class TextBlock(_Block, frozen=True, tag="text"):
    text: str
    citations: Any = None  # echoed from answers; without effect, as every `citations`


class ImageBlock(_Block, frozen=True, tag="image"):
    """Refused by name where the model does not see."""

    source: Any
    image_transformations: Any = None


class PlainSource(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class ContentSource(msgspec.Struct, frozen=True, tag_field="type", tag="content", forbid_unknown_fields=True):
    content: str | Annotated[list[TextBlock | ImageBlock], _PARTS]


class DocumentBlock(_Block, frozen=True, tag="document"):
    """A text; PDF files are none."""

    source: PlainSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: Any = None


class SearchResultBlock(_Block, frozen=True, tag="search_result"):
    content: Annotated[list[TextBlock], _PARTS]
    source: str
    title: str
    citations: Any = None


class ThinkingBlock(_Block, frozen=True, tag="thinking"):
    """What the model thought; templates show it or not. The signature is not looked at."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block, frozen=True, tag="redacted_thinking"):
    """Encrypted by somebody else: without effect."""

    data: str


class ToolUseBlock(_Block, frozen=True, tag="tool_use"):
    id: Annotated[str, Meta(min_length=1)]
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: None = None


Readable = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(_Block, frozen=True, tag="tool_result"):
    tool_use_id: str
    content: str | Annotated[list[Readable], _PARTS] | None = None
    is_error: bool | None = None
    toolset_name: None = None


Block = Readable | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], _PARTS]  # all messages together have no more blocks


class AnthropicTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # input is always streamed as it comes
    input_examples: Annotated[Any, ignored([])] = None
    allowed_callers: Annotated[Any, neutral(["direct"])] = None
    defer_loading: Annotated[Any, ignored(False)] = None  # the model is told of every tool at once


class AnthropicToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the model's template has a switch for its reasoning, this is it."""

    type: Literal["enabled", "disabled", "adaptive"]
    # How long a model thinks is its own to decide, within `max_tokens`.
    budget_tokens: Annotated[Annotated[int, Meta(ge=1024, le=2**31)] | None, ignored()] = None
    display: Annotated[Literal["summarized", "omitted"] | None, ignored("summarized")] = None


class JsonFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user_id: User | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens: what an input is made of."""

    model: ModelName
    messages: Annotated[list[MessageParam], limits.MESSAGES.length(min_length=1)]
    system: str | Annotated[list[TextBlock], _PARTS] | None = None
    # What Anthropic's servers or models bring is refused by its type.
    tools: Annotated[list[AnthropicTool], limits.TOOLS.length()] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    # vLLM's, as a chat's: variables for the chat template. What `thinking` says of its switch comes first.
    chat_template_kwargs: dict[str, Any] | None = None

    context_management: Annotated[Any, ignored({})] = None
    speed: Annotated[Any, ignored("standard")] = None
    mcp_servers: Annotated[Any, neutral([])] = None
    # A conversation that Anthropic keeps. Tool runners go on without it where they are told that there is none.
    thread: Annotated[Any, neutral()] = None


class MessagesRequest(CountTokensRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: PositiveCount  # what the context has no room for is taken off, and told by the stop reason
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], limits.STOP_STRINGS.length()] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Count | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # there is one tier: both are served by it
    sparse_attention: SparseAttentionField | None = None
    close_objects: bool | None = None  # these two are this server's own

    container: Annotated[Any, neutral()] = None
    diagnostics: Annotated[Any, ignored({})] = None
    inference_geo: Annotated[Any, ignored()] = None
