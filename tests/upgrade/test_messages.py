"""Two neighbouring versions understand each other: by bytes that the previous one has written."""

from typing import Any

import msgspec
import pytest

from tests.interfaces.bus import kinds
from tests.simulation.deployment.versions import NEW_FIELDS
from tests.upgrade.messages import filled, least, recorded

RECORDED = recorded()
KINDS = {kind.__name__: kind for kind in kinds()}


def keeps(value: Any, old: Any) -> bool:
    """Whether `value` says all that `old` does: maps may have more keys, arrays more at their end."""
    if isinstance(old, dict):
        return isinstance(value, dict) and all(key in value and keeps(value[key], one) for key, one in old.items())
    if isinstance(old, list):
        return isinstance(value, list) and len(value) >= len(old) and all(map(keeps, value, old))
    return type(value) is type(old) and bool(value == old)


def test_no_kind_of_message_has_gone() -> None:
    assert set(RECORDED) - set(KINDS) == set()
    assert len(RECORDED) > 50


@pytest.mark.parametrize("name", RECORDED)
def test_what_the_previous_release_wrote_is_read(name: str) -> None:
    wire = RECORDED[name].wire
    read = msgspec.msgpack.decode(wire, type=KINDS[name])
    assert keeps(msgspec.msgpack.decode(msgspec.msgpack.encode(read)), msgspec.msgpack.decode(wire))


@pytest.mark.parametrize("name", RECORDED)
def test_the_previous_release_reads_what_is_written(name: str) -> None:
    """Its fields are there, where it looks for them, with values of their types, also where only what must is said."""
    old = msgspec.msgpack.decode(RECORDED[name].wire)
    assert keeps(msgspec.msgpack.decode(msgspec.msgpack.encode(filled(KINDS[name]))), old)
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(least(KINDS[name])))
    if isinstance(said, dict):
        assert [field for field in RECORDED[name].required if field not in said] == []
    else:
        assert len(said) >= len(RECORDED[name].required)


def test_the_simulator_takes_away_what_the_previous_release_does_not_have() -> None:
    told = {name.rpartition(".")[2] for name in NEW_FIELDS}
    grown = {
        name
        for name, one in RECORDED.items()
        if len(msgspec.msgpack.decode(one.wire))
        < len(msgspec.msgpack.decode(msgspec.msgpack.encode(filled(KINDS[name]))))
    }
    assert grown - told == set(), "name their new fields in tests/simulation/deployment/versions.py"


@pytest.mark.parametrize(
    ("value", "old", "kept"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"b": 2}, {"a": 1}, False),
        ([1, "x", 3], [1, "x"], True),
        ([0, 1, "x"], [1, "x"], False),
        ({"a": [{"b": 1.5}]}, {"a": [{"b": 1.5}]}, True),
        ({"a": 1.0}, {"a": 1}, False),
    ],
)
def test_what_is_kept(value: Any, old: Any, kept: bool) -> None:
    assert keeps(value, old) == kept
