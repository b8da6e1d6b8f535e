"""The gateway's HTTP API as commands use it: objects, uploads, downloads, and its refusals as errors."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
from rich.console import Console
from rich.progress import DownloadColumn, Progress

from services.cli.target import Gateway, trust_of
from services.cli.ui import bar_columns
from shared.errors import ConfigurationError, RyzansteinError, Unavailable

T = TypeVar("T")

TIMEOUT = 30.0
LONG_TIMEOUT = httpx.Timeout(TIMEOUT, write=600.0, read=600.0)
"""Of a file's upload: the gateway answers when it has stored all of it."""
PATIENCE = 60.0
"""Seconds for which a gateway that is waited at may be away."""
PAUSE = 0.5
"""Seconds until it is asked again."""
_AWAY = (502, 503, 504)
"""Statuses of a gateway that starts or drains, or of a proxy that finds none."""


class Refused(RyzansteinError):
    """The server's own words."""


class GatewayClient:
    """Speaks to one gateway, as any OpenAI client does. Methods raise `Unavailable` where none answers, and `Refused`
    with what it says."""

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
                return await self._send(path.name, data, purpose)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None

    async def _send(self, name: str, data: IO[bytes], purpose: str) -> dict[str, Any]:
        fields = {"data": {"purpose": purpose}, "files": {"file": (name, data)}}
        return await self.ask("POST", "/v1/files", timeout=LONG_TIMEOUT, **fields)

    async def content(self, path: str) -> AsyncGenerator[bytes, None]:
        """The bytes that lie at `path` of the API."""
        async with self._got(path, {}) as response:
            async for part in response.aiter_bytes():
                yield part

    async def lines(self, path: str, headers: dict[str, str]) -> AsyncGenerator[str, None]:
        """The lines of what it says at `path`, as they come."""
        async with self._got(path, headers) as response:
            async for line in response.aiter_lines():
                yield line

    @contextlib.asynccontextmanager
    async def _got(self, path: str, headers: dict[str, str]) -> AsyncIterator[httpx.Response]:
        with self._reachable():
            async with self._http.stream("GET", path, headers=headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(response)
                yield response

    async def download(self, path: str, target: Path) -> None:
        """Writes them to the file `target`, which appears whole. Raises `ConfigurationError` where it cannot be."""
        await save(self.content(path), target)

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
    return Unavailable(message) if response.status_code in _AWAY else Refused(message)


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


@contextlib.asynccontextmanager
async def connected(gateway: Gateway, key: str, ca: str = "") -> AsyncIterator[GatewayClient]:
    """`key`: an API key, or none; `ca`: a file of authorities to trust. Raises `ConfigurationError` for what is no
    address."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    trust = trust_of(gateway.certificate, ca)
    try:
        http = httpx.AsyncClient(
            base_url=gateway.url, headers=headers, timeout=TIMEOUT, trust_env=False, verify=trust
        )
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
