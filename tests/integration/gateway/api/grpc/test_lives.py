"""Calls that end before their answers, and generations that outlive their calls."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from h2.settings import SettingCodes

from services.gateway.api.grpc.framing import MessageReader
from services.gateway.api.grpc.generated import inference_pb2 as pb
from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.integration.gateway.api.grpc.conftest import MODEL, PROMPT, QUESTION, Client, text_of
from tests.integration.gateway.api.grpc.test_errors import SERVICE, details, failure
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, saying, silence, until
from tests.integration.gateway.lifecycle.test_gateway_lost import gateway_process
from tests.integration.gateway.resuming import Paced
from tests.unit.gateway.api.grpc.test_server import calls
from tests.unit.gateway.server.http2.test_connection import REQUEST, Pair, framed

TEXT = b"A connection is a cursor over a log."
KEY = [("idempotency-key", "order-66")]


@pytest.fixture
async def other(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    async with run_gateway(nats_settings, grpc_port=0) as running:
        yield running


async def some(call: Any, characters: int) -> list[pb.GenerationEvent]:
    """Events until there are as many characters."""
    events: list[pb.GenerationEvent] = []
    while len(text_of(events)) < characters:
        event = await call.read()
        assert event is not grpc.aio.EOF, events
        events.append(event)
    return events


@pytest.mark.parametrize(("whole", "grace"), [(False, 0.2), (True, 3600.0)], ids=["after the grace", "at once"])
async def test_a_cancelled_call_cancels_its_generation(
    nats_settings: CommonSettings, ring: FakeRing, whole: bool, grace: float
) -> None:
    """A whole answer is nobody's to resume."""
    ring.behave = silence
    async with (
        run_gateway(nats_settings, grpc_port=0, resume_grace=grace) as gateway,
        Client(gateway.service.grpc_address) as client,
    ):
        call = client.Generate(pb.GenerateRequest(model=MODEL, text="x", output=pb.OutputOptions(whole=whole)))
        await until(lambda: ring.requests)
        call.cancel()
        await until(lambda: ring.cancelled | ring.commanded)


async def test_a_deadline_ends_the_call_and_reaches_the_request(client: Client, ring: FakeRing) -> None:
    ring.behave = silence
    error = await failure(client.Generate(PROMPT, timeout=0.3))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    (request,) = ring.requests
    later = await _deadline(client, ring, timeout=30)
    assert 25 < later - request.deadline < 40
    outlived = await _deadline(client, ring, timeout=30, metadata=[("x-ryzanstein-background", "60")])
    assert outlived - later > 500, "what may be read later is of use after the call's deadline"


async def _deadline(client: Client, ring: FakeRing, **options: Any) -> float:
    seen = len(ring.requests)
    call = client.Generate(PROMPT, **options)
    await until(lambda: len(ring.requests) > seen)
    call.cancel()
    return ring.requests[-1].deadline


async def test_the_server_itself_keeps_the_deadline(client: Client, ring: FakeRing) -> None:
    ring.behave = silence
    call = client.channel.unary_stream("/ryzanstein.v1.InferenceService/Generate")
    error = await failure(call(PROMPT.SerializeToString(), metadata=[("x-request-id", "a")], timeout=0.2))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_stream_goes_on_at_another_gateway_after_the_first_was_killed(
    bus: Bus, nats_settings: CommonSettings, ring: FakeRing, other: RunningGateway, tmp_path: Path
) -> None:
    ring.behave = paced = Paced(TEXT, 10)
    async with gateway_process(bus, nats_settings, tmp_path, "--grpc-port", "0") as doomed:
        beat = await doomed.process.wait_ready()
        async with Client(beat.grpc_address) as client:
            call = client.Chat(QUESTION)
            events = await some(call, 10)
            await doomed.kill()
            error = await failure(call)
            assert error.code() == grpc.StatusCode.UNAVAILABLE
    paced.allow()
    asked = pb.AttachRequest(generation_id=events[0].id, position=events[-1].position)
    async with Client(other.service.grpc_address) as client:
        rest = [event async for event in client.Attach(asked)]
    assert text_of(events) + text_of(rest) == TEXT.decode()
    assert rest[0].id == events[0].id


