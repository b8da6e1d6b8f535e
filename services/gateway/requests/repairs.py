"""Bodies that say what they mean in another form than ours: read all the same, once they are refused. Pure.

- A byte order mark before the JSON.
- A whole number with a fraction of zeros or an exponent (6.0, 6e0, 1E2), which is an integer to JSON Schema.
- Fields of messages that are not known: `reasoning` is vLLM's new name for `reasoning_content`, what else clients echo
  back of answers is left out and named.
"""

import re
from decimal import Decimal

import msgspec

from services.gateway.requests.schemas import Message

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


def repaired(body: bytes | msgspec.Raw, dropped: list[str] | None) -> bytes | None:
    """`body` in our form; None where nothing helps. `dropped` gets the fields of messages that were left out; None:
    none is."""
    data = bytes(body).removeprefix(BOM)
    try:
        fields = msgspec.json.decode(data, type=_Fields)
        fields = {name: _with_integers(value) for name, value in fields.items()}
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
