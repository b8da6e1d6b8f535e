"""The ASGI application: routes, and around them request ids, errors, logs and metrics."""

import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Router, WebSocketRoute

from services.gateway.api.backend import GatewayBackend
from services.gateway.api.console.pages import PAGES
from services.gateway.api.dialect import Dialect, Dialects, dialects_of
from services.gateway.api.openapi.document import document
from services.gateway.api.openapi.operation import TEMPLATE, ApiRoute
from services.gateway.api.operations import METRICS, OPEN_PATHS, own_routes
from services.gateway.auth.authenticator import ANONYMOUS, PUBLIC_PATHS, Principal, token_of
from services.gateway.auth.browsers import Browsers, listed
from services.gateway.core.asgi import request_headers, send_json
from services.gateway.core.errors import CLIENT_GONE, ClientGone, RouteError, headers_of, log_failure, status_of
from services.gateway.intake.headers import check_request_id
from services.gateway.tracing.requests import begin_request, end_request
from shared import tracing
from shared.errors import InvalidRequest
from shared.service import logs
from shared.service.endpoints import OpsApp, Receive, Scope, Send

log = structlog.get_logger(__name__)


class GatewayApp:
    """Every answer carries an x-request-id; every error is in the shape of the API that was asked."""

    def __init__(self, backend: GatewayBackend, ops: OpsApp, dialects: Sequence[Dialect]) -> None:
        """`dialects`: what it speaks, in the order of its routes."""
        settings = self._settings = backend.settings
        self._backend = backend
        self._ops = ops
        self._browsers = Browsers(settings.host, listed(settings.allowed_hosts), listed(settings.allowed_origins))
        self.dialects = Dialects(dialects)
        spoken = [route for one in dialects for make in one.routes for route in make(backend)]
        # The way of nearly every request, past the router's search.
        self._direct: dict[tuple[str, str], Any] = {
            ("POST", one.path): one.direct for one in spoken if isinstance(one, ApiRoute) and one.direct
        }
        self._direct_paths = frozenset(path for _, path in self._direct)
        own = own_routes(backend, ops, lambda: document(self.routes, settings))
        self._router = Router(routes=[*spoken, *own], redirect_slashes=False, default=_not_found)

    @property
    def routes(self) -> list[BaseRoute]:
        return self._router.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        if scope["path"].endswith("/") and (path := scope["path"].rstrip("/")) and path not in PAGES:
            scope["path"] = path  # pages keep theirs: their links are relative
        scope["app"] = self  # lets the router raise where it would else answer in plain text
        public = scope["path"] in PUBLIC_PATHS and not (
            self._settings.metrics_need_key and scope["path"] == METRICS.path
        )
        if public and scope["type"] == "http":
            await self._ops(scope, receive, _Exchange(scope, send).send)
            return
        exchange = _Exchange(scope, send)
        # Counted from here on: what a connection brought before it was closed to more is answered.
        with self._around(scope, exchange):
            try:
                exchange.take_request_id()
                self._browsers.check(scope, everybody=self._backend.authenticator.open)
                scope["state"]["principal"] = self._principal(scope)
                app = self._direct.get((scope.get("method", ""), scope["path"]), self._router)
                await app(scope, receive, exchange.send)
            except Exception as error:
                await exchange.fail(error)
            finally:
                self._account(scope, exchange)

    def _around(self, scope: Scope, exchange: "_Exchange") -> AbstractContextManager[None]:
        """An exchange, which it counts and traces."""
        if scope["type"] != "http":
            return contextlib.nullcontext()
        return self._traced(scope, exchange) if tracing.on() else self._backend.active()

    @contextlib.contextmanager
    def _traced(self, scope: Scope, exchange: "_Exchange") -> Iterator[None]:
        with self._backend.active():
            span = begin_request(scope)
            try:
                with tracing.active(span):
                    yield
            finally:
                end_request(span, scope, exchange.status, self._route(scope))

    def _principal(self, scope: Scope) -> Principal:
        """Who asks. Anybody may load a page, which asks for the key with which it asks for everything else."""
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return ANONYMOUS
        return self._backend.authenticator.authenticate(token_of(scope))

    def _route(self, scope: Scope) -> str:
        """The route that a request took, for metrics: one of few."""
        if scope["path"] in self._direct_paths:
            return str(scope["path"])
        return str(scope.get(TEMPLATE, "other"))

    def _account(self, scope: Scope, exchange: "_Exchange") -> None:
        if scope["type"] != "http":
            return
        seconds = time.perf_counter() - exchange.began
        route, model = self._route(scope), scope["state"].get("model", "")
        self._backend.metrics.answered(route, model, exchange.status, seconds, exchange.error)
        if logs.threshold() <= logging.INFO:
            log.info(
                "request",
                method=scope["method"],
                path=scope["path"][:256],
                status=exchange.status,
                model=model,
                milliseconds=round(seconds * 1000, 1),
            )


