"""/v1/files: POST, GET, GET and DELETE of one, GET of its content."""

import time
from functools import partial
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.openai.multipart import MultipartForm
from services.gateway.api.openapi.operation import OCTETS, Operation
from services.gateway.core.asgi import send_parts
from services.gateway.core.errors import InvalidParameter, convert
from services.gateway.core.pagination import ListPage, Order, PageQuery, list_object, page
from services.gateway.files.files import ANCHOR, expiry
from shared.messages.batches import LEAST_EXPIRY, MOST_EXPIRY, FileRecord

PATH = "/v1/files"
_operation = partial(Operation, tag="Files")
# What clients may say that a file is for. Only `batch` makes a difference here.
Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
EXPIRY_ANCHOR, EXPIRY_SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class UploadForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of an upload beside its file."""

    purpose: Purpose
    anchor: str | None = msgspec.field(default=None, name=EXPIRY_ANCHOR)
    seconds: str | None = msgspec.field(default=None, name=EXPIRY_SECONDS)


class FileObject(msgspec.Struct):
    """OpenAI's file object."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    status_details: str | None


class FileList(ListPage):
    """A page of files."""

    data: list[FileObject]


class FilesQuery(PageQuery, frozen=True, forbid_unknown_fields=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=10_000, description="Files of a page.")] = 10_000
    order: Order = "desc"
    purpose: Annotated[str, Meta(description="Those of one purpose alone.")] | None = None


class FileDeleted(msgspec.Struct):
    """What DELETE answers."""

    id: str
    object: Literal["file"]
    deleted: bool


UPLOAD = _operation(
    f"POST {PATH}",
    "uploadFile",
    "Stores a file.",
    "With `purpose` before `file` in the form a wrong one is refused before the file is read; the input of a batch "
    "has the purpose `batch`.",
    request_content={
        "multipart/form-data": {
            "type": "object",
            "required": ["purpose", "file"],
            "properties": {
                "purpose": {"type": "string", "enum": get_args(Purpose)},
                "file": {"type": "string", "format": "binary"},
                EXPIRY_ANCHOR: {"const": ANCHOR},
                EXPIRY_SECONDS: {"type": "integer", "minimum": LEAST_EXPIRY, "maximum": MOST_EXPIRY},
            },
            "dependentRequired": {EXPIRY_ANCHOR: [EXPIRY_SECONDS], EXPIRY_SECONDS: [EXPIRY_ANCHOR]},
            "additionalProperties": False,
        }
    },
    response=FileObject,
    errors=(408, 413, 507),
)
LIST = _operation(f"GET {PATH}", "listFiles", "Lists files.", response=FileList, query=FilesQuery, errors=(404,))
RETRIEVE = _operation(f"GET {PATH}/{{file}}", "retrieveFile", "A file's description.", response=FileObject)
DELETE = _operation(f"DELETE {PATH}/{{file}}", "deleteFile", "Deletes a file.", response=FileDeleted)
CONTENT = _operation(f"GET {PATH}/{{file}}/content", "downloadFile", "A file's bytes.", response_content=OCTETS)


def file_object(record: FileRecord) -> dict[str, Any]:
    """OpenAI's file object."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": int(record.created_at),
        "expires_at": int(record.expires_at) or None,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": record.status,
        "status_details": None,
    }


async def upload(ask: RequestContext) -> dict[str, Any]:
    await ask.counted()
    files = ask.parts.files
    form = MultipartForm(ask.scope, ask.receive, ask.settings.body_timeout, files.limit)
    await form.until_file()
    if "purpose" in form.fields:
        convert(form.fields, UploadForm)  # refused before a byte is stored
    parts, size = form.file_data(), form.announced
    async with files.receive(ask.tenant, form.filename or "file", parts, size) as record:
        await form.rest()
        fields = convert(form.fields, UploadForm)
        seconds = _expires_after(fields)
        now = time.time()
        expires = now + seconds if seconds else 0.0
        named = msgspec.structs.replace(record, purpose=fields.purpose, created_at=now, expires_at=expires)
        return file_object(await files.publish(named))


def _expires_after(form: UploadForm) -> float:
    given = form.seconds
    if given is not None and not (given.isascii() and given.isdigit() and len(given) < 10):
        raise InvalidParameter(
            "Invalid type for 'expires_after.seconds': expected an integer.",
            param="expires_after.seconds",
            reason="invalid_type",
        )
    return expiry(form.anchor, None if given is None else int(given), "expires_after", form.purpose)


async def list_files(ask: RequestContext) -> dict[str, Any]:
    wanted = ask.query(FilesQuery)
    await ask.counted()
    records = await ask.parts.files.listed(ask.tenant, wanted.purpose)
    found, more = page(records, after=wanted.after, limit=wanted.limit, ascending=wanted.order == "asc")
    return list_object([file_object(record) for record in found], more)


async def retrieve(ask: RequestContext) -> dict[str, Any]:
    return file_object(await ask.parts.files.get(ask.named("file"), ask.tenant))


async def delete(ask: RequestContext) -> dict[str, Any]:
    await ask.parts.files.delete(ask.named("file"), ask.tenant)
    return {"id": ask.named("file"), "object": "file", "deleted": True}


async def content(ask: RequestContext) -> None:
    """The bytes, a chunk at a time, as fast as the client takes them."""
    files = ask.parts.files
    record = await files.get(ask.named("file"), ask.tenant)
    await send_parts(ask.send, files.content(record), "application/octet-stream", record.bytes)


file_routes = routes_of(
    (UPLOAD, upload), (LIST, list_files), (RETRIEVE, retrieve), (DELETE, delete), (CONTENT, content)
)
