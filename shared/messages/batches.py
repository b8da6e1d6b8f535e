"""Files and batch jobs: what gateways keep of them in NATS, and what other programs send and get.

As in `shared.messages`: fields are only ever added, at the end and with a default. The values in KV are maps
in MessagePack; what other programs ask for may be JSON as well (docs/batch.md).
"""

from typing import Annotated, Any, Literal

import msgspec

from shared.messages.jobs import JobRecord

FileStatus = Literal["uploading", "processed"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
# What becomes of a batch whose files are being written.
Ending = Literal["", "completed", "expired", "cancelled", "failed"]

# States that a batch does not leave.
OVER: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file in the KV bucket `files`. Its bytes are the object `object_name` of the object store `files`."""

    id: str
    tenant: str
    filename: str
    purpose: str
    created_at: float  # Unix seconds
    object_name: str
    bytes: int = 0
    expires_at: float = 0.0  # Unix seconds; 0: it is kept until somebody deletes it
    status: FileStatus = "processed"  # `uploading`: nobody but the gateway that receives it knows of it
    # Where the chunks lie of one that is being uploaded: what a gateway that died has left is removed.
    nuid: str = ""
    # Of a part: the upload that it belongs to. An upload in parts is a record itself, without bytes.
    upload: str = ""
    expected: int = 0  # bytes that an upload's parts will have together
    # Seconds after which an upload's file goes; 0: it is kept until somebody deletes it.
    expires_after: float = 0.0


class BatchError(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with the input file, as OpenAI shows it."""

    code: str
    message: str
    line: int | None = None  # number of the line, from 1
    param: str | None = None


class Counts(msgspec.Struct, frozen=True):
    """OpenAI's request_counts."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class TokenCounts(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one line, or of all."""

    input: int = 0
    cached: int = 0
    output: int = 0

    def plus(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(self.input + other.input, self.cached + other.cached, self.output + other.output)


class BatchJob(JobRecord, frozen=True, omit_defaults=True):
    """A batch in the KV bucket `batches`; every change is a compare-and-set. Times are unix seconds, 0: not yet."""

    endpoint: str  # endpoint of all its lines
    input_file_id: str
    input_object: str  # name of the input in the object store `files`
    completion_window: str
    expires_at: float  # when the completion window ends
    status: BatchStatus = "validating"
    # Seconds that output and error file are kept; 0: until somebody deletes them.
    output_expires_after: float = 0.0
    errors: list[BatchError] = []
    model: str = ""
    counts: Counts = Counts()
    usage: TokenCounts = TokenCounts()
    ending: Ending = ""
    in_progress_at: float = 0.0
    finalizing_at: float = 0.0
    completed_at: float = 0.0
    failed_at: float = 0.0
    expired_at: float = 0.0
    cancelling_at: float = 0.0
    cancelled_at: float = 0.0
    output_file_id: str = ""
    error_file_id: str = ""
    own_input: bool = False  # whether its input file was made with it, and goes with it
    # Unfinished lines up to this number may be under way; 0: none is. Written before they begin.
    begun: int = 0
    lost: list[int] = []  # `begun` of the gateways that were lost while they ran it, the largest three


class LineResult(msgspec.Struct, frozen=True, array_like=True):
    """What has come of one line of a batch."""

    line: int  # its number in the input file, from 1
    succeeded: bool  # whether it belongs into the output file, not the error file
    # The line for that file, JSON without a line break; empty: it is in the object store, being too large.
    text: bytes
    usage: TokenCounts = TokenCounts()
    object_name: str = ""
    size: int = 0  # bytes of the line, where it is in the object store


class LineResults(msgspec.Struct, frozen=True):
    """Results of one turn of a runner's event loop, in the stream `BATCHES` on `batches.results.<batch>`."""

    results: list[LineResult]


# --- what other programs ask, by request-reply ---------------------------------------------------


LEAST_EXPIRY, MOST_EXPIRY = 3600, 2_592_000


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's expiration policy."""

    seconds: Annotated[int, msgspec.Meta(ge=LEAST_EXPIRY, le=MOST_EXPIRY)]
    anchor: Literal["created_at"] = "created_at"


class BatchSubmit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`batches.submit`: one of `input_file_id` and `object` names the input."""

    endpoint: str = "/v1/chat/completions"
    input_file_id: str | None = None
    # Name of an object that the program has put into the object store `files` itself.
    object: str | None = None
    filename: str | None = None  # what that file is called; the object's name where it is left out
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
    idempotency_key: str | None = None
    tenant: str = ""


class BatchAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`batches.status` and `batches.cancel`."""

    id: str
    tenant: str = ""


class BatchListing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`batches.list`."""

    after: str | None = None
    limit: int = 20
    tenant: str = ""


class BatchReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of them: a batch as `GET /v1/batches/{id}` shows it, a page of them, or an error in OpenAI's shape."""

    batch: dict[str, Any] | None = None
    batches: list[dict[str, Any]] | None = None
    has_more: bool = False
    # Names of the batch's files in the object store `files`: input, output, errors.
    files: dict[str, str] | None = None
    error: dict[str, Any] | None = None
    status: int = 0  # the HTTP status that belongs to `error`
