"""GET /version, /ping and /load, as vLLM has them."""

import msgspec

from services.gateway.backend import Backend
from services.gateway.http_io import send_json
from shared.service.endpoints import Receive, Scope, Send

PING = "/ping"


class Version(msgspec.Struct, frozen=True):
    version: str


class Pong(msgspec.Struct, frozen=True):
    """Nothing: it is the status that counts."""


class Load(msgspec.Struct, frozen=True):
    server_load: int
    """Requests that this gateway is answering, without the one that asks, and generations on WebSockets."""


class SayRoute:
    """The same for everybody."""

    def __init__(self, answer: msgspec.Struct) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, self._answer)


class LoadRoute:
    """How much is under way."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, Load(self._backend.active_now - 1))
