"""The operations of batches, for their routes and the OpenAPI document."""

from typing import Any, Literal

import msgspec

from services.gateway.batches.service import BatchCreate
from services.gateway.files.operations import AFTER
from services.gateway.openapi import parameters
from services.gateway.openapi.operation import Operation, Parameter
from shared.messages.batches import BatchStatus, Counts

PATH = "/v1/batches"
TAG = "Batches"
MOST = 100
"""Batches of a page."""
ID = Parameter(
    "batch",
    "The batch's id.",
    {"type": "string", "minLength": 1},
    "path",
    "batch_1f0c9a7767e1c5b09b1d6e0f4c2a8835",
)


class BatchObject(msgspec.Struct):
    """OpenAI's batch object; it has the times of its states, too."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    request_counts: Counts
    usage: dict[str, Any] | None
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


CREATE = Operation(
    "POST",
    PATH,
    "createBatch",
    "Runs the requests of a file, in idle capacity.",
    TAG,
    request=BatchCreate,
    example={
        "input_file_id": "file-1f0c9a7767e1c5b09b1d6e0f4c2a8835",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    response=BatchObject,
    parameters=(parameters.IDEMPOTENCY,),
    errors=(404, 408, 413, 422, 429, 503),
)
LIST = Operation(
    "GET",
    PATH,
    "listBatches",
    "The batches that there are, the newest first.",
    TAG,
    response=BatchList,
    parameters=(
        AFTER,
        Parameter("limit", "Batches of a page.", {"type": "integer", "minimum": 1, "maximum": MOST}, "query"),
    ),
    errors=(404, 503),
)
RETRIEVE = Operation(
    "GET",
    PATH + "/{batch}",
    "retrieveBatch",
    "A batch as it stands.",
    TAG,
    response=BatchObject,
    parameters=(ID,),
    errors=(404, 503),
)
CANCEL = Operation(
    "POST",
    PATH + "/{batch}/cancel",
    "cancelBatch",
    "Begins no more of a batch's lines, and keeps what is done.",
    TAG,
    response=BatchObject,
    parameters=(ID,),
    errors=(404, 409, 503),
)
