"""Files of tenants: their records in the bucket `files`, their bytes in the object store `files`.

    record (uploading) ──▶ chunks ──▶ meta of the object ──▶ record (processed): now it is seen
          └── killed anywhere before: what is there is removed once the record is old (`sweep`)

A file goes in the opposite order: bytes, then record, so that one that was cut off can be repeated. Whoever
asks as another tenant is told that there is no such file.

Each gateway watches the records, and so knows what every tenant has: an upload is counted from its beginning on,
with the size that its client has announced. Two gateways that admit within the moment that news take may together
admit more than a quota.
"""

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable

import msgspec
import structlog

from services.gateway.core.errors import InvalidParameter, QuotaExceeded, RouteError, check_range, missing
from services.gateway.core.settings import GatewaySettings
from shared.errors import PayloadTooLarge, RyzansteinError, StorageFull, Unavailable
from shared.limits import TENANT_FILE_BYTES, TENANT_FILES, UPLOAD
from shared.messages.batches import LEAST_EXPIRY, MOST_EXPIRY, FileRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import KvEntry
from shared.nats.objects import MissingObject, Objects
from shared.nats.tenants import DeletionMarkers, Held, Holdings, TenantBucket, tenant_key

log = structlog.get_logger(__name__)

SWEEP_INTERVAL = 60.0
UPLOAD_TIME = 3600.0  # seconds after which an upload that has not ended is given up


# Seconds after which a batch's input goes when nothing was said, as in OpenAI's API.
BATCH_EXPIRY = float(MOST_EXPIRY)
FOR_OUTPUTS = 4  # that part of the store takes no uploads: what batches have computed must find room
KNOWN_WITHIN = 5.0  # seconds that an upload waits for a gateway that has just started to know what there is


def unknown_file(file_id: str) -> RouteError:
    """The error for an id of which there is no file, or another tenant's."""
    return RouteError(f"No such File object: {file_id[:64]}")


