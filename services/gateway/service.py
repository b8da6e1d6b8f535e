"""The gateway as a service: what it starts, what it stops, and in which order."""

import asyncio
from typing import Any, ClassVar

from services.gateway.answers import Answers
from services.gateway.app import GatewayApp
from services.gateway.auth.authenticator import Authenticator
from services.gateway.auth.watch import KeyWatch
from services.gateway.backend import Backend, shutting_down
from services.gateway.build import Parts
from services.gateway.catalog import Catalog
from services.gateway.generations import Generations
from services.gateway.heirs import Heirs
from services.gateway.idempotency import IdempotencyKeys
from services.gateway.intake import Intake
from services.gateway.limits.limiter import Limiter
from services.gateway.metrics import GatewayMetrics
from services.gateway.reading import Reading
from services.gateway.responses.history import History
from services.gateway.responses.intake import ResponseIntake
from services.gateway.responses.keeper import ResponseKeeper
from services.gateway.responses.lookup import ResponseLookup
from services.gateway.responses.store import ResponseStore
from services.gateway.settings import GatewaySettings
from services.gateway.structured import Grammars
from services.gateway.tokenizer_store import TokenizerStore
from shared.errors import BrokerUnavailable, ConfigurationError
from shared.lifecycle import Service
from shared.messages import ServiceName
from shared.telemetry import OpsApp
from shared.tls import Certificates, server_context

LAST_WORDS = 2.0
"""Seconds that streams get to write their error when the time to drain is over."""


class GatewayService(Service):
    """Serves the API until it is told to stop; then lets running streams end."""

    name: ClassVar[ServiceName] = "gateway"
    changes_streams: ClassVar[bool] = True
    settings: GatewaySettings

    def __init__(self, settings: GatewaySettings) -> None:
        super().__init__(settings)
        self.settings = settings
        self._metrics = GatewayMetrics(self.registry)
        self._authenticator = Authenticator(required=settings.require_key)
        self._backend = Backend(self._authenticator)
        self._keys: KeyWatch | None = None
        self._limiter: Limiter | None = None
        self._certificates: Certificates | None = None
        self._generations: Generations | None = None
        self._answers: Answers | None = None
        self._heirs: Heirs | None = None
        self._catalog: Catalog | None = None
        self._grammars = Grammars()

    def listen_port(self) -> int:
        return self.settings.port

    def make_app(self) -> Any:
        ops = OpsApp(self.health, self.registry)
        return GatewayApp(self._backend, ops, self.settings, self._metrics)

    def server_options(self) -> dict[str, Any]:
        return {
            "http": "httptools",
            "ws": "websockets-sansio",
            "ws_max_size": self.settings.body_limit,
            "ws_per_message_deflate": False,  # small messages: time is dearer than bytes
            "timeout_keep_alive": 75,
            "server_header": False,
            "proxy_headers": False,  # nobody asks for the client's address
            **self._tls_options(),
        }

    def _tls_options(self) -> dict[str, Any]:
        """Raises `ConfigurationError`."""
        settings = self.settings
        if not settings.tls_certificate:
            if settings.tls_key or settings.tls_client_ca:
                raise ConfigurationError(
                    "RYZANSTEIN_TLS_KEY and RYZANSTEIN_TLS_CLIENT_CA are of no use without "
                    "RYZANSTEIN_TLS_CERTIFICATE; set that too."
                )
            return {}
        context = server_context(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
        self._certificates = Certificates(context, settings.tls_certificate, settings.tls_key)
        return {"ssl_context_factory": lambda config, default: context}

    async def start(self) -> None:
        generations = Generations(self.bus, self.instance, self.settings, self._metrics)
        tokenizers = TokenizerStore(self.bus)
        catalog = Catalog(
            self.bus,
            on_card=tokenizers.prefetch,
            on_lost=generations.on_group_lost,
            on_alive=generations.on_group_alive,
        )
        self._generations, self._catalog = generations, catalog
        api_keys = self._keys = KeyWatch(self.bus, self._authenticator)
        await generations.start(catalog)
        self.spawn(api_keys.run(), "keys")
        if self._certificates is not None:
            self.spawn(self._certificates.run(self.settings.tls_check_interval), "certificates")
        self.spawn(catalog.watch_models(), "models")
        self.spawn(catalog.watch_groups(), "groups")
        self.spawn(generations.tokens.run(), "journal")
        self.spawn(generations.run(), "timeouts")
        self.spawn(generations.suspects.run(), "suspects")
        try:
            async with asyncio.timeout(self.settings.nats_connect_timeout):
                await catalog.wait()
                await api_keys.wait()
        except TimeoutError:
            raise BrokerUnavailable(
                "NATS answers, but its buckets `models`, `groups` and `keys` cannot be read; is JetStream enabled?"
            ) from None
        await self._open(generations, catalog, tokenizers)

    async def _open(self, generations: Generations, catalog: Catalog, tokenizers: TokenizerStore) -> None:
        """Everything that needs to know the models and the groups; then requests are taken."""
        answers = Answers(self.bus, self.instance, self.settings, self._metrics, generations)
        keys = IdempotencyKeys(self.bus, self.settings.idempotency_ttl)
        reading = Reading(answers, catalog, tokenizers, self._metrics)
        answers.watch_silently, answers.free_key = reading.watch, keys.free
        store = ResponseStore(self.bus, self.settings.response_ttl, self.settings.response_max_bytes)
        keeper = ResponseKeeper(store, answers, reading)
        lookup = ResponseLookup(store, keeper, answers, reading, catalog, tokenizers)
        answers.keep, reading.is_deleted = keeper.keep, lookup.is_deleted
        heirs = Heirs(self.bus, self.instance, answers, answers.owners, self.settings.journal_max_age)
        heirs.keep_of_lost = keeper.keep_of_lost
        self._answers, self._heirs = answers, heirs
        await keys.start()
        await store.start()
        await answers.owners.start()
        await heirs.start()
        self.spawn(answers.run(), "answers")
        self.spawn(answers.owners.run(), "owners")
        self.spawn(answers.owners.watch(), "claims")
        self.spawn(heirs.run(), "unfinished")
        self.spawn(heirs.watch(), "heirs")
        parts = Parts(self.settings, answers, self._metrics)
        limiter = self._limiter = Limiter(self.bus, self.instance, self.settings)
        await limiter.start()
        self.spawn(limiter.run(), "in use")
        self.spawn(limiter.windows.run(), "limits")
        intake = Intake(
            parts, catalog, tokenizers, keys, reading, self._grammars, self._authenticator, limiter
        )
        intake.responses = ResponseIntake(intake, History(lookup), self.settings, answers.writer)
        self._backend.open(intake, reading, catalog, lookup)

    async def stop(self) -> None:
        """In this order: not ready (said before), no new connections, no new requests, streams at their end."""
        if self._generations is not None:
            await asyncio.sleep(self.settings.drain_delay)
        self.stop_accepting()
        self._backend.drain()
        if self._generations is None or self._catalog is None:
            return
        if not await self._backend.idle(self.settings.drain_timeout):
            if self._answers is not None:
                self._answers.end_readers(shutting_down())
            await self._backend.idle(LAST_WORDS)
        self._catalog.stop()
        if self._keys is not None:
            self._keys.stop()
        if self._answers is not None:
            await self._answers.stop()
        if self._heirs is not None:
            self._heirs.stop()
            await self._heirs.write_list()
        await self._generations.stop()
        await self._grammars.stop()
        if self._limiter is not None:
            await self._limiter.stop()
