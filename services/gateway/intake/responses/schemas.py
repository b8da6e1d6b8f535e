"""Bodies of /v1/responses, as OpenAI defines them (API reference, "Responses").

As in `services/gateway/intake/schemas.py` fields that this server does not have are declared too, so that they can
be refused by name.
"""

from typing import Any

import msgspec

from services.gateway.intake.schemas import CacheBreakpoint, StreamOptions


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class InputFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request and the counting of its tokens have in common."""

    model: str
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's, as a chat's: variables for the chat template."""

    # refused unless neutral
    chat_template: Any = None
    conversation: Any = None


class InputTokensRequest(InputFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses/input_tokens."""

    personality: Any = None


class ResponseRequest(InputFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses."""

    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    user: str | None = None

    # vLLM's, as a chat's
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    # vLLM's, ignored
    early_stopping: Any = None
    length_penalty: Any = None
    mm_processor_kwargs: Any = None
    spaces_between_special_tokens: Any = None

    # refused unless neutral
    access_programs: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "chat_template": (),
    "context_management": ([],),
    "conversation": (),
    "image": ({}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
    "moderation": (),
    "personality": (),
    "prompt": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory", "in-memory"),
}
"""Fields of OpenAI's API and vLLM's that are not supported, with the values that ask for nothing (null always)."""

NEUTRAL_IN_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
"""The same for a function among `tools`."""


# --- input items ---------------------------------------------------------------------------------


class AnyItem(msgspec.Struct, frozen=True):
    """What tells the kind of an item."""

    type: str | None = None
    role: str | None = None


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a content. What an answer's part brings besides its text is taken without effect."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: Any = None

    # refused where they are given
    detail: Any = None
    file_data: Any = None
    file_id: Any = None
    file_url: Any = None
    filename: Any = None
    image_url: Any = None
    input_audio: Any = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class MessageItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[Part]
    type: str | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None

    # refused where they are given
    async_: Any = msgspec.field(default=None, name="async")
    caller: Any = None
    created_by: Any = None
    namespace: Any = None


class FunctionCallOutputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: str | None = None
    name: str | None = None

    # refused where they are given
    caller: Any = None
    created_by: Any = None
    namespace: Any = None


class ReasoningText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    type: str = "reasoning_text"


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
