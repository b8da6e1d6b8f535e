"""Responses on a WebSocket, whose path is that of the POST."""

from collections.abc import Callable
from typing import Any

import msgspec

from services.gateway.api.session import check_name
from services.gateway.api.websocket import ClientMessage, WebSocketSession
from services.gateway.core.asgi import StreamChunk
from services.gateway.core.errors import InvalidParameter, describe, status_of
from services.gateway.intake.decoding import decode
from shared.errors import QueueFull

_encode = msgspec.json.encode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
STEER, CREATE = "response.steer", "response.create"


class ResponseConnection(WebSocketSession):
    """OpenAI's WebSocket of responses: `client.responses.connect()`.

        {"type": "response.create", "model": ..., "input": ..., "stream_id": "a"}     ──▶
                                     ◀── the events of the response, with `stream_id` where one was given
                                     ◀── {"type": "error", "status": 400, "error": {...}}

    One response at a time, and one more for each `stream_id`. An error ends its response, and not the connection.
    """

    route = "/v1/responses"

    async def handle(self, text: str | bytes) -> None:
        lane: str | None = None
        try:
            fields = decode(text.encode() if isinstance(text, str) else text, _object)
            lane = _lane(fields)
            self.begin(lane, _creation(lane, fields))
        except (InvalidParameter, QueueFull) as error:
            await self.send_end(lane, error)

    def framing(self, name: str) -> Callable[[StreamChunk], bytes]:
        """OpenAI's events have no place for a position."""
        end = b',"stream_id":' + _encode(name) + b"}" if name else b"}"
        return lambda chunk: chunk.data[:-1] + end

    async def send_end(self, name: str | None, error: Exception | None) -> None:
        """Its last event is the end of a response; any other error is told."""
        if error is None:
            return
        detail = describe(error, self._context.request_id).error
        told: dict[str, Any] = {"type": "error", "status": status_of(error), "error": detail}
        await self.send(_encode(told | {"stream_id": name} if name else told))


def _lane(fields: dict[str, msgspec.Raw]) -> str:
    """The `stream_id`, taken out of a message; empty: it has none. Raises `InvalidParameter`."""
    given = fields.pop("stream_id", None)
    return "" if given is None else check_name(_string(given, "stream_id"), "stream_id")


def _creation(lane: str, fields: dict[str, msgspec.Raw]) -> ClientMessage:
    """Raises `InvalidParameter`."""
    kind = _string(fields.pop("type", msgspec.Raw(b"null")), "type")
    if kind != CREATE:
        detail = "send a new response with the input" if kind == STEER else f"supported is: '{CREATE}'"
        raise InvalidParameter(
            f"Invalid value: '{kind[:64]}'. This server takes no such event; {detail}.", param="type"
        )
    if not _generate(fields):
        options = msgspec.json.decode(fields.get("prompt_cache_options", b"null"))
        if options is None or isinstance(options, dict):
            fields["prompt_cache_options"] = msgspec.Raw(_encode((options or {}) | {"prewarm": True}))
    return ClientMessage("generate", lane, "responses", msgspec.Raw(_encode(fields)))


def _generate(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether output is wanted: `generate`, taken out of a message. False is `prompt_cache_options.prewarm`."""
    given = bytes(fields.pop("generate", msgspec.Raw(b"null")))
    if given not in (b"true", b"false", b"null"):
        raise InvalidParameter(
            "Invalid type for 'generate': expected true or false.", param="generate", reason="invalid_type"
        )
    return given != b"false"


def _string(given: msgspec.Raw, name: str) -> str:
    try:
        return _text.decode(given)
    except msgspec.DecodeError:
        raise InvalidParameter(
            f"Invalid type for '{name}': expected a string.", param=name, reason="invalid_type"
        ) from None
