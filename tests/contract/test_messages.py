"""The wire: what we write others can read, and versions can differ by fields added at the end."""

import inspect
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import messages
from shared.messages import (
    Cancel,
    Claimed,
    ControlCommand,
    Drain,
    GenerationRequest,
    GroupEvent,
    GroupLoad,
    Heartbeat,
    SamplingParams,
    SparseAttention,
    TokenEntry,
    TokenFrame,
    TokenLogprobs,
)
from shared.messages.groups import OfferedBlock, OfferedSession
from shared.nats.bus import encode
from tests.contract.strategies import messages as instances_of

ALL = [
    kind
    for _, kind in inspect.getmembers(messages, inspect.isclass)
    if issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
]
ARRAYS = {TokenFrame, TokenEntry, TokenLogprobs, OfferedBlock, OfferedSession}


def read(wire: bytes) -> Any:
    """`wire` as the reference implementation of MessagePack reads it."""
    return msgpack.unpackb(wire, strict_map_key=False)


def test_the_module_has_its_messages() -> None:
    assert {GenerationRequest, TokenFrame, Heartbeat, GroupEvent} <= set(ALL)


@settings(max_examples=200)
@given(st.sampled_from(ALL).flatmap(instances_of))
def test_every_message_comes_back_and_the_reference_reads_it(message: msgspec.Struct) -> None:
    wire = encode(message)
    assert msgspec.msgpack.decode(wire, type=type(message)) == message
    seen = read(wire)
    if type(message) in ARRAYS:
        assert isinstance(seen, list)
    else:
        assert isinstance(seen, dict)
        assert set(seen) <= {*message.__struct_fields__, "type"}
    assert msgspec.msgpack.decode(msgpack.packb(seen), type=type(message)) == message


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_messages_are_frozen_and_all_but_tokens_and_blocks_are_maps(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.array_like == (kind in ARRAYS)
    assert not kind.__struct_config__.forbid_unknown_fields


def test_golden_request() -> None:
    request = GenerationRequest(
        "g", "r", "m", "c", [1, 2], 8, sampling=SamplingParams(temperature=0.0, logit_bias={5: -1.0})
    )
    assert read(encode(request)) == {
        "generation_id": "g",
        "request_id": "r",
        "model": "m",
        "consumer": "c",
        "prompt": [1, 2],
        "max_tokens": 8,
        "sampling": {"temperature": 0.0, "logit_bias": {5: -1.0}},
    }


def test_golden_sparse_attention_tells_only_what_is_not_as_ever() -> None:
    request = GenerationRequest("g", "r", "m", "c", [1], 8, sparse=SparseAttention("window", threshold=512))
    assert read(encode(request))["sparse"] == {"kind": "window", "threshold": 512}
    chosen = GenerationRequest("g", "r", "m", "c", [1], 8, sparse=SparseAttention())
    assert read(encode(chosen))["sparse"] == {}, "asked for, with every default"
    assert msgspec.msgpack.decode(encode(chosen), type=GenerationRequest).sparse == SparseAttention()


def test_golden_frame() -> None:
    entries = [
        TokenEntry("a", 1, 7, [42]),
        TokenEntry("b", 0, 0, [], "error", None, 0, "queue_full", "Too many.", True),
        TokenEntry("c", 0, 3, [9], logprobs=[TokenLogprobs(-0.5, [(9, -0.5), (8, -1.0)])]),
    ]
    assert read(encode(TokenFrame("group", 3, 99, entries))) == [
        "group",
        3,
        99,
        [
            ["a", 1, 7, [42], "", None, 0, "", "", False, b"", b"", "", "", 0],
            ["b", 0, 0, [], "error", None, 0, "queue_full", "Too many.", True, b"", b"", "", "", 0],
            ["c", 0, 3, [9], "", [[-0.5, [[9, -0.5], [8, -1.0]]]], 0, "", "", False, b"", b"", "", "", 0],
        ],
    ]


def test_golden_commands_are_told_apart_by_their_tag() -> None:
    cancel = {"type": "cancel", "generation_ids": ["a"], "attempt": 2, "claim": 5}
    assert read(encode(Cancel(["a"], 2, 5))) == cancel
    assert read(encode(Claimed(["a"], 5))) == {"type": "claimed", "generation_ids": ["a"], "claim": 5}
    assert read(encode(Drain())) == {"type": "drain"}
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ControlCommand)
    assert decoder.decode(msgpack.packb({"type": "drain", "since": "later versions"})) == Drain()
    del cancel["claim"]  # an older gateway's
    assert decoder.decode(msgpack.packb(cancel)) == Cancel(["a"], 2)
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgpack.packb({"type": "explode"}))


@settings(max_examples=200)
@given(st.sampled_from(ALL).flatmap(instances_of))
def test_a_reader_ignores_fields_of_later_versions(message: msgspec.Struct) -> None:
    seen = read(encode(message))
    if isinstance(seen, list):
        later = msgpack.packb([*seen, {"new": 1}])
    else:
        later = msgpack.packb({**seen, "a_field_of_tomorrow": [1, {"x": None}]})
    assert msgspec.msgpack.decode(later, type=type(message)) == message


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@settings(max_examples=10)
@given(data=st.data())
def test_missing_optional_fields_take_their_defaults(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(instances_of(kind))
    fields = msgspec.structs.fields(kind)
    required = [field for field in fields if field.required]
    assert list(fields[: len(required)]) == required, "fields are added at the end, with a default"
    values = {field.encode_name: getattr(message, field.name) for field in required}
    tag = {"type": kind.__struct_config__.tag} if kind.__struct_config__.tag else {}
    earlier = encode(list(values.values()) if kind in ARRAYS else {**tag, **values})
    decoded = msgspec.msgpack.decode(earlier, type=kind)
    assert decoded == kind(*values.values())


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        (GenerationRequest, {"generation_id": "g"}),
        (GenerationRequest, {"generation_id": 1}),
        (TokenEntry, ["g", 0, 0, ["token"]]),
        (TokenEntry, ["g", 0, 0, [1], "because"]),
        (GroupLoad, {"running": "many"}),
    ],
)
def test_wrong_types_and_missing_fields_are_refused(kind: type[msgspec.Struct], wire: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgpack.packb(wire), type=kind)
