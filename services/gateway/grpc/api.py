"""The gRPC API of a gateway, put together; and what is logged and counted of its calls."""

import ssl
import time
from collections.abc import Callable

import structlog
from google.rpc.code_pb2 import Code

from services.gateway.backend import Backend
from services.gateway.connections.places import Door
from services.gateway.errors import status_of
from services.gateway.grpc.auth import authorizer
from services.gateway.grpc.call import Call
from services.gateway.grpc.health import SERVICE as HEALTH
from services.gateway.grpc.health import HealthService
from services.gateway.grpc.inference import SERVICE, Inference
from services.gateway.grpc.reflection import ReflectionService
from services.gateway.grpc.server import GrpcServer, ServerOptions
from services.gateway.grpc.status import code_of
from services.gateway.metrics import GatewayMetrics
from services.gateway.readers.mailbox import ClientGone
from services.gateway.rest import log_failure
from services.gateway.settings import GatewaySettings
from shared.errors import InvalidRequest
from shared.service.endpoints import Health
from shared.service.listener import bind

log = structlog.get_logger(__name__)

CLIENT_GONE = 499
"""As in the logs and metrics of the REST API."""


def make_server(
    backend: Backend,
    settings: GatewaySettings,
    health: Callable[[], Health],
    metrics: GatewayMetrics,
    port: int,
    tls: ssl.SSLContext | None = None,
    door: Door | None = None,
) -> GrpcServer:
    """A server on `port`, not started yet. Raises `PortInUse`, `ConfigurationError`."""
    methods = {
        **Inference(backend, settings).methods(),
        **HealthService(health, [SERVICE]).methods(),
        **ReflectionService([SERVICE, HEALTH]).methods(),
    }
    options = ServerOptions(
        message_limit=settings.body_limit,
        message_timeout=settings.body_timeout,
        keepalive=settings.grpc_keepalive,
        keepalive_timeout=settings.grpc_keepalive / 3,
    )
    sock = bind(settings.host, port, option="--grpc-port")
    accounts = Accounts(metrics, frozenset(methods))
    return GrpcServer(sock, methods, options, accounts.on_done, authorizer(backend), tls, door)


class Accounts:
    """Every call is logged and counted under its path, beside the REST API's requests."""

    def __init__(self, metrics: GatewayMetrics, paths: frozenset[str]) -> None:
        self._metrics = metrics
        self._paths = paths

    def on_done(self, call: Call) -> None:
        """`call` has ended."""
        error = call.error
        seconds = time.perf_counter() - call.began
        gone = isinstance(error, ClientGone)
        status = 200 if error is None else CLIENT_GONE if gone else status_of(error)
        structlog.contextvars.bind_contextvars(request_id=call.request_id)  # also where it never began
        if isinstance(error, Exception) and not gone and not isinstance(error, InvalidRequest):
            log_failure(error)
        route = call.headers.path if call.headers.path in self._paths else "other"
        self._metrics.requests.labels(route, call.model, status).inc()
        self._metrics.duration.labels(route).observe(seconds)
        log.info(
            "request",
            method="gRPC",
            path=call.headers.path[:256],
            status=Code.Name(0 if error is None else 1 if gone else code_of(error)),
            model=call.model,
            milliseconds=round(seconds * 1000, 1),
        )
