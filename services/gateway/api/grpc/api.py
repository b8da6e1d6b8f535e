"""The gRPC API of a gateway, put together: who calls, and what is logged and counted of its calls."""

import ssl
import time
from collections.abc import Callable, Mapping

import structlog
from google.rpc.code_pb2 import Code

from services.gateway.api.backend import GatewayBackend
from services.gateway.api.grpc.call import GrpcCall
from services.gateway.api.grpc.health import SERVICE as HEALTH
from services.gateway.api.grpc.health import HealthService, ReflectionService
from services.gateway.api.grpc.inference import SERVICE, Answer, Inference
from services.gateway.api.grpc.server import GrpcServer, ServerOptions
from services.gateway.api.grpc.status import code_of
from services.gateway.core.errors import ClientGone, log_failure, status_of
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.server.connections import ConnectionLimiter
from shared.errors import InvalidRequest
from shared.service.endpoints import Health
from shared.service.listener import bind

log = structlog.get_logger(__name__)


def make_server(
    backend: GatewayBackend,
    health: Callable[[], Health],
    port: int,
    tls: ssl.SSLContext | None = None,
    door: ConnectionLimiter | None = None,
    calls: Mapping[str, Answer] | None = None,
) -> GrpcServer:
    """A server on `port`, not started yet; `calls`: of kinds of jobs. Raises `PortInUse`, `ConfigurationError`."""
    settings = backend.settings
    methods = {
        **Inference(backend, calls or {}).methods(),
        **HealthService(health, [SERVICE]).methods(),
        **ReflectionService([SERVICE, HEALTH]).methods(),
    }
    options = ServerOptions(
        message_limit=settings.body_limit,
        message_timeout=settings.body_timeout,
        keepalive=settings.grpc_keepalive,
        keepalive_timeout=settings.grpc_keepalive / 3,
    )
    sock = bind(settings.host, port, option="--grpc-port", shared=settings.share_port)

    def authorize(call: GrpcCall) -> None:
        scheme, _, token = (call.metadata("authorization") or "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else call.metadata("x-api-key")
        call.principal = backend.authenticator.authenticate(given)

    def on_done(call: GrpcCall) -> None:
        account(call, call.headers.path if call.headers.path in methods else "other", backend.metrics)

    return GrpcServer(sock, methods, options, on_done, authorize, tls, door)


def account(call: GrpcCall, route: str, metrics: GatewayMetrics) -> None:
    """Logs and counts a call that has ended under its path, beside the REST API's requests."""
    error = call.error
    seconds = time.perf_counter() - call.began
    status = 200 if error is None else status_of(error)
    structlog.contextvars.bind_contextvars(request_id=call.request_id)  # also where it never began
    if isinstance(error, Exception) and not isinstance(error, (ClientGone, InvalidRequest)):
        log_failure(error)
    metrics.answered(route, call.model, status, seconds, error)
    log.info(
        "request",
        method="gRPC",
        path=call.headers.path[:256],
        status=Code.Name(0 if error is None else code_of(error)),
        model=call.model,
        milliseconds=round(seconds * 1000, 1),
    )
