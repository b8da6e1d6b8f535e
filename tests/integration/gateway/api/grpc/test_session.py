"""ChatSession: several generations on one stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.core.large_requests import LARGE_REQUEST, LargeRequests
from services.gateway.intake.prompts.kv_cache import session_of
from tests.integration.gateway.api.grpc.conftest import MODEL, PROMPT, QUESTION, Client
from tests.integration.gateway.fake_ring import FakeRing, silence, until
from tests.integration.gateway.resuming import Paced
from tests.integration.gateway.turns import no_room

TEXT = b"Several at once."


class Session:
    """A stream, and what came on it by the ids of its generations."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.text: dict[str, str] = {}
        self.generations: dict[str, str] = {}
        self.positions: dict[str, str] = {}
        self.ends: dict[str, pb.ChatSessionResponse] = {}
        self.refused: list[pb.ChatSessionResponse] = []

    async def send(self, identity: str, **fields: Any) -> None:
        await self.call.write(pb.ChatSessionRequest(id=identity, **fields))

    async def read(self) -> bool:
        """Takes the next message; False at the end."""
        message = await asyncio.wait_for(self.call.read(), 20)
        if message is grpc.aio.EOF:
            return False
        kind = message.WhichOneof("result")
        if kind == "event":
            event = message.event
            self.generations.setdefault(message.id, event.id)
            self.positions[message.id] = event.position
            said = "".join(delta.text for delta in event.choices)
            self.text[message.id] = self.text.get(message.id, "") + said
        elif message.refused:
            self.refused.append(message)
        else:
            assert message.id not in self.ends, "one end each"
            self.ends[message.id] = message
        return True

    async def until(self, condition: Any) -> None:
        while not condition():
            assert await self.read(), "the stream ended"


@pytest.fixture
async def session(client: Client) -> AsyncIterator[Session]:
    call = client.ChatSession()
    yield Session(call)
    call.cancel()


def reason(message: pb.ChatSessionResponse) -> str:
    info = ErrorInfo()
    assert message.error.details[0].Unpack(info)
    return info.reason


async def test_generations_run_side_by_side_and_end_one_by_one(session: Session, ring: FakeRing) -> None:
    ring.behave = paced = Paced(TEXT, 4)
    await session.send("a", chat=QUESTION)
    await session.send("b", generate=PROMPT)
    await session.until(lambda: len(session.text.get("a", "")) + len(session.text.get("b", "")) == 8)
    paced.allow()
    await session.call.done_writing()
    while await session.read():
        pass
    assert session.text == {"a": TEXT.decode(), "b": TEXT.decode()}
    assert {key: end.WhichOneof("result") for key, end in session.ends.items()} == {"a": "done", "b": "done"}
    assert not session.ends["a"].done.cancelled
    assert session.generations["a"].startswith("chatcmpl-")
    assert await session.call.code() == grpc.StatusCode.OK


async def test_cancel_and_attach(session: Session, ring: FakeRing) -> None:
    ring.behave = paced = Paced(TEXT, 4)
    await session.send("a", chat=QUESTION)
    await session.send("b", chat=QUESTION)
    await session.until(lambda: len(session.text.get("a", "")) + len(session.text.get("b", "")) == 8)
    attach = pb.AttachRequest(generation_id=session.generations["b"], position=session.positions["b"])
    await session.send("c", attach=attach)
    await session.send("a", cancel=pb.CancelAction())
    await session.until(lambda: "a" in session.ends)
    assert session.ends["a"].done.cancelled
    await until(lambda: ring.cancelled | ring.commanded)
    paced.allow()
    await session.until(lambda: {"b", "c"} <= session.ends.keys())
    assert (session.text["b"], session.text["c"]) == (TEXT.decode(), TEXT[4:].decode())


