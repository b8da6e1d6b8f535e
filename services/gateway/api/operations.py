"""What a gateway answers about itself: its health, its load, its cluster, its keys, its API's document, its pages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.routing import BaseRoute

from services.gateway.api.backend import GatewayBackend, RequestContext, routes_of
from services.gateway.api.cluster import ClusterState
from services.gateway.api.console.pages import PATHS, page_routes
from services.gateway.api.management.keys import ApiKeyList
from services.gateway.api.openapi.document import DocumentRoute
from services.gateway.api.openapi.operation import TEXT, ApiRoute, Operation
from services.gateway.core.pagination import PageQuery
from shared.process import VERSION
from shared.service.endpoints import Health, OpsApp

PING = "/ping"


class Version(msgspec.Struct, frozen=True):
    version: str


class Pong(msgspec.Struct, frozen=True):
    """Nothing: it is the status that counts."""


class Load(msgspec.Struct, frozen=True):
    # Requests that this gateway is answering, without the one that asks, and generations on WebSockets.
    server_load: int


class Document(msgspec.Struct):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]


_operation = partial(Operation, tag="Operations")
CLUSTER = _operation(
    "GET /v1/cluster",
    "retrieveCluster",
    "Rings, services, and what this gateway is generating.",
    "It shows no prompts or answers, and no id by which they could be read.",
    response=ClusterState,
)
KEYS = _operation(
    "GET /v1/keys",
    "listKeys",
    "Lists API keys, and how much of their limits is used.",
    "The newest first; no secrets. For keys made with `--view-keys`; others get 403 `insufficient_permissions`.",
    response=ApiKeyList,
    query=PageQuery,
    errors=(404,),
)
SERVER_VERSION = _operation("GET /version", "version", "The version of Ryzanstein, as in vLLM.", response=Version)
PINGS = tuple(
    _operation(f"{method} {PING}", name, "200 while the process lives.", response=Pong)
    for method, name in (("GET", "ping"), ("POST", "pingByPost"))
)
LOAD = _operation("GET /load", "load", "Requests that this gateway is answering.", response=Load)
HEALTH = _operation("GET /health", "health", "200 while the process lives.", response=Health, plain=True)
READY = _operation(
    "GET /ready",
    "ready",
    "200 when the gateway can work, else 503 with the reason.",
    response=Health,
    errors=(503,),
    plain=True,
)
METRICS = _operation(
    "GET /metrics", "metrics", "Prometheus metrics.", response_content={TEXT: {"type": "string"}}, plain=True
)
DOCUMENT = _operation("GET /openapi.json", "openapi", "This document.", response=Document)
OPS = (HEALTH, READY, METRICS)
# Files of the package, the description of the API, a sign of life: the same for everybody, and nothing of anybody.
OPEN_PATHS = frozenset((*PATHS, DOCUMENT.path, PING))


async def version(ask: RequestContext) -> Version:
    return Version(VERSION)


async def ping(ask: RequestContext) -> Pong:
    return Pong()


async def load(ask: RequestContext) -> Load:
    return Load(ask.backend.active_now - 1)


async def cluster(ask: RequestContext) -> ClusterState:
    """The cluster's state, as this gateway sees it."""
    ask.answer_headers["cache-control"] = "no-store"
    return await ask.backend.started.cluster.state(ask.tenant)


async def keys(ask: RequestContext) -> ApiKeyList:
    """Who has keys. Raises `RouteError`, `InvalidParameter`, `BrokerUnavailable`."""
    ask.check_views_keys()
    ask.answer_headers["cache-control"] = "no-store"
    return await ask.backend.started.keys.listed(ask.query(PageQuery))


_about_itself = routes_of(
    (SERVER_VERSION, version), *((one, ping) for one in PINGS), (LOAD, load), (CLUSTER, cluster), (KEYS, keys)
)


def own_routes(backend: GatewayBackend, ops: OpsApp, describe: Callable[[], dict[str, Any]]) -> list[BaseRoute]:
    """All of them. `describe` makes the document of the API."""
    return [
        *(ApiRoute(ops, item) for item in OPS),
        *_about_itself(backend),
        *page_routes(),
        ApiRoute(DocumentRoute(describe), DOCUMENT),
    ]
