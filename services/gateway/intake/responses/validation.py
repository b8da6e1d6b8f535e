"""Checks of what only a response's request has; the rest is checked as the chat completion that it becomes."""

from collections.abc import Collection

from services.gateway.core.errors import InvalidParameter, check_metadata_sizes, check_range, check_size
from services.gateway.intake.responses.schemas import (
    NEUTRAL,
    NEUTRAL_IN_TOOL,
    InputFields,
    ReasoningOptions,
    ResponseRequest,
)
from services.gateway.intake.validation import PRIORITIES, check_request_id_field
from shared import limits

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""What `include` may name; no reasoning is ever encrypted here, so the second adds nothing."""
TOOL_CHOICES = ("function", "allowed_tools")
"""Types of a `tool_choice` that is more than a word: there are no other tools."""


def check_input_fields(request: InputFields) -> None:
    """Raises `InvalidParameter` for the first thing wrong in `request`."""
    for name, neutral in NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise unsupported(name)
    if request.truncation not in (None, "auto", "disabled"):
        raise _not_one_of("truncation", request.truncation, ("auto", "disabled"))
    if request.reasoning is not None:
        _check_reasoning(request.reasoning)
    if request.input is None and request.previous_response_id is None:
        raise InvalidParameter(
            "Missing required parameter: 'input'; send a text or an array of items.",
            param="input",
            reason="missing_required_parameter",
        )
    if request.input == [] and request.previous_response_id is None:
        raise InvalidParameter(
            "Invalid 'input': empty array. Expected an array with minimum length 1, but got an empty array "
            "instead.",
            param="input",
            reason="empty_array",
        )
    if isinstance(request.input, list):
        check_size("input", request.input, limits.ITEMS)
    _check_tools(request)


def _check_tools(request: InputFields) -> None:
    for index, tool in enumerate(request.tools or []):
        if tool.get("type") != "function":
            raise InvalidParameter(
                f"Invalid value: '{str(tool.get('type'))[:64]}'. This server has no tools of its own; "
                "supported values are: 'function'.",
                param=f"tools[{index}].type",
                reason="invalid_value",
            )
        for name, values in NEUTRAL_IN_TOOL.items():
            value = tool.get(name)
            if value is not None and value not in values:
                raise unsupported(f"tools[{index}].{name}")

    choice = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") not in TOOL_CHOICES:
        raise _not_one_of("tool_choice.type", str(choice.get("type")), TOOL_CHOICES)


def check_request(request: ResponseRequest) -> None:
    """As `check_input_fields`, for a request that generates."""
    check_input_fields(request)
    check_include(request.include)
    if request.top_logprobs is not None:
        check_range("top_logprobs", request.top_logprobs, 0, 20)
    for name in ("max_output_tokens", "max_tool_calls"):
        value = getattr(request, name)
        if value is not None:
            check_range(name, value, 1, 2**31)
    if request.background and request.store is False:
        raise InvalidParameter(
            "Invalid value for 'store': a background response is asked for by its id, so it is kept; leave "
            "out 'store', or 'background'.",
            param="store",
            reason="invalid_value",
        )
    if request.priority is not None:
        check_range("priority", request.priority, *PRIORITIES)
    check_size("cache_salt", request.cache_salt, limits.CACHE_SALT)
    check_request_id_field(request.request_id)
    check_metadata_sizes(request.metadata)
    check_size("safety_identifier", request.safety_identifier, limits.USER_CHARACTERS)
    check_size("user", request.user, limits.USER_CHARACTERS)
    _check_stream_options(request)


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


def unsupported(name: str, detail: str = "leave it out") -> InvalidParameter:
    return InvalidParameter(
        f"Unsupported parameter: '{name}' is not supported by this server; {detail}.",
        param=name,
        reason="unsupported_parameter",
    )


def _check_reasoning(reasoning: ReasoningOptions) -> None:
    neutral = {"summary": (), "generate_summary": (), "context": ("auto",), "mode": ("standard",)}
    for name, values in neutral.items():
        value = getattr(reasoning, name)
        if value is not None and value not in values:
            raise unsupported(f"reasoning.{name}")


def _check_stream_options(request: ResponseRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise InvalidParameter(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
            reason="invalid_value",
        )
    if options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
    if options.include_usage:
        raise unsupported("stream_options.include_usage", "the last event of a response always has its usage")


def _not_one_of(name: str, given: str, allowed: tuple[str, ...]) -> InvalidParameter:
    supported = ", ".join(f"'{value}'" for value in allowed)
    return InvalidParameter(
        f"Invalid value: '{given[:64]}'. Supported values are: {supported}.",
        param=name,
        reason="invalid_value",
    )
