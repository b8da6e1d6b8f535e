"""What the routes work with: there once the service has started, closed to new work when it stops.

starting ──open──▶ serving ──drain──▶ draining ──close──▶ closed
refuses            takes              sessions begin      refuses
everything         everything         nothing new         everything
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from itertools import groupby
from typing import Any, TypeVar, cast

import msgspec
from starlette.routing import BaseRoute

from services.gateway.api.cluster import Cluster
from services.gateway.api.management.adapters import AdapterManagement
from services.gateway.api.management.keys import KeyManagement
from services.gateway.api.management.models import Management
from services.gateway.api.openapi.operation import ApiRoute, Operation
from services.gateway.auth.authenticator import Authenticator, Principal
from services.gateway.core.asgi import read_body, send_json
from services.gateway.core.catalog import Catalog
from services.gateway.core.errors import RouteError
from services.gateway.core.large_requests import LARGE_REQUEST
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.files.files import Files
from services.gateway.files.uploads import Uploads
from services.gateway.intake.decoding import decode, read_query
from services.gateway.intake.intake import Intake
from services.gateway.persistence.budget import HistoryBudget
from services.gateway.persistence.chats import StoredChats
from services.gateway.persistence.conversations import Conversations
from services.gateway.persistence.responses import ResponseLookup
from services.gateway.streams.reading import Reading
from shared.errors import Unavailable
from shared.service.endpoints import Receive, Scope, Send

BodyT = TypeVar("BodyT")
QueryT = TypeVar("QueryT", bound=msgspec.Struct)
ServiceT = TypeVar("ServiceT")
SMALL_BODY = 64 << 10  # bytes of a body that names or describes something
_decoder_of: Callable[[Any], msgspec.json.Decoder[Any]] = cache(msgspec.json.Decoder)


def shutting_down() -> Unavailable:
    """What requests are told while the gateway stops."""
    return Unavailable(
        "The gateway is shutting down; retry, or resume a stream at another gateway by its last event id.",
        retry_after=1,
    )


class GatewayServices(msgspec.Struct, frozen=True):
    """What is there once the gateway has started."""

    intake: Intake
    reading: Reading
    catalog: Catalog
    responses: ResponseLookup
    stored_chats: StoredChats
    conversations: Conversations
    files: Files
    uploads: Uploads
    # The services behind the kinds of jobs that this gateway runs, by their class.
    jobs: Mapping[type, object]
    cluster: Cluster
    management: Management
    adapters: AdapterManagement
    keys: KeyManagement

    def job(self, service: type[ServiceT]) -> ServiceT:
        """The one of that class, for routes of its kind."""
        return cast(ServiceT, self.jobs[service])


class _Active:
    """Counts what is being worked on: a context manager, the same one around everything, for thousands wait in it."""

    __slots__ = ("count", "idle")

    def __init__(self) -> None:
        self.count = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def __enter__(self) -> None:
        self.count += 1
        self.idle.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self.idle.set()


class GatewayBackend:
    """Opened by the service, asked by the routes, which are built before NATS is connected. What is refused is refused
    here: `parts` and `started` raise `Unavailable` before it is open, and `parts` once it is closed."""

    def __init__(self, authenticator: Authenticator, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self.authenticator = authenticator
        self.settings = settings
        self.metrics = metrics
        self._parts: GatewayServices | None = None
        self._draining = self._closed = False
        self._active = _Active()

    def open(self, parts: GatewayServices) -> None:
        """From now on requests are taken."""
        self._parts = parts

    def drain(self) -> None:
        """From now on sessions, which outlast their requests, begin nothing new. What came over a connection that
        ends with its answer is served: it was sent before its client could know."""
        self._draining = True

    def close(self) -> None:
        """From now on everything is refused."""
        self._closed = True

    def check_draining(self) -> None:
        """For a session that is about to begin something. Raises `Unavailable`."""
        if self._draining:
            raise shutting_down()

    @property
    def parts(self) -> GatewayServices:
        """For a request."""
        if self._closed:
            raise shutting_down()
        return self.started

    @property
    def started(self) -> GatewayServices:
        """To the gateway's end: what is there may be asked for as long as anybody listens."""
        if self._parts is None:
            raise Unavailable("The gateway is starting; try again in a moment.", retry_after=1)
        return self._parts

    @property
    def active_now(self) -> int:
        """Requests, and generations on WebSockets, that are being worked on."""
        return self._active.count

    def active(self) -> AbstractContextManager[None]:
        """Around the work for one request."""
        return self._active

    async def idle(self, within: float) -> bool:
        """Waits until no request is being worked on; False when that takes longer than `within` seconds."""
        try:
            await asyncio.wait_for(self._active.idle.wait(), within)
        except TimeoutError:
            return False
        return True


