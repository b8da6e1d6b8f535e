"""GET /openapi.json: from the routes' descriptions to an OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.1)."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from services.gateway.api.openapi import operation as parameters
from services.gateway.api.openapi.operation import EVENTS, JSON, LINES, ApiRoute, Operation, Parameter
from services.gateway.core.asgi import send_json
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.headers import EXACT_HEADER
from services.gateway.intake.rules import NULL, Schema, schema_of, table
from shared import limits
from shared.process import VERSION
from shared.service.endpoints import Receive, Scope, Send

REF = "#/components/schemas/{name}"
STATUSES = {
    400: "The request must change; `param` names the field, `code` says how.",
    401: "The API key is missing or unknown.",
    403: "The Host, the page that asks (Origin), or what the API key asks for is not allowed.",
    404: "Not found, or no longer available.",
    405: "Method not allowed; `Allow` lists those that are.",
    408: "The body was not complete in time.",
    409: "Conflict with its current state.",
    412: "It was changed in the meantime: `If-Match` or `If-None-Match` does not hold.",
    413: "The body is over the limit.",
    415: "The body is not JSON by its Content-Type.",
    422: "The Idempotency-Key was used with another body before.",
    429: "Too many requests; try again after `Retry-After` seconds.",
    500: "Internal error; report it with the request id.",
    503: "Temporarily unavailable; try again after `Retry-After` seconds.",
    504: "No token came in time.",
    507: "The store of files is full; delete some, or make it larger.",
}
ABOUT = (
    "OpenAI's API, and beyond it generations that outlive connections: every event of a stream has an id, from "
    "which any gateway goes on. `WS /v1/stream` has several generations on one WebSocket connection. "
    "Where a field appears twice in a JSON object, the last one counts."
)


def document(routes: Iterable[Any], settings: GatewaySettings) -> dict[str, Any]:
    """The document of those of `routes` that describe themselves."""
    operations = [item for route in routes if isinstance(route, ApiRoute) for item in route.operations]
    shown, components = _schemas(operations)
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.template, {})[operation.method.lower()] = _operation(operation, shown, settings)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ryzanstein", "version": VERSION, "description": ABOUT},
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "description": "An API key."}},
        },
    }


def _schemas(operations: Sequence[Operation]) -> tuple[dict[int, Any], dict[str, Any]]:
    """The schema of every type that the operations name (by the type's id), and the components they refer to."""
    types = []
    for operation in operations:
        answers = (operation.response, *operation.events, *operation.lines, operation.error)
        types += [kind for kind in (operation.request, *answers) if kind]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    constrain(components)
    return dict(zip(map(id, types), schemas, strict=True)), components


# A string, strings, token ids or lists of token ids: no type in Python says that these are not mixed.
TEXTS_OR_IDS = (
    ("CompletionRequest", "prompt", limits.CHOICES),
    ("EmbeddingRequest", "input", limits.EMBEDDING_INPUTS),
    ("ClassifyRequest", "input", limits.EMBEDDING_INPUTS),
    ("PoolingRequest", "input", limits.EMBEDDING_INPUTS),
)


# Bodies that need not name their model where one is served.
NAMELESS = (
    *("ChatCompletionRequest", "ClassifyRequest", "CompletionRequest", "EmbeddingRequest"),
    *("MessagesRequest", "RerankRequest", "ResponseRequest", "ScoreRequest", "PoolingRequest"),
    *("CompactRequest", "CountTokensRequest", "InputTokensRequest"),
)


def _texts_or_ids(most: int) -> Schema:
    text: Schema = {"type": "string", "minLength": 1}
    ids: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    many: Schema = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [text, many | {"items": text}, ids, many | {"items": ids}]}


def constrain(components: dict[str, Schema]) -> None:
    """Writes into the schemas of requests, in place, what types in Python cannot say: these two tables, and what fields
    demand of each other (`intake/rules.py`)."""
    for name, field, most in TEXTS_OR_IDS:
        if name in components:
            texts = _texts_or_ids(most.value)
            needed = field in components[name].get("required", ())
            components[name]["properties"][field] = texts if needed else {"anyOf": [*texts["anyOf"], NULL.schema]}
    for name in NAMELESS:
        if name in components:
            shown = components[name]
            shown["required"] = [field for field in shown.get("required", ()) if field != "model"]
            shown["properties"]["model"] = {"anyOf": [shown["properties"]["model"], NULL.schema]}
            shown["additionalProperties"] = NULL.schema  # an unknown field that is null counts as not given
    for name, rules in table():
        if name in components:
            components[name] |= schema_of(rules)


