"""Uploads in parts: each part is a file that nobody sees, until they are put together.

    create ──▶ upload (uploading) ──part──▶ file (uploading) ... ──complete──▶ file (processed), parts gone
                                  └─cancel──▶ parts gone

An upload that is not completed within `UPLOAD_TIME` is removed with its parts, as a file that was cut off is.
"""

import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence

import msgspec

from services.gateway.core.errors import InvalidField, RouteError
from services.gateway.files.files import UPLOAD_TIME, Files
from shared.errors import PayloadTooLarge
from shared.limits import UPLOAD
from shared.messages.batches import FileRecord
from shared.nats.kv import KvEntry

PREFIX, PART, FILE = "upload_", "part_", "file-"


def unknown_upload(upload_id: str) -> RouteError:
    return RouteError(f"No such Upload object: {upload_id[:64]}")


def expiry_of(record: FileRecord) -> float:
    """Unix seconds at which it is given up."""
    return record.created_at + UPLOAD_TIME


class Uploads:
    """Methods raise `RouteError` where there is no upload of that id and tenant, `BrokerUnavailable`."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def create(self, tenant: str, filename: str, purpose: str, expected: int, expires_after: float) -> FileRecord:
        """Raises `PayloadTooLarge`, and what `Files.admit` raises."""
        if expected > self._files.limit:
            raise PayloadTooLarge(
                f"The file is to have {expected:,} bytes ({UPLOAD.cited(self._files.limit)}); split it."
            )
        await self._files.admit(tenant, expected)
        upload_id = PREFIX + secrets.token_hex(12)
        record = FileRecord(
            id=upload_id,
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            created_at=time.time(),
            object_name=upload_id,
            status="uploading",
            expected=expected,
            expires_after=expires_after,
        )
        await self._files.note(record)
        return record

    async def add(self, upload_id: str, tenant: str, data: AsyncIterable[bytes], size: int) -> FileRecord:
        """A part, whose id is `part_id`. `size`: the most that it may come to, negative where that is not known."""
        await self._pending(upload_id, tenant)
        async with self._files.receive(tenant, upload_id, data, size) as part:
            part = msgspec.structs.replace(part, upload=upload_id)
            await self._files.note(part)
        return part

    async def complete(
        self, upload_id: str, tenant: str, parts: Sequence[str], md5: str
    ) -> tuple[FileRecord, FileRecord]:
        """The upload, and the file of these parts, in this order. Raises `InvalidParameter` where they are not those of
        the upload, or not as many bytes as were announced."""
        entry = await self._pending(upload_id, tenant)
        upload, found = entry.value, [await self._part(part, upload_id, tenant) for part in parts]
        size = sum(part.bytes for part in found)
        if size != upload.expected:
            raise InvalidField(
                "part_ids",
                f"these parts have {size:,} bytes, and the upload was to have {upload.expected:,}; name all of them.",
            )
        digest = hashlib.md5(usedforsecurity=False)
        async with self._files.receive(tenant, upload.filename, self._joined(found, digest.update), size) as file:
            if md5 and digest.hexdigest() != md5.lower():
                raise InvalidField("md5", f"the parts have the checksum {digest.hexdigest()}.")
            now = time.time()
            expires = now + upload.expires_after if upload.expires_after else 0.0
            named = msgspec.structs.replace(file, purpose=upload.purpose, created_at=now, expires_at=expires)
            if not await self._files.take(entry):
                raise unknown_upload(upload_id)  # somebody was quicker
            made = await self._files.publish(named)
        await self._clear(upload_id, tenant)
        return upload, made

    async def cancel(self, upload_id: str, tenant: str) -> FileRecord:
        entry = await self._pending(upload_id, tenant)
        if not await self._files.take(entry):
            raise unknown_upload(upload_id)
        await self._clear(upload_id, tenant)
        return entry.value

    # --- inside ----------------------------------------------------------------------------------

    async def _pending(self, upload_id: str, tenant: str) -> KvEntry[FileRecord]:
        entry = await self._files.unfinished(upload_id, tenant) if upload_id.startswith(PREFIX) else None
        if entry is None or time.time() >= expiry_of(entry.value):
            raise unknown_upload(upload_id)
        return entry

    async def _part(self, part_id: str, upload_id: str, tenant: str) -> FileRecord:
        name = FILE + part_id.removeprefix(PART)
        entry = await self._files.unfinished(name, tenant) if part_id.startswith(PART) else None
        if entry is None or entry.value.upload != upload_id:
            raise InvalidField("part_ids", f"'{part_id[:64]}' is no part of this upload.")
        return entry.value

    async def _joined(self, parts: Sequence[FileRecord], seen: Callable[[bytes], None]) -> AsyncGenerator[bytes, None]:
        for part in parts:
            async with contextlib.aclosing(self._files.content(part)) as chunks:
                async for chunk in chunks:
                    seen(chunk)
                    yield chunk

    async def _clear(self, upload_id: str, tenant: str) -> None:
        """Its parts are of no use any more."""
        for part in await self._files.parts_of(upload_id, tenant):
            await self._files.discard(part)


def part_id(part: FileRecord) -> str:
    return PART + part.id.removeprefix(FILE)