class _Exchange:
    """One request and its answer."""

    __slots__ = ("_more_headers", "_scope", "_send", "began", "error", "request_id", "status")

    def __init__(self, scope: Scope, send: Send) -> None:
        self.began = time.perf_counter()
        self.status = 0
        self.error: Exception | None = None
        self._scope = scope
        self._send = send
        self.request_id = f"req-{secrets.token_hex(12)}"
        self._remember()

    def take_request_id(self) -> None:
        """The client's, where it sent one. Raises `InvalidParameter`."""
        given = request_headers(self._scope).get(b"x-request-id")
        if given is not None:
            self.request_id = check_request_id(given.decode("latin-1"))
            self._remember()

    def _remember(self) -> None:
        state = self._scope.setdefault("state", {})
        state["request_id"] = self.request_id
        self._more_headers = state.setdefault("answer_headers", {})
        structlog.contextvars.bind_contextvars(request_id=self.request_id)

    def send(self, message: Any) -> Awaitable[None]:
        if message["type"] in ("http.response.start", "websocket.accept"):
            self._begin(message)
        return self._send(message)

    def _begin(self, message: Any) -> None:
        self.status = message.get("status", 101)
        more = {"x-request-id": self.request_id, **self._more_headers}
        for paths, more_headers in self._scope["app"].dialects.headed:
            if self._scope["path"].startswith(paths):
                more |= more_headers(self._scope, self.request_id, more)
        headers = list(message.get("headers", ()))
        for name, value in more.items():
            headers.append((name.encode(), value.encode()))
        message["headers"] = headers

    async def fail(self, error: Exception) -> None:
        """Answers with `error`, if there was no answer yet."""
        self.error = error
        if isinstance(error, ClientGone):
            self.status = CLIENT_GONE
            return
        if isinstance(error, HTTPException):
            error = _route_error(self._scope, error)
        if not isinstance(error, InvalidRequest):
            log_failure(error)
        send = self.send
        if self._scope["type"] == "websocket":
            if self.status or "websocket.http.response" not in self._scope.get("extensions", {}):
                await self._send({"type": "websocket.close", "code": 1008, "reason": str(error)[:120]})
                return
            send = self._deny
        if not self.status:
            body = dialects_of(self._scope).of_request(self._scope).describe(error, self.request_id)
            await send_json(send, status_of(error), body, headers_of(error))
        else:
            self.status = status_of(error)  # a stream has told it: for logs and metrics alone

    async def _deny(self, message: Any) -> None:
        """Answers a WebSocket's handshake like a request (ASGI's extension `websocket.http.response`)."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-request-id", self.request_id.encode())]
        await self._send({**message, "type": f"websocket.{message['type']}"})


def _route_error(scope: Scope, error: HTTPException) -> RouteError:
    """What the router raised, in our words."""
    allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    return RouteError(
        f"Not allowed to {scope['method']} {scope['path'][:256]}; allowed: {allow or 'other methods'}.",
        status=error.status_code,
        reason="method_not_allowed",
        allow=allow,
    )


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    sockets = [route.path for route in scope["app"].routes if isinstance(route, WebSocketRoute)]
    if scope["type"] == "websocket":
        raise RouteError(f"WebSockets are at {' and '.join(sockets)}.", reason="unknown_url")
    if (why := dialects_of(scope).absent.get(scope["path"])) is not None:
        raise RouteError(f"{scope['path']} is not served here: {why}.", reason="unsupported_endpoint")
    hint = "see /openapi.json, or /docs in a browser, for what is here"
    if scope["path"] in sockets:
        hint = "it is a WebSocket"
    elif meant := _meant(scope):
        hint = f"it is at {meant}"
    raise RouteError(f"Unknown request URL: {scope['method']} {scope['path'][:256]}; {hint}.", reason="unknown_url")


def _meant(scope: Scope) -> str:
    """The path that a client asks for whose base URL lacks /v1, or has it twice; empty: there is none."""
    path = scope["path"]
    meant = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    known = any(getattr(route, "path", "") == meant for route in scope["app"].routes)
    return meant if known else ""