def _operation(operation: Operation, shown: dict[int, Any], settings: GatewaySettings) -> dict[str, Any]:
    given = operation.all_parameters + ([] if operation.plain else [parameters.REQUEST])
    answer = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": [_parameter(item, settings) for item in given],
        "responses": _responses(operation, shown),
    }
    if operation.description:
        answer["description"] = operation.description
    content = dict(_content(operation.request_content))
    if operation.request:
        content[JSON] = {"schema": shown[id(operation.request)]}
        if operation.example is not None:
            content[JSON]["example"] = operation.example
    if content:
        answer["requestBody"] = {"required": operation.needs_body, "content": content}
    return answer


def _parameter(item: Parameter, settings: GatewaySettings) -> dict[str, Any]:
    schema = dict(item.schema)
    if schema.pop(parameters.MAX_SECONDS, False):
        schema["maximum"] = settings.background_limit
    answer: dict[str, Any] = {"name": item.name, "in": item.place, "description": item.description, "schema": schema}
    if item.place == "path":
        answer["required"] = True
    if item.example is not None:
        answer["example"] = item.example
    return answer


def _responses(operation: Operation, shown: dict[int, Any]) -> dict[str, Any]:
    content, error = dict(_content(operation.response_content)), shown[id(operation.error)]
    if operation.response:
        content[JSON] = {"schema": shown[id(operation.response)]}
    if operation.events:
        content[EVENTS] = {"schema": _event([shown[id(kind)] for kind in operation.events], error)}
    if operation.lines:
        lines = [shown[id(kind)] for kind in operation.lines]
        content[LINES] = {"schema": {"description": "One line.", "anyOf": [*lines, error]}}
    done = {"description": "Done."} | ({"content": content} if content else {})
    answers: dict[str, dict[str, Any]] = {str(operation.success): done}
    if operation.accepted:
        answers["202"] = {**done, "description": "Under way."}
    if operation.plain:
        for status in operation.errors:
            answers[str(status)] = {"description": STATUSES[status], "content": content}
        return answers
    for status in sorted(operation.statuses):
        answers[str(status)] = {"description": STATUSES[status], "content": {JSON: {"schema": error}}}
    for code, answer in answers.items():
        answer["headers"] = _headers(int(code), generates=parameters.BACKGROUND in operation.parameters)
    return answers


def _event(data: list[Any], error: Any) -> dict[str, Any]:
    """One event of a stream: version 3.1 has no word for the whole."""
    chunk = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": [*data, error]}}
    return {
        "type": "object",
        "description": "One server-sent event.",
        "properties": {
            "data": {"anyOf": [{"const": "[DONE]"}, chunk]},
            "id": {"type": "string", "description": "Where its reader stands: the `Last-Event-ID` behind it."},
            "retry": {"type": "integer"},
        },
    }


def _headers(status: int, generates: bool) -> dict[str, Any]:
    headers: dict[str, Any] = {
        "x-request-id": {"description": "Names the request.", "required": True, "schema": {"type": "string"}}
    }
    if generates and status == 200:
        headers[EXACT_HEADER] = {
            "description": "Whether the text depends on the model, its settings (`system_fingerprint`) and the request "
            "alone, to the bit: not on other requests, on what is cached, or on failures.",
            "schema": {"type": "string", "enum": ["true", "false"]},
        }
    if status in (429, 503, 504):
        headers["retry-after"] = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
    if status == 405:
        headers["allow"] = {"description": "The methods.", "required": True, "schema": {"type": "string"}}
    return headers


def _content(schemas: Any) -> Iterable[tuple[str, Any]]:
    return ((kind, {"schema": schema}) for kind, schema in schemas.items())


class DocumentRoute:
    """Makes the document when it is first asked for: no gateway starts slower for it."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._body = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._body = self._body or msgspec.json.encode(self._make())
        await send_json(send, 200, self._body)
