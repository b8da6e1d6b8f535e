"""Calls, frames and bytes that nobody would send: each is answered or ended, none is a fault of ours."""

import contextlib
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.server.http2 import frames
from services.gateway.server.http2.frames import PREFACE
from services.gateway.server.http2.hpack import literal
from tests.integration.gateway.api.grpc.conftest import MODEL, PROMPT, QUESTION, Client
from tests.integration.gateway.api.grpc.test_errors import read
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing
from tests.integration.gateway.lifecycle.test_bad_messages import EXAMPLES
from tests.integration.gateway.raw import connect
from tests.unit.gateway.server.http2.test_connection import framed, http2_frame

pytestmark = pytest.mark.usefixtures("no_trace")
SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
METHODS = {f"/{SERVICE.full_name}/{method.name}": method.input_type for method in SERVICE.methods}
OTHERS = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    f"/{SERVICE.full_name}/Other",
]
PATHS = [*METHODS, *OTHERS]
TABLE = (Path(__file__).parents[5] / "docs/grpc.md").read_text()
# What a call may end with when nothing is wrong with the server.
DOCUMENTED = {"OK", *re.findall(r"^\| ([A-Z_]+) \|", TABLE, re.MULTILINE)} - {"INTERNAL"}
# What grpcio says in place of a status that comes while it still sends messages.
HIDDEN = "Internal error from Core"
MOST_DEEP = 3

numbers = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9) | st.integers(-(2**31), 2**31 - 1),
}


def messages(kind: Descriptor, depth: int = 0) -> st.SearchStrategy[Any]:
    """Messages of `kind` with any values, of which some are small and the model is mostly one that there is."""
    fields = {
        field.name: values(field, depth) for field in kind.fields if depth < MOST_DEEP or field.message_type is None
    }
    made = GetMessageClass(kind)
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: made(**given))


def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (values(part, depth) for part in field.message_type.fields)
        return st.dictionaries(key, value, max_size=3)
    one = _value(field, depth)
    return st.lists(one, max_size=3) if field.is_repeated else one


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    if field.name == "model":
        return st.sampled_from([MODEL] * 8 + ["", "other"])
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.text(max_size=20)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    any_number = numbers[field.cpp_type]
    return any_number if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else st.integers(0, 4) | any_number


def changed(good: Any) -> st.SearchStrategy[Any]:
    """`good` with up to two fields of its own set to anything."""
    one = st.one_of(
        [values(field, 0).map(lambda value, name=field.name: (name, value)) for field in good.DESCRIPTOR.fields]
    )

    def merged(given: list[tuple[str, Any]]) -> Any:
        message = type(good)()
        message.CopyFrom(good)
        message.MergeFrom(type(good)(**dict(given)))
        return message

    return st.lists(one, max_size=2).map(merged)


def cut(data: bytes, at: int) -> bytes:
    return data[: at % (len(data) + 1)]


GOOD = {
    "Generate": PROMPT,
    "Chat": QUESTION,
    "ChatSession": pb.ChatSessionRequest(id="1", chat=QUESTION),
    "Embed": pb.EmbedRequest(model=MODEL, inputs=[pb.EmbedInput(text="x")]),
    "Tokenize": pb.TokenizeRequest(model=MODEL, text="x"),
    "Detokenize": pb.DetokenizeRequest(model=MODEL, token_ids=[1]),
}


def encoded(path: str) -> st.SearchStrategy[bytes]:
    good = GOOD.get(path.rpartition("/")[2])
    made = messages(METHODS[path])
    return (changed(good) | made if good else made).map(lambda message: message.SerializeToString())


payloads = {
    path: encoded(path) | st.builds(cut, encoded(path), st.integers(0, 99)) | st.binary(max_size=60) for path in METHODS
} | {path: st.binary(max_size=60) for path in OTHERS}
calls = st.sampled_from(PATHS).flatmap(
    lambda path: st.tuples(
        st.just(path), payloads[path].map(lambda payload: [payload]) | st.lists(payloads[path], min_size=1, max_size=2)
    )
)


