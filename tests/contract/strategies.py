"""Hypothesis strategies for message structs, made from their type annotations."""

from functools import reduce
from typing import Any

import msgspec
from hypothesis import strategies as st

SCALARS: dict[type[msgspec.inspect.Type], st.SearchStrategy[Any]] = {
    msgspec.inspect.AnyType: st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.text(max_size=8),
    msgspec.inspect.NoneType: st.none(),
    msgspec.inspect.BoolType: st.booleans(),
    msgspec.inspect.FloatType: st.floats(allow_nan=False),
    msgspec.inspect.StrType: st.text(max_size=12),
    msgspec.inspect.BytesType: st.binary(max_size=12),
}


def messages(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Instances of a message struct, every field filled."""
    return _of(msgspec.inspect.type_info(kind))


def _of(info: Any) -> st.SearchStrategy[Any]:
    kind = type(info)
    if kind is msgspec.inspect.IntType:
        return st.integers(info.ge or 0, info.le or 2**64 - 1)
    if kind in SCALARS:
        return SCALARS[kind]
    if kind is msgspec.inspect.LiteralType:
        return st.sampled_from(info.values)
    if kind is msgspec.inspect.UnionType:
        return reduce(lambda left, right: left | right, map(_of, info.types))
    if kind is msgspec.inspect.StructType:
        return st.builds(info.cls, **{field.name: _of(field.type) for field in info.fields})
    return _container(info)


def _container(info: Any) -> st.SearchStrategy[Any]:
    if isinstance(info, msgspec.inspect.ListType):
        return st.lists(_of(info.item_type), max_size=4)
    if isinstance(info, msgspec.inspect.DictType):
        return st.dictionaries(_of(info.key_type), _of(info.value_type), max_size=3)
    assert isinstance(info, msgspec.inspect.TupleType), f"no strategy for {info}"
    return st.tuples(*map(_of, info.item_types))
