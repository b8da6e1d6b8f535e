"""From bytes to requests: decoded, checked against what their types say, and refused in OpenAI's words.

What is beyond a type, or beyond the range, length or values that its annotation gives a field, msgspec finds while it
decodes; `refusal` says it as an `InvalidParameter`, in one place for REST, WebSocket, gRPC and batches. The words and
codes follow OpenAI's, because clients and their users know them. A body that says what it means in another form than
ours is read all the same, once it is refused:

- A byte order mark before the JSON.
- A whole number with a fraction of zeros or an exponent (6.0, 6e0, 1E2), which is an integer to JSON Schema.
- Unknown fields that are null: null counts as not given.
- Fields of messages that are not known: `reasoning` is vLLM's new name for `reasoning_content`, what else clients echo
  back of answers is left out and named.
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import inspect

from services.gateway.core.errors import InvalidParameter, above, empty_array, hinted, out_of_range
from services.gateway.intake.schemas import Message
from shared.limits import Limit

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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = unparsed(error)
    except RecursionError:
        why = _TOO_DEEP
    raise InvalidParameter(why, param=None, reason="invalid_json")


def lacks_model(error: InvalidParameter) -> bool:
    """Whether `error` says that a request names no model."""
    return error.param == "model" and error.reason == "missing_required_parameter"


def with_model(body: bytes | msgspec.Raw, model: str) -> bytes:
    """`body`, which was decoded but for its model, with one; null counts as not given. Raises `InvalidParameter`: what
    comes behind the fields was not looked at."""
    try:
        fields = msgspec.json.decode(bytes(body).removeprefix(BOM), type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidParameter(unparsed(error), param=None, reason="invalid_json") from None
    except RecursionError:
        raise InvalidParameter(_TOO_DEEP, param=None, reason="invalid_json") from None
    return msgspec.json.encode(fields | {"model": model})


_TOO_DEEP = "The JSON body of your request is nested too deeply."


def unparsed(error: Exception) -> str:
    return f"We could not parse the JSON body of your request ({error}); send one JSON object in UTF-8."


def convert(fields: Mapping[str, Any], kind: type[T], *, strict: bool = True) -> T:
    """`fields`, which came in another form than JSON, as a request. `strict`: a text is no number. Raises
    `InvalidParameter`."""
    try:
        return msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise refusal(error, kind, lambda: fields) from None


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


# --- what msgspec refuses, in OpenAI's words -----------------------------------------------------

_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.+?)`(?: - at `\$\.?(.*)`)?$")
_TYPE = re.compile(r"Expected `(.+?)`, got `(.+?)`$")
_BOUND = re.compile(r"Expected `(\w+)`( of length)? ([<>]=?) (\S+?)(?:\.0)?$")
_VALUE = re.compile(r"Invalid enum value '?(.*?)'?$", re.DOTALL)
_TAG = re.compile(r"Invalid value '?(.*?)'?$", re.DOTALL)
"""Of the field that says which of several kinds an object is."""
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[\]]+)")
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
"""What msgspec takes for an integer among the keys of an object."""
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_KINDS: dict[str, type[inspect.Type]] = {
    "int": inspect.IntType,
    "float": inspect.FloatType,
    "str": inspect.StrType,
    "array": inspect.ListType,
    "object": inspect.DictType,
    "value": inspect.LiteralType,
}
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def refusal(error: msgspec.ValidationError, kind: Any, given: Callable[[], Any]) -> InvalidParameter:
    """`error`, for which what `given` returns is no `kind`, for the client."""
    text = str(error)
    for pattern, words in ((_UNKNOWN, "Unknown"), (_MISSING, "Missing required")):
        if match := pattern.match(text):
            name = f"{match[2]}.{match[1]}" if match[2] else match[1]
            reason = f"{words.lower().replace(' ', '_')}_parameter"
            return InvalidParameter(f"{words} parameter: '{name}'.", param=name, reason=reason)
    what, at, where = text.rpartition(" - at ")
    what, where = (what, where) if at else (text, "")
    path, in_key = where.rpartition("`$")[2].strip("`").lstrip("."), where.startswith("`key`")
    if match := _TYPE.match(what):
        return _wrong_key(path, given) if in_key else _wrong_type(path, match[1], match[2])
    try:
        return _beyond(what, path, in_key, _info(kind), given)
    except (LookupError, TypeError, ValueError, RecursionError, StopIteration):
        return InvalidParameter(f"Invalid value for '{path}': {what}.", param=path)


def _wrong_type(param: str, expected: str, got: str) -> InvalidParameter:
    kinds = [_WORDS.get(kind, kind) for kind in expected.split(" | ") if kind != "null"]
    wanted = kinds[0] if len(kinds) == 1 else "one of " + " or ".join(kinds)
    what = f"for '{param}'" if param else "of the body"
    shown = _WORDS.get(got, got)
    if got == "float" and "int" in expected.split(" | "):
        shown = "a number with a fraction, or one beyond 64 bits,"
    return InvalidParameter(
        f"Invalid type {what}: expected {wanted}, but got {shown} instead.",
        param=param or None,
        reason="invalid_type",
    )


def _wrong_key(path: str, given: Callable[[], Any]) -> InvalidParameter:
    """What stands at `path` is an object by token ids, and has a key that is no integer; msgspec does not say which."""
    try:
        _, keys = _find(given(), path, bool)
        wrong = next(f" {key[:64]!r}" for key in keys if not _INTEGER.fullmatch(key))
    except (msgspec.DecodeError, LookupError, TypeError, StopIteration):
        wrong = ""  # more is wrong with the body
    return InvalidParameter(
        f"Invalid key{wrong} in '{path}': expected the id of a token, an integer from 0 to the size of the model's "
        "vocabulary less 1.",
        param=path,
        reason="invalid_token_id",
    )


def _beyond(
    what: str, path: str, in_key: bool, info: inspect.Type, given: Callable[[], Any]
) -> InvalidParameter:
    """Of a value that has the right type. Raises `LookupError` where nothing else is to be said."""
    if match := _TAG.match(what):
        kinds = _branches(_type_at(info, path.rpartition(".")[0], in_key))
        tags = [str(kind.tag) for kind, _ in kinds if isinstance(kind, inspect.StructType) and kind.tag]
        return _unknown_value(match[1], path, dict.fromkeys(tags))
    node = _type_at(info, path, in_key)
    if match := _BOUND.match(what):
        kind, of_length, sign, bound = match.groups()
        most = float(bound)

        def wrong(value: Any) -> bool:
            return not _SIGNS[sign](len(value) if of_length else value, most)

        name, value = _find(given(), path, wrong)
        if in_key:
            value = next(filter(wrong, value))
        limit = _said(node, kind).get("limit")
        if of_length:
            error = _wrong_length(name, value, limit, in_key)
        else:
            error = out_of_range(name, value, sign, bound, whole=kind == "int", limit=limit)
        return InvalidParameter(error.message, param=_without_index(name), reason=error.reason)
    if match := _VALUE.match(what):
        said = _said(node, "value")
        return _unknown_value(match[1], path, said["values"], said.get("reason", "invalid_value"))
    if not what.startswith("Expected `str` matching"):
        raise LookupError(what)
    said = _said(node, "str")
    return InvalidParameter(
        f"Invalid '{path}': expected {said['expected']}.",
        param=_without_index(path),
        reason=said.get("reason", "invalid_value"),
    )


def _unknown_value(
    given: str, path: str, known: Iterable[object], reason: str = "invalid_value"
) -> InvalidParameter:
    supported = ", ".join(f"'{value}'" for value in known)
    message = f"Invalid value: '{given[:64]}'. Supported values of '{path}' are: {supported}."
    return InvalidParameter(message, param=path, reason=reason)


def _wrong_length(name: str, value: Any, limit: Limit | None, in_key: bool) -> InvalidParameter:
    if value:
        assert limit is not None
        return above(name, value, limit)
    if in_key:
        message = f"Invalid '{name}': a key is empty; a key has at least one character."
        return InvalidParameter(message, param=name)
    if isinstance(value, str):
        message = f"Invalid '{name}': empty string. Expected at least one character."
        return InvalidParameter(message, param=name, reason="empty_string")
    return empty_array(name)


def _without_index(name: str) -> str:
    """The array of an element: clients know that by its name."""
    return name[: name.rindex("[")] if name.endswith("]") else name


def _find(given: Any, path: str, wrong: Callable[[Any], bool]) -> tuple[str, Any]:
    """The name and value of what msgspec means by `path`, in which the key of an object is `[...]`."""
    name = ""
    for index, field in _STEP.findall(path):
        if index.isdigit():
            given, name = given[int(index)], f"{name}[{index}]"
        else:
            key = field or next(key for key, value in given.items() if wrong(value))
            given, name = given[key], f"{name}.{key}" if name else key
    return name, given


_info = cache(inspect.type_info)


def _type_at(node: inspect.Type, path: str, in_key: bool) -> inspect.Type:
    """Of objects of several kinds, what stands there in any of them."""
    for index, field in _STEP.findall(path):
        inner = [one for branch, _ in _branches(node) for one in _inner(branch, index, field)]
        node = inner[0] if len(inner) == 1 else inspect.UnionType(tuple(inner))
    if in_key:
        return next(one.key_type for one, _ in _branches(node) if isinstance(one, inspect.DictType))
    return node


def _inner(node: inspect.Type, index: str, field: str) -> Iterator[inspect.Type]:
    if isinstance(node, inspect.StructType):
        yield from (one.type for one in node.fields if one.encode_name == field)
    elif isinstance(node, inspect.ListType) and index.isdigit():
        yield node.item_type
    elif isinstance(node, inspect.DictType) and index == "...":
        yield node.value_type


def _said(node: inspect.Type, word: str) -> dict[str, Any]:
    """What the annotation of the branch of `node` that msgspec calls `word` says besides its bounds."""
    for branch, extra in _branches(node):
        if isinstance(branch, _KINDS[word]):
            return extra | ({"values": branch.values} if isinstance(branch, inspect.LiteralType) else {})
    raise LookupError(word)


def _branches(
    node: inspect.Type, extra: Mapping[str, Any] | None = None
) -> Iterator[tuple[inspect.Type, dict[str, Any]]]:
    """The types of a union, or the one, each with what annotations say besides its bounds."""
    if isinstance(node, inspect.Metadata):
        yield from _branches(node.type, {**(extra or {}), **(node.extra or {})})
    elif isinstance(node, inspect.UnionType):
        for one in node.types:
            yield from _branches(one, extra)
    else:
        yield node, dict(extra or {})


# --- other forms ---------------------------------------------------------------------------------

BOM = b"\xef\xbb\xbf"
_NUMBERS = re.compile(rb"[\[\]\s,0-9.eE+-]+")
_ZEROS = re.compile(rb"(?<=[0-9])\.0+(?![0-9])")
_WITH_EXPONENT = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?[eE][+-]?[0-9]+")
_LONGEST = 20
"""Characters of a number with an exponent that is read here, and digits of what comes of it: no field takes more."""
_MANY = 4096
"""Bytes of numbers; of more only fractions are looked at: these are the tokens of a prompt, and may be millions."""
_KNOWN = frozenset(field.encode_name for field in msgspec.structs.fields(Message))

_Fields = dict[str, msgspec.Raw]


@cache
def _needed(kind: Any) -> frozenset[str]:
    """Fields without which a body is none, but for the model (`with_model`): that they are null is told."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return frozenset()
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if field.required) - {
        "model"
    }


def repaired(
    body: bytes | msgspec.Raw, dropped: list[str] | None, needed: frozenset[str] = frozenset()
) -> bytes | None:
    """`body` in our form; None where nothing helps. `dropped` gets the fields of messages that were left out; None:
    none is. `needed`: fields that stay where they are null."""
    data = bytes(body).removeprefix(BOM)
    try:
        fields = msgspec.json.decode(data, type=_Fields)
        fields = {
            name: _with_integers(value)
            for name, value in fields.items()
            if bytes(value) != b"null" or name in needed
        }
        if dropped is not None and "messages" in fields:
            messages = msgspec.json.decode(fields["messages"], type=list[_Fields])
            fields["messages"] = msgspec.Raw(
                msgspec.json.encode([_known(message, dropped) for message in messages])
            )
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
