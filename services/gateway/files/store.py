"""Files of tenants: their records in the bucket `files`, their bytes in the object store `files`.

    record (uploading) ──▶ chunks ──▶ meta of the object ──▶ record (processed): now it is seen
          └── killed anywhere before: what is there is removed once the record is old (`sweep`)

A file goes in the opposite order: bytes, then record, so that one that was cut off can be repeated. Whoever
asks as another tenant is told that there is no such file.
"""

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable

import msgspec
import structlog

from services.gateway.errors import RouteError
from shared import subjects
from shared.batches import FileRecord
from shared.bus import Bus
from shared.errors import RyzansteinError
from shared.objects import MissingObject, Objects
from shared.stores import Bucket

log = structlog.get_logger(__name__)

SWEEP_INTERVAL = 60.0
UPLOAD_TIME = 3600.0
"""Seconds after which an upload that has not ended is given up."""


def unknown_file(file_id: str) -> RouteError:
    """The error for an id of which there is no file, or another tenant's."""
    return RouteError(f"No such File object: {file_id[:64]}", status=404, reason="not_found")


class Files:
    """Opened by `start`. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, *, limit: int, store_bytes: int) -> None:
        """`limit`: bytes of one file; `store_bytes`: of all together, 0: as many as NATS has."""
        self.objects = Objects(bus, subjects.FILES_STORE, max_bytes=store_bytes)
        self.limit = limit
        self._bus = bus
        self._bucket: Bucket[FileRecord] | None = None

    async def start(self) -> None:
        self._bucket = await Bucket.open(self._bus, subjects.FILES_BUCKET, FileRecord)
        await self.objects.open()

    @property
    def _records(self) -> Bucket[FileRecord]:
        assert self._bucket is not None, "not started"
        return self._bucket

    # --- in --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def receive(
        self, tenant: str, filename: str, parts: AsyncIterable[bytes]
    ) -> AsyncGenerator[FileRecord, None]:
        """Stores what `parts` yields, as a file that nobody sees until `publish`; removed again when the block
        raises. Raises `PayloadTooLarge`, `StorageFull` too."""
        file_id, nuid = f"file-{secrets.token_hex(12)}", secrets.token_hex(11)
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            filename=filename,
            purpose="",
            created_at=time.time(),
            object_name=file_id,
            status="uploading",
            nuid=nuid,
        )
        await self._records.put(file_id, record)
        try:
            async with asyncio.timeout(UPLOAD_TIME):
                size = await self.objects.write(file_id, parts, nuid=nuid, limit=self.limit)
            yield msgspec.structs.replace(record, bytes=size)
        except BaseException:
            await self._discard(record)
            raise

    async def _discard(self, record: FileRecord) -> None:
        try:
            await self._remove(record)
        except RyzansteinError as error:  # the sweep will do it
            log.info("upload_not_removed", file=record.id, error=str(error))

    async def publish(self, record: FileRecord) -> FileRecord:
        """From now on it is seen."""
        record = msgspec.structs.replace(record, status="processed", nuid="")
        await self._records.put(record.id, record)
        return record

    async def put(self, record: FileRecord, parts: AsyncIterable[bytes]) -> FileRecord:
        """Stores a file under an id that says what is in it: of several writings the first one stays."""
        size = await self.objects.write(record.object_name, parts, nuid=secrets.token_hex(11), fresh=True)
        return await self.publish(msgspec.structs.replace(record, bytes=size))

    async def adopt(self, tenant: str, object_name: str, filename: str) -> FileRecord:
        """A file of what another program has put into the object store; of the same content the same file.
        Raises `RouteError`."""
        info = await self.objects.info(object_name)
        known = await self._records.get(object_name)
        if info is None or known is not None:
            raise RouteError(
                f"There is no object '{object_name[:64]}' of yours in the object store {subjects.FILES_STORE}; "
                "put it there first, or name a file by its id.",
                status=404,
                reason="not_found",
            )
        text = f"{len(tenant)}:{tenant}:{info.nuid}:{object_name}"
        file_id = f"file-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"
        if (again := await self._records.get(file_id)) is not None:
            return again.value
        return await self.publish(
            FileRecord(file_id, tenant, filename, "batch", time.time(), object_name, bytes=info.size)
        )

    # --- out -------------------------------------------------------------------------------------

    async def get(self, file_id: str, tenant: str) -> FileRecord:
        """Raises `RouteError` where there is none."""
        entry = await self._records.get(file_id) if file_id else None
        if entry is None or not _visible(entry.value, tenant, time.time()):
            raise unknown_file(file_id)
        return entry.value

    async def listed(self, tenant: str, purpose: str | None) -> list[FileRecord]:
        """Those of a tenant, in no order."""
        now = time.time()
        records = await self._records.items()
        return [
            record
            for record in records.values()
            if _visible(record, tenant, now) and purpose in (None, record.purpose)
        ]

    async def content(self, record: FileRecord, *, patience: float = 0.0) -> AsyncGenerator[bytes, None]:
        """Its bytes, a chunk at a time. Raises `RouteError` when they have been removed."""
        try:
            async with contextlib.aclosing(self.objects.read(record.object_name, patience=patience)) as parts:
                async for part in parts:
                    yield part
        except MissingObject:
            raise unknown_file(record.id) from None

    # --- away ------------------------------------------------------------------------------------

    async def delete(self, file_id: str, tenant: str) -> None:
        """Raises `RouteError` where there is none."""
        await self._remove(await self.get(file_id, tenant))

    async def _remove(self, record: FileRecord) -> None:
        if record.nuid:
            await self.objects.purge(record.nuid)
        await self.objects.delete(record.object_name)
        await self._records.delete(record.id)

    async def run(self) -> None:
        """Removes what has expired, and uploads that were cut off. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL)
            try:
                await self.sweep(time.time())
            except RyzansteinError as error:
                log.info("files_not_swept", error=str(error))

    async def sweep(self, now: float) -> None:
        """Each gateway does this; what is gone already is no error."""
        for record in (await self._records.items()).values():
            if _over(record, now):
                await self._remove(record)
                log.info("file_removed", file=record.id, status=record.status)


def _visible(record: FileRecord, tenant: str, now: float) -> bool:
    return record.tenant == tenant and record.status == "processed" and not _over(record, now)


def _over(record: FileRecord, now: float) -> bool:
    if record.status == "uploading":
        return now >= record.created_at + UPLOAD_TIME + SWEEP_INTERVAL
    return 0 < record.expires_at <= now
