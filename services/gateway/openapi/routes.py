"""GET /openapi.json."""

from collections.abc import Callable
from typing import Any

import msgspec

from services.gateway.http_io import send_json
from shared.service.endpoints import Receive, Scope, Send


class DocumentRoute:
    """Makes the document when it is first asked for: no gateway starts slower for it."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._body = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._body = self._body or msgspec.json.encode(self._make())
        await send_json(send, 200, self._body)
