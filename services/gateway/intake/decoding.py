"""From bytes to requests: decoded, checked against what their types say, refused in words of `core/errors.py`.

A body that says what it means in another form than ours is read all the same, once it is refused:

- A byte order mark before the JSON.
- A whole number with a fraction of zeros or an exponent (6.0, 6e0, 1E2), which is an integer to JSON Schema.
- Unknown fields that are null: null counts as not given.
- Fields of messages that are not known: `reasoning` is vLLM's new name for `reasoning_content`, what else clients echo
  back of answers is left out and named.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from services.gateway.core.errors import InvalidParameter, convert, hinted, refusal
from services.gateway.intake.schemas import Message

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)
_ENTRY = re.compile(r"(\w+)\[([^\[\]]*)\]")


def decode(
    body: bytes | msgspec.Raw,
    decoder: msgspec.json.Decoder[T],
    dropped: list[str] | None = None,
    *,
    names: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """`body` as a request. `dropped`: gets the unknown fields of messages; None: they are refused. `names`: what fields
    of a chat are called in an API that has other names for them. Raises `InvalidParameter`."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        kind: Any = decoder.type
        other = repaired(body, dropped, _needed(kind))
    data = bytes(body) if other is None else other
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise hinted(refusal(error, decoder.type, lambda: msgspec.json.decode(data)), names) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unparsed(error) from None


def lacks_model(error: InvalidParameter) -> bool:
    """Whether `error` says that a request names no model."""
    return error.param == "model" and error.reason == "missing_required_parameter"


def with_model(body: bytes | msgspec.Raw, model: str) -> bytes:
    """`body`, which was decoded but for its model, with one; null counts as not given. Raises `InvalidParameter`: what
    comes behind the fields was not looked at."""
    try:
        fields = msgspec.json.decode(bytes(body).removeprefix(BOM), type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unparsed(error) from None
    return msgspec.json.encode(fields | {"model": model})


def _unparsed(error: Exception) -> InvalidParameter:
    why = f"We could not parse the JSON body of your request ({error}); send one JSON object in UTF-8."
    if isinstance(error, RecursionError):
        why = "The JSON body of your request is nested too deeply."
    return InvalidParameter(why, param=None, reason="invalid_json")


def read_query(query: bytes, kind: type[StructT]) -> StructT:
    """A URL's query. Where `name` has a list, `name` and `name[]` are its entries, as often as one likes; where it has
    an object, `name[key]` is; else the last one counts. Raises `InvalidParameter`."""
    several = {field.name: field.default_factory for field in msgspec.structs.fields(kind)}
    fields: dict[str, Any] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        match = _ENTRY.fullmatch(name)
        plain, key = match.groups() if match else (name, "")
        if several.get(plain) is list and not key:
            fields.setdefault(plain, []).append(value)
        elif several.get(plain) is dict and key:
            fields.setdefault(plain, {})[key] = value
        elif several.get(plain) is dict:
            message = f"Unknown parameter: '{name[:64]}'; send '{plain}[key]'."
            raise InvalidParameter(message, param=name[:64], reason="unknown_parameter")
        else:
            fields[name[:64]] = value
    return convert(fields, kind, strict=False)


# --- other forms ---------------------------------------------------------------------------------

BOM = b"\xef\xbb\xbf"
_NUMBERS = re.compile(rb"[\[\]\s,0-9.eE+-]+")
_ZEROS = re.compile(rb"(?<=[0-9])\.0+(?![0-9])")
_WITH_EXPONENT = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?[eE][+-]?[0-9]+")
# Characters of a number with an exponent that is read here, and digits of what comes of it: no field takes more.
_LONGEST = 20
# Bytes of numbers; of more only fractions are looked at: these are the tokens of a prompt, and may be millions.
_MANY = 4096
_KNOWN = frozenset(field.encode_name for field in msgspec.structs.fields(Message))

_Fields = dict[str, msgspec.Raw]


@cache
def _needed(kind: Any) -> frozenset[str]:
    """Fields without which a body is none, but for the model (`with_model`): that they are null is told."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return frozenset()
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if field.required) - {"model"}


def repaired(
    body: bytes | msgspec.Raw, dropped: list[str] | None, needed: frozenset[str] = frozenset()
) -> bytes | None:
    """`body` in our form; None where nothing helps. `dropped` gets the fields of messages that were left out; None:
    none is. `needed`: fields that stay where they are null."""
    data = bytes(body).removeprefix(BOM)
    try:
        fields = msgspec.json.decode(data, type=_Fields)
        fields = {
            name: _with_integers(value) for name, value in fields.items() if bytes(value) != b"null" or name in needed
        }
        if dropped is not None and "messages" in fields:
            messages = msgspec.json.decode(fields["messages"], type=list[_Fields])
            fields["messages"] = msgspec.Raw(msgspec.json.encode([_known(message, dropped) for message in messages]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data if len(data) < len(bytes(body)) else None
    return msgspec.json.encode(fields)


def _with_integers(value: msgspec.Raw) -> msgspec.Raw:
    """A number, or an array of them: whole ones without fraction and exponent."""
    data = bytes(value)
    if not _NUMBERS.fullmatch(data):
        return value
    data = _ZEROS.sub(b"", data)
    return msgspec.Raw(_WITH_EXPONENT.sub(_whole, data) if len(data) <= _MANY else data)


def _whole(number: re.Match[bytes]) -> bytes:
    """Exactly, which a float is not."""
    text = number[0]
    if len(text) > _LONGEST:
        return text
    try:
        exact = Decimal(text.decode())
        is_whole = exact.adjusted() < _LONGEST and exact == exact.to_integral_value()
    except ArithmeticError:
        return text
    return b"%d" % int(exact) if is_whole else text


def _known(message: _Fields, dropped: list[str]) -> _Fields:
    if _KNOWN.issuperset(message):
        return message
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    dropped += (f"messages[].{name}" for name in message if name not in _KNOWN)
    return {name: value for name, value in message.items() if name in _KNOWN}
