"""The gateway's HTTP API as commands use it: objects, uploads, downloads, events, and its refusals as errors."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
from rich.console import Console
from rich.progress import DownloadColumn, Progress

from services.cli.target import Gateway, trust_of
from services.cli.ui import bar_columns
from shared.errors import ConfigurationError, RyzansteinError, Unavailable

T = TypeVar("T")

TIMEOUT = 30.0
# Of a file's upload: the gateway answers when it has stored all of it.
LONG_TIMEOUT = httpx.Timeout(TIMEOUT, write=600.0, read=600.0)
PATIENCE = 60.0  # seconds for which a gateway that is waited at may be away
PAUSE = 0.5  # seconds until it is asked again
_AWAY = (502, 503, 504)  # statuses of a gateway that starts or drains, or of a proxy that finds none


class RequestRefused(RyzansteinError):
    """The server's own words."""


class ServerEvent(NamedTuple):
    data: str
    id: str


class EventReader:
    """Server-sent events, made of the lines of a stream: one is there with its blank line. No I/O. (httpx-sse has no
    comments, in which the gateway says how far a prompt is.)"""

    def __init__(self) -> None:
        self._data: list[str] = []
        self._id = ""
        self.comment = ""  # the last line, where it is one

    def take(self, line: str) -> ServerEvent | None:
        """The event that ends with `line`."""
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        self.comment = value if line and not field else ""
        if field == "data":
            self._data.append(value)
        elif field == "id":
            self._id = value
        elif not line and self._data:
            event, self._data = ServerEvent("\n".join(self._data), self._id), []
            return event
        return None


class GatewayClient:
    """Speaks to one gateway, as any OpenAI client does. Methods raise `Unavailable` where none answers, and
    `RequestRefused` with what it says."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The object that it answers with; `options` are those of httpx."""
        with self._reachable():
            response = await self._http.request(method, path, **options)
        if response.status_code != 200:
            raise _refusal(response)
        answer: dict[str, Any] = response.json()
        return answer

    async def upload(self, path: Path, purpose: str, screen: Console | None = None) -> dict[str, Any]:
        """The file's object; with `screen` under a bar. Raises `ConfigurationError` where it cannot be read."""
        columns, is_shown = bar_columns(DownloadColumn()), screen is not None and screen.is_terminal
        try:
            with (
                Progress(*columns, console=screen, disable=not is_shown) as progress,
                progress.open(path, "rb", description=f"uploading {path.name}") as data,
            ):
                fields = {"data": {"purpose": purpose}, "files": {"file": (path.name, data)}}
                return await self.ask("POST", "/v1/files", timeout=LONG_TIMEOUT, **fields)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None

    async def content(self, path: str) -> AsyncGenerator[bytes, None]:
        """The bytes that lie at `path` of the API."""
        async with self._got(path, {}) as response:
            async for part in response.aiter_bytes():
                yield part

    async def events(self, path: str, last: str = "") -> AsyncGenerator["ServerEvent", None]:
        """The events at `path`, as they come; `last`: those behind the one with that id."""
        events = EventReader()
        async with self._got(path, {"Last-Event-ID": last} if last else {}) as response:
            async for line in response.aiter_lines():
                if (event := events.take(line)) is not None:
                    yield event

    @contextlib.asynccontextmanager
    async def _got(self, path: str, headers: dict[str, str]) -> AsyncIterator[httpx.Response]:
        with self._reachable():
            async with self._http.stream("GET", path, headers=headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(response)
                yield response

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise Unavailable(
                f"The gateway at {self._http.base_url} did not answer ({error or type(error).__name__}); start it, or "
                "name it with --url."
            ) from None


def _refusal(response: httpx.Response) -> RyzansteinError:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.url} answered with status {response.status_code}."
    return Unavailable(message) if response.status_code in _AWAY else RequestRefused(message)


async def save(parts: AsyncGenerator[bytes, None], target: Path) -> None:
    """Writes `parts` to the file `target`, which appears whole. Raises `ConfigurationError` where it cannot be."""
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb") as out:
            async for data in parts:
                out.write(data)
        part.replace(target)
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror}.") from None


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` returns, once the gateway is there: it may be away for `PATIENCE`. Raises `Unavailable`."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + PATIENCE
    while True:
        try:
            return await ask()
        except Unavailable:
            if loop.time() >= give_up:
                raise
        await asyncio.sleep(PAUSE)


def http_options(key: str, trust: ssl.SSLContext | bool, timeout: httpx.Timeout | float) -> dict[str, Any]:
    """Of a client of httpx; `key`: an API key, or none."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return {"headers": headers, "timeout": timeout, "trust_env": False, "verify": trust}


@contextlib.asynccontextmanager
async def connected(gateway: Gateway, key: str, ca: str = "") -> AsyncIterator[GatewayClient]:
    """`key`: an API key, or none; `ca`: a file of authorities to trust. Raises `ConfigurationError` for what is no
    address."""
    trust = trust_of(gateway.certificate, ca)
    try:
        http = httpx.AsyncClient(base_url=gateway.url, **http_options(key, trust, TIMEOUT))
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigurationError(f"{gateway.url!r} is not the address of a gateway ({error}).") from None
    async with http:
        yield GatewayClient(http)


def metadata_of(pairs: list[str]) -> dict[str, str] | None:
    """From `key=value` pairs. Raises `ConfigurationError`."""
    found = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not key or not separator:
            raise ConfigurationError(f"--metadata takes KEY=VALUE, not {pair!r}.")
        found[key] = value
    return found or None
