"""The document at /openapi.json: whole, true to the routes, and true to the answers."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
from msgspec import inspect
from starlette.routing import Route

from services.gateway.api import shapes
from services.gateway.api.app import GatewayApp
from services.gateway.api.models.shapes import ModelList
from services.gateway.api.openapi.document import STATUSES, document
from services.gateway.api.openapi.operation import ApiRoute, Operation
from services.gateway.core.settings import GatewaySettings
from tests.integration.gateway.fake_ring import MODEL
from tests.interfaces.http import gateway_app, openapi

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def app() -> GatewayApp:
    return gateway_app()


@pytest.fixture(scope="module")
def made(app: GatewayApp) -> dict[str, Any]:
    return openapi(app)


def operations(app: GatewayApp) -> list[Operation]:
    return [item for route in app.routes if isinstance(route, ApiRoute) for item in route.operations]


def test_every_route_is_in_it(app: GatewayApp, made: dict[str, Any]) -> None:
    """Pages for people say that they are none of the API by `include_in_schema=False`."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.include_in_schema]
    undescribed = [route.path for route in routes if not isinstance(route, ApiRoute)]
    assert not undescribed, "make them ApiRoutes with an Operation, see services/gateway/api/openapi/operation.py"
    told = {(path, method) for path, item in made["paths"].items() for method in item}
    assert told == {(item.template, item.method.lower()) for item in operations(app)}
    assert len(told) >= 10
    names = [item.name for item in operations(app)]
    assert len(names) == len(set(names))


def test_its_schemas_are_schemas_and_its_references_lead_somewhere(made: dict[str, Any]) -> None:
    for name, schema in made["components"]["schemas"].items():
        assert jsonschema_rs.meta.is_valid(schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"}), name
    for reference in references(made):
        at: Any = made
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]


def test_no_name_tells_where_in_the_code_a_type_is(made: dict[str, Any]) -> None:
    """Types with the same name get their modules' before it, so that a file that moves would change the document."""
    assert [name for name in made["components"]["schemas"] if "." in name] == []


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_status_has_its_words(app: GatewayApp) -> None:
    assert {status for item in operations(app) for status in item.errors} <= STATUSES.keys()


def test_examples_are_what_the_schema_allows(app: GatewayApp, made: dict[str, Any]) -> None:
    for operation in operations(app):
        if operation.example is not None:
            name = operation.request.__name__
            validator = jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}"} | made)
            validator.validate(operation.example)


def test_limits_of_this_gateway_are_in_it(app: GatewayApp) -> None:
    made = document(app.routes, GatewaySettings(background_limit=77))
    given = {item["name"]: item for item in made["paths"]["/v1/completions"]["post"]["parameters"]}
    assert given["X-Ryzanstein-Background"]["schema"]["maximum"] == 77


def test_every_most_of_a_request_is_a_limit_with_a_name(app: GatewayApp) -> None:
    """A value that is longer is refused by the name of what it exceeds; lengths without one could not be."""
    nameless = [
        f"{operation.request.__name__}: {kind}"
        for operation in operations(app)
        if operation.request
        for kind in unnamed(inspect.type_info(operation.request), {}, set())
    ]
    assert nameless == []


def unnamed(kind: inspect.Type, extra: dict[str, Any], seen: set[type]) -> Iterator[str]:
    """Types in `kind` that have a greatest length and no limit beside it."""
    if isinstance(kind, inspect.Metadata):
        yield from unnamed(kind.type, kind.extra or {}, seen)
        return
    if getattr(kind, "max_length", None) is not None and "limit" not in extra:
        yield str(kind)
    if isinstance(kind, inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
    parts = [getattr(kind, name, None) for name in ("item_type", "key_type", "value_type")]
    parts += [field.type for field in getattr(kind, "fields", ())] + list(getattr(kind, "types", ()))
    for part in parts:
        if part is not None:
            yield from unnamed(part, {}, seen)


async def test_answers_are_what_it_says_to_the_last_field(http: httpx.AsyncClient) -> None:
    asked = CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}
    plain = {"model": MODEL, "prompt": "Hi", "logprobs": 2}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    answers = [
        ((await http.post("/v1/chat/completions", json=asked)).content, shapes.ChatCompletion),
        ((await http.post("/v1/completions", json=plain)).content, shapes.Completion),
        ((await http.get("/v1/models")).content, ModelList),
    ]
    for path, sent, kind in (
        ("/v1/chat/completions", asked | usage, shapes.ChatCompletionChunk),
        ("/v1/completions", plain | usage, shapes.Completion),
    ):
        events = (await http.post(path, json=sent)).text.split("\n")
        data = [line[6:].encode() for line in events if line.startswith("data: ") and line != "data: [DONE]"]
        assert len(data) >= 3
        answers += [(item, kind) for item in data]
    for answer, kind in answers:
        again = msgspec.json.encode(msgspec.json.decode(answer, type=kind))
        assert json.loads(again) == json.loads(answer)


async def test_it_is_served(http: httpx.AsyncClient) -> None:
    answer = await http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["openapi"].startswith("3.1")
