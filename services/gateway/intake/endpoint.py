"""What a dialect brings to the intake: its endpoints, each with how its bodies are read and its answers are shown.

    body ──decode──▶ request ──prepare──▶ a canonical request ──▶ `InputProcessor` ──▶ `StreamReader`

The intake knows them by their names and imports none.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from services.gateway.core.errors import InvalidParameter, RouteError, missing
from services.gateway.intake.decoding import decode
from services.gateway.intake.headers import IgnoredFields
from services.gateway.intake.processor import InputProcessor
from services.gateway.intake.record import Context
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.streams.reading import Presentation
from services.gateway.streams.stream_reader import StreamReader


class Endpoint:
    """Whose answer a generation is."""

    # Its `GenerationRecord.endpoint`, of which the prefix of its ids is made: small letters, digits, dots.
    name: ClassVar[str]
    presentation: ClassVar[Presentation]  # how its answers are shown
    generates: ClassVar[bool] = True  # whether its answers have text; else they are not streamed
    nameless: ClassVar[bool] = False  # whether its answers lack their generation's id


class BodyEndpoint(Endpoint):
    """One that takes JSON bodies, over whichever transport."""

    invoked_by: ClassVar[tuple[str, ...]] = ()  # fields by each of which /invocations knows a body for it
    # The field by which a conversation so far is known to be one for it (`conversation`).
    conversation_field: ClassVar[str] = ""

    def decode(self, body: bytes | msgspec.Raw, ignored: IgnoredFields) -> Any:
        """Raises `InvalidParameter`."""
        raise NotImplementedError

    def check(self, request: Any, ignored: IgnoredFields) -> None:
        """As far as that needs no model. Raises `InvalidRequest`."""

    async def prepare(self, processor: InputProcessor, request: Any, context: Context) -> StreamReader:
        """Raises as `Intake.prepare`."""
        raise NotImplementedError

    async def conversation(self, processor: InputProcessor, body: bytes, context: Context) -> ChatCompletionRequest:
        """The conversation so far that a body describes. Raises as `prepare`."""
        raise NotImplementedError


class Endpoints:
    """Those of one gateway, by their names."""

    def __init__(self, listed: Iterable[Endpoint]) -> None:
        self._all = {one.name: one for one in listed}
        self.bodies = {name: one for name, one in self._all.items() if isinstance(one, BodyEndpoint)}
        self._invoked = {field: one for one in self.bodies.values() for field in one.invoked_by}
        described = [one for one in self.bodies.values() if one.conversation_field]
        self._conversations = {one.conversation_field: one for one in described}

    def named(self, name: str, body: bytes | msgspec.Raw) -> BodyEndpoint:
        """The one that takes `body`, where `bodies` has none of that name. Raises `RouteError`, `InvalidParameter`."""
        if name == "invocations":
            return self._by_fields(body)
        raise RouteError(f"The endpoint '{name}' is not served here.", status=404, reason="unsupported_endpoint")

    def _by_fields(self, body: bytes | msgspec.Raw) -> BodyEndpoint:
        """By the first of the fields that `body` has."""
        fields = decode(body, _fields)
        for name, endpoint in self._invoked.items():
            if name in fields:
                return endpoint
        raise missing("messages", "the body of a chat, or another with one of: " + ", ".join(self._invoked))

    def of_conversation(self, body: bytes) -> BodyEndpoint | None:
        """The one whose conversation `body` describes; None: it is a chat. Raises `InvalidParameter`."""
        fields = decode(body, _fields)
        return next((one for field, one in self._conversations.items() if field in fields), None)

    def generates(self, name: str) -> bool:
        """Whether the answers of `GenerationRecord.endpoint` have text."""
        return name not in self._all or self._all[name].generates


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def streamed(endpoint: Endpoint, request: Any) -> Any:
    """`request` with `stream` set. Raises `RouteError`, and `InvalidParameter` when it says no to that."""
    if not endpoint.generates:
        raise RouteError(
            "Embeddings and scores are not streamed; POST them to /v1/embeddings, /v1/rerank, /v1/score or "
            "/v1/classify.",
            status=400,
            reason="unsupported_parameter",
        )
    if getattr(request, "stream", None) is False:
        raise InvalidParameter(
            "Invalid value for 'stream': every generation on a WebSocket is streamed; leave it out.", param="stream"
        )
    return msgspec.structs.replace(request, stream=True)
