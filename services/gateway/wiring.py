"""What the gateway works with behind its routes: made, started and stopped in this order.

groups, models, keys ──known──▶ generations, answers, heirs ──▶ intake ──▶ requests are taken ──▶ files, batches
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from services.gateway.api.backend import Backend, shutting_down
from services.gateway.api.cluster import Cluster
from services.gateway.auth.authenticator import Authenticator, KeyWatch
from services.gateway.batches.dependencies import BatchMetrics, BatchParts, line_endpoints
from services.gateway.batches.files import Files
from services.gateway.batches.jobs import Jobs
from services.gateway.batches.queue import BatchQueue
from services.gateway.batches.results import Results
from services.gateway.batches.runners import Runners
from services.gateway.batches.service import Batches
from services.gateway.core.catalog import Catalog
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.intake import Intake
from services.gateway.intake.record import Parts
from services.gateway.intake.responses.intake import History, ResponseIntake
from services.gateway.intake.structured_output import Grammars
from services.gateway.lifecycle.answers import Answers
from services.gateway.lifecycle.failover import Heirs
from services.gateway.lifecycle.generations import Generations
from services.gateway.lifecycle.idempotency import IdempotencyKeys
from services.gateway.persistence.chats import ChatIndex, ChatShelf, StoredChats
from services.gateway.persistence.keeper import Keeper, ResponseShelf
from services.gateway.persistence.responses import ResponseLookup
from services.gateway.persistence.store import ResponseStore
from services.gateway.ratelimit.limiter import Limiter
from services.gateway.streams.reading import Reading
from services.gateway.tokenizer.store import TokenizerStore
from shared.errors import BrokerUnavailable
from shared.nats.bus import Bus
from shared.nats.tenants import Quota

Spawn = Callable[[Coroutine[Any, Any, Any], str], object]

LAST_WORDS = 2.0
"""Seconds that streams get to write their error when the time to drain is over."""


class Work:
    """Built at once, without I/O; `backend` is opened by `start`, when requests can be taken."""

    def __init__(
        self,
        bus: Bus,
        instance: str,
        settings: GatewaySettings,
        registry: CollectorRegistry,
        metrics: GatewayMetrics,
        backend: Backend,
        spawn: Spawn,
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._spawn = spawn
        self._opened = False
        self.generations = Generations(bus, instance, settings, metrics)
        self._tokenizers = tokenizers = TokenizerStore(
            bus, special_tokens_in_messages=settings.special_tokens_in_messages
        )
        self.catalog = Catalog(
            bus,
            on_card=tokenizers.prefetch,
            on_lost=self.generations.on_group_lost,
            on_alive=self.generations.on_group_alive,
        )
        self._api_keys = KeyWatch(bus, backend.authenticator)
        self.answers = Answers(bus, instance, settings, metrics, self.generations)
        self._idempotency = IdempotencyKeys(bus, settings.idempotency_ttl)
        self._reading = Reading(self.answers, self.catalog, tokenizers, metrics)
        self.heirs = Heirs(bus, instance, self.answers, self.answers.owners, settings.journal_max_age)
        quota = Quota(settings.tenant_response_bytes, settings.tenant_responses)
        self._store = ResponseStore(bus, settings.response_ttl, settings.response_max_bytes, quota)
        self._chat_index = ChatIndex(bus, settings.response_ttl, quota)
        self._lookup, self._stored_chats = self._kept(tokenizers)
        self._cluster = Cluster(bus, self.catalog, self.answers)
        self.limiter = Limiter(bus, instance, settings)
        self._grammars = Grammars()
        self._intake = Intake(
            Parts(settings, self.answers, metrics),
            self.catalog,
            tokenizers,
            self._idempotency,
            self._reading,
            self._grammars,
            backend.authenticator,
            self.limiter,
        )
        self._intake.responses = ResponseIntake(
            self._intake, History(self._lookup), settings, self.answers.writer
        )
        self._jobs = FilesAndBatches(
            bus, instance, settings, registry, self._intake, self.catalog, backend.authenticator
        )

    def _kept(self, tokenizers: TokenizerStore) -> tuple[ResponseLookup, StoredChats]:
        """Where answers are found that outlive the journal, and who keeps them; the others are told."""
        answers, reading, store = self.answers, self._reading, self._store
        keeper = Keeper(answers, ResponseShelf(store, reading), ChatShelf(self._chat_index, store, reading))
        lookup = ResponseLookup(store, keeper, answers, reading, self.catalog, tokenizers)
        answers.watch_silently, answers.free_key = reading.watch, self._idempotency.free
        answers.keep, reading.is_deleted = keeper.keep, lookup.is_deleted
        self.heirs.keep_of_lost = keeper.keep_of_lost
        return lookup, StoredChats(self._chat_index, store, keeper, answers)

    async def start(self) -> None:
        """Raises `BrokerUnavailable`, `ConfigurationError`."""
        await self.generations.start(self.catalog)
        self._spawn(self._api_keys.run(), "keys")
        self._spawn(self.catalog.watch_models(), "models")
        self._spawn(self.catalog.watch_groups(), "groups")
        self._spawn(self.generations.tokens.run(), "journal")
        self._spawn(self.generations.run(), "timeouts")
        self._spawn(self.generations.suspects.run(), "suspects")
        try:
            async with asyncio.timeout(self._settings.nats_connect_timeout):
                await self.catalog.wait()
                await self._api_keys.wait()
        except TimeoutError:
            raise BrokerUnavailable(
                "NATS answers, but its buckets `models`, `groups` and `keys` cannot be read; is JetStream enabled?"
            ) from None
        await self._open()

    async def _open(self) -> None:
        """Everything that needs to know the models and the groups; then requests are taken."""
        await self._idempotency.start()
        await self._store.start()
        await self._chat_index.start()
        await self.answers.large_records.start()
        await self.answers.owners.start()
        await self.heirs.start()
        await self.limiter.start()
        self._opened = True
        self._spawn(self.answers.run(), "answers")
        self._spawn(self.answers.owners.run(), "owners")
        self._spawn(self.answers.owners.watch(), "claims")
        self._spawn(self.heirs.run(), "unfinished")
        self._spawn(self.heirs.watch(), "heirs")
        self._spawn(self.limiter.run(), "in use")
        self._spawn(self.limiter.windows.run(), "limits")
        self._backend.cluster = self._cluster
        self._backend.open(self._intake, self._reading, self.catalog, self._lookup, self._stored_chats)
        await self._jobs.start(self._backend, self._spawn)

    async def stop(self) -> None:
        """No new connections come by now. What they brought is answered and streams may end within their time, then
        everything else does."""
        if self._opened:
            await self._jobs.stop()
            await self._end_streams()
        self.catalog.stop()
        self._api_keys.stop()
        if self._opened:
            await self.answers.stop()
            self.heirs.stop()
            await self.heirs.write_list()
        await self.generations.stop()
        await self._grammars.stop()
        await self._tokenizers.stop()
        if self._opened:
            await self.limiter.stop()

    async def _end_streams(self) -> None:
        if not await self._backend.idle(self._settings.drain_timeout):
            self.answers.end_readers(shutting_down())
            await self._backend.idle(LAST_WORDS)
        self._backend.close()


class FilesAndBatches:
    """Opened by `start`, once requests are taken."""

    def __init__(
        self,
        bus: Bus,
        instance: str,
        settings: GatewaySettings,
        registry: CollectorRegistry,
        intake: Intake,
        catalog: Catalog,
        authenticator: Authenticator,
    ) -> None:
        self._bus = bus
        self._files = Files(bus, settings)
        self._jobs = Jobs(bus, settings.tenant_batches)
        self._results = Results(bus, self._files.objects, settings.batch_window_limit)
        endpoints = line_endpoints(intake, catalog)
        self._batches = Batches(self._jobs, self._files, endpoints, settings)
        parts = BatchParts(
            self._files,
            self._results,
            endpoints,
            catalog,
            BatchMetrics(registry),
            settings,
            authenticator,
            instance,
        )
        self._runners = Runners(bus, self._jobs, parts)

    async def start(self, backend: Backend, spawn: Spawn) -> None:
        """Raises `BrokerUnavailable`, `ConfigurationError`."""
        await self._files.start()
        await self._jobs.start()
        await self._results.start()
        backend.open_jobs(self._files, self._batches)
        await BatchQueue(self._bus, self._batches, self._files).start()
        spawn(self._files.watch(), "files of tenants")
        spawn(self._files.run(), "files")
        spawn(self._runners.watch(), "batches")
        spawn(self._runners.run(), "batch runners")
        spawn(self._runners.sweep(), "batches that are forgotten")

    async def stop(self) -> None:
        """Leaves its batches to other gateways, what is done of them stored."""
        await self._runners.stop()
        await self._results.stop()
