"""What the gateway works with behind its routes: made, started and stopped in this order.

groups, models, keys ──known──▶ generations, answers, heirs ──▶ intake ──▶ requests are taken ──▶ files, batches
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from services.gateway.auth.watch import KeyWatch
from services.gateway.backend import Backend, shutting_down
from services.gateway.catalog import Catalog
from services.gateway.console.cluster import Cluster
from services.gateway.jobs import FilesAndBatches
from services.gateway.life.answers import Answers
from services.gateway.life.generations import Generations
from services.gateway.life.heirs import Heirs
from services.gateway.life.idempotency import IdempotencyKeys
from services.gateway.life.keeper import Keeper
from services.gateway.limits.limiter import Limiter
from services.gateway.metrics import GatewayMetrics
from services.gateway.readers.reading import Reading
from services.gateway.requests.build import Parts
from services.gateway.requests.intake import Intake
from services.gateway.requests.structured import Grammars
from services.gateway.responses.history import History
from services.gateway.responses.intake import ResponseIntake
from services.gateway.responses.kept import ResponseShelf
from services.gateway.responses.lookup import ResponseLookup
from services.gateway.responses.store import ResponseStore
from services.gateway.settings import GatewaySettings
from services.gateway.stored_chats.chats import StoredChats
from services.gateway.stored_chats.index import ChatIndex, ChatShelf
from services.gateway.text.tokenizer_store import TokenizerStore
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
