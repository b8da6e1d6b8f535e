"""The span of a line of a batch: a trace of its own, linked to the span that created the batch.

A trace with a million lines could neither be stored nor read; and whether a line is traced is the sampler's to say
for each, as for a request.
"""

from shared import tracing
from shared.messages.batches import BatchJob
from shared.tracing import Span


def line_span(job: BatchJob, line: int, request_id: str) -> Span:
    """Ends when the line's result is stored."""
    if not tracing.on():
        return tracing.NONE
    created = tracing.parse(job.traceparent)
    return tracing.begin(
        f"line {job.endpoint}",
        kind="consumer",
        attributes={
            "ryzanstein.batch": job.id,
            "ryzanstein.line": line,
            "ryzanstein.request_id": request_id,
            "ryzanstein.lane": "batch",
        },
        links=[created] if created is not None else [],
    )
