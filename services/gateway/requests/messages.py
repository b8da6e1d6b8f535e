"""What is checked of a conversation's messages, and what they say as text. Pure."""

from services.gateway.errors import InvalidParameter
from services.gateway.requests.refusals import asks_for_nothing, empty_array, unsupported
from services.gateway.requests.schemas import NEUTRAL_IN_MESSAGE, CacheBreakpoint, ContentPart, Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PARTS = ("text", "refusal")
OTHER_PARTS = ("image_url", "input_audio", "file")


def check_message(path: str, message: Message) -> None:
    if message.role not in ROLES:
        supported = ", ".join(f"'{role}'" for role in ROLES)
        raise InvalidParameter(
            f"Invalid value: '{message.role[:64]}'. Supported values are: {supported}.",
            param=f"{path}.role",
            reason="invalid_value",
        )
    for name, neutral in NEUTRAL_IN_MESSAGE.items():
        value = getattr(message, name)
        if value is not None and not asks_for_nothing(value, neutral):
            raise unsupported(f"{path}.{name}")
    if message.content is None and not (message.tool_calls or message.function_call or message.refusal):
        raise InvalidParameter(
            f"Missing required parameter: '{path}.content'; send a string or an array of text parts.",
            param=f"{path}.content",
            reason="missing_required_parameter",
        )
    if isinstance(message.content, list):
        _check_parts(f"{path}.content", message)


def _check_parts(path: str, message: Message) -> None:
    parts = message.content
    assert isinstance(parts, list)
    if not parts:
        raise empty_array(path)
    for index, part in enumerate(parts):
        _check_part(f"{path}[{index}]", part)


def _check_part(path: str, part: ContentPart) -> None:
    if part.type not in PARTS:
        supported = " and ".join(f"'{kind}'" for kind in PARTS)
        raise InvalidParameter(
            f"Invalid value: '{part.type[:64]}'. This server reads text alone; supported values are: {supported}.",
            param=f"{path}.type",
            reason="invalid_value",
        )
    if getattr(part, part.type) is None:
        raise InvalidParameter(
            f"Missing required parameter: '{path}.{part.type}'.",
            param=f"{path}.{part.type}",
            reason="missing_required_parameter",
        )
    others = (kind for kind in PARTS if kind != part.type)
    for name in (*OTHER_PARTS, *others):
        if getattr(part, name) is not None:
            raise unsupported(f"{path}.{name}")
    check_breakpoint(f"{path}.prompt_cache_breakpoint", part.prompt_cache_breakpoint)


def check_breakpoint(path: str, given: CacheBreakpoint | None) -> None:
    """Raises `InvalidParameter`."""
    if given is not None and given.ttl is not None:
        raise unsupported(f"{path}.ttl")


def text_of(message: Message) -> str:
    """A message's content as one text; parts are joined by line breaks. What was refused was said, too."""
    content = message.content or ""
    if isinstance(content, list):
        content = "\n".join(part.text or part.refusal or "" for part in content)
    return (
        "\n".join((content, message.refusal))
        if content and message.refusal
        else content or message.refusal or ""
    )