class RequestContext:
    """One request to a route."""

    def __init__(self, backend: GatewayBackend, scope: Scope, receive: Receive, send: Send) -> None:
        self.backend = backend
        self.settings = backend.settings
        self.scope, self.receive, self.send = scope, receive, send
        self.request_id: str = scope["state"]["request_id"]
        self.principal: Principal = scope["state"]["principal"]
        self.tenant = self.principal.tenant
        self.answer_headers: dict[str, str] = scope["state"]["answer_headers"]

    @property
    def parts(self) -> GatewayServices:
        """Raises `Unavailable`."""
        return self.backend.parts

    def named(self, name: str) -> str:
        """What its path names."""
        return str(self.scope["path_params"][name])

    def query(self, kind: type[QueryT]) -> QueryT:
        """Its query. Raises `InvalidParameter`."""
        return read_query(self.scope["query_string"], kind)

    async def received(self, limit: int) -> bytes:
        """Its body. Raises as `read_body`."""
        return await read_body(self.scope, self.receive, limit, self.settings.body_timeout)

    async def body(self, limit: int) -> bytes:
        """Its body, to be decoded at once: a large one in its turn. Raises as `read_body`, `QueueFull`."""
        body = await self.received(limit)
        if len(body) > LARGE_REQUEST:
            await self.parts.intake.large.turn(self.tenant, len(body))
        return body

    async def decoded(self, kind: type[BodyT], limit: int = SMALL_BODY) -> BodyT:
        """Its body as `kind`. Raises as `body`, and `InvalidParameter`."""
        decoder: msgspec.json.Decoder[BodyT] = _decoder_of(kind)
        return decode(await self.body(limit), decoder)

    async def counted(self) -> Intake:
        """The intake, of which it asks for something that generates nothing. Raises `RateLimited`."""
        await self.parts.intake.count(self.principal, self.answer_headers)
        return self.parts.intake

    def history_budget(self) -> HistoryBudget:
        """For what it reads of what is stored; held until it leaves the context."""
        return self.parts.intake.processor.stored.budget(self.tenant)

    def check_manages_models(self) -> None:
        """For what changes which models or adapters are served. Raises `RouteError`."""
        if not self.settings.manage_models:
            raise RouteError(
                "Managing models over the API is off (RYZANSTEIN_MANAGE_MODELS); use `ryzanstein models`.",
                status=403,
                reason="model_management_off",
            )
        if not self.principal.manages_models:
            raise RouteError(
                "This API key cannot manage models; use one made with `ryzanstein keys create --manage-models`.",
                status=403,
                reason="insufficient_permissions",
            )

    def check_views_keys(self) -> None:
        """Raises `RouteError`."""
        if not self.principal.views_keys:
            raise RouteError(
                "This API key cannot list keys; use one made with `ryzanstein keys create --view-keys`.",
                status=403,
                reason="insufficient_permissions",
            )

    def of_model(self, model: str) -> None:
        """For logs and metrics."""
        self.scope["state"]["model"] = model


# What it returns is sent as JSON, bytes as they are; None: it has answered by itself.
Handler = Callable[[RequestContext], Awaitable[object]]
Handled = tuple[Operation, Handler]
RouteMaker = Callable[[GatewayBackend], Iterable[BaseRoute]]


def routes_of(*handled: Handled) -> RouteMaker:
    """Makes a route of each path, in this order; operations of one path stand together."""
    return lambda backend: [route(backend, *group) for _, group in groupby(handled, lambda one: one[0].path)]


def route(backend: GatewayBackend, *handled: Handled, direct: Any = None) -> ApiRoute:
    """The route of one path, with a handler for each of its operations. `direct`: as of `ApiRoute`."""
    handlers = {operation.method: handler for operation, handler in handled}

    class Answer:  # an instance: of a function Starlette would make an endpoint of its own
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            handler = handlers.get(scope["method"]) or handlers["GET"]  # HEAD
            answer = await handler(RequestContext(backend, scope, receive, send))
            if answer is not None:
                await send_json(send, 200, answer)

    return ApiRoute(Answer(), *(operation for operation, _ in handled), direct=direct)
