"""The gateway as a service: what it starts, what it stops, and in which order."""

import asyncio
import functools
import ssl
from typing import TYPE_CHECKING, Any, ClassVar

import structlog
from starlette.middleware.cors import CORSMiddleware

from services.gateway.api.app import GatewayApp
from services.gateway.api.backend import GatewayBackend
from services.gateway.api.dialect import Dialect
from services.gateway.auth.authenticator import Authenticator
from services.gateway.auth.browsers import is_loopback, listed
from services.gateway.core.metrics import GatewayMetrics, vllm_aliases
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.registry import DIALECTS
from services.gateway.job_kinds import KINDS, JobKind
from services.gateway.server.connections import ConnectionLimiter, ConnectionLimits, allowed_by_files
from services.gateway.server.held import HeldWatch
from services.gateway.server.http1 import guarded_http
from services.gateway.server.websocket import GuardedWebSocket
from services.gateway.wiring import Container
from shared.config import with_sections
from shared.errors import ConfigurationError
from shared.messages import ServiceName
from shared.service.endpoints import OpsApp, Receive, Scope, Send
from shared.service.http_server import HttpServer
from shared.service.lifecycle import Service
from shared.service.listener import bind
from shared.tls import Certificates, server_context

if TYPE_CHECKING:
    from services.gateway.api.grpc.server import GrpcServer

log = structlog.get_logger(__name__)

