"""The words of refusals that many checks share, in OpenAI's shape. Pure."""

from collections.abc import Sequence

from services.gateway.errors import InvalidParameter


def unsupported(name: str, detail: str = "leave it out") -> InvalidParameter:
    return InvalidParameter(
        f"Unsupported parameter: '{name}' is not supported by this server; {detail}.",
        param=name,
        reason="unsupported_parameter",
    )


def asks_for_nothing(value: object, neutral: Sequence[object]) -> bool:
    """Whether `value` is one of `neutral`, also by its type: to Python 0 is False, to a client it is not."""
    return any(type(value) is type(allowed) and value == allowed for allowed in neutral)


def empty_array(name: str) -> InvalidParameter:
    return InvalidParameter(
        f"Invalid '{name}': empty array. Expected an array with minimum length 1, "
        "but got an empty array instead.",
        param=name,
        reason="empty_array",
    )
