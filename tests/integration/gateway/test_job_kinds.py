"""Kinds of jobs: each is gone with its line in the list, and nothing else is."""

import re

import grpc
import openai
import pytest
from starlette.routing import Route

from services.gateway.api.backend import GatewayBackend
from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.auth.authenticator import Authenticator
from services.gateway.batches.wiring import BatchRuntime
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.job_kinds import KINDS, JobKind
from services.gateway.service import GatewayService
from services.gateway.training.wiring import TrainingRuntime
from shared.config import CommonSettings
from shared.service.endpoints import new_registry
from tests.integration.gateway.api.grpc.conftest import Client
from tests.integration.gateway.batches import helpers as batches
from tests.integration.gateway.conftest import run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing
from tests.integration.gateway.training import fake_trainer as training


async def run_batch(client: openai.AsyncOpenAI) -> None:
    job = await batches.submit(client, batches.requests(1))
    assert (await batches.until_status(client, job.id)).status == "completed"


async def check_training_file(client: openai.AsyncOpenAI) -> None:
    job = await training.submit(client)
    await training.until_status(client, job.id, "queued")


WORKS = {BatchRuntime: run_batch, TrainingRuntime: check_training_file}  # what shows of each that it does


def paths_of(kind: JobKind) -> set[tuple[str, str]]:
    """Method and path of each of its operations."""
    backend = GatewayBackend(Authenticator(), GatewaySettings(), GatewayMetrics(new_registry()))
    routes = [made for make in kind.routes for made in make(backend)]
    return {
        (method, re.sub(r"\{.*?\}", "x", route.path))
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
    }


@pytest.mark.parametrize("gone", KINDS, ids=lambda kind: kind.make.__name__)
async def test_without_a_kind_the_others_work(
    gone: JobKind, nats_settings: CommonSettings, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    await batches.ready(ring)
    monkeypatch.setattr(GatewayService, "job_kinds", tuple(kind for kind in KINDS if kind is not gone))
    own = set(gone.settings.model_fields) - set(CommonSettings.model_fields)
    assert own
    assert not own & set(GatewayService.settings_type().model_fields)
    async with run_gateway(nats_settings, grpc_port=0) as gateway:
        async with gateway.openai() as client:
            question = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
            assert (await client.chat.completions.create(**question)).choices  # type: ignore[call-overload]
            for kind in gateway.service.job_kinds:
                await WORKS[kind.make](client)  # type: ignore[index]
        async with gateway.http() as http:
            assert paths_of(gone)
            for method, path in paths_of(gone):
                assert (await http.request(method, path)).status_code == 404, (method, path)
        if gone.make is BatchRuntime:
            async with Client(gateway.service.grpc_address) as calls:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await calls.ListBatches(pb.ListBatchesRequest())
                assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
