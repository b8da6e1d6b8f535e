"""Batches over NATS: a file of requests in, a file of answers out, without HTTP (docs/batch.md of the server).

Needs the extra `batch` (nats-py). Files are the server's object store `files`; nothing here holds a whole one.
"""

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import nats
import nats.errors
import nats.js.errors
import stamina
from nats.aio.client import Client as NatsClient
from nats.js.object_store import ObjectStore

from ryzanstein_client.errors import ApiError, error_from
from ryzanstein_client.files import replacing

STORE = "files"
OVER = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it was when it was asked for."""

    id: str
    status: str
    total: int
    completed: int
    failed: int
    """Lines that have an error for their answer."""
    files: Mapping[str, str]
    """Names in the object store `files`: `input`, and once they are there `output` and `errors`."""
    raw: Mapping[str, Any]
    """OpenAI's object."""

    @property
    def over(self) -> bool:
        return self.status in OVER

    @property
    def errors(self) -> list[str]:
        """What is wrong with the input file, a sentence each."""
        found = (self.raw.get("errors") or {}).get("data") or []
        return [f"line {each['line']}: {each['message']}" if each.get("line") else each["message"] for each in found]


class BatchQueue:
    """A connection to the server's NATS. Use it as an asynchronous context manager.

    Methods raise `ApiError` for what the server refuses, and nats-py's errors when NATS or every gateway stays
    away for longer than `patience`.
    """

    def __init__(
        self,
        url: str = "nats://127.0.0.1:4222",
        user: str = "",
        password: str = "",
        *,
        tenant: str = "",
        timeout: float = 10.0,
        patience: float = 60.0,
        **options: Any,
    ) -> None:
        """`tenant`: whose batches they are. `timeout`, `patience`: seconds for one answer, and for all tries.
        `options` go to `nats.connect`: `tls`, `user_credentials`, ..."""
        self._url = url
        self._options = {**({"user": user, "password": password} if user else {}), **options}
        self._tenant = tenant
        self._timeout = timeout
        self._patience = patience
        self._client: NatsClient | None = None

    async def __aenter__(self) -> Self:
        self._client = await nats.connect(self._url, **self._options)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def submit(
        self,
        path: str | os.PathLike[str],
        *,
        endpoint: str = "/v1/chat/completions",
        window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Batch:
        """Puts a file of JSON lines into the store and hands it in; returns before it has been checked.

        `window`: how long it may take (`24h`, `90m`, `7d`). `idempotency_key`: for a program that may be killed
        and begin again: with the same key the same batch comes back, provided the file is the same.
        """
        key = idempotency_key or str(uuid.uuid4())
        name = f"client-{uuid.uuid5(uuid.NAMESPACE_URL, f'{self._tenant}/{key}')}"
        store = await self._store()
        await self._upload(store, name, Path(path))
        fields = {
            "object": name,
            "endpoint": endpoint,
            "completion_window": window,
            "filename": Path(path).name,
            "idempotency_key": key,
            **({"metadata": dict(metadata)} if metadata else {}),
        }
        return _batch_from(await self._ask("submit", **fields))

    async def status(self, batch: str) -> Batch:
        return _batch_from(await self._ask("status", id=batch))

    async def cancel(self, batch: str) -> Batch:
        """Begins no more of its lines; what is done is kept."""
        return _batch_from(await self._ask("cancel", id=batch))

    async def newest(self, limit: int = 20) -> list[Batch]:
        """The newest first, without the names of their files."""
        found = await self._ask("list", limit=limit)
        return [_batch_from({"batch": each}) for each in found["batches"] or []]

    async def watch(self, batch: str, *, interval: float = 1.0) -> AsyncIterator[Batch]:
        """The batch now and whenever it has changed, looked at every `interval` seconds; ends when it is over."""
        last: Batch | None = None
        while True:
            found = await self.status(batch)
            if found != last:
                yield found
            if found.over:
                return
            last = found
            await asyncio.sleep(interval)

    async def wait(self, batch: str, *, interval: float = 1.0) -> Batch:
        """Returns when it is over."""
        async for found in self.watch(batch, interval=interval):
            last = found
        return last

    async def download(
        self, batch: Batch, path: str | os.PathLike[str], which: Literal["output", "errors"] = "output"
    ) -> bool:
        """Writes a file of results, whole or not at all; False where the batch has none."""
        name = batch.files.get(which)
        if name is None:
            return False
        store = await self._store()
        with replacing(path) as file:
            await store.get(name, writeinto=cast("Any", file))
        return True

    # --- NATS ---------------------------------------------------------------------------------------

    async def _store(self) -> ObjectStore:
        assert self._client is not None, "use the queue as an asynchronous context manager"
        return await self._client.jetstream().object_store(STORE)

    async def _upload(self, store: ObjectStore, name: str, path: Path) -> None:
        """Once: an object that is there already is a batch's, or the whole of an earlier try."""
        with path.open("rb") as file:
            try:
                await store.get_info(name)
            except nats.js.errors.ObjectNotFoundError:
                await store.put(name, cast("Any", file))

    async def _ask(self, what: str, **fields: Any) -> dict[str, Any]:
        async for attempt in stamina.retry_context(on=_again, attempts=None, timeout=self._patience, wait_max=2.0):
            with attempt:
                return await self._ask_once(what, fields)
        raise AssertionError("stamina ends with an answer or an exception")

    async def _ask_once(self, what: str, fields: dict[str, Any]) -> dict[str, Any]:
        assert self._client is not None, "use the queue as an asynchronous context manager"
        data = json.dumps({**fields, **({"tenant": self._tenant} if self._tenant else {})}).encode()
        reply = await self._client.request(f"batches.{what}", data, timeout=self._timeout)
        answer: dict[str, Any] = json.loads(reply.data)
        if answer.get("error"):
            raise error_from(answer["error"], int(answer.get("status") or 0))
        return answer


def _again(error: Exception) -> bool:
    if isinstance(error, ApiError):
        return error.again
    return isinstance(
        error, nats.errors.TimeoutError | nats.errors.NoRespondersError | nats.errors.ConnectionReconnectingError
    )


def _batch_from(answer: Mapping[str, Any]) -> Batch:
    raw = answer["batch"]
    counts = raw.get("request_counts") or {}
    return Batch(
        id=raw["id"],
        status=raw["status"],
        total=counts.get("total", 0),
        completed=counts.get("completed", 0),
        failed=counts.get("failed", 0),
        files=answer.get("files") or {},
        raw=raw,
    )
