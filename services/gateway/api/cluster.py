"""GET /v1/cluster: rings, services, and what this gateway is generating for whoever asks. Never what anybody wrote
or reads.

While there are no keys an id is all that is needed to read a generation, so no part of one is shown, only a digest.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterable

import msgspec

from services.gateway.core.catalog import Catalog
from services.gateway.lifecycle.request_state import RequestState
from services.gateway.lifecycle.request_tracker import RequestTracker
from shared.messages import GroupRecord, ServiceRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket

FRESH = 1.0  # seconds for which the services are not asked for again, however many look at them
MOST = 100  # generations that are shown; there may be thousands
DIGEST = 8  # hexadecimal digits of an id's digest: enough to find one's own


class ClusterGroup(msgspec.Struct, frozen=True):
    """A ring, as the health monitor knows it."""

    group: str
    model: str
    state: str  # starting, ready, busy, hung, draining or gone
    epoch: int
    ranks: int
    running: int
    waiting: int
    slots: int  # sequences that its batch has room for; 0: not known
    kv_used: float  # share of its KV blocks, 0 to 1
    step_seconds: float  # what a step takes that computes no prompt; 0: not measured yet
    weight: float  # how fast it is, against its own past and its peers, 0.05 to 1
    loaded: float  # share of the weights that has been read, 0 to 1
    message: str
    updated_at: float  # Unix seconds


class ServiceInstance(msgspec.Struct, frozen=True):
    name: str
    instance: str
    state: str
    heard_at: float  # Unix seconds of its last heartbeat; 0: not known


class RunningGeneration(msgspec.Struct, frozen=True):
    digest: str  # the first digits of the SHA-256 of its id
    model: str
    endpoint: str
    status: str  # queued or in_progress
    created: float  # Unix seconds
    tokens: int  # output tokens so far, of all choices
    choices: int
    readers: int  # connections that read it here


class ClusterState(msgspec.Struct, frozen=True):
    object: str
    now: float  # Unix seconds, by the gateway's clock
    gateway: str
    models: list[str]
    groups: list[ClusterGroup]
    services: list[ServiceInstance]
    generations: list[RunningGeneration]  # the newest of the tenant that asks which this gateway looks after
    generations_total: int  # all of these


class Cluster:
    """What a gateway knows of the others."""

    def __init__(self, bus: Bus, catalog: Catalog, answers: RequestTracker) -> None:
        self._bus = bus
        self._catalog = catalog
        self._answers = answers
        self._services: list[ServiceInstance] = []
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def state(self, tenant: str) -> ClusterState:
        """As `tenant` may see it. Raises `BrokerUnavailable`."""
        await self._ask()
        going = [
            answer
            for answer in self._answers.all()
            if answer.owned and not answer.ended and answer.record.tenant == tenant
        ]
        return ClusterState(
            object="cluster",
            now=time.time(),
            gateway=self._answers.consumer,
            models=[card.model for card in self._catalog.listed()],
            groups=groups_of(self._catalog.groups()),
            services=self._services,
            generations=running(going),
            generations_total=len(going),
        )

    async def _ask(self) -> None:
        async with self._asking:
            if time.monotonic() - self._asked_at < FRESH:
                return
            bucket = await Bucket.open(self._bus, subjects.SERVICES_BUCKET, ServiceRecord)
            self._services = services_of((await bucket.items()).values())
            self._asked_at = time.monotonic()


def groups_of(records: Iterable[GroupRecord]) -> list[ClusterGroup]:
    """By name. Pure."""
    return [_group(record) for record in sorted(records, key=lambda one: one.group)]


def _group(record: GroupRecord) -> ClusterGroup:
    load = record.load
    return ClusterGroup(
        group=record.group,
        model=record.model,
        state=record.state,
        epoch=record.epoch,
        ranks=len(record.ranks),
        running=load.running,
        waiting=load.waiting,
        slots=load.slots,
        kv_used=round(1 - load.free_blocks / load.total_blocks, 4) if load.total_blocks else 0.0,
        step_seconds=load.step_seconds,
        weight=record.weight,
        loaded=record.loaded,
        message=record.message,
        updated_at=record.updated_at,
    )


def services_of(records: Iterable[ServiceRecord]) -> list[ServiceInstance]:
    """By name and instance; those that are gone last. Pure."""
    ordered = sorted(records, key=lambda one: (one.state == "gone", one.name, one.instance))
    return [ServiceInstance(one.name, one.instance, one.state, one.heard_at) for one in ordered]


def running(answers: Iterable[RequestState]) -> list[RunningGeneration]:
    """The newest first. Pure."""
    newest = sorted(answers, key=lambda one: one.record.created, reverse=True)[:MOST]
    return [_generation(answer) for answer in newest]


def _generation(answer: RequestState) -> RunningGeneration:
    record = answer.record
    tokens = sum(len(generation.tokens) for generation in answer.generations)
    return RunningGeneration(
        digest=hashlib.sha256(answer.public_id.encode()).hexdigest()[:DIGEST],
        model=record.model_shown,
        endpoint=record.endpoint,
        status="in_progress" if tokens else "queued",
        created=record.created,
        tokens=tokens,
        choices=len(answer.generations),
        readers=answer.readers,
    )
