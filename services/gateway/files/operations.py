"""The operations of files, for their routes and the OpenAPI document."""

from typing import Any, Literal

import msgspec

from services.gateway.files.expiry import ANCHOR, LEAST_EXPIRY, MOST_EXPIRY
from services.gateway.openapi.operation import Operation, Parameter

PATH = "/v1/files"
TAG = "Files"
PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
"""What clients may say that a file is for. Only `batch` makes a difference here."""
EXPIRY_ANCHOR, EXPIRY_SECONDS = "expires_after[anchor]", "expires_after[seconds]"
MOST = 10_000
"""Files of a page."""
ID = Parameter(
    "file",
    "The file's id.",
    {"type": "string", "minLength": 1},
    "path",
    "file-1f0c9a7767e1c5b09b1d6e0f4c2a8835",
)


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


class FileList(msgspec.Struct):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct):
    """What DELETE answers."""

    id: str
    object: Literal["file"]
    deleted: bool


def _query(name: str, description: str, schema: dict[str, Any]) -> Parameter:
    return Parameter(name, description, schema, "query")


AFTER = _query("after", "The id of the last one that you have.", {"type": "string"})
UPLOAD = Operation(
    "POST",
    PATH,
    "uploadFile",
    "Stores a file.",
    TAG,
    "With `purpose` before `file` in the form a wrong one is refused before the file is read; the input of a batch "
    "has the purpose `batch`.",
    request_content={
        "multipart/form-data": {
            "type": "object",
            "required": ["purpose", "file"],
            "properties": {
                "purpose": {"type": "string", "enum": list(PURPOSES)},
                "file": {"type": "string", "format": "binary"},
                EXPIRY_ANCHOR: {"const": ANCHOR},
                EXPIRY_SECONDS: {"type": "integer", "minimum": LEAST_EXPIRY, "maximum": MOST_EXPIRY},
            },
            "dependentRequired": {EXPIRY_ANCHOR: [EXPIRY_SECONDS], EXPIRY_SECONDS: [EXPIRY_ANCHOR]},
            "additionalProperties": False,
        }
    },
    response=FileObject,
    errors=(408, 413, 429, 503, 507),
)
LIST = Operation(
    "GET",
    PATH,
    "listFiles",
    "The files that there are.",
    TAG,
    response=FileList,
    parameters=(
        AFTER,
        _query("limit", "Files of a page.", {"type": "integer", "minimum": 1, "maximum": MOST}),
        _query("order", "By time.", {"type": "string", "enum": ["asc", "desc"]}),
        _query("purpose", "Those of one purpose alone.", {"type": "string"}),
    ),
    errors=(404, 503),
)
RETRIEVE = Operation(
    "GET",
    PATH + "/{file}",
    "retrieveFile",
    "A file's description.",
    TAG,
    response=FileObject,
    parameters=(ID,),
    errors=(404, 503),
)
DELETE = Operation(
    "DELETE",
    PATH + "/{file}",
    "deleteFile",
    "Deletes a file.",
    TAG,
    response=FileDeleted,
    parameters=(ID,),
    errors=(404, 503),
)
CONTENT = Operation(
    "GET",
    PATH + "/{file}/content",
    "downloadFile",
    "A file's bytes.",
    TAG,
    response_content={"application/octet-stream": {"type": "string", "format": "binary"}},
    parameters=(ID,),
    errors=(404, 503),
)
