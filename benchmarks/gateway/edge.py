"""A gateway's edge alone, in a process of its own: REST and gRPC over everything of the gateway but NATS.

Requests are decoded, checked and tokenized, answers detokenized, formatted and written as ever. The tokens
come from this process itself, three of each answer at a time, as a ring's frames bring them. What is left of a
request's CPU time is what the API costs and what both share of it.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.control_plane.systems import HOST
from benchmarks.peers.servers import free_port
from benchmarks.processes import Child, python
from services.gateway.api.app import GatewayApp
from services.gateway.api.backend import GatewayBackend
from services.gateway.api.backend import GatewayServices as BackendParts
from services.gateway.api.grpc.api import make_server
from services.gateway.auth.authenticator import Authenticator
from services.gateway.core.catalog import Catalog, Resolved, SparseKinds
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.registry import DIALECTS
from services.gateway.intake.intake import Intake
from services.gateway.intake.processor import InputProcessor
from services.gateway.intake.record import RunDependencies
from services.gateway.lifecycle.generation import Deliver
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.persistence.responses import StoredTurns
from services.gateway.ratelimit.limiter import Limiter
from services.gateway.streams.reading import Presentations
from services.gateway.tokenizer.tokenizer import StubTokenizer
from shared.messages import ModelCard, TokenEntry
from shared.process import freeze_gc_after_startup
from shared.service.endpoints import Health, OpsApp
from shared.service.http_server import HttpServer
from shared.service.listener import bind
from shared.service.logs import configure_logging

FRAME = 3  # tokens of an answer that come at a time
STEP = 0.001  # seconds between two frames, when there is time


class _Answers:
    """Stands where `Answers` does: every answer is of one choice, and says `a` until its length."""

    consumer = "gateway-edge"
    writer = "ed9e0000"

    def __init__(self) -> None:
        self._open: dict[str, list[Any]] = {}

    async def submit(self, answer: RequestState, *, record_first: bool = False) -> "asyncio.Future[None]":
        stored = asyncio.get_running_loop().create_future()
        stored.set_result(None)
        return stored

    def join(self, answer: RequestState, deliver: Deliver) -> None:
        self._open[answer.identity] = [answer.generations[0].request, deliver, 0]

    def leave(self, answer: RequestState, deliver: Deliver) -> None:
        self._open.pop(answer.identity, None)

    def cancel(self, answer: RequestState) -> None: ...

    def end_choice(self, answer: RequestState, index: int) -> None: ...

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP)
            self.say(FRAME)

    def say(self, tokens: int) -> None:
        """So many tokens of each answer."""
        for row in list(self._open.values()):
            request, deliver, position = row
            count = min(tokens, request.max_tokens - position)
            if count:
                row[2] = position + count
                finish = "length" if row[2] == request.max_tokens else ""
                said = [ord("a")] * count
                deliver(0, TokenEntry(request.generation_id, 0, position, said, finish))  # type: ignore[arg-type]


class EdgeParts(NamedTuple):
    """Everything of a gateway but NATS."""

    answers: _Answers
    app: GatewayApp
    backend: GatewayBackend
    health: Callable[[], Health]


def edge_parts() -> EdgeParts:
    """Put together as the service does it."""
    card = ModelCard("stub", context_length=2048, vocab_size=256, eos_token_ids=[0], tokenizer="", created=0)
    tokenizer, answers, settings = StubTokenizer(), _Answers(), GatewaySettings()
    metrics = GatewayMetrics(CollectorRegistry())

    async def get(_: ModelCard, tenant: str) -> StubTokenizer:
        return tokenizer

    async def loaded(*_: object, **__: object) -> ModelCard:
        return card

    named, kinds = Resolved(card.model), SparseKinds([], [])
    known = {"card": lambda _: card, "listed": lambda: [card], "is_model": lambda _: True}
    catalog = cast(Any, SimpleNamespace(**known, resolve=lambda *_: named, sparse_kinds=lambda _: kinds))
    catalog.of_request = partial(Catalog.of_request, catalog)
    cold_starts = cast(Any, SimpleNamespace(card=loaded))
    endpoints = [one for dialect in DIALECTS for one in dialect.endpoints]
    presentations = Presentations({one.name: one.presentation for one in endpoints})
    parts = RunDependencies(settings, cast(Any, answers), metrics, presentations)
    nobody, tokenizers = cast(Any, None), cast(Any, SimpleNamespace(get=get))
    authenticator = Authenticator()
    authenticator.complete()
    backend = GatewayBackend(authenticator, settings, metrics)
    limiter = Limiter(nobody, "gateway-edge", settings)
    processor = InputProcessor(
        parts, catalog, cold_starts, tokenizers, nobody, limiter, nobody, StoredTurns(*[nobody] * 4)
    )
    intake = Intake(processor, endpoints, nobody, nobody, authenticator)
    backend.open(BackendParts(intake, nobody, catalog, *[nobody] * (len(BackendParts.__struct_fields__) - 3)))

    def health() -> Health:
        return Health("gateway", "edge", "ready", True, "")

    app = GatewayApp(backend, OpsApp(health, CollectorRegistry()), DIALECTS)
    return EdgeParts(answers, app, backend, health)


async def serve(port: int, grpc_port: int) -> None:
    """Prints a line once both APIs are served; runs until it is killed."""
    configure_logging("gateway", "edge", level="warning", fmt="json")
    parts = edge_parts()
    options: dict[str, Any] = {
        "http": "httptools",
        "timeout_keep_alive": 75,
        "server_header": False,
        "proxy_headers": False,
    }
    await HttpServer(parts.app, bind(HOST, port), **options).start()
    await make_server(parts.backend, parts.health, grpc_port).start()
    freeze_gc_after_startup()
    print("serving", flush=True)
    await parts.answers.run()


class Edge:
    """The process, to be measured as the whole stack is (`control_plane_systems.Ours`)."""

    def __init__(self) -> None:
        self.port, grpc_port = free_port(), free_port()
        self.grpc_address = f"{HOST}:{grpc_port}"
        command = python("benchmarks.gateway.edge", self.port, grpc_port)
        self._child = Child("The edge", command)

    async def start(self) -> None:
        """Raises BenchError."""
        await self._child.start()

    async def stop(self) -> None:
        await self._child.stop()

    def processes(self) -> Mapping[str, list[int]]:
        return {"gateway": [self._child.pid]}


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
