"""Two releases of messages at once: a process of the previous one neither sends nor understands what has come since.

Messages are MessagePack maps (and a few arrays) that grow at their end. So a process of the previous release is this
code with the newest fields taken away from what it encodes and from what it decodes, `install`ed once in place of
msgspec's own functions:

    encode, newest fields at their defaults (maps leave them out) ──▶ bus ──▶ decode, newest fields at their defaults
"""

import importlib
from collections.abc import Mapping
from typing import Any

import msgspec

from tests.simulation.core.processes import CURRENT, Process

CURRENT_RELEASE, PREVIOUS_RELEASE = "current", "previous"

# By struct: the first field that the previous release does not have; it has none of those behind it either, and all
# have a default.
NEW_FIELDS: dict[str, str] = {
    "shared.messages.cluster.Heartbeat": "version",
    "shared.messages.cluster.ServiceRecord": "version",
    "shared.messages.generations.GenerationRequest": "cache_ttl",
    "shared.messages.generations.TokenEntry": "fingerprint",
    "shared.messages.groups.GroupLoad": "prompt_tokens_per_second",
    "shared.messages.registry.HostBeat": "trains",
    "shared.messages.registry.HostModel": "load_seconds",
    "shared.messages.registry.ModelPlacement": "waiting",
    "shared.messages.registry.ModelSpec": "pinned_by_request",
}


def check() -> None:
    """Raises `ValueError` where the list has a struct or a field that is no longer there, or one without a default."""
    for name in NEW_FIELDS:
        lacking = [field.name for field in _news(name) if field.required]
        if lacking:
            raise ValueError(f"{lacking} of {name} have no default, so the previous release cannot be spoken to")


def _news(name: str) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields that the previous release does not have."""
    kind = _struct(name)
    if NEW_FIELDS[name] not in kind.__struct_fields__:
        raise ValueError(f"{name} has no field {NEW_FIELDS[name]}: correct `NEW_FIELDS`")
    return msgspec.structs.fields(kind)[kind.__struct_fields__.index(NEW_FIELDS[name]) :]


def _struct(name: str) -> type[msgspec.Struct]:
    module, _, kind = name.rpartition(".")
    try:
        found: type[msgspec.Struct] = getattr(importlib.import_module(module), kind)
    except AttributeError:
        raise ValueError(f"there is no message {name}: correct `NEW_FIELDS`") from None
    return found


class _Spoken:
    old: set[Process] = set()  # processes of the previous release
    new_fields: dict[type, dict[str, Any]] = {}  # by struct: its newest fields, and their defaults


def speak(process: Process, version: str) -> None:
    """What `process` encodes and decodes from now on. Raises `ValueError`."""
    if version not in (CURRENT_RELEASE, PREVIOUS_RELEASE):
        raise ValueError(f"there is no release {version!r}; known are {CURRENT_RELEASE}, {PREVIOUS_RELEASE}")
    if version == CURRENT_RELEASE:
        _Spoken.old.discard(process)
        return
    if not _Spoken.new_fields:
        check()
        _Spoken.new_fields = {_struct(name): _defaults(name) for name in NEW_FIELDS}
    _Spoken.old.add(process)


def inherit(parent: Process, child: Process) -> None:
    """A child is of its parent's release."""
    if parent in _Spoken.old:
        _Spoken.old.add(child)


def forget(process: Process) -> None:
    """It has ended."""
    _Spoken.old.discard(process)


def _defaults(name: str) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in _news(name)
    }


def without_news(value: Any) -> Any:
    """`value` as the previous release would have it: the same object where nothing is new in it."""
    if isinstance(value, msgspec.Struct):
        changed = {
            name: other
            for name in value.__struct_fields__
            if (other := without_news(held := getattr(value, name))) is not held
        }
        changed |= _Spoken.new_fields.get(type(value), {})
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float | str | bytes):
        others = [without_news(one) for one in value]
        return value if all(a is b for a, b in zip(others, value, strict=True)) else type(value)(others)
    if isinstance(value, Mapping):
        return {key: without_news(one) for key, one in value.items()}
    return value


def _heard(value: Any) -> Any:
    """`value` as the process that runs has it."""
    return without_news(value) if _Spoken.old and CURRENT.get() in _Spoken.old else value


_encoder_type, _decoder_type = msgspec.msgpack.Encoder, msgspec.msgpack.Decoder
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class Encoder:
    """Stands where `msgspec.msgpack.Encoder` does."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._encoder = _encoder_type(*given, **named)

    def encode(self, value: Any) -> bytes:
        return self._encoder.encode(_heard(value))

    def encode_into(self, value: Any, *given: Any) -> None:
        self._encoder.encode_into(_heard(value), *given)


class Decoder:
    """Stands where `msgspec.msgpack.Decoder` does."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._decoder = _decoder_type(*given, **named)

    def __class_getitem__(cls, kind: Any) -> Any:
        return _decoder_type[kind]

    @property
    def type(self) -> Any:
        return self._decoder.type

    def decode(self, data: Any) -> Any:
        return _heard(self._decoder.decode(data))


def install() -> None:
    """Before any service is imported. Idempotent."""
    msgspec.msgpack.Encoder, msgspec.msgpack.Decoder = Encoder, Decoder  # type: ignore[misc, assignment]
    msgspec.msgpack.encode = lambda value, **named: _encode(_heard(value), **named)  # type: ignore[assignment]
    msgspec.msgpack.decode = lambda data, **named: _heard(_decode(data, **named))  # type: ignore[assignment]
