"""What a route says of itself: the words from which Starlette's routes and the OpenAPI document are made.

A new path is one `Operation` beside its route, among the routes of its dialect:

    EMBEDDINGS = Operation("POST /v1/embeddings", "createEmbedding", "Embeddings of texts.",
                           tag="Embeddings", request=EmbeddingRequest, response=EmbeddingList)
    ...
    completions("embeddings", EMBEDDINGS)

What one function answers from what a service holds is `routes_of((OPERATION, function))` of `api.backend`.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.routing import Match, Route

from services.gateway.core.errors import ErrorBody
from services.gateway.intake.headers import IDEMPOTENCY_KEY, REQUEST_ID
from shared.service.endpoints import Scope

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
LINES = "application/x-ndjson"
OCTETS: Mapping[str, Any] = {"application/octet-stream": {"type": "string", "format": "binary"}}
# Statuses, besides those that follow from its body, with which a request for tokens may end.
GENERATING = (404, 422, 504)


class Parameter(msgspec.Struct, frozen=True):
    """A header, query field or part of the path."""

    name: str
    description: str
    schema: Mapping[str, Any]
    place: str = "header"
    example: Any = None


COMMON_ERRORS = (400, 401, 403, 405, 429, 500, 503)  # statuses that any operation may answer with


def query_of(kind: type[msgspec.Struct]) -> tuple[Parameter, ...]:
    """The parameters of a query that is read as `kind`; objects are for the operation's description."""
    _, components = msgspec.json.schema_components([kind])
    found = []
    for name, schema in components[kind.__name__]["properties"].items():
        schema = schema.get("anyOf", [schema])[0] | {"default": schema.get("default")}
        if schema["default"] is None:
            del schema["default"]
        if schema.get("type") != "object":
            found.append(Parameter(name, schema.pop("description", ""), schema, "query"))
    return tuple(found)


class Operation(msgspec.Struct, frozen=True):
    """One method of one path."""

    route: str  # method and path, as Starlette has it; `{name:path}` may hold slashes
    name: str  # the document's operationId
    summary: str
    description: str = ""
    tag: str = ""  # of its group; a module with one makes its operations of a `partial`
    request: Any = None  # the type that the JSON body is decoded as; None: the request has no body
    needs_body: bool = True  # whether the request may not come without its body
    request_content: Mapping[str, Any] = {}  # bodies that are not JSON: their schemas by content type
    example: Any = None  # a body to begin with
    response: Any = None  # the type of the JSON answer; None: see `response_content`
    response_content: Mapping[str, Any] = {}  # other answers: their schemas by content type
    events: tuple[Any, ...] = ()  # the types of a server-sent event's data, where the answer can be a stream
    # The types of a line, where the answer can be a stream of JSON texts, a line each.
    lines: tuple[Any, ...] = ()
    error: Any = ErrorBody  # the type of the body of an error: each API has its own
    success: int = 200
    accepted: bool = False  # whether 202 answers, in the same form, what is still under way
    query: type[msgspec.Struct] | None = None  # what its query is read as
    parameters: tuple[Parameter, ...] = ()  # its headers
    # Statuses of errors, besides those that every operation may have, and that follow from its path and body.
    errors: tuple[int, ...] = ()
    # Answered beside the API, on every service: without x-request-id and without OpenAI's errors.
    plain: bool = False

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.route.partition(" ")[2]

    @property
    def template(self) -> str:
        """The path as OpenAPI has it."""
        return re.sub(r"\{(\w+):\w+\}", r"{\1}", self.path)

    @property
    def all_parameters(self) -> list[Parameter]:
        """Of its path, its query and its headers."""
        named = [_named(name) for name in re.findall(r"\{(\w+)\}", self.template)]
        return [*named, *(query_of(self.query) if self.query else ()), *self.parameters]

    @property
    def statuses(self) -> set[int]:
        """Of errors: whatever a path names may be missing, whatever has a body may send it wrong."""
        by_path = {404} if "{" in self.path else set[int]()
        by_body = {408, 413, 415} if self.request is not None else set[int]()
        return {*COMMON_ERRORS, *by_path, *by_body, *self.errors}


