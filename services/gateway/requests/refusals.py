"""The words of refusals that many checks share, in OpenAI's shape. Pure."""

from collections.abc import Collection, Mapping, Sequence

from services.gateway.errors import InvalidParameter
from shared import limits
from shared.limits import Limit


def unsupported(name: str, detail: str = "leave it out") -> InvalidParameter:
    return InvalidParameter(
        f"Unsupported parameter: '{name}' is not supported by this server; {detail}.",
        param=name,
        reason="unsupported_parameter",
    )


def asks_for_nothing(value: object, neutral: Sequence[object]) -> bool:
    """Whether `value` is one of `neutral`, also by its type: to Python 0 is False, to a client it is not."""
    return any(type(value) is type(allowed) and value == allowed for allowed in neutral)


def check_size(name: str, given: Collection[object] | None, limit: Limit) -> None:
    """Raises `InvalidParameter` where a text has more characters, or anything else more entries, than `limit`."""
    if given is not None and len(given) > limit.value:
        raise above(name, given, limit)


def above(name: str, given: Collection[object], limit: Limit) -> InvalidParameter:
    """What `check_size` raises."""
    most, got = limit.value, len(given)
    if isinstance(given, Mapping):
        what = f"too many properties. Expected an object with at most {most} properties, but got an object with {got}"
        reason = "object_above_max_properties"
    else:
        kind, reason = "array", "array_above_max_length"
        if isinstance(given, str):
            kind, reason = "string", "string_above_max_length"
        article = "an" if kind == "array" else "a"
        what = (
            f"{kind} too long. Expected {article} {kind} with maximum length {most}, but got {article} {kind} with "
            f"length {got}"
        )
    return InvalidParameter(f"Invalid '{name}': {what} instead ({limit.cited()}).", param=name, reason=reason)


def check_metadata_sizes(metadata: Mapping[str, str] | None) -> None:
    """Raises `InvalidParameter`."""
    check_size("metadata", metadata, limits.METADATA_ENTRIES)
    for key, value in (metadata or {}).items():
        check_size("metadata", key, limits.METADATA_KEY)
        check_size(f"metadata.{key}", value, limits.METADATA_VALUE)


def empty_array(name: str) -> InvalidParameter:
    return InvalidParameter(
        f"Invalid '{name}': empty array. Expected an array with minimum length 1, "
        "but got an empty array instead.",
        param=name,
        reason="empty_array",
    )
