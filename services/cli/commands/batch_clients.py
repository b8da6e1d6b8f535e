"""Two ways to the same batches: the gateway's HTTP API, and the queue itself (docs/batch.md)."""

import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx
import msgspec

from shared.config import CommonSettings
from shared.errors import ConfigurationError, RyzansteinError, Unavailable
from shared.messages.batches import BatchAsk, BatchListing, BatchReply, BatchSubmit
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.objects import CHUNK, MissingObject, Objects

Batch = dict[str, Any]
"""A batch as `GET /v1/batches/{id}` shows it."""
Kind = Literal["output", "errors"]
FILE_FIELDS = {"output": "output_file_id", "errors": "error_file_id"}
TIMEOUT = 30.0


class Wanted(msgspec.Struct, frozen=True):
    """What is to be submitted."""

    path: Path
    endpoint: str
    window: str
    metadata: dict[str, str] | None


class BatchClient(Protocol):
    """Methods raise `RyzansteinError`."""

    async def submit(self, wanted: Wanted) -> Batch: ...

    async def get(self, batch: str) -> Batch: ...

    async def cancel(self, batch: str) -> Batch: ...

    async def listed(self, limit: int) -> list[Batch]: ...

    def content(self, batch: Batch, kind: Kind) -> AsyncIterator[bytes]:
        """The bytes of one of its files."""
        ...


class Refused(RyzansteinError):
    """The server's own words."""


class HttpBatches:
    """By the gateway's API, as any OpenAI client does it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def submit(self, wanted: Wanted) -> Batch:
        with wanted.path.open("rb") as data:
            file = await self._ask(
                "POST",
                "/v1/files",
                data={"purpose": "batch"},
                files={"file": (wanted.path.name, data)},
                timeout=httpx.Timeout(TIMEOUT, write=600.0, read=600.0),
            )
        body = {
            "input_file_id": file["id"],
            "endpoint": wanted.endpoint,
            "completion_window": wanted.window,
            "metadata": wanted.metadata,
        }
        key = {"Idempotency-Key": secrets.token_hex(16)}
        return await self._ask("POST", "/v1/batches", json=body, headers=key)

    async def get(self, batch: str) -> Batch:
        return await self._ask("GET", f"/v1/batches/{batch}")

    async def cancel(self, batch: str) -> Batch:
        return await self._ask("POST", f"/v1/batches/{batch}/cancel")

    async def listed(self, limit: int) -> list[Batch]:
        found: list[Batch] = (await self._ask("GET", f"/v1/batches?limit={limit}"))["data"]
        return found

    async def content(self, batch: Batch, kind: Kind) -> AsyncGenerator[bytes, None]:
        with _reachable(self._http):
            path = f"/v1/files/{batch[FILE_FIELDS[kind]]}/content"
            async with self._http.stream("GET", path) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise Refused(_message(response))
                async for part in response.aiter_bytes():
                    yield part

    async def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with _reachable(self._http):
            response = await self._http.request(method, path, **options)
        if response.status_code != 200:
            raise Refused(_message(response))
        answer: dict[str, Any] = response.json()
        return answer


@contextlib.contextmanager
def _reachable(http: httpx.AsyncClient) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise Unavailable(
            f"The gateway at {http.base_url} did not answer ({error or type(error).__name__}); start it, or name it "
            "with --url."
        ) from None


def _message(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"{response.url} answered with status {response.status_code}."
    return str(message)


class NatsBatches:
    """By the queue: the file goes into the object store, the rest is request and reply."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._objects = Objects(bus, subjects.FILES_STORE)

    async def submit(self, wanted: Wanted) -> Batch:
        name = f"upload-{secrets.token_hex(12)}"
        await self._objects.write(name, _parts(wanted.path), nuid=secrets.token_hex(11))
        asked = BatchSubmit(
            endpoint=wanted.endpoint,
            object=name,
            filename=wanted.path.name,
            completion_window=wanted.window,
            metadata=wanted.metadata,
        )
        return self._batch(await self._ask(subjects.BATCH_SUBMIT, asked))

    async def get(self, batch: str) -> Batch:
        return self._batch(await self._ask(subjects.BATCH_STATUS, BatchAsk(id=batch)))

    async def cancel(self, batch: str) -> Batch:
        return self._batch(await self._ask(subjects.BATCH_CANCEL, BatchAsk(id=batch)))

    async def listed(self, limit: int) -> list[Batch]:
        return (await self._ask(subjects.BATCH_LIST, BatchListing(limit=limit))).batches or []

    async def content(self, batch: Batch, kind: Kind) -> AsyncGenerator[bytes, None]:
        name = batch[FILE_FIELDS[kind]]
        try:
            async with contextlib.aclosing(self._objects.read(name)) as parts:
                async for part in parts:
                    yield part
        except MissingObject:
            raise Refused(f"The file {name} is gone.") from None

    async def _ask(self, subject: str, asked: msgspec.Struct) -> BatchReply:
        reply = await self._bus.request(subject, asked, BatchReply, timeout=TIMEOUT)
        if reply.error is not None:
            raise Refused(str(reply.error["message"]))
        return reply

    def _batch(self, reply: BatchReply) -> Batch:
        return reply.batch or {}


async def _parts(path: Path) -> AsyncGenerator[bytes, None]:
    with path.open("rb") as data:
        while part := data.read(CHUNK):
            yield part


@contextlib.asynccontextmanager
async def by_http(url: str, key: str) -> AsyncIterator[BatchClient]:
    """`key`: an API key, or none. Raises `ConfigurationError` for what is no address."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        http = httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT, trust_env=False)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigurationError(f"{url!r} is no address of a gateway ({error}).") from None
    async with http:
        yield HttpBatches(http)


@contextlib.asynccontextmanager
async def by_nats(settings: CommonSettings) -> AsyncIterator[BatchClient]:
    """Raises `BrokerUnavailable`."""
    bus = await Bus.connect(settings, "ryzanstein batch")
    try:
        yield NatsBatches(bus)
    finally:
        await bus.close()
