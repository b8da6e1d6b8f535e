"""NATS object stores: files of any size, in and out in chunks.

The layout is that of the NATS object store (nats-architecture-and-design, ADR-20), so that any NATS client
reads and writes the same objects.

    $O.<store>.C.<nuid>    the chunks of one writing, in order
    $O.<store>.M.<name>    what the object is: its nuid, size and digest; the last one counts

A writing shows nothing until its meta message is stored. One that is cut off leaves chunks that nobody knows;
whoever began it can have them removed by their nuid (`purge`).
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import structlog
from nats.js.api import Header, ObjectStoreConfig, RawStreamMsg
from nats.js.errors import NotFoundError
from nats.js.object_store import ObjectStore

from shared.errors import BrokerFull, BrokerUnavailable, InternalError, PayloadTooLarge, StorageFull
from shared.nats.bus import LEADER_PAUSE, Bus
from shared.nats.errors import BROKER_ERRORS, broker_error, lacks_room, reason_of, translated
from shared.nats.streams import create_replicated, made_by_others, when_led

log = structlog.get_logger(__name__)

CHUNK = 128 << 10  # bytes of a chunk, as nats-py and the nats command write them
LEAST_BYTES = 1 << 20  # with less room than that a store is of no use
READ_PAUSE = 0.5  # seconds between two tries to read a chunk
_DIGEST = "SHA-256="


class ObjectInfo(msgspec.Struct, frozen=True):
    """What stands in an object's meta message."""

    name: str
    nuid: str
    size: int
    digest: str = ""
    deleted: bool = False


class StoredVersion(msgspec.Struct, frozen=True):
    """One writing of an object, as somebody has seen it."""

    name: str
    nuid: str
    revision: int  # of its meta message


class MissingObject(Exception):
    """There is no object of that name, or its chunks have been removed."""


