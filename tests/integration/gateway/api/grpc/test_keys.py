"""Keys, tenants, limits and TLS hold for gRPC as for REST."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway.api.grpc.generated import inference_pb2 as pb
from shared.config import CommonSettings
from shared.keys import NewKey
from shared.nats.bus import Bus
from tests.integration.gateway.api.grpc.conftest import MODEL, PROMPT, QUESTION, Client, text_of
from tests.integration.gateway.api.grpc.test_errors import SERVICE, details, failure
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing
from tests.integration.gateway.server.test_tls import Files, files

__all__ = ["files"]  # a fixture


def metadata(key: NewKey) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key.token}")]


async def test_everything_but_health_is_refused_without_a_key(
    client: Client, gateway: RunningGateway, keys: Keys
) -> None:
    key = await keys.make("mine")
    await changes_to(gateway, {}, 401)
    for call in (client.Generate(PROMPT), client.ListModels(pb.ListModelsRequest())):
        error = await failure(call)
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert details(error)["ErrorInfo"].reason == "INVALID_API_KEY"
    wrong = await failure(client.Generate(PROMPT, metadata=[("authorization", "Bearer nonsense")]))
    assert wrong.code() == grpc.StatusCode.UNAUTHENTICATED
    reflection = client.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    assert (await failure(reflection())).code() == grpc.StatusCode.UNAUTHENTICATED
    health = health_pb2_grpc.HealthStub(client.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    events = [event async for event in client.Generate(PROMPT, metadata=metadata(key))]
    assert text_of(events) == "Hello, world!"


async def test_a_generation_is_not_there_for_other_tenants(client: Client, gateway: RunningGateway, keys: Keys) -> None:
    mine, theirs = await keys.make("mine"), await keys.make("theirs")
    await changes_to(gateway, bearer(theirs), 200)
    await changes_to(gateway, bearer(mine), 200)
    events = [event async for event in client.Generate(PROMPT, metadata=metadata(mine))]
    attach, cancel = (pb.AttachRequest(generation_id=events[0].id), pb.CancelRequest(generation_id=events[0].id))
    for call in (client.Attach, client.Cancel):
        request: Any = attach if call._method.endswith(b"Attach") else cancel
        error = await failure(call(request, metadata=metadata(theirs)))
        assert error.code() == grpc.StatusCode.NOT_FOUND
    again = [event async for event in client.Attach(attach, metadata=metadata(mine))]
    assert text_of(again) == text_of(events)


async def test_a_session_whose_key_was_revoked_begins_nothing_more(
    client: Client, gateway: RunningGateway, keys: Keys
) -> None:
    key = await keys.make("mine")
    await changes_to(gateway, bearer(key), 200)
    call = client.ChatSession(metadata=metadata(key))
    await call.write(pb.ChatSessionRequest(id="a", chat=QUESTION))
    while (await call.read()).WhichOneof("result") != "done":
        pass
    await keys.revoke(key)
    await changes_to(gateway, bearer(key), 401)
    for action in ({"chat": QUESTION}, {"attach": pb.AttachRequest(generation_id="0" * 32)}):
        await call.write(pb.ChatSessionRequest(id="b", **action))
        assert (await call.read()).error.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
    call.cancel()


async def test_limits_are_kept_and_told(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with (
        run_gateway(nats_settings, grpc_port=0, requests_per_minute=1) as gateway,
        Client(gateway.service.grpc_address) as client,
    ):
        call = client.Generate(PROMPT)
        assert text_of([event async for event in call]) == "Hello, world!"
        assert dict(await call.trailing_metadata())["x-ratelimit-remaining-requests"] == "0"
        error = await failure(client.Generate(PROMPT))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error)["ErrorInfo"].reason == "RATE_LIMIT_EXCEEDED"
        assert details(error)["RetryInfo"].retry_delay.seconds >= 1


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Tokenize", pb.TokenizeRequest(model=MODEL, text="Hello")),
        ("Detokenize", pb.DetokenizeRequest(model=MODEL, token_ids=[72])),
        ("ListBatches", pb.ListBatchesRequest()),
    ],
)
async def test_what_generates_nothing_is_counted(
    nats_settings: CommonSettings, ring: FakeRing, method: str, request_: Any
) -> None:
    async with (
        run_gateway(nats_settings, grpc_port=0, requests_per_minute=1) as gateway,
        Client(gateway.service.grpc_address) as client,
    ):
        await getattr(client, method)(request_)
        error = await failure(getattr(client, method)(request_))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_tls(nats_settings: CommonSettings, ring: FakeRing, files: Files, bus: Bus) -> None:
    certificate, key = files.issue("gateway")
    options = {"tls_certificate": certificate, "tls_key": key, "grpc_port": 0}
    async with run_gateway(nats_settings, **options) as gateway:
        trusted = grpc.ssl_channel_credentials(await asyncio.to_thread(Path(files.ca).read_bytes))
        async with grpc.aio.secure_channel(gateway.service.grpc_address, trusted) as channel:
            call = channel.unary_stream(
                f"{SERVICE}/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerationEvent.FromString,
            )
            assert text_of([event async for event in call(PROMPT)]) == "Hello, world!"
        async with Client(gateway.service.grpc_address) as plain:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await plain.ListModels(pb.ListModelsRequest(), timeout=10)
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
