"""Message batches as batches of lines: their requests as an input file, and its results as Anthropic has them. Pure.

{"custom_id", "params"} ──▶ {"custom_id", "method", "url", "body"}             a line of the input
output line, error line ──▶ {"custom_id", "result": {"type": "succeeded", ...}}
input line without one  ──▶ {"custom_id", "result": {"type": "canceled"}}
"""

import hashlib
from typing import Any

import msgspec

from services.gateway.batches.results import EXPIRED
from services.gateway.batches.states import needs_work
from services.gateway.dialects.anthropic.errors import MESSAGES, AnthropicError, anthropic_error, rfc3339
from shared.messages.batches import BatchJob

_encode = msgspec.json.Encoder().encode
_OURS, _THEIRS = "batch_", "msgbatch_"


class _Detail(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Failure(msgspec.Struct):
    error: _Detail = msgspec.field(default_factory=_Detail)


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _OutputLine(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Detail | None = None


class _InputLine(msgspec.Struct):
    custom_id: str


_output = msgspec.json.Decoder(_OutputLine)
_input = msgspec.json.Decoder(_InputLine)
_failure = msgspec.json.Decoder(_Failure)


def public_id(job: BatchJob) -> str:
    return _THEIRS + job.id.removeprefix(_OURS)


def job_id(public: str) -> str:
    """Empty where it is no id of a message batch."""
    return _OURS + public.removeprefix(_THEIRS) if public.startswith(_THEIRS) else ""


def line_of(custom_id: str, params: msgspec.Raw) -> bytes:
    """Of the input file, without a line break."""
    return _encode({"custom_id": custom_id, "method": "POST", "url": MESSAGES, "body": params})


def batch_object(job: BatchJob) -> dict[str, Any]:
    """Anthropic's message batch. It has ended once its results can be read."""
    ended = not needs_work(job)
    begun = job.status == "cancelling" or job.cancelled_at
    identity = public_id(job)
    return {
        "id": identity,
        "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if begun else "in_progress",
        "request_counts": _counts(job, ended=ended),
        "created_at": rfc3339(job.created_at),
        "expires_at": rfc3339(job.expires_at),
        "ended_at": _time(max(job.completed_at, job.failed_at, job.expired_at, job.cancelled_at) if ended else 0),
        "cancel_initiated_at": _time(job.cancelling_at),
        "archived_at": None,
        "results_url": f"{MESSAGES}/batches/{identity}/results" if ended else None,
    }


def _time(at: float) -> str | None:
    return rfc3339(at) if at else None


def _counts(job: BatchJob, *, ended: bool) -> dict[str, int]:
    """Nothing but `processing` until the end, as at Anthropic's. What failed of a batch that has expired counts as
    expired: how many failed before is not kept apart."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if not ended:
        return counts | {"processing": job.counts.total}
    total, completed, failed = job.counts.total, job.counts.completed, job.counts.failed
    rest = max(0, total - completed - failed)
    counts["succeeded"] = completed
    counts["expired" if job.status == "expired" else "errored"] = failed
    counts["canceled" if job.status == "cancelled" else "errored"] += rest
    return counts


def custom_id_of(line: bytes) -> str:
    """Of a line of any of the batch's files."""
    return _input.decode(line).custom_id


def digest_of(custom_id: str) -> int:
    """Eight bytes, by which an id is remembered."""
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest())


def result_of(line: bytes) -> bytes:
    """Of a line of the output or the error file."""
    given = _output.decode(line)
    if given.response is None:
        error = given.error or _Detail()
        if error.code == EXPIRED["code"]:
            return _result(given.custom_id, {"type": "expired"})
        return _errored(given.custom_id, anthropic_error(500, error.message, ""))
    response = given.response
    if response.status_code == 200:
        return _result(given.custom_id, {"type": "succeeded", "message": response.body})
    message = _failure.decode(response.body).error.message
    return _errored(given.custom_id, anthropic_error(response.status_code, message, response.request_id))


def missing_result(job: BatchJob, custom_id: str) -> bytes:
    """Of a request that was never run: its batch was cancelled, or has failed."""
    if job.status == "cancelled":
        return _result(custom_id, {"type": "canceled"})
    message = job.errors[0].message if job.errors else "The batch has ended before this request was run."
    return _errored(custom_id, anthropic_error(400, message, ""))


def _errored(custom_id: str, error: AnthropicError) -> bytes:
    return _result(custom_id, {"type": "errored", "error": error})


def _result(custom_id: str, result: dict[str, Any]) -> bytes:
    return _encode({"custom_id": custom_id, "result": result}) + b"\n"
