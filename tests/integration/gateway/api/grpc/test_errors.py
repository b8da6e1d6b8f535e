"""Wrong calls: each gets its code, its sentence and its details, and hurts nobody else."""

import asyncio
import contextlib
from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from services.gateway.api.grpc.generated import inference_pb2 as pb
from shared.config import CommonSettings
from tests.integration.gateway.api.grpc.conftest import MODEL, PROMPT, QUESTION, Client, text_of
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, failing, silence, until

SERVICE = "/ryzanstein.v1.InferenceService"
NAN = float("nan")


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with, however many messages come before it."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(call, [])
    return raised.value


async def read(call: Any, events: list[Any]) -> None:
    """Appends what comes to `events`. Raises what the call ends with."""
    if not hasattr(call, "read"):
        events.append(await call)
        return
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The google.rpc details of an error by their names."""
    found: dict[str, Any] = {}
    metadata = dict(error.trailing_metadata() or ())
    status = Status.FromString(metadata["grpc-status-details-bin"])  # type: ignore[arg-type]
    assert status.message == error.details()
    assert status.code == error.code().value[0]
    for detail in status.details:
        for kind in (BadRequest, ErrorInfo, RequestInfo, RetryInfo):
            message = kind()
            if detail.Unpack(message):
                found[kind.__name__] = message
    assert found["ErrorInfo"].domain == "ryzanstein"
    assert found["RequestInfo"].request_id == metadata["x-request-id"]
    return found


def prompt(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(model=MODEL, text="x", sampling=pb.SamplingParameters(**sampling))


INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
WRONG: list[tuple[str, Any, dict[str, str], grpc.StatusCode, str, str]] = [
    ("Generate", pb.GenerateRequest(model="other", text="x"), {}, MISSING, "MODEL_NOT_FOUND", ""),
    ("Generate", pb.GenerateRequest(text="x"), {}, INVALID, "EMPTY_STRING", "model"),
    ("Generate", pb.GenerateRequest(model=MODEL), {}, INVALID, "MISSING_REQUIRED_PARAMETER", "prompt"),
    ("Generate", pb.GenerateRequest(model=MODEL, text=""), {}, INVALID, "EMPTY_PROMPT", "prompt"),
    ("Generate", prompt(temperature=3), {}, INVALID, "DECIMAL_ABOVE_MAX_VALUE", "sampling.temperature"),
    ("Generate", prompt(temperature=NAN), {}, INVALID, "INVALID_VALUE", "sampling.temperature"),
    ("Generate", prompt(logit_bias={1: NAN}), {}, INVALID, "INVALID_VALUE", "sampling.logit_bias"),
    ("Generate", prompt(logit_bias={999: 1}), {}, INVALID, "INVALID_TOKEN_ID", "sampling.logit_bias"),
    ("Generate", prompt(n=129), {}, INVALID, "INTEGER_ABOVE_MAX_VALUE", "sampling.n"),
    ("Generate", prompt(stop=[""]), {}, INVALID, "EMPTY_STRING", "sampling.stop"),
    ("Generate", prompt(max_tokens=4096), {}, INVALID, "CONTEXT_LENGTH_EXCEEDED", "prompt"),
    (
        "Generate",
        pb.GenerateRequest(model=MODEL, tokens=pb.TokenIds(ids=[256])),
        {},
        INVALID,
        "INVALID_TOKEN_ID",
        "prompt",
    ),
    ("Generate", PROMPT, {"x-session-id": "a" * 257}, INVALID, "INVALID_HEADER", "X-Session-ID"),
    ("Generate", PROMPT, {"x-request-id": "a b"}, INVALID, "INVALID_HEADER", "x-request-id"),
    ("Generate", PROMPT, {"last-event-id": "3"}, INVALID, "INVALID_VALUE", "last-event-id"),
    ("Generate", PROMPT, {"x-ryzanstein-background": "a"}, INVALID, "INVALID_HEADER", "X-Ryzanstein-Background"),
    ("Chat", pb.ChatRequest(model=MODEL), {}, INVALID, "EMPTY_ARRAY", "messages"),
    (
        "Chat",
        pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(content="x")]),
        {},
        INVALID,
        "MISSING_REQUIRED_PARAMETER",
        "messages[0].role",
    ),
    (
        "Chat",
        pb.ChatRequest(model=MODEL, messages=QUESTION.messages, sampling=pb.SamplingParameters(logprobs=21)),
        {},
        INVALID,
        "INTEGER_ABOVE_MAX_VALUE",
        "sampling.logprobs",
    ),
    ("Attach", pb.AttachRequest(generation_id="?"), {}, MISSING, "GENERATION_NOT_FOUND", ""),
    ("Attach", pb.AttachRequest(generation_id="0" * 32, position="x"), {}, INVALID, "INVALID_POSITION", "position"),
    ("Cancel", pb.CancelRequest(generation_id="0" * 32), {}, MISSING, "GENERATION_NOT_FOUND", ""),
    ("Tokenize", pb.TokenizeRequest(model=MODEL), {}, INVALID, "MISSING_REQUIRED_PARAMETER", "input"),
    ("Detokenize", pb.DetokenizeRequest(model=MODEL, token_ids=[999]), {}, INVALID, "INVALID_TOKEN_ID", "token_ids"),
]


@pytest.mark.parametrize("case", range(0, len(WRONG), 8))
async def test_what_is_wrong_is_named(client: Client, case: int) -> None:
    for name, request, metadata, code, reason, field in WRONG[case : case + 8]:
        error = await failure(getattr(client, name)(request, metadata=list(metadata.items())))
        assert error.code() == code, (name, request, error)
        found = details(error)
        assert found["ErrorInfo"].reason == reason, (name, request)
        if code == INVALID and field:
            assert [violation.field for violation in found["BadRequest"].field_violations] == [field]
        assert "RetryInfo" not in found


async def test_retryable_errors_say_when(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = silence
    async with (
        run_gateway(nats_settings, grpc_port=0, max_generations=1) as gateway,
        Client(gateway.service.grpc_address) as client,
    ):
        first = client.Generate(PROMPT)
        await until(lambda: ring.requests)
        error = await failure(client.Generate(PROMPT))
        first.cancel()
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(error)["ErrorInfo"].reason == "QUEUE_FULL"
    assert details(error)["RetryInfo"].retry_delay.seconds >= 1


async def test_what_is_no_such_call(client: Client) -> None:
    unknown = await failure(client.channel.unary_unary(f"{SERVICE}/Divine")(b""))
    assert (unknown.code(), details(unknown)["ErrorInfo"].reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNKNOWN_METHOD")
    nonsense = await failure(client.channel.unary_stream(f"{SERVICE}/Generate")(b"\xff\xff"))
    assert (nonsense.code(), details(nonsense)["ErrorInfo"].reason) == (INVALID, "INVALID_PROTOBUF")
    broken_text = await failure(client.channel.unary_stream(f"{SERVICE}/Generate")(b"\x12\x02\xc3\x28"))
    assert broken_text.code() == INVALID
    two = client.channel.stream_stream(f"{SERVICE}/Generate")
    error = await failure(two(iter([PROMPT.SerializeToString()] * 2)))
    assert (error.code(), "takes exactly one" in (error.details() or "")) == (INVALID, True)
    none = await failure(two(iter([])))
    assert "0 whole request messages" in (none.details() or "")
    squeezed = client.channel.unary_stream(f"{SERVICE}/Generate")
    error = await failure(squeezed(PROMPT.SerializeToString() * 100, compression=grpc.Compression.Deflate))
    assert (error.code(), "identity,gzip" in (error.details() or "")) == (grpc.StatusCode.UNIMPLEMENTED, True)
    assert text_of([event async for event in client.Generate(PROMPT)]) == "Hello, world!"


async def test_a_message_may_be_compressed_with_gzip_and_its_limit_stays(client: Client) -> None:
    events = client.Generate(PROMPT, compression=grpc.Compression.Gzip)
    assert text_of([event async for event in events]) == "Hello, world!"
    bomb = pb.GenerateRequest(model=MODEL, text="x" * (5 << 20))
    error = await failure(client.Generate(bomb, compression=grpc.Compression.Gzip))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "RYZANSTEIN_BODY_LIMIT" in (error.details() or "")


async def test_too_much_metadata_ends_its_call_alone(client: Client) -> None:
    going = client.Generate(PROMPT)
    large = [("x-large", "y" * 20_000)]
    error = await failure(client.Generate(PROMPT, metadata=large))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "16,384" in (error.details() or "")
    assert text_of([event async for event in going]) == "Hello, world!"


async def test_a_message_over_the_limit_is_refused_and_one_under_it_is_taken(
    nats_settings: CommonSettings, ring: FakeRing
) -> None:
    async with (
        run_gateway(nats_settings, grpc_port=0, body_limit=1 << 20) as gateway,
        Client(gateway.service.grpc_address) as client,
    ):
        error = await failure(client.Generate(pb.GenerateRequest(model=MODEL, text="x" * (2 << 20))))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error)["ErrorInfo"].reason == "PAYLOAD_TOO_LARGE"
        error = await failure(client.Generate(pb.GenerateRequest(model=MODEL, text="x" * 900_000)))
        assert details(error)["ErrorInfo"].reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_other_protocols_are_sent_away(gateway: RunningGateway) -> None:
    url = f"http://{gateway.service.grpc_address}"
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{url}/v1/models")
    assert (answer.status_code, answer.text) == (505, "This port speaks gRPC.\n")


async def test_a_request_that_never_ends_is_given_up(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with (
        run_gateway(nats_settings, grpc_port=0, body_timeout=0.2) as gateway,
        Client(gateway.service.grpc_address) as client,
    ):
        never = asyncio.Event()

        async def messages() -> Any:
            await never.wait()
            yield b""

        error = await failure(client.channel.stream_stream(f"{SERVICE}/Generate")(messages()))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert details(error)["ErrorInfo"].reason == "REQUEST_TIMEOUT"
        host, port = gateway.service.grpc_address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))  # and says nothing
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(reader.read(1024), 10):
                pass
        writer.close()
        never.set()


async def test_a_fault_of_ours_shows_nothing_of_our_insides(
    client: Client, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(gateway.service._backend.parts.intake, "prepare_decoded", broken)
    error = await failure(client.Generate(PROMPT, metadata=[("x-request-id", "trace-1")]))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "trace-1" in (error.details() or "")
    assert "secret" not in str(error)


async def test_an_error_after_tokens_comes_behind_them(client: Client, ring: FakeRing) -> None:
    ring.behave = failing("invalid_request", "The ring took offence.", behind=b"H")
    events: list[pb.GenerationEvent] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(client.Generate(PROMPT), events)
    assert text_of(events) == "H"
    assert (raised.value.code(), raised.value.details()) == (INVALID, "The ring took offence.")
