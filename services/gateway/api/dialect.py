"""An API that the gateway speaks, as the application knows it: its routes, its endpoints, and its own words for errors.

    DIALECTS ──▶ routes, in their order             ──▶ the router, /openapi.json
             ──▶ paths, claims                      ──▶ who describes an error, who adds headers to an answer
             ──▶ endpoints                          ──▶ how a stream of that endpoint's generations is framed

The application is made with a list of them and imports none: what is taken out of it is gone, and no other notices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.api.backend import RequestContext, RouteMaker
from services.gateway.core.asgi import EventStream, LineStream
from services.gateway.core.errors import describe
from services.gateway.intake.endpoint import Endpoint
from shared.service.endpoints import Scope


@dataclass(frozen=True, slots=True)
class ModelView:
    """How an API shows models on the paths that it shares with OpenAI's."""

    # The list of them, each as OpenAI's (`api.models.shapes.Model`).
    page: Callable[[RequestContext, Sequence[Any]], object]
    one: Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API, or a family of paths of one."""

    name: str
    routes: Sequence[RouteMaker] = ()
    endpoints: Sequence[Endpoint] = ()  # of the generations that are begun in it
    # The body for an error, with the request's id.
    describe: Callable[[BaseException, str], object] = describe
    stream: type[EventStream] | type[LineStream] = EventStream
    error_event: bytes = b""  # the type of the event that tells of an error within a stream
    done: bool = True  # whether streams end with `[DONE]`, but for those that end otherwise in the same API
    # What paths begin with whose errors it describes, where these are not described as OpenAI's are.
    paths: tuple[str, ...] = ()
    # Whether a request for a path that others have too is for it.
    claims: Callable[[Scope], bool] | None = None
    # What answers on its `paths` have beside the headers that are given; with the request's id.
    answer_headers: Callable[[Scope, str, Mapping[str, str]], dict[str, str]] | None = None
    models: ModelView | None = None  # of requests that it claims
    # Paths that its clients know from other servers, and why they lead nowhere here.
    absent: Mapping[str, str] = field(default_factory=dict)


# What is spoken on paths that no dialect has claimed, and in streams of endpoints that none has.
PLAIN = Dialect("plain")


class Dialects:
    """Those that one gateway speaks."""

    def __init__(self, listed: Sequence[Dialect]) -> None:
        self.absent = {path: why for one in listed for path, why in one.absent.items()}
        self._claims = [(one, one.claims) for one in listed if one.claims is not None]
        self._paths = [(path, one) for one in listed for path in one.paths]
        # What paths begin with whose answers have more headers, and these.
        self.headed = [(one.paths, one.answer_headers) for one in listed if one.answer_headers is not None]
        # Endpoints whose answers lack their generation's id.
        self.nameless = frozenset(each.name for one in listed for each in one.endpoints if each.nameless)
        self.by_endpoint = {each.name: one for one in listed for each in one.endpoints}

    def of_path(self, path: str) -> Dialect:
        """Before anything else is known of a request."""
        return next((one for prefix, one in self._paths if path.startswith(prefix)), PLAIN)

    def of_request(self, scope: Scope) -> Dialect:
        """As `of_path`, for paths that two APIs have."""
        return next((one for one, claims in self._claims if claims(scope)), self.of_path(scope["path"]))


def dialects_of(scope: Scope) -> Dialects:
    """Those of the application that serves a request."""
    spoken: Dialects = scope["app"].dialects
    return spoken
