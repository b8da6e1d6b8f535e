"""What services say to each other over NATS and keep there: names, messages and stored records."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import msgspec

from shared import messages
from shared.nats import subjects
from tests.interfaces.sources import module_of, nodes
from tests.interfaces.structs import fields, reached

_STORES = ("Bucket", "TenantBucket")


def bus() -> Iterator[str]:
    """A line for each name of the bus, each bucket's kind of records, and each field of a message or record."""
    yield from (
        f"{name} = {value!r}" for name, value in vars(subjects).items() if name.isupper() and isinstance(value, str)
    )
    yield from _subjects()
    stored = dict(_stored())
    yield from (f"{bucket} keeps {kind.__name__}" for bucket, kind in sorted(stored.items()))
    for kind in kinds():
        yield from fields(kind)


def kinds() -> list[type[msgspec.Struct]]:
    """Every message and every stored record, with what they are made of."""
    told = [kind for _, kind in inspect.getmembers(messages, inspect.isclass) if issubclass(kind, msgspec.Struct)]
    return [kind for kind in reached([*told, *dict(_stored()).values()]) if kind is not msgspec.Struct]


def _subjects() -> Iterator[str]:
    """Each function that makes a subject, with its parameters' names as their values."""
    for name, function in inspect.getmembers(subjects, inspect.isfunction):
        parameters = inspect.signature(function).parameters
        texts = all(one.annotation in (str, "str", subjects.Lane) for one in parameters.values())
        if texts and name not in ("escape", "unescape") and not name.startswith("_"):
            yield f"{name}({', '.join(parameters)}) = {function(*parameters)!r}"


def _stored() -> Iterator[tuple[str, Any]]:
    """Each bucket with the kind of record that is kept in it, where it is opened."""
    for path, node in nodes("bucket", "services", "shared"):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).removesuffix(".open") in _STORES
            and len(node.args) > 2
        ):
            bucket, kind = node.args[1:3]
            if isinstance(bucket, ast.Attribute) and isinstance(kind, ast.Name):
                yield getattr(subjects, bucket.attr), getattr(importlib.import_module(module_of(path)), kind.id)
