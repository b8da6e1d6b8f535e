"""What is wrong with fields that JSON does not have, in the words of the REST API."""

from typing import Any

import msgspec

from services.gateway.errors import InvalidParameter

_object = msgspec.json.Decoder(dict[str, Any])


def missing(name: str, wanted: str) -> InvalidParameter:
    """The error for a field that must be there."""
    return InvalidParameter(
        f"Missing required parameter: '{name}'; send {wanted}.",
        param=name,
        reason="missing_required_parameter",
    )


def schema_in(text: str, name: str) -> dict[str, Any]:
    """The JSON Schema that a field has as JSON text. Raises `InvalidParameter`."""
    return object_in(text, name, "a JSON Schema")


def object_in(text: str, name: str, wanted: str) -> dict[str, Any]:
    """The object that a field has as JSON text. Raises `InvalidParameter`."""
    try:
        return _object.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidParameter(
            f"Invalid '{name}': it is no JSON object ({why}); send {wanted} as JSON text.",
            param=name,
            reason="invalid_json",
        ) from None
