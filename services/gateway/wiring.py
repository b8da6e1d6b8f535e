"""What the gateway works with behind its routes: made, started and stopped in this order.

groups, models, keys ──known──▶ generations, answers, heirs ──▶ files, jobs ──▶ requests are taken
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from services.gateway.api.backend import GatewayBackend, GatewayServices, shutting_down
from services.gateway.api.cluster import Cluster
from services.gateway.api.management.adapters import AdapterManagement
from services.gateway.api.management.keys import KeyManagement
from services.gateway.api.management.models import Management
from services.gateway.auth.authenticator import KeyWatch
from services.gateway.core.adapters import RETENTION_FACTOR, AdapterRegistry
from services.gateway.core.catalog import Catalog
from services.gateway.core.cold_starts import ColdStarts
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.registry import ModelRegistry
from services.gateway.core.settings import GatewaySettings
from services.gateway.files.files import Files
from services.gateway.files.uploads import Uploads
from services.gateway.intake.endpoint import Endpoint
from services.gateway.intake.intake import Intake
from services.gateway.intake.processor import InputProcessor
from services.gateway.intake.record import RunDependencies as IntakeParts
from services.gateway.intake.sampling.grammars import GrammarChecker
from services.gateway.job_kinds import JobKind
from services.gateway.jobs.runtime import JobResources
from services.gateway.lifecycle.failover import GatewayFailover
from services.gateway.lifecycle.generations import Generations
from services.gateway.lifecycle.idempotency import IdempotencyKeys
from services.gateway.lifecycle.request_tracker import RequestTracker
from services.gateway.persistence.budget import history_pool
from services.gateway.persistence.chats import ChatIndex, ChatStore, StoredChats
from services.gateway.persistence.conversations import Conversations
from services.gateway.persistence.keeper import ResponseArchive, ResponseShelf
from services.gateway.persistence.responses import ResponseLookup, StoredTurns
from services.gateway.persistence.store import ResponseStore
from services.gateway.ratelimit.limiter import Limiter
from services.gateway.streams.reading import Presentations, Reading, Runs
from services.gateway.tokenizer.store import TokenizerStore
from shared.errors import BrokerUnavailable
from shared.nats.bus import Bus
from shared.nats.tenants import Quota
from shared.tasks import cancel_all

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]

ERROR_FLUSH_TIMEOUT_S = 2.0  # seconds that streams get to write their error when the time to drain is over


class Container:
    """Built at once, without I/O; `backend` is opened by `start`, when requests can be taken."""

    def __init__(
        self,
        bus: Bus,
        instance: str,
        settings: GatewaySettings,
        registry: CollectorRegistry,
        metrics: GatewayMetrics,
        backend: GatewayBackend,
        kinds: Sequence[JobKind],
        spawn: Spawn,
        endpoints: Sequence[Endpoint],
    ) -> None:
        """`endpoints`: of what the gateway speaks."""
        self._settings = settings
        self._backend = backend
        self._spawn = spawn
        self._opened = False
        self._loops: list[asyncio.Task[None]] = []  # that end before what they look after does
        keys = self._idempotency = IdempotencyKeys(bus, settings.idempotency_ttl)
        tokenizers = self._tokenizers = TokenizerStore(
            bus, special_tokens_in_messages=settings.special_tokens_in_messages
        )
        models = self._registry = ModelRegistry(bus)
        retention = RETENTION_FACTOR * settings.journal_max_age
        adapters = self._adapters = AdapterRegistry(bus, retention)
        catalog = self.catalog = Catalog(bus, models, adapters, on_card=tokenizers.prefetch)
        cold = self._cold_starts = ColdStarts(bus, instance, settings, catalog, metrics.held)
        presentations = Presentations({one.name: one.presentation for one in endpoints})
        runs = Runs(catalog, tokenizers, presentations)
        quota = Quota(settings.tenant_response_bytes, settings.tenant_responses)
        store = self._store = ResponseStore(bus, settings.response_ttl, settings.response_max_bytes, quota)
        chats = self._chat_index = ChatIndex(bus, settings.response_ttl, quota)
        conversations = self._conversations = Conversations(bus, settings.response_ttl, quota)
        keeper = ResponseArchive(ResponseShelf(store, runs, conversations), ChatStore(chats, store, runs))
        self.generations = Generations(bus, instance, settings, metrics, catalog)
        answers = self.answers = RequestTracker(bus, instance, settings, metrics, self.generations, keys, keeper, runs)
        self.heirs = GatewayFailover(bus, instance, answers, answers.owners, keeper, settings.journal_max_age)
        reading = Reading(answers, runs, metrics, store.is_deleted)
        lookup = ResponseLookup(store, keeper, answers, runs)
        self._api_keys = KeyWatch(bus, backend.authenticator)
        self.limiter = Limiter(bus, instance, settings)
        self._grammars = GrammarChecker()
        files = self._files = Files(bus, settings)
        processor = InputProcessor(
            IntakeParts(settings, answers, metrics, presentations),
            catalog,
            cold,
            tokenizers,
            self._grammars,
            self.limiter,
            files,
            StoredTurns(lookup, conversations, settings.history_bytes, history_pool(settings.history_held_bytes)),
        )
        intake = Intake(processor, endpoints, keys, reading, backend.authenticator)
        given = JobResources(
            bus, instance, settings, registry, backend.authenticator, files, catalog, cold, tokenizers, adapters, intake
        )
        self._jobs = [kind.make(given) for kind in kinds]
        management = Management(bus, catalog, settings)
        self._parts = GatewayServices(
            intake,
            reading,
            catalog,
            lookup,
            StoredChats(chats, store, keeper, answers),
            conversations,
            files,
            Uploads(files),
            {type(one.service): one.service for one in self._jobs},
            Cluster(bus, catalog, answers),
            management,
            AdapterManagement(bus, catalog, management),
            KeyManagement(backend.authenticator, self.limiter),
        )

    async def start(self) -> None:
        """Raises `BrokerUnavailable`, `ConfigurationError`."""
        await self.generations.start()
        self._spawn(self.generations.tokens.run(), "journal")
        self._loops += (
            self._spawn(self._api_keys.run(), "keys"),
            self._spawn(self.catalog.watch_models(), "models"),
            self._spawn(self.catalog.watch_groups(self.generations), "groups"),
            self._spawn(self._registry.watch_specs(), "registry"),
            self._spawn(self._registry.watch_hosts(), "hosts"),
            self._spawn(self._registry.watch_placements(), "placements"),
            self._spawn(self._adapters.watch(), "adapters"),
            self._spawn(self._adapters.run(), "adapters that nobody needs"),
            self._spawn(self._cold_starts.run(), "cold starts"),
            self._spawn(self.generations.run(), "timeouts"),
            self._spawn(self.generations.suspects.run(), "suspects"),
        )
        try:
            async with asyncio.timeout(self._settings.nats_connect_timeout):
                await self.catalog.wait()
                await self._api_keys.wait()
        except TimeoutError:
            raise BrokerUnavailable(
                "NATS answers, but its buckets `models`, `groups`, `registry` and `api_keys` cannot be read; is "
                "JetStream enabled?"
            ) from None
        await self._open()

    async def _open(self) -> None:
        """Everything that needs to know the models and the groups; then requests are taken."""
        large = self.answers.large_records
        for one in (self._idempotency, self._store, self._chat_index, self._conversations, large):
            await one.bucket.ensure()
        for bucket in self.heirs.buckets:
            await bucket.ensure()
        await self.answers.owners.start()
        await self._tokenizers.start()
        await self.limiter.start()
        self._opened = True
        self._loops += (
            self._spawn(self.answers.run(), "answers"),
            self._spawn(self.answers.owners.run(), "owners"),
            self._spawn(self.answers.owners.watch(), "claims"),
            self._spawn(self.heirs.run(), "unfinished"),
            self._spawn(self.heirs.watch(), "heirs"),
            self._spawn(self.limiter.run(), "in use"),
            self._spawn(self.limiter.windows.run(), "limits"),
        )
        await self._files.start()
        self._spawn(self._files.watch(), "files of tenants")
        self._spawn(self._files.run(), "files")
        for jobs in self._jobs:
            self._loops += [self._spawn(work, name) for work, name in await jobs.start()]
        self._backend.open(self._parts)

    async def stop(self) -> None:
        """No new connections come by now. What they brought is answered and streams may end within their time, then
        everything else does."""
        if self._opened:
            for jobs in reversed(self._jobs):
                await jobs.stop()
            await self._end_streams()
        await cancel_all(self._loops)
        if self._opened:
            await self.answers.stop()
            await self.heirs.write_list()
        await self.generations.stop()
        await self._grammars.stop()
        await self._tokenizers.stop()
        if self._opened:
            await self.limiter.windows.stop()

    async def _end_streams(self) -> None:
        if not await self._backend.idle(self._settings.drain_timeout):
            self.answers.end_readers(shutting_down())
            await self._backend.idle(ERROR_FLUSH_TIMEOUT_S)
        self._backend.close()