async def test_generations_of_one_api_are_read_and_cancelled_over_the_other(
    gateway: RunningGateway, client: Client, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT, 5)
    call = client.Generate(PROMPT)
    events = await some(call, 5)
    async with gateway.http() as http:
        shown = (await http.get(f"/v1/generations/{events[0].id}")).json()
        assert (shown["status"], shown["response"]["choices"][0]["text"]) == ("in_progress", "A con")
    cancelled = await client.Cancel(pb.CancelRequest(generation_id=events[0].id))
    assert cancelled.cancelled
    assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE
    paced.allow()
    again = await client.Cancel(pb.CancelRequest(generation_id=events[0].id))
    assert not again.cancelled


async def test_a_chat_over_rest_is_attached_to_as_text_and_as_tokens(
    gateway: RunningGateway, client: Client, ring: FakeRing
) -> None:
    ring.behave = saying(TEXT.decode())
    async with gateway.http() as http:
        body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 100, "stream": True}
        body["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
        answer = (await http.post("/v1/completions", json=body)).text
    identity = answer.partition('"id":"')[2].partition('"')[0]
    events = [event async for event in client.Attach(pb.AttachRequest(generation_id=identity))]
    assert text_of(events) == TEXT.decode()
    tokens = pb.OutputOptions(kind=pb.OUTPUT_KIND_TOKENS)
    asked = pb.AttachRequest(generation_id=identity, position="30", output=tokens)
    events = [event async for event in client.Attach(asked)]
    ids = [token for event in events for delta in event.choices for token in delta.token_ids]
    assert bytes(ids) == TEXT[30:]


async def test_a_repeat_under_a_key_is_the_same_generation_on_any_gateway(
    client: Client, other: RunningGateway, ring: FakeRing
) -> None:
    first = [event async for event in client.Generate(PROMPT, metadata=KEY)]
    async with Client(other.service.grpc_address) as elsewhere:
        again = [event async for event in elsewhere.Generate(PROMPT, metadata=KEY)]
        behind = [("last-event-id", "7")]
        rest = [event async for event in elsewhere.Generate(PROMPT, metadata=KEY + behind)]
        error = await failure(elsewhere.Generate(pb.GenerateRequest(model=MODEL, text="y"), metadata=KEY))
    assert (again[0].id, text_of(again)) == (first[0].id, text_of(first))
    assert text_of(rest) == "world!"
    assert len(ring.requests) == 1
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert details(error)["ErrorInfo"].reason == "IDEMPOTENCY_KEY_REUSED"


async def test_a_reader_that_does_not_read_holds_up_nobody_and_grows_nothing(
    gateway: RunningGateway, client: Client, ring: FakeRing
) -> None:
    """The rest of its answer waits as tokens in the log, and one message at most as bytes."""
    text = "abcdefgh" * 250
    ring.behave = saying(text)
    request = pb.GenerateRequest(model=MODEL, text="x", sampling=pb.SamplingParameters(max_tokens=2000))
    host, port = gateway.service.grpc_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    slow = Pair()
    slow.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
    slow.client.send_headers(1, [*REQUEST[:2], (":path", f"{SERVICE}/Generate"), *REQUEST[3:]])
    slow.client.send_data(1, framed(request.SerializeToString()), end_stream=True)
    writer.write(slow.client.data_to_send())
    assert text_of([event async for event in client.Generate(request)]) == text
    await until(lambda: ring.answered == 2)
    server = gateway.service._grpc
    (stream,) = [stream for peer in server.peers for stream in peer.connection.streams.values()]
    await until(lambda: stream.pending)
    assert len(stream.pending) < 1000
    slow.client.increment_flow_control_window(1 << 20, stream_id=1)
    writer.write(slow.client.data_to_send())
    while not slow.ended(1):
        slow.events += slow.client.receive_data(await asyncio.wait_for(reader.read(1 << 16), 20))
        writer.write(slow.client.data_to_send())
    writer.close()
    messages = MessageReader(1 << 20).feed(slow.received(1))
    assert text_of([pb.GenerationEvent.FromString(message) for message in messages]) == text


async def test_a_client_that_has_gone_silent_is_let_go(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, grpc_port=0, grpc_keepalive=0.3) as gateway:
        host, port = gateway.service.grpc_address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
        writer.write(calls(1, f"{SERVICE}/ListModels"))  # who calls nothing is not asked, but sent away
        said = b""
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.wait_for(reader.read(1024), 20):
                said += data
        writer.close()
        assert b"\0\0\x08\x06" in said
