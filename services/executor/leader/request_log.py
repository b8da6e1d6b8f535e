"""What the leader says of its requests: a log line for each beginning and end, and the spans of sampled ones."""

from collections.abc import Callable, Sequence

import structlog

from services.executor.ipc.board import RankTime
from services.executor.leader.tracing import AttemptTraces
from services.executor.scheduler.steps import Row
from shared.messages import GenerationRequest, Refusal, TokenEntry

REMEMBERED = 16384
"""Requests whose ids are known, at most."""

log = structlog.get_logger(__name__)


def ids_of(rows: Sequence[Row], which: Sequence[int] | None = None) -> list[str]:
    """Generations of the rows with these indices; None: of all."""
    found = rows if which is None else [rows[index] for index in which]
    return sorted({row.request.generation_id for row in found})


class Attempts:
    """Of one ring."""

    def __init__(self, group: str, epoch: int, times: Callable[[], list[RankTime]]) -> None:
        self.traces = AttemptTraces(group, epoch, times)
        self._request_ids: dict[str, str] = {}
        """By generation: entries name that alone."""

    def taken(self, request: GenerationRequest, refusal: Refusal | None, *, repeated: bool) -> None:
        """`request` was accepted, unless there is a `refusal`; `repeated`: the ring had it before."""
        if refusal is None and not repeated:
            self._request_ids[request.generation_id] = request.request_id
            if len(self._request_ids) > REMEMBERED:
                del self._request_ids[next(iter(self._request_ids))]
            if request.traceparent:
                self.traces.begin(request)
        log.info(
            "refused" if refusal else "accepted",
            request_id=request.request_id,
            generation_id=request.generation_id,
            attempt=request.attempt,
            prompt_tokens=len(request.prompt),
            reason=refusal.code if refusal else "",
            **self.traces.ids(request.generation_id),
        )

    def ended(self, entry: TokenEntry) -> None:
        """`entry` is the last of its attempt."""
        log.info(
            "finished",
            request_id=self._request_ids.pop(entry.generation_id, ""),
            generation_id=entry.generation_id,
            attempt=entry.attempt,
            reason=entry.finish,
            output_tokens=entry.position + len(entry.tokens),
            code=entry.error_code,
            **self.traces.ids(entry.generation_id),
        )
        if self.traces:
            self.traces.end(entry)