async def ended(client: Client, path: str, sent: list[bytes]) -> str:
    """The name of the code that a call of `path` ends with; empty where grpcio does not tell."""
    if len(sent) == 1:
        call = client.channel.unary_stream(path)(sent[0], timeout=30)
    else:
        call = client.channel.stream_stream(path)(iter(sent), timeout=30)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await read(call, [])
    if await call.details() == HIDDEN:
        return ""
    return str((await call.code()).name)


async def still_answers(client: Client) -> None:
    assert [model.id for model in (await client.ListModels(pb.ListModelsRequest())).models] == [MODEL]


@pytest.mark.slow
@settings(EXAMPLES, max_examples=150)
@given(call=calls)
async def test_messages_of_any_kind(client: Client, call: tuple[str, list[bytes]]) -> None:
    code = await ended(client, *call)
    assert code in DOCUMENTED or (not code and len(call[1]) > 1)


HEADERS = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x")]


def head(path: str, content_type: bytes, extra: list[tuple[bytes, bytes]]) -> bytes:
    """A header block."""
    given = [*HEADERS, (b":path", path.encode()), (b"te", b"trailers"), (b"content-type", content_type), *extra]
    return b"".join(literal(name, value) for name, value in given)


names = st.sampled_from([b"grpc-timeout", b"x-request-id", b"grpc-encoding", b":path", b"authorization", b"A"])
blocks = st.builds(
    head,
    st.sampled_from(PATHS),
    st.sampled_from([b"application/grpc"] * 4 + [b"text/html"]),
    st.lists(st.tuples(names, st.binary(max_size=12)), max_size=1),
)
bodies = (
    st.builds(framed, st.binary(max_size=40)) | st.just(framed(PROMPT.SerializeToString())) | st.binary(max_size=40)
)
streams = st.sampled_from([1, 3, 5]) | st.integers(0, 2**31 - 1)
one_frame = (
    st.builds(http2_frame, st.just(frames.HEADERS), st.sampled_from([4, 5]), st.sampled_from([1, 3, 5]), blocks)
    | st.builds(http2_frame, st.just(frames.DATA), st.sampled_from([0, 1]), st.sampled_from([1, 3, 5]), bodies)
    | st.builds(http2_frame, st.integers(0, 12), st.integers(0, 255), streams, bodies | blocks)
)
settings_frame = http2_frame(frames.SETTINGS, 0, 0, b"")
several = st.lists(one_frame, min_size=1, max_size=6).map(b"".join)
connections = (
    several.map(lambda data: PREFACE + settings_frame + data)
    | st.builds(cut, several.map(lambda data: PREFACE + settings_frame + data), st.integers(0, 400))
    | st.binary(max_size=80)
    | st.binary(max_size=80).map(lambda data: PREFACE + data)
)


@settings(EXAMPLES, max_examples=150)
@given(data=connections)
async def test_bytes_and_frames_of_any_kind(gateway: RunningGateway, client: Client, data: bytes) -> None:
    async with connect(gateway.service.grpc_address) as broken:
        await broken.send(data)
        await still_answers(client)
        with contextlib.suppress(OSError):
            broken.writer.write_eof()
        await broken.rest()


async def test_a_good_call_made_of_the_same_pieces_reaches_the_ring(gateway: RunningGateway, ring: FakeRing) -> None:
    """Else the frames above would all be refused for one reason."""
    block = head(f"/{SERVICE.full_name}/Generate", b"application/grpc", [])
    data = PREFACE + settings_frame + http2_frame(frames.HEADERS, 4, 1, block)
    data += http2_frame(frames.DATA, 1, 1, framed(PROMPT.SerializeToString()))
    async with connect(gateway.service.grpc_address) as raw:
        await raw.send(data)
        answer = b""
        while b"grpc-status" not in answer:
            part = await raw.reader.read(65_536)
            assert part, answer
            answer += part
    assert [request.prompt for request in ring.requests] == [[ord("x")]]