class Objects:
    """One object store; opened by `open`. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, store: str, *, max_bytes: int = 0, setting: str = "") -> None:
        """`max_bytes`: of a store that is created, or a smaller part of it where the broker has not so much to give;
        0: as many as the broker has. `setting`: the environment variable that says it."""
        self._bus = bus
        self._name = store
        self._stream = f"OBJ_{store}"
        self._max_bytes = max_bytes
        self._setting = setting

    async def open(self) -> None:
        """Creates the store where it does not exist, or waits for it where this user may not."""
        if await made_by_others(self._bus, self._stream):
            return
        most = self._max_bytes
        while True:
            try:
                with translated(f"create the object store {self._name}"):
                    await create_replicated(self._bus, partial(self._create, most))
                break
            except BrokerFull:
                if most < LEAST_BYTES:
                    raise
                # Not halves: they often come to all that is left, and a broker with nothing left makes no stream.
                most = most * 2 // 3
        if most != self._max_bytes:
            log.warning("stream_max_bytes_reduced", store=self._name, wanted=self._max_bytes, set=most)

    def _create(self, most: int, replicas: int) -> Awaitable[ObjectStore]:
        config = ObjectStoreConfig(bucket=self._name, replicas=replicas, max_bytes=most or None)
        return self._bus.jetstream().create_object_store(self._name, config)

    async def capacity(self) -> int:
        """Bytes that the open store may have, as it was created; 0: as many as the broker has."""
        with translated(f"look at the object store {self._name}"):
            info = await when_led(self._bus, lambda: self._bus.jetstream().stream_info(self._stream), created=True)
        return max(0, info.config.max_bytes or 0)

    async def info(self, name: str) -> ObjectInfo | None:
        """What is stored as `name`; None: nothing."""
        found = await self._found(name)
        return None if found is None else found[0]

    async def version(self, name: str) -> StoredVersion | None:
        """The same, for `delete_version`."""
        found = await self._found(name)
        return None if found is None else StoredVersion(name, found[0].nuid, found[1])

    async def _found(self, name: str) -> tuple[ObjectInfo, int] | None:
        with translated(f"read an object of {self._name}"):
            try:
                message = await self._bus.jetstream().get_last_msg(self._stream, self._meta(name))
            except NotFoundError:
                return None
        try:
            info = msgspec.json.decode(message.data or b"", type=ObjectInfo)
        except msgspec.DecodeError as error:
            log.warning("undecodable_object", store=self._name, name=name, error=str(error))
            return None
        return None if info.deleted else (info, message.seq or 0)

    async def names(self) -> list[str]:
        """Of all objects, deleted ones not."""
        prefix = f"$O.{self._name}.M."
        tokens = [subject.removeprefix(prefix) for subject in await self._subjects(f"{prefix}>")]
        return [base64.urlsafe_b64decode(token).decode() for token in tokens]

    async def writings(self, prefix: str) -> list[str]:
        """The nuids, of those that begin with these tokens (`job.`), of which there are chunks."""
        chunks = self._chunks("")
        return [subject.removeprefix(chunks) for subject in await self._subjects(f"{chunks}{prefix}>")]

    async def _subjects(self, pattern: str) -> list[str]:
        with translated(f"list the objects of {self._name}"):
            info = await when_led(
                self._bus, lambda: self._bus.jetstream().stream_info(self._stream, subjects_filter=pattern)
            )
        return list(info.state.subjects or {})

    # --- in --------------------------------------------------------------------------------------

    async def write(
        self, name: str, parts: AsyncIterable[bytes], *, nuid: str, limit: int = 0, fresh: bool = False
    ) -> int:
        """Stores what `parts` yields as `name`; returns its bytes. `nuid`: a name that was never used before.

        `fresh`: if the object is there already, that one stays. Raises `PayloadTooLarge` beyond `limit` bytes
        (0: any number), `StorageFull`, and whatever `parts` raises; then nothing of it is left. Who is cancelled, or
        loses the broker, while its name is stored may have stored it: then it is whole.
        """
        try:
            size, count, digest = await self._write_chunks(nuid, parts, limit)
            old = await self.info(name)
        except BaseException:
            await self._try_to_purge(nuid)
            raise
        if fresh and old is not None:
            await self._try_to_purge(nuid)
            return size
        try:
            await self._write_meta(name, nuid, size, count, digest)
        except StorageFull:
            await self._try_to_purge(nuid)
            raise
        if old is not None and old.nuid != nuid:
            await self._try_to_purge(old.nuid)
        return size

    async def put(self, name: str, data: bytes, *, fresh: bool = False) -> None:
        """As `write`, what is held whole."""

        async def parts() -> AsyncGenerator[bytes, None]:
            yield data

        await self.write(name, parts(), nuid=secrets.token_hex(11), fresh=fresh)

    async def _write_chunks(self, nuid: str, parts: AsyncIterable[bytes], limit: int) -> tuple[int, int, bytes]:
        digest, size, count = hashlib.sha256(), 0, 0
        async for chunk in _chunks(parts):
            size += len(chunk)
            if limit and size > limit:
                raise PayloadTooLarge(f"The file is larger than the {limit:,} bytes that are left for it; split it.")
            await self._publish(self._chunks(nuid), chunk, {"Nats-Msg-Id": f"{nuid}-{count}"})
            digest.update(chunk)
            count += 1
        return size, count, digest.digest()

    async def _write_meta(self, name: str, nuid: str, size: int, count: int, digest: bytes) -> None:
        meta: dict[str, Any] = {
            "name": name,
            "options": {"max_chunk_size": CHUNK},
            "bucket": self._name,
            "nuid": nuid,
            "size": size,
            "chunks": count,
            "mtime": datetime.now(UTC).isoformat(),
            "digest": _DIGEST + base64.urlsafe_b64encode(digest).decode(),
        }
        await self._publish(self._meta(name), json.dumps(meta).encode(), {Header.ROLLUP: "sub"})

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        try:
            await self._bus.jetstream().publish(subject, data, headers=headers)
        except BROKER_ERRORS as error:
            if lacks_room(error):
                limit = "raise its limit" + (f" ({self._setting} sets that of a new one)" if self._setting else "")
                raise StorageFull(
                    f"The object store {self._name} is full ({reason_of(error)}); delete files that are not needed, or "
                    f"{limit}."
                ) from error
            raise broker_error(f"store a part of an object in {self._name}", error) from error

    # --- out -------------------------------------------------------------------------------------

    async def read(self, name: str, *, patience: float = 0.0) -> AsyncGenerator[bytes, None]:
        """Yields the object's chunks, one asked for at a time.

        `patience`: seconds for which a chunk is tried again while the broker is away. Raises `MissingObject`,
        and `InternalError` when what was read is not what was written.
        """
        info = await self._patient_info(name, patience)
        if info is None:
            raise MissingObject(name)
        subject, digest = self._chunks(info.nuid), hashlib.sha256()
        left, sequence = info.size, 1
        while left > 0:
            message = await self._chunk(name, subject, sequence, patience)
            data = message.data or b""
            sequence = (message.seq or 0) + 1
            left -= len(data)
            digest.update(data)
            yield data
        wanted = info.digest.removeprefix(_DIGEST).removeprefix("sha-256=")
        if left or (wanted and base64.urlsafe_b64decode(wanted) != digest.digest()):
            raise InternalError(f"The object {name} of {self._name} is not what was written; write it again.")

    async def get(self, name: str) -> bytes:
        """As `read`, all of it."""
        return b"".join([part async for part in self.read(name)])

    async def _patient_info(self, name: str, patience: float) -> ObjectInfo | None:
        give_up = time.monotonic() + patience
        while True:
            try:
                return await self.info(name)
            except BrokerUnavailable:
                if time.monotonic() >= give_up:
                    raise
            await asyncio.sleep(READ_PAUSE)

    async def _chunk(self, name: str, subject: str, sequence: int, patience: float) -> RawStreamMsg:
        """The first chunk from `sequence` on. No consumer, so there is none to lose with a connection."""
        give_up = time.monotonic() + patience
        missing = False
        while True:
            try:
                return await self._bus.jetstream().get_msg(
                    self._stream, seq=sequence, subject=subject, next=True, direct=not missing
                )
            except NotFoundError:
                if missing:
                    raise MissingObject(name) from None
                missing = True  # a server that follows may not have it yet: the leader is asked
                await asyncio.sleep(LEADER_PAUSE)
            except BROKER_ERRORS as error:
                if time.monotonic() >= give_up:
                    raise broker_error(f"read an object of {self._name}", error) from error
                await asyncio.sleep(READ_PAUSE)

    # --- away ------------------------------------------------------------------------------------

    async def delete(self, name: str) -> None:
        """Removes it; no error where it is gone."""
        info = await self.info(name)
        with translated(f"delete an object of {self._name}"):
            jetstream = self._bus.jetstream()
            await jetstream.purge_stream(self._stream, subject=self._meta(name))
            if info is not None:
                await jetstream.purge_stream(self._stream, subject=self._chunks(info.nuid))

    async def delete_version(self, version: StoredVersion) -> None:
        """Removes that one; what was written as its name since then stays."""
        with translated(f"delete an object of {self._name}"):
            jetstream = self._bus.jetstream()
            await jetstream.purge_stream(self._stream, seq=version.revision + 1, subject=self._meta(version.name))
            await jetstream.purge_stream(self._stream, subject=self._chunks(version.nuid))

    async def purge(self, nuid: str) -> None:
        """Removes the chunks of a writing."""
        with translated(f"delete an object of {self._name}"):
            await self._bus.jetstream().purge_stream(self._stream, subject=self._chunks(nuid))

    async def _try_to_purge(self, nuid: str) -> None:
        with contextlib.suppress(BrokerUnavailable):
            await self.purge(nuid)

    def _chunks(self, nuid: str) -> str:
        return f"$O.{self._name}.C.{nuid}"

    def _meta(self, name: str) -> str:
        return f"$O.{self._name}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


async def _chunks(parts: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The same bytes, `CHUNK` at a time."""
    held = bytearray()
    async for part in parts:
        held += part
        while len(held) >= CHUNK:
            yield bytes(held[:CHUNK])
            del held[:CHUNK]
    if held:
        yield bytes(held)
