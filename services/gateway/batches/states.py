"""The states of a batch, and how it is shown. Pure: times are arguments, in unix seconds.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed | expired
        │  └─▶ failed   └──▶ cancelling ──────────▶ cancelled
        └──────────────────────▲

A batch whose time is over before it was validated expires too.
"""

import re
from typing import Any

import msgspec

from services.gateway.core.errors import InvalidParameter, RouteError, check_range
from shared.config import seconds_of
from shared.messages.batches import OVER, BatchError, BatchJob, Counts, Ending, TokenCounts

WINDOW = "([0-9]{1,6})([smhd])"
_WINDOW = re.compile(WINDOW)

_replace = msgspec.structs.replace


def window_seconds(window: str, most: float) -> float:
    """Seconds of a completion window such as 24h. Raises `InvalidParameter` above `most`, and for 0."""
    if not _WINDOW.fullmatch(window):
        raise InvalidParameter(
            f"Invalid value: '{window[:32]}'. A completion window is a number of seconds, minutes, hours or days: "
            "'24h', '90m', '7d'.",
            param="completion_window",
        )
    seconds = seconds_of(window) or 0.0
    check_range("completion_window", seconds, 1, most)
    return seconds


# --- what happens to it --------------------------------------------------------------------------


def begun(job: BatchJob, now: float, requests: int, model: str) -> BatchJob:
    """Its input is in order."""
    if job.status != "validating":
        return job
    counts = Counts(total=requests)
    return _replace(job, status="in_progress", in_progress_at=now, model=model, counts=counts, begun=0, lost=[])


def failed(job: BatchJob, now: float, errors: list[BatchError]) -> BatchJob:
    """Its input is not in order."""
    if job.status != "validating":
        return job
    return _replace(job, status="failed", failed_at=now, errors=errors)


def cancelling(job: BatchJob, now: float) -> BatchJob:
    """Somebody wants no more of it. Raises `RouteError` (409, as OpenAI does) when it is over for another reason."""
    if job.status in ("cancelling", "cancelled", "finalizing"):
        return job
    if job.status in OVER:
        raise RouteError(f"Cannot cancel a batch with status '{job.status}'.", status=409, reason="batch_is_over")
    return _replace(job, status="cancelling", cancelling_at=now, ending="cancelled")


def finalizing(job: BatchJob, now: float, ending: Ending) -> BatchJob:
    """Its lines are done, or their time is."""
    if job.status not in ("validating", "in_progress"):
        return job
    return _replace(job, status="finalizing", finalizing_at=now, ending=ending)


def input_gone(job: BatchJob, now: float) -> BatchJob:
    """Its input file was deleted while it was needed; what is done is kept."""
    error = BatchError("input_file_gone", "The input file was deleted, or has expired, while it was needed.")
    if job.status == "validating":
        return failed(job, now, [error])
    if job.status not in ("in_progress", "finalizing"):
        return job
    return _replace(job, status="finalizing", finalizing_at=now, ending="failed", errors=[error])


def too_large(job: BatchJob, now: float, error: BatchError) -> BatchJob:
    """Its results are more than may be kept: no more lines are run, and what is done is kept."""
    if job.status != "in_progress":
        return job
    return _replace(job, status="finalizing", finalizing_at=now, ending="failed", errors=[error])


def unwritten(job: BatchJob, now: float, error: BatchError) -> BatchJob:
    """There was no room for its files for too long: its results are lost, which `error` says."""
    return _replace(job, status="failed", failed_at=now, ending="failed", errors=[*job.errors, error])


def ended(job: BatchJob, now: float, *, counts: Counts, usage: TokenCounts, output: str, errors: str) -> BatchJob:
    """Its files are written; an empty id: there is nothing to write."""
    job = _replace(job, counts=counts, usage=usage, output_file_id=output, error_file_id=errors)
    if job.ending == "cancelled":
        return _replace(job, status="cancelled", cancelled_at=now)
    if job.ending == "failed":
        return _replace(job, status="failed", failed_at=now)
    if job.ending == "expired":
        return _replace(job, status="expired", expired_at=now)
    return _replace(job, status="completed", completed_at=now)


# Gateways that are lost while a line is under way before it runs alone; where one more is lost then, it fails.
ALONE = 2


def announced(job: BatchJob, line: int) -> BatchJob:
    """Unfinished lines up to `line` may begin."""
    return _replace(job, begun=line)


def handed_back(job: BatchJob) -> BatchJob:
    """Its gateway has ended what was under way, and looks after it no longer."""
    return _replace(job, begun=0, owner="")


def taken_over(job: BatchJob) -> BatchJob:
    """The gateway before was lost: what was under way there may be the cause."""
    if not job.begun:
        return job
    return _replace(job, begun=0, lost=sorted([*job.lost, job.begun], reverse=True)[: ALONE + 1])


def losses(job: BatchJob, line: int) -> int:
    """Gateways that were lost while `line`, which has no result, was under way. Lines begin in their order, so what is
    unfinished now was so then, and under way as far as the gateway had got."""
    return sum(line <= begun for begun in job.lost)


def needs_work(job: BatchJob) -> bool:
    """Whether some gateway has to look after it."""
    return job.status not in OVER or not job.clean


def file_id(job: BatchJob, kind: str) -> str:
    """The id of its `output` or `errors`: whoever writes that file writes the same one."""
    return f"file-{job.id.removeprefix('batch_')}{kind}"


# --- how it is shown -----------------------------------------------------------------------------


def batch_object(job: BatchJob) -> dict[str, Any]:
    errors = None
    if job.errors:
        data = [{"code": one.code, "line": one.line, "message": one.message, "param": one.param} for one in job.errors]
        errors = {"object": "list", "data": data}
    times = {
        name: int(getattr(job, name)) or None
        for name in (
            "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at",
            "expired_at", "cancelling_at", "cancelled_at",
        )
    }  # fmt: skip
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model or None,
        "errors": errors,
        "input_file_id": job.input_file_id,
        "completion_window": job.completion_window,
        "status": job.status,
        "output_file_id": job.output_file_id or None,
        "error_file_id": job.error_file_id or None,
        "created_at": int(job.created_at),
        **times,
        "request_counts": msgspec.structs.asdict(job.counts),
        "usage": _usage(job.usage),
        "metadata": job.metadata,
    }


def _usage(usage: TokenCounts) -> dict[str, Any] | None:
    if usage == TokenCounts():
        return None
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input + usage.output,
    }
