"""/v1/uploads: a file in parts. POST, POST of a part, POST .../complete and .../cancel."""

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.openai.files import FileObject, Purpose, file_object
from services.gateway.api.openai.multipart import MultipartForm
from services.gateway.api.openapi.operation import Operation
from services.gateway.core.errors import convert
from services.gateway.files.files import expiry
from services.gateway.files.uploads import expiry_of, part_id
from shared import limits
from shared.messages.batches import FileRecord

PATH = "/v1/uploads"
_operation = partial(Operation, tag="Uploads")
BODY_BYTES = 1 << 20


class UploadExpiry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: int


class NewUpload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: Annotated[int, Meta(ge=1, le=2**53)]
    filename: Annotated[str, limits.UPLOAD_NAME.length(min_length=1)]
    mime_type: str  # without effect: a file is its bytes
    purpose: Purpose
    expires_after: UploadExpiry | None = None


class UploadCompletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    part_ids: Annotated[list[str], limits.UPLOAD_PARTS.length(min_length=1)]
    md5: str | None = None


class NoFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part's form has its file alone."""


class UploadPart(msgspec.Struct):
    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class Upload(msgspec.Struct):
    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled"]
    file: FileObject | None


CREATE = _operation(
    f"POST {PATH}",
    "createUpload",
    "Begins the upload of a file in parts.",
    request=NewUpload,
    example={"bytes": 1000, "filename": "lines.jsonl", "mime_type": "text/jsonl", "purpose": "batch"},
    response=Upload,
    errors=(413, 507),
)
ADD = _operation(
    f"POST {PATH}/{{upload}}/parts",
    "addUploadPart",
    "A part of the file; parts may come at once.",
    request_content={
        "multipart/form-data": {
            "type": "object",
            "required": ["data"],
            "properties": {"data": {"type": "string", "format": "binary"}},
            "additionalProperties": False,
        }
    },
    response=UploadPart,
    errors=(408, 413, 507),
)
COMPLETE = _operation(
    f"POST {PATH}/{{upload}}/complete",
    "completeUpload",
    "Makes a file of the parts, in their order.",
    request=UploadCompletion,
    example={"part_ids": ["part_0123456789abcdef01234567"]},
    response=Upload,
    errors=(413, 507),
)
CANCEL = _operation(
    f"POST {PATH}/{{upload}}/cancel", "cancelUpload", "Cancels an upload, and deletes its parts.", response=Upload
)


def _shown(record: FileRecord, status: str, file: FileRecord | None = None) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "upload",
        "bytes": record.expected,
        "created_at": int(record.created_at),
        "expires_at": int(expiry_of(record)),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": status,
        "file": None if file is None else file_object(file),
    }


async def create(ask: RequestContext) -> dict[str, Any]:
    await ask.counted()
    given = await ask.decoded(NewUpload, BODY_BYTES)
    after = given.expires_after
    anchor, seconds = (after.anchor, after.seconds) if after else (None, None)
    expires_after = expiry(anchor, seconds, "expires_after", given.purpose)
    made = await ask.parts.uploads.create(ask.tenant, given.filename, given.purpose, given.bytes, expires_after)
    return _shown(made, "pending")


async def add(ask: RequestContext) -> UploadPart:
    await ask.counted()
    most = min(ask.parts.files.limit, limits.UPLOAD_PART.value)
    form = MultipartForm(ask.scope, ask.receive, ask.settings.body_timeout, most, name="data")
    await form.until_file()
    convert(form.fields, NoFields)
    upload_id = ask.named("upload")
    part = await ask.parts.uploads.add(upload_id, ask.tenant, form.file_data(), form.announced)
    await form.rest()
    return UploadPart(part_id(part), "upload.part", int(part.created_at), upload_id)


async def complete(ask: RequestContext) -> dict[str, Any]:
    await ask.counted()
    given = await ask.decoded(UploadCompletion, BODY_BYTES)
    uploads, upload_id = ask.parts.uploads, ask.named("upload")
    record, file = await uploads.complete(upload_id, ask.tenant, given.part_ids, given.md5 or "")
    return _shown(record, "completed", file)


async def cancel(ask: RequestContext) -> dict[str, Any]:
    await ask.counted()
    return _shown(await ask.parts.uploads.cancel(ask.named("upload"), ask.tenant), "cancelled")


upload_routes = routes_of((CREATE, create), (ADD, add), (COMPLETE, complete), (CANCEL, cancel))