# Headers of answers that pages of allowed origins may read.
EXPOSED_HEADERS = (
    "etag",
    "request-id",
    "x-request-id",
    "x-ryzanstein-exact",
    "x-ryzanstein-generation",
    "x-ryzanstein-progress",
    "x-ryzanstein-ignored-fields",
    "x-ryzanstein-warning",
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    *(f"anthropic-ratelimit-{of}-{what}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)


class GatewayService(Service):
    """Serves the API until it is told to stop; then lets running streams end."""

    name: ClassVar[ServiceName] = "gateway"
    changes_streams: ClassVar[bool] = True
    traces: ClassVar[bool] = True
    job_kinds: ClassVar[tuple[JobKind, ...]] = KINDS
    settings: GatewaySettings

    @classmethod
    def settings_type(cls) -> type[GatewaySettings]:
        """A gateway's settings, and those of its kinds of jobs."""
        return with_sections(GatewaySettings, [kind.settings for kind in cls.job_kinds])

    def __init__(self, settings: GatewaySettings) -> None:
        super().__init__(settings)
        self.settings = settings
        self._metrics = GatewayMetrics(self.registry)
        if settings.metrics_aliases:
            self.registry.register(vllm_aliases(self._metrics))
        self._backend = GatewayBackend(Authenticator(required=settings.require_key), settings, self._metrics)
        self._certificates: Certificates | None = None
        self._grpc: GrpcServer | None = None
        self._work: Container | None = None

    @functools.cached_property
    def _door(self) -> ConnectionLimiter:
        """Made with the first server, for it takes as many files as the process may have."""
        limit = allowed_by_files(self.settings.max_connections)
        return ConnectionLimiter(limit, self.settings.head_timeout, self._metrics.connection_refused)

    @property
    def work(self) -> Container:
        """There once it has been started."""
        assert self._work is not None, "not started"
        return self._work

    async def run(self) -> None:
        """With the ops port, where it has one, from the first moment to the last."""
        ops = self._make_ops_server() if self.settings.share_port else None
        try:
            if ops is not None:
                await ops.start()
                log.info("ops_listening", address=ops.address)
            await super().run()
        finally:
            if ops is not None:
                await ops.stop()

    def listen_port(self) -> int:
        return self.settings.port

    def shares_port(self) -> bool:
        return self.settings.share_port

    def _make_ops_server(self) -> HttpServer:
        """Who asks the shared port does not know which gateway answers. Raises `PortInUse`,
        `ConfigurationError`."""
        ops = OpsApp(self.health, self.registry)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            """/metrics may need a key here too."""
            await (self._app if scope["path"] in ops.paths else ops)(scope, receive, send)

        sock = bind(self.settings.host, self.settings.ops_port, option="--ops-port")
        admission = self._door.admission("http")._replace(connections=self._door.ops)
        return HttpServer(app, sock, **self.server_options() | {"admission": admission, "ws": "none"})

    def make_app(self) -> Any:
        return self._app

    @functools.cached_property
    def _app(self) -> Any:
        ops = OpsApp(self.health, self.registry)
        jobs = Dialect("job kinds", [make for kind in self.job_kinds for make in kind.routes])
        app = GatewayApp(self._backend, ops, (*DIALECTS, jobs))
        origins = listed(self.settings.allowed_origins)
        if not origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )

    def server_options(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "http": guarded_http(ConnectionLimits(settings.head_timeout, settings.head_limit), self._door),
            "admission": self._door.admission("http"),
            "ws": GuardedWebSocket,
            "ws_max_size": self.settings.body_limit,
            "ws_per_message_deflate": False,  # small messages: time is dearer than bytes
            "timeout_keep_alive": 75,
            "server_header": False,
            "proxy_headers": False,  # nobody asks for the client's address
            **self._tls_options,
        }

    @functools.cached_property
    def _tls_options(self) -> dict[str, Any]:
        """Raises `ConfigurationError`."""
        settings = self.settings
        if not settings.tls_certificate:
            if settings.tls_key or settings.tls_client_ca:
                raise ConfigurationError(
                    "RYZANSTEIN_TLS_KEY and RYZANSTEIN_TLS_CLIENT_CA require RYZANSTEIN_TLS_CERTIFICATE; set that too."
                )
            return {}
        context = server_context(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
        self._certificates = Certificates(context, settings.tls_certificate, settings.tls_key)
        return {"ssl_context_factory": lambda config, default: context}

    async def start(self) -> None:
        held = HeldWatch(self._door, self.settings.owed_limit, self.settings.arriving_limit)
        self._metrics.watch_connections(self._door.count, held.total)
        self.spawn(held.run(), "bytes held")
        self._make_grpc()
        if not self.shares_port():
            await self._serve_grpc()
        if self._certificates is not None:
            from services.gateway.server.certificates import CertificateExpiry  # its library takes a moment

            expiry = CertificateExpiry(self.registry, self.settings.tls_certificate)
            watch = self._certificates.run(self.settings.tls_check_interval, expiry.refresh)
            self.spawn(watch, "certificates")
        endpoints = [one for dialect in DIALECTS for one in dialect.endpoints]
        self._work = Container(
            self.bus,
            self.instance,
            self.settings,
            self.registry,
            self._metrics,
            self._backend,
            self.job_kinds,
            self.spawn,
            endpoints,
        )
        await self._work.start()
        if self.shares_port():
            await self._serve_grpc()
        self.spawn(self._tell_models(), "models told")
        self._warn_if_open()

    def models(self) -> list[str]:
        return [] if self._work is None else [card.model for card in self._work.catalog.listed()]

    async def _tell_models(self) -> None:
        """Other models are told at once: who starts a stack waits until its own is listed."""
        changed, told = self.work.catalog.changed, list[str]()
        while True:
            await changed.wait()
            changed.clear()
            if (models := self.models()) != told:
                told = models
                await self.beat_if_heard()

    def _warn_if_open(self) -> None:
        settings = self.settings
        if self._backend.authenticator.open and not is_loopback(settings.host) and not settings.tls_client_ca:
            log.warning(
                "open_to_the_network",
                host=settings.host,
                advice="Anyone who reaches this address can use it: create an API key (`ryzanstein keys create`), set "
                "RYZANSTEIN_REQUIRE_KEY=true, or listen on 127.0.0.1.",
            )

    async def _serve_grpc(self) -> None:
        """Calls are refused until the backend is open."""
        if self._grpc is not None:
            await self._grpc.start()
            self.grpc_address = self._grpc.address
            log.info("grpc_listening", address=self._grpc.address)

    def _make_grpc(self) -> None:
        """Raises `PortInUse`, `ConfigurationError`."""
        settings = self.settings
        if settings.grpc_port is None:
            return
        from services.gateway.api.grpc.api import make_server  # its libraries take a moment, and memory

        tls: ssl.SSLContext | None = None
        if settings.tls_certificate:
            tls = server_context(settings.tls_certificate, settings.tls_key, settings.tls_client_ca, protocol="h2")
            pair = Certificates(tls, settings.tls_certificate, settings.tls_key)
            self.spawn(pair.run(settings.tls_check_interval), "grpc certificates")
        calls = {name: call for kind in self.job_kinds for name, call in kind.calls(self._backend).items()}
        self._grpc = make_server(self._backend, self.health, settings.grpc_port, tls, self._door, calls)

    async def stop(self) -> None:
        """In this order: not ready (said before), no new connections, no new requests, streams at their end."""
        if self._work is not None:
            await asyncio.sleep(self.settings.drain_delay)
        if self._grpc is not None:
            await self._grpc.stop_accepting()
        await self.stop_accepting()
        self._backend.drain()
        try:
            if self._work is not None:
                await self._work.stop()
        finally:
            if self._grpc is not None:
                await self._grpc.stop()