# Where an ASGI scope has the path of the route that it took, as OpenAPI has it.
TEMPLATE = "ryzanstein.template"


class ApiRoute(Route):
    """A route that is in the document, with an operation for each of its methods."""

    def __init__(self, app: Any, *operations: Operation, direct: Any = None) -> None:
        """`direct`: of a path of so many requests that a POST goes past the router's search: who answers it."""
        (path,) = {operation.path for operation in operations}
        super().__init__(path, app, methods=[operation.method for operation in operations])
        self.operations = operations
        self.direct = direct

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, TEMPLATE: self.operations[0].template}


MAX_SECONDS = "x-max-seconds"  # stands in a schema for the gateway's own limit, which the document fills in


def _pattern(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{pattern}$"}


REQUEST = Parameter(
    "x-request-id",
    "Id of the request in every service's log; generated if missing.",
    _pattern(REQUEST_ID.pattern),
    example="order-66-attempt-1",
)
SESSION = Parameter(
    "X-Session-ID",
    "The conversation goes back to the group that holds its KV cache. 1 to 256 printable ASCII characters.",
    _pattern(r"[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?"),
    example="conversation-7",
)
IDEMPOTENCY = Parameter(
    "Idempotency-Key",
    "The same request under the same key is one generation: a repeat attaches to it or returns its answer. With it "
    "`Last-Event-ID` may be sent: the stream goes on behind that event.",
    _pattern(IDEMPOTENCY_KEY.pattern),
    example="order-66",
)
BACKGROUND = Parameter(
    "X-Ryzanstein-Background",
    "Seconds for which the generation continues without a connected client.",
    {"type": "number", "exclusiveMinimum": 0, MAX_SECONDS: True},
    example=60,
)
LAST_EVENT = Parameter(
    "Last-Event-ID",
    "The id of the last event that you have: the stream resumes after it.",
    {"type": "string", "pattern": r"^([0-9]{1,10}(,[0-9]{1,10})*)?$", "maxLength": 2048},
    example="12",
)
POSITIONS = Parameter(
    "X-Ryzanstein-Positions",
    "Whether each line of a stream has its position in the generation's log, which `Last-Event-ID` takes.",
    {"type": "string", "enum": ["true", "false"]},
    example="true",
)
PROGRESS = Parameter(
    "X-Ryzanstein-Progress",
    "Whether a stream tells how much of a long prompt is computed in its own events or lines too, and not in comments "
    "alone.",
    {"type": "string", "enum": ["true", "false"]},
    example="true",
)
GENERATING_HEADERS = (SESSION, IDEMPOTENCY, BACKGROUND, PROGRESS)  # the headers of a request for tokens
generating = partial(Operation, parameters=GENERATING_HEADERS, errors=GENERATING)  # makes operations of such requests
_EXAMPLES = {
    "generation": "chatcmpl-1f0c9a7767e1c5b09b1d6e0f4c2a8835",
    "response": "resp_1f0c9a7767e1c5b09b1d6e0f4c2a8835",
    "file": "file-1f0c9a7767e1c5b09b1d6e0f4c2a8835",
    "batch": "batch_1f0c9a7767e1c5b09b1d6e0f4c2a8835",
    "job": "ftjob-1f0c9a7767e1c5b09b1d6e0f4c2a8835",
    "message_batch": "msgbatch_1f0c9a7767e1c5b09b1d6e0f4c2a8835",
}
_NAMED = {
    "model": "The model's name; slashes in it may stay as they are.",
    "generation": "The id that every chunk and every response of it has.",
}


def _named(name: str) -> Parameter:
    """What a path names by `name`."""
    about = _NAMED.get(name, f"The {name.replace('_', ' ')}'s id.")
    schema = SESSION.schema if name == "session" else {"type": "string", "minLength": 1}
    return Parameter(name, about, schema, "path", _EXAMPLES.get(name))
