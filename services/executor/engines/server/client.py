"""HTTP with the server: what is sent to prove who we are, and how much of an answer is read.

ask    ─▶ ServerAnswer(status, body)     small, each within PROBE_TIMEOUT
stream ─▶ events                         of one generation, until it ends or is closed
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from shared.errors import ConfigurationError

CONNECT_TIMEOUT = 10.0  # seconds
PROBE_TIMEOUT = 60.0  # seconds for an answer of one piece; a token that a busy server is asked for is one
ANSWER_BYTES = 4 << 20  # of an answer of one piece; pages of metrics have some 100 KB
ERROR_BYTES = 64 << 10  # read of the body of an error
ERROR_CHARS = 300  # told of it
CREDENTIAL_BYTES = 16 << 10
PROBES_AT_ONCE = 4  # connections beside those of the generations
# Servers close idle connections after 5 s, as uvicorn and cpp-httplib do: ours are gone before, so that no request
# meets the closing.
KEEP_ALIVE = 3.0

_JSON = {"Content-Type": "application/json"}
_DONE = b"[DONE]"  # the data of a last event


class ServerFault(Exception):
    """The server has answered what it must not: why, as the end of a sentence about it."""


class ServerAnswer(msgspec.Struct, frozen=True):
    status: int
    body: bytes


class ServerClient:
    def __init__(self, url: str, credentials: Path | None, places: int) -> None:
        parsed = _checked(url)
        self.name = str(parsed).rstrip("/")  # for sentences; it has no secret
        self._secret = _read_secret(credentials) if credentials is not None else ""
        headers = {"Accept-Encoding": "identity"}  # what is compressed could be of any size
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        self._http = httpx.AsyncClient(
            base_url=parsed,
            headers=headers,
            trust_env=False,  # neither a proxy nor a .netrc of the environment gets to see what is sent here
            timeout=httpx.Timeout(PROBE_TIMEOUT, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=places + PROBES_AT_ONCE, keepalive_expiry=KEEP_ALIVE),
        )

    async def ask(self, path: str, body: Any = None) -> ServerAnswer:
        """GET, or POST where there is a body."""
        content = None if body is None else msgspec.json.encode(body)
        method = "GET" if body is None else "POST"
        async with self._http.stream(method, path, content=content, headers=_JSON) as response:
            return ServerAnswer(response.status_code, await _bounded(response, ANSWER_BYTES, whole=response.is_success))

    @asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator[httpx.Response]:
        """The response as soon as its headers are there. Leaving closes the connection, unless all was read."""
        # No bound on the silence: a long prompt takes minutes, and whether the server still computes is watched apart.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
        async with self._http.stream(
            "POST", path, content=msgspec.json.encode(body), timeout=timeout, headers=_JSON
        ) as response:
            yield response

    async def whole(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """The response of a stream that is one piece."""
        yield await _bounded(response, ANSWER_BYTES, whole=True)

    async def error(self, response: httpx.Response) -> ServerAnswer:
        """The response of a stream that is none."""
        return ServerAnswer(response.status_code, await _bounded(response, ERROR_BYTES, whole=False))

    async def close(self) -> None:
        await self._http.aclose()

    def refuse_unauthorized(self, answer: ServerAnswer) -> None:
        if answer.status in (401, 403):
            how = "refuses the credentials" if self._secret else "asks for credentials"
            raise ConfigurationError(
                f"{self.name} {how} ({answer.status}): put its API key into the file that engine_credentials names"
            )

    def sentence(self, said: ServerAnswer | str) -> str:
        """What an error says, on one line and without what only the server and we may know."""
        text = re.sub(r"\s+", " ", said if isinstance(said, str) else _message(said.body)).strip().rstrip(".")
        if self._secret:
            text = text.replace(self._secret, "***")
        return (text if len(text) <= ERROR_CHARS else f"{text[:ERROR_CHARS]}…") or "nothing"


async def events(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    """The data of each event, until the stream says that it is done or ends. Raises `ServerFault` for an event of more
    than `limit` bytes."""
    data: list[bytes] = []
    size = 0
    async for line in _lines(response, limit):
        if not line:
            if data == [_DONE]:
                return
            if data:
                yield b"\n".join(data)
            data, size = [], 0
        elif line.startswith(b"data:"):
            size += len(line)
            if size > limit:
                raise _too_long(limit)
            data.append(line[5:].removeprefix(b" "))


async def _lines(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for chunk in response.aiter_raw():
        looked = len(rest)  # a line is looked through once, however many chunks it comes in
        rest += chunk
        begin = 0
        while (end := rest.find(b"\n", max(begin, looked))) >= 0:
            yield bytes(rest[begin:end]).removesuffix(b"\r")
            begin = end + 1
        del rest[:begin]
        if len(rest) > limit:
            raise _too_long(limit)


def _too_long(limit: int) -> ServerFault:
    return ServerFault(f"it sent an event of more than {limit} bytes")


def _checked(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigurationError(f"The engine's URL is none ({error}): write http://HOST:PORT") from None
    if parsed.userinfo:
        raise ConfigurationError("The engine's URL has credentials in it: put them into the file of engine_credentials")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigurationError(f"The engine's URL {url} names no server: write http://HOST:PORT")
    return parsed


def _read_secret(path: Path) -> str:
    try:
        with path.open("rb") as file:
            secret = file.read(CREDENTIAL_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in ASCII"
        raise ConfigurationError(f"The engine's credentials cannot be read from {path}: {why}") from None
    if not secret or not secret.isprintable():
        raise ConfigurationError(
            f"The engine's credentials in {path} are not one line of text: write the API key alone"
        )
    return secret


async def _bounded(response: httpx.Response, limit: int, *, whole: bool) -> bytes:
    """The body, or its beginning where it need not be `whole`."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit:
            if whole:
                raise ServerFault(f"its answer to {response.request.url.path} has more than {limit} bytes")
            break
    return bytes(body[:limit])


def _message(body: bytes) -> str:
    """What a body of an error says, in the forms that servers have."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return said if isinstance(said, str) else msgspec.json.encode(said).decode()
