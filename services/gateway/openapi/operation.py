"""What a route says of itself: the words from which Starlette's routes and the OpenAPI document are made.

A new endpoint is one `Operation` beside its route and one line in the application's table:

    EMBEDDINGS = Operation("POST", "/v1/embeddings", "createEmbedding", "Embeddings of texts.",
                           tag="Embeddings", request=EmbeddingRequest, response=EmbeddingList)
    ...
    ApiRoute(EmbeddingsRoute(backend), EMBEDDINGS)
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.routing import Match, Route

from shared.service.endpoints import Scope

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
GENERATING = (404, 408, 413, 422, 429, 503, 504)
"""Statuses, besides those of every operation, with which a request for tokens may end."""


class Parameter(msgspec.Struct, frozen=True):
    """A header, query field or part of the path."""

    name: str
    description: str
    schema: Mapping[str, Any]
    place: str = "header"
    example: Any = None


class Operation(msgspec.Struct, frozen=True):
    """One method of one path."""

    method: str
    path: str
    """As Starlette has it; `{name:path}` may hold slashes."""
    name: str
    """The document's operationId."""
    summary: str
    tag: str = ""
    description: str = ""
    request: Any = None
    """The type that the JSON body is decoded as; None: the request has no body."""
    request_content: Mapping[str, Any] = {}
    """Bodies that are not JSON: their schemas by content type."""
    example: Any = None
    """A body to begin with."""
    response: Any = None
    """The type of the JSON answer; None: see `response_content`."""
    response_content: Mapping[str, Any] = {}
    """Other answers: their schemas by content type."""
    events: tuple[Any, ...] = ()
    """The types of a server-sent event's data, where the answer can be a stream."""
    success: int = 200
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    """Statuses of errors, besides those that every operation may have."""
    plain: bool = False
    """Answered beside the API, on every service: without x-request-id and without OpenAI's errors."""

    @property
    def template(self) -> str:
        """The path as OpenAPI has it."""
        return re.sub(r"\{(\w+):\w+\}", r"{\1}", self.path)


TEMPLATE = "ryzanstein.template"
"""Where an ASGI scope has the path of the route that it took, as OpenAPI has it."""


class ApiRoute(Route):
    """A route that is in the document, with an operation for each of its methods."""

    def __init__(self, app: Any, *operations: Operation) -> None:
        (path,) = {operation.path for operation in operations}
        super().__init__(path, app, methods=[operation.method for operation in operations])
        self.operations = operations

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, TEMPLATE: self.operations[0].template}