class Files:
    """Opened by `start`. Methods raise `BrokerUnavailable`."""

    def __init__(self, bus: Bus, settings: GatewaySettings) -> None:
        most = settings.files_max_bytes
        self.objects = Objects(bus, subjects.FILES_STORE, max_bytes=most, setting="RYZANSTEIN_FILES_MAX_BYTES")
        self.limit = settings.file_limit  # bytes of one file
        self._quota, self._most = settings.tenant_file_bytes, settings.tenant_files
        self._records = TenantBucket(bus, subjects.FILES_BUCKET, FileRecord, lambda record: record.tenant)
        self._held = Holdings()
        self._known = asyncio.Event()
        self._store_bytes = 0
        self._marks = DeletionMarkers[FileRecord]()

    async def start(self) -> None:
        await self._records.ensure()
        await self.objects.open()
        self._store_bytes = await self.objects.capacity()

    # --- what there is ---------------------------------------------------------------------------

    async def watch(self) -> None:
        """Counts what each tenant has. Runs until it is cancelled."""
        await self._records.follow_revisions(self._note, self._known.set)

    def _note(self, key: str, record: FileRecord | None, revision: int) -> None:
        if record is not None:
            self._held.note(key, _held(record))
        else:
            self._held.forget(key)
            self._marks.note(key, revision, time.monotonic())

    async def admit(self, tenant: str, size: int) -> int:
        """Bytes that a file of `size`, or of a size that is not known (negative), may have. Raises `PayloadTooLarge`,
        `QuotaExceeded`, `StorageFull`, `Unavailable`."""
        try:
            await asyncio.wait_for(self._known.wait(), KNOWN_WITHIN)
        except TimeoutError:
            raise Unavailable(
                "The gateway has not read the list of files yet; try again in a moment.", retry_after=1
            ) from None
        entries, held = self._held.of(tenant)
        if entries >= self._most:
            raise QuotaExceeded(f"You have {entries:,} files ({TENANT_FILES.cited(self._most)}); delete some.")
        if size > self._quota:
            raise PayloadTooLarge(
                f"The file has up to {size:,} bytes, more than all yours together may have "
                f"({TENANT_FILE_BYTES.cited(self._quota)}); split it."
            )
        left = self._quota - held
        if left <= 0 or size > left:
            raise QuotaExceeded(
                f"Your files have {held:,} bytes, those that are being uploaded counted, and this one has "
                f"{_bytes(size)} ({TENANT_FILE_BYTES.cited(self._quota)}); delete some."
            )
        return min(self.limit, left, self._left_for_all(size))

    def _left_for_all(self, size: int) -> int:
        if not self._store_bytes:
            return self.limit
        most = self._store_bytes - self._store_bytes // FOR_OUTPUTS
        left = most - self._held.size
        if left <= 0 or size > left:
            raise StorageFull(
                f"The files of all tenants have {self._held.size:,} bytes, and uploads may fill {most:,} of the store "
                f"(RYZANSTEIN_FILES_MAX_BYTES, less a {FOR_OUTPUTS}th for outputs of batches); delete files that are "
                "not needed."
            )
        return left

    # --- in --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def receive(
        self, tenant: str, filename: str, parts: AsyncIterable[bytes], size: int = -1
    ) -> AsyncGenerator[FileRecord, None]:
        """Stores what `parts` yields, as a file that nobody sees until `publish`; removed again when the block
        raises. `size`: the most that it may come to, as far as that is known. Raises what `admit` raises."""
        most = await self.admit(tenant, size)
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
            bytes=most if size < 0 else size,
        )
        self._held.note(tenant_key(tenant, file_id), _held(record))  # before the next one is admitted
        try:
            await self._records.put(tenant, file_id, record)
            async with asyncio.timeout(UPLOAD_TIME):
                written = await self._write(file_id, parts, nuid, most)
            yield msgspec.structs.replace(record, bytes=written)
        except BaseException:
            await self.discard(record)
            raise

    async def _write(self, name: str, parts: AsyncIterable[bytes], nuid: str, most: int) -> int:
        try:
            return await self.objects.write(name, parts, nuid=nuid, limit=most)
        except PayloadTooLarge:
            raise PayloadTooLarge(
                f"The file is larger than the {most:,} bytes that there were for it ({UPLOAD.cited(self.limit)}; "
                f"{TENANT_FILE_BYTES.cited(self._quota)}); split it."
            ) from None

    async def discard(self, record: FileRecord) -> None:
        try:
            await self._remove(record)
        except RyzansteinError as error:  # the sweep will do it
            log.info("upload_cleanup_failed", file=record.id, error=str(error))

    async def publish(self, record: FileRecord) -> FileRecord:
        """From now on it is seen."""
        record = msgspec.structs.replace(record, status="processed", nuid="")
        await self.note(record)
        return record

    # --- uploads in parts (`uploads.py`) -----------------------------------------------------------

    async def note(self, record: FileRecord) -> None:
        """Writes the record, of what nobody sees where it is being uploaded."""
        await self._records.put(record.tenant, record.id, record)
        self._held.note(tenant_key(record.tenant, record.id), _held(record))

    async def unfinished(self, name: str, tenant: str) -> KvEntry[FileRecord] | None:
        """What nobody sees."""
        entry = await self._records.get(tenant, name)
        mine = entry is not None and entry.value.tenant == tenant and entry.value.status == "uploading"
        return entry if mine else None

    async def take(self, entry: KvEntry[FileRecord]) -> bool:
        """Removes an upload, for one of those who want to; whether it is this one."""
        gone = msgspec.structs.replace(entry.value, status="processed", expires_at=1.0)
        if await self._records.update(entry.key, gone, entry.revision) is None:
            return False
        await self._records.delete(entry.key)
        self._held.forget(entry.key)
        return True

    async def parts_of(self, upload: str, tenant: str) -> list[FileRecord]:
        return [entry.value async for entry in self._records.of(tenant) if entry.value.upload == upload]

    # --- of batches ------------------------------------------------------------------------------

    async def put(self, record: FileRecord, parts: AsyncIterable[bytes]) -> FileRecord:
        """Stores the output of a batch under an id that says what is in it: of several writings the first one stays.

        Outputs may fill the quota once more, so that uploads leave room for them. Raises `QuotaExceeded`,
        `StorageFull`.
        """
        entries, held = self._held.of(record.tenant)
        left = 2 * self._quota - held
        refusal = QuotaExceeded(
            f"Your {entries:,} files have {held:,} bytes, and with outputs of batches they may have "
            f"{2 * self._quota:,} (twice the {TENANT_FILE_BYTES.cited(self._quota)}); delete some."
        )
        if left <= 0:
            raise refusal
        nuid = secrets.token_hex(11)
        try:
            size = await self.objects.write(record.object_name, parts, nuid=nuid, limit=left, fresh=True)
        except PayloadTooLarge:
            raise refusal from None
        return await self.publish(msgspec.structs.replace(record, bytes=size))

    async def adopt(self, tenant: str, object_name: str, filename: str) -> FileRecord:
        """A file of what another program has put into the object store; of the same content the same file.
        Raises `RouteError`."""
        info = await self.objects.info(object_name)
        known = await self._records.get(tenant, object_name)
        if info is None or known is not None:
            raise RouteError(
                f"There is no object '{object_name[:64]}' of yours in the object store {subjects.FILES_STORE}; "
                "put it there first, or name a file by its id."
            )
        text = f"{len(tenant)}:{tenant}:{info.nuid}:{object_name}"
        file_id = f"file-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"
        if (again := await self._records.get(tenant, file_id)) is not None:
            return again.value
        await self.admit(tenant, info.size)
        return await self.publish(
            FileRecord(file_id, tenant, filename, "batch", time.time(), object_name, bytes=info.size)
        )

    # --- out -------------------------------------------------------------------------------------

    async def get(self, file_id: str, tenant: str) -> FileRecord:
        """Raises `RouteError` where there is none."""
        entry = await self._records.get(tenant, file_id) if file_id else None
        if entry is None or not _visible(entry.value, tenant, time.time()):
            raise unknown_file(file_id)
        return entry.value

    async def listed(self, tenant: str, purpose: str | None) -> list[FileRecord]:
        """Those of a tenant, in no order."""
        now = time.time()
        return [
            entry.value
            async for entry in self._records.of(tenant)
            if _visible(entry.value, tenant, now) and purpose in (None, entry.value.purpose)
        ]

    async def content(self, record: FileRecord, *, patience: float = 0.0) -> AsyncGenerator[bytes, None]:
        """Its bytes, a chunk at a time. Raises `RouteError` when they have been removed."""
        try:
            async with contextlib.aclosing(self.objects.read(record.object_name, patience=patience)) as parts:
                async for part in parts:
                    yield part
        except MissingObject:
            raise unknown_file(record.id) from None

    async def whole(self, file_id: str, tenant: str, most: int) -> tuple[str, bytes]:
        """A file's name and bytes. Raises `RouteError` where there is none, `PayloadTooLarge` where it has more than
        `most` bytes."""
        record = await self.get(file_id, tenant)
        if record.bytes > most:
            raise PayloadTooLarge(f"The file {file_id} has {record.bytes:,} bytes, and {most:,} may be read.")
        async with contextlib.aclosing(self.content(record)) as parts:
            return record.filename, b"".join([part async for part in parts])

    # --- away ------------------------------------------------------------------------------------

    async def delete(self, file_id: str, tenant: str) -> None:
        """Raises `RouteError` where there is none."""
        await self._remove(await self.get(file_id, tenant))

    async def _remove(self, record: FileRecord) -> None:
        if record.nuid:
            await self.objects.purge(record.nuid)
        await self.objects.delete(record.object_name)
        entry = await self._records.get(record.tenant, record.id)
        if entry is not None:
            await self._records.delete(entry.key)
        self._held.forget(tenant_key(record.tenant, record.id) if entry is None else entry.key)

    async def run(self) -> None:
        """Removes what has expired, and uploads that were cut off. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL)
            try:
                await self.sweep(time.time())
            except RyzansteinError as error:
                log.info("file_expiry_failed", error=str(error))

    async def sweep(self, now: float) -> None:
        """Each gateway does this; what is gone already is no error. It looks at what is due alone, and removes the
        marks that records have left."""
        for key in self._held.due(now):
            record = await self._records.at(key)
            if record is None:
                self._held.forget(key)
            elif _over(record, now):
                await self._remove(record)
                log.info("file_removed", file=record.id, status=record.status)
        await self._marks.sweep(self._records, time.monotonic())


def _held(record: FileRecord) -> Held:
    due = record.created_at + UPLOAD_TIME + SWEEP_INTERVAL
    return Held(record.tenant, record.bytes, due if record.status == "uploading" else record.expires_at)


def _bytes(size: int) -> str:
    return f"{size:,}" if size >= 0 else "a size that is not known"


def _visible(record: FileRecord, tenant: str, now: float) -> bool:
    return record.tenant == tenant and record.status == "processed" and not _over(record, now)


def _over(record: FileRecord, now: float) -> bool:
    if record.status == "uploading":
        return now >= record.created_at + UPLOAD_TIME + SWEEP_INTERVAL
    return 0 < record.expires_at <= now


ANCHOR = "created_at"


def expiry(anchor: str | None, seconds: int | None, param: str, purpose: str) -> float:
    """Seconds of an expiration policy, 0 where there is none: a file goes by its purpose then. Raises
    `InvalidParameter`."""
    if anchor is None and seconds is None:
        return BATCH_EXPIRY if purpose == "batch" else 0.0
    if anchor != ANCHOR:
        raise InvalidParameter(
            f"Invalid value for '{param}.anchor': supported values are: '{ANCHOR}'.", param=f"{param}.anchor"
        )
    if seconds is None:
        raise missing(f"{param}.seconds")
    check_range(f"{param}.seconds", seconds, LEAST_EXPIRY, MOST_EXPIRY)
    return float(seconds)
