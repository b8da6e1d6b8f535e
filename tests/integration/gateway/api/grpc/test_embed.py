"""Vectors over gRPC."""

import grpc
import pytest

from services.gateway.api.grpc.generated import inference_pb2 as pb
from tests.integration.gateway.api.grpc.conftest import Client
from tests.integration.gateway.api.grpc.test_errors import details, failure
from tests.integration.gateway.api.test_rest import until_listed
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing, stub_card
from tests.integration.gateway.intake.test_embeddings import embed, vector


@pytest.fixture
async def model(gateway: RunningGateway, ring: FakeRing) -> str:
    ring.behave = embed
    await ring.add_model(stub_card("vectors", embedding_size=4))
    async with gateway.http() as http:
        await until_listed(http, "vectors")
    return "vectors"


async def test_texts_and_tokens_become_vectors(client: Client, model: str) -> None:
    for inputs in (
        [pb.EmbedInput(text=letter) for letter in "ade"],
        [pb.EmbedInput(tokens=pb.TokenIds(ids=[ord(letter)])) for letter in "ade"],
    ):
        answer = await client.Embed(pb.EmbedRequest(model=model, inputs=inputs))
        shown = [list(each.values) for each in answer.embeddings]
        assert shown == [pytest.approx(vector([ord(letter)]), abs=1e-7) for letter in "ade"]
        assert answer.usage.prompt_tokens == 3


async def test_fewer_dimensions_and_the_same_key(client: Client, model: str, ring: FakeRing) -> None:
    request = pb.EmbedRequest(model=model, inputs=[pb.EmbedInput(text="a")], dimensions=2)
    first, again = [await client.Embed(request, metadata=[("idempotency-key", "v")]) for _ in range(2)]
    assert len(first.embeddings[0].values) == 2
    assert first == again
    assert len(ring.requests) == 1


async def test_what_is_wrong_is_named(client: Client, model: str) -> None:
    a, ids = pb.EmbedInput(text="a"), pb.EmbedInput(tokens=pb.TokenIds(ids=[1]))
    cases = [
        ([], None, "EMPTY_ARRAY"),
        ([pb.EmbedInput()], None, "MISSING_REQUIRED_PARAMETER"),
        ([a, ids], None, "INVALID_TYPE"),
        ([a], 5, "INTEGER_ABOVE_MAX_VALUE"),
    ]
    for inputs, dimensions, reason in cases:
        error = await failure(client.Embed(pb.EmbedRequest(model=model, inputs=inputs, dimensions=dimensions)))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert details(error)["ErrorInfo"].reason == reason
