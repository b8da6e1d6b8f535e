"""How clients ask: one gateway or the next, with a patience of their own, and what a refusal means to them.

Lost        the connection broke, fell silent, or never came to be: another gateway may have the answer
Refused     an error in the API's shape; `again` says whether it makes sense to try once more
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.clients.history import History
from tests.simulation.core.asgi import Event, Exchange, Lost

# Seconds without a byte after which a client takes its connection for lost: a read time-out, as client libraries
# have it. Nobody tells it that its line is cut.
SILENCE = 30.0
PAUSE = (0.1, 1.0)  # seconds before a client that nobody served tries again, from and to
AGAIN = (408, 409, 429, 500, 502, 503, 504, 507)  # statuses after which OpenAI's own client tries again
QUOTA = "quota_exceeded"  # the code of an error about what a tenant keeps: waiting does not help
NO_KEY = ("invalid_api_key", "16")  # codes of an error about a key: the API's, and gRPC's UNAUTHENTICATED

__all__ = ["AGAIN", "PAUSE", "SILENCE", "Lost", "Refused", "Reply", "Surroundings", "events_of", "exchange"]


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{status} {code}: {message[:200]}")
        self.status, self.code, self.retry_after = status, code, retry_after

    @property
    def again(self) -> bool:
        """Whether the error says that it may be tried once more. `conflict`s of state are none of these."""
        return self.status in AGAIN and self.status != 409


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Surroundings:
    """What a client has around it."""

    # Addresses of those that it may try; in the order of the load balancer.
    gateways: Callable[[], Sequence[str]]
    history: History
    draw: random.Random  # the client's own
    model: str = "stub"
    tenant: str = ""
    token: str = ""  # its API key; empty: none
    stopping: Callable[[], bool] = lambda: False  # whether it is to begin nothing new
    _turn: int = field(default=0)

    def turn(self, number: int) -> None:
        """Which gateway it asks first."""
        self._turn = number

    def replaced(self, token: str, error: Refused) -> bool:
        """Whether it was asked with a key that is another one by now, and refused for that."""
        return error.code in NO_KEY and token != self.token

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def gateway(self) -> str:
        """The next one to try. Raises `Lost` while there is none."""
        found = self.gateways()
        if not found:
            raise Lost("there is no gateway")
        self._turn += 1
        return found[self._turn % len(found)]

    async def pause(self, at_least: float = 0.0) -> None:
        await asyncio.sleep(max(at_least, self.draw.uniform(*PAUSE)))

    async def insist(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        final: str = "",
        **more: Any,
    ) -> tuple[Reply, str]:
        """Asks one gateway after the other until one has answered, and says which. Raises `Refused` where it makes no
        sense to go on, or for the code `final`."""
        while True:
            wait, token = 0.0, self.token
            try:
                gateway = self.gateway()
                return await self.ask(gateway, method, path, body, headers, **more), gateway
            except Lost:
                pass
            except Refused as error:
                if error.code == final or not (error.again or self.replaced(token, error)):
                    raise
                wait = error.retry_after
            await self.pause(wait)

    async def ask(
        self,
        gateway: str,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        silence: float = SILENCE,
    ) -> Reply:
        """One whole answer. `body`: bytes, or what JSON is made of. Raises `Lost`, `Refused`."""
        async with exchange(gateway, method, path, body, headers, self.token) as asked:
            status, found = await _start(asked, silence)
            data = b"".join([part async for part in _parts(asked, silence)])
        try:
            return _checked(Reply(status, found, data))
        except Refused as error:
            if error.code == QUOTA:
                self.history.quotas.append((self.now, self.tenant, str(error)))
            raise


def exchange(gateway: str, method: str, path: str, body: Any, headers: dict[str, str] | None, token: str) -> Exchange:
    """Of one HTTP request."""
    path, _, query = path.partition("?")
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"host": "localhost", **({"authorization": f"Bearer {token}"} if token else {})}
    if body is not None:
        given |= {"content-type": "application/json", "content-length": str(len(data))}
    given |= headers or {}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
    }
    return Exchange(gateway, scope, {"type": "http.request", "body": data, "more_body": False})


async def events_of(asked: Exchange, silence: float = SILENCE) -> AsyncIterator[tuple[str, bytes]]:
    """(id, data) of each server-sent event, `[DONE]` included. Raises `Lost`, `Refused`."""
    status, headers = await _start(asked, silence)
    buffer = b""
    async for part in _parts(asked, silence):
        if status != 200:
            buffer += part
            continue
        *events, buffer = (buffer + part).split(b"\n\n")
        for event in events:
            found = _event(event)
            if found is not None:
                yield found
    _checked(Reply(status, headers, buffer))


async def next_event(asked: Exchange, silence: float = SILENCE) -> Event:
    """Raises `Lost`, also where nothing comes for so long."""
    try:
        async with asyncio.timeout(silence):
            return await asked.receive()
    except TimeoutError:
        raise Lost(f"nothing came for {silence:g} s") from None


async def _start(asked: Exchange, silence: float) -> tuple[int, dict[str, str]]:
    event = await next_event(asked, silence)
    return event["status"], {name.decode().lower(): value.decode() for name, value in event["headers"]}


async def _parts(asked: Exchange, silence: float) -> AsyncIterator[bytes]:
    more = True
    while more:
        event = await next_event(asked, silence)
        more = event.get("more_body", False)
        if event.get("body"):
            yield event["body"]


def _checked(reply: Reply) -> Reply:
    if reply.status < 300:
        return reply
    try:
        error = json.loads(reply.body).get("error") or {}
    except (ValueError, AttributeError):
        error = {}
    retry_after = float(reply.headers.get("retry-after", 0))
    raise Refused(reply.status, str(error.get("code")), str(error.get("message")), retry_after)


def refusal(error: dict[str, Any]) -> Refused:
    """Of an error that came within a stream or a session, with the status that REST would have given it."""
    kind, code = str(error.get("type")), str(error.get("code"))
    again = kind in ("server_error", "rate_limit_error", "overloaded_error") or code == "rate_limit_exceeded"
    return Refused(503 if again else 400, code, str(error.get("message")))


def _event(text: bytes) -> tuple[str, bytes] | None:
    """None: a comment."""
    identity, data = "", None
    for line in text.split(b"\n"):
        name, _, value = line.partition(b": ")
        if name == b"id":
            identity = value.decode()
        elif name == b"data":
            data = value
    return None if data is None else (identity, data)