async def test_a_generation_that_is_cancelled_before_it_runs(session: Session, ring: FakeRing) -> None:
    ring.behave = silence
    await session.send("a", chat=QUESTION)
    await session.send("a", cancel=pb.CancelAction())
    await session.until(lambda: "a" in session.ends)
    assert session.ends["a"].done.cancelled


async def test_wrong_messages_are_answered_and_the_others_go_on(session: Session, ring: FakeRing) -> None:
    ring.behave = paced = Paced(TEXT, 0)
    await session.send("a", chat=QUESTION)
    await session.send("a", chat=QUESTION)
    await session.send("z", cancel=pb.CancelAction())
    await session.until(lambda: len(session.refused) == 2)
    assert [reason(message) for message in session.refused] == ["DUPLICATE_ID", "UNKNOWN_ID"]
    await session.send("", chat=QUESTION)
    await session.send("b")
    await session.send("c", chat=pb.ChatRequest(model=MODEL))
    await session.send("d", chat=QUESTION, background_seconds=-1.0)
    await session.send("e", attach=pb.AttachRequest(generation_id="0" * 32))
    await session.send("f", generate=PROMPT, position="3")
    await session.until(lambda: len(session.ends) == 6)
    reasons = {key: reason(end) for key, end in session.ends.items()}
    assert reasons == {
        "": "INVALID_VALUE",
        "b": "MISSING_REQUIRED_PARAMETER",
        "c": "EMPTY_ARRAY",
        "d": "INVALID_HEADER",
        "e": "GENERATION_NOT_FOUND",
        "f": "INVALID_VALUE",
    }
    paced.allow()
    await session.until(lambda: "a" in session.ends)
    assert session.text["a"] == TEXT.decode()


async def test_a_large_request_that_may_not_wait_is_refused_alone(
    session: Session, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.behave = paced = Paced(TEXT, 3)
    await session.send("a", chat=QUESTION)
    await until(lambda: ring.requests)
    monkeypatch.setattr(LargeRequests, "turn", no_room)
    await session.send("b", generate=pb.GenerateRequest(model=MODEL, text="x" * LARGE_REQUEST))
    await session.until(lambda: "b" in session.ends)
    assert session.ends["b"].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    paced.allow()
    await session.until(lambda: "a" in session.ends)
    assert session.text["a"] == TEXT.decode()


async def test_each_generation_has_its_own_key_session_and_delivery(session: Session, ring: FakeRing) -> None:
    whole = pb.GenerateRequest(model=MODEL, text="x", output=pb.OutputOptions(whole=True))
    for identity in ("a", "b"):
        await session.send(identity, generate=whole, idempotency_key="k-1", session_id="mine")
        await session.until(lambda identity=identity: identity in session.ends)
    assert session.generations["a"] == session.generations["b"]
    assert session.text["a"] == session.text["b"] == "Hello, world!"
    assert [request.session for request in ring.requests] == [session_of("", "mine")]


async def test_nonsense_ends_the_stream_with_a_status(client: Client) -> None:
    call = client.channel.stream_stream("/ryzanstein.v1.InferenceService/ChatSession")()
    await call.write(b"\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError, match=r"not a ryzanstein\.v1\.ChatSessionRequest"):
        await call.read()
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_goes_leaves_its_generations_for_the_grace(
    session: Session, ring: FakeRing, client: Client
) -> None:
    ring.behave = paced = Paced(TEXT, 4)
    await session.send("a", chat=QUESTION)
    await session.until(lambda: len(session.text.get("a", "")) == 4)
    session.call.cancel()
    paced.allow()
    attach = pb.AttachRequest(generation_id=session.generations["a"], position=session.positions["a"])
    rest = [event async for event in client.Attach(attach)]
    assert "".join(delta.text for event in rest for delta in event.choices) == TEXT[4:].decode()


async def test_a_deadline_is_the_streams(client: Client, ring: FakeRing) -> None:
    ring.behave = silence
    call = client.ChatSession(timeout=0.3)
    await call.write(pb.ChatSessionRequest(id="a", chat=QUESTION))
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
