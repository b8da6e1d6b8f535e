"""A gateway with a gRPC port, and grpcio's own client to call it."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from services.gateway.api.grpc.generated import inference_pb2 as pb
from shared.config import CommonSettings
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing

MODEL = "org/stub-model"
PROMPT = pb.GenerateRequest(model=MODEL, text="x")
QUESTION = pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role=pb.ROLE_USER, content="Hi?")])
_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]


class Client:
    """What protoc would make of the service, from its descriptor. Use as a context manager."""

    def __init__(self, address: str, *options: tuple[str, Any]) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=list(options))

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    def __getattr__(self, name: str) -> Any:
        """A method of the service, for calls."""
        if name not in _SERVICE.methods_by_name:
            raise AttributeError(name)
        method = _SERVICE.methods_by_name[name]
        request, response = (getattr(pb, kind.name) for kind in (method.input_type, method.output_type))
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        return getattr(self.channel, kind)(
            f"/{_SERVICE.full_name}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )


def text_of(events: Sequence[pb.GenerationEvent], choice: int = 0) -> str:
    """What these events add to the text of a choice."""
    return "".join(delta.text for event in events for delta in event.choices if delta.index == choice)


@pytest.fixture
async def gateway(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    async with run_gateway(nats_settings, grpc_port=0) as running:
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[Client]:
    async with Client(gateway.service.grpc_address) as made:
        yield made
