"""Health, reflection, and the end of the service."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.core.settings import GatewaySettings
from shared.config import CommonSettings
from shared.errors import PortInUse
from tests.integration.gateway.api.grpc.conftest import PROMPT, QUESTION, Client, text_of
from tests.integration.gateway.api.grpc.test_errors import failure
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, until
from tests.integration.gateway.lifecycle.test_drain import Held

SERVICE = "ryzanstein.v1.InferenceService"
Response = health_pb2.HealthCheckResponse


@pytest.mark.slow
async def test_health_says_what_ready_says_until_the_end(gateway: RunningGateway, client: Client) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)
    for name in ("", SERVICE):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == Response.SERVING
    error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="other")))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="other"))
    assert (await unknown.read()).status == Response.SERVICE_UNKNOWN
    listed = await stub.List(health_pb2.HealthListRequest())
    assert listed.statuses.keys() == {"", SERVICE}
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == Response.SERVING
    gateway.service.end()
    assert (await failure(watch)).code() == grpc.StatusCode.UNAVAILABLE
    await gateway.task


@pytest.mark.slow
async def test_a_drain_is_seen_by_health_and_ends_every_answer(nats_settings: CommonSettings, ring: FakeRing) -> None:
    held = ring.behave = Held()
    alone = ("grpc.use_local_subchannel_pool", 1)  # a connection of its own
    async with (
        run_gateway(nats_settings, grpc_port=0, drain_delay=1.0) as gateway,
        Client(gateway.service.grpc_address) as client,
        Client(gateway.service.grpc_address, alone) as late,
        Client(gateway.service.grpc_address, alone) as new,
    ):
        watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Response.SERVING
        call = client.Generate(PROMPT)
        await asyncio.wait_for(held.begun.wait(), 10)
        session = late.ChatSession()
        await session.write(pb.ChatSessionRequest(id="a", attach=pb.AttachRequest(generation_id="?")))
        assert (await session.read()).error.message
        gateway.service.end()
        assert (await watch.read()).status == Response.NOT_SERVING
        await until(lambda: gateway.service._backend._draining)
        await session.write(pb.ChatSessionRequest(id="b", chat=QUESTION))
        refused = await session.read()
        assert refused.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        error = await failure(new.Generate(PROMPT))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        held.go_on.set()
        assert text_of([event async for event in call]) == "Hi!"
        await asyncio.wait_for(gateway.task, 20)


class Reflected:
    """What the server says of itself, through gRPC's own reflection client (which is synchronous)."""

    def __init__(self, address: str) -> None:
        self._address = address

    def services(self) -> tuple[list[str], Any]:
        with grpc.insecure_channel(self._address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            names = sorted(database.get_services())
            return names, DescriptorPool(database).FindServiceByName(SERVICE)


async def test_reflection_tells_every_service_and_method(gateway: RunningGateway) -> None:
    reflected = Reflected(gateway.service.grpc_address)
    names, service = await asyncio.to_thread(reflected.services)
    assert names == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", SERVICE]
    ours = pb.DESCRIPTOR.services_by_name["InferenceService"]
    assert {method.name for method in service.methods} == {method.name for method in ours.methods}
    assert service.methods_by_name["ChatSession"].client_streaming


async def test_reflection_answers_under_its_newer_name_too(client: Client) -> None:
    call = client.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")()
    await call.write(b"\x3a\x00")  # list_services
    assert SERVICE.encode() in await call.read()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_without_a_port_it_is_not_served(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings) as gateway:
        assert gateway.service.grpc_address == ""
    assert GatewaySettings().grpc_port is None


async def test_a_taken_port_is_named_with_its_option(gateway: RunningGateway, nats_settings: CommonSettings) -> None:
    taken = int(gateway.service.grpc_address.rpartition(":")[2])
    with pytest.raises(PortInUse, match="--grpc-port"):
        async with run_gateway(nats_settings, grpc_port=taken):
            pass
