"""What the leader says of its requests: a log line for each beginning and end, and the spans of sampled ones, made here
for all ranks.

    generate GROUP            from the leader's acceptance to the last token
    ├─ queue                  until the first step that computes some of it
    ├─ prefill                its prompt, an event for each chunk
    ├─ decode                 one span, counters instead of tokens
    └─ rank 0, rank 1, ...    what each rank spent on the attempt's steps, and how much of that on the others

While no attempt is traced, a step costs one look at an empty dict.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog

from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RankTime
from services.executor.scheduler.steps import SampledRow, ScheduledTokens
from shared import tracing
from shared.messages import GenerationRequest, Refusal, TokenEntry
from shared.sparse_attention import to_argument
from shared.tracing import NONE, Attributes, Span, Value

MOST_CHUNKS = 64  # events of one prompt


class _Attempt:
    def __init__(self, request: GenerationRequest, span: Span, times: list[RankTime]) -> None:
        self.attempt = request.attempt
        self.span = span
        self._times = times
        self._part = tracing.under(span, "queue")
        self._state = "queue"
        self._first_step = self._last_step = 0
        self._prompt = len(request.prompt) + len(request.generated)
        self._chunks = self._steps = self._drafted = self._recomputed = self._widest = self._batch = 0
        self._seconds = self._longest = 0.0
        self._preempted = False

    def step(self, chunk: ScheduledTokens, samples: bool, batch: int, began: int, seconds: float) -> None:
        """A step has computed `chunk` of it, among `batch` sequences; `samples`: it has given a token. `began` in
        unix nanoseconds."""
        self._first_step = self._first_step or began
        self._last_step = began + round(seconds * 1e9)
        if self._state == "queue":
            self._next("prefill", began)
            found: dict[str, Value] = {"ryzanstein.prompt_tokens": self._prompt}
            self._part.set(found | {"ryzanstein.cached_tokens": chunk.sequence.cached_tokens})
        if self._state == "prefill":
            self._prefill(chunk, samples, batch, began, seconds)
        else:
            self._decode(chunk, batch, began, seconds)

    def end(self, entry: TokenEntry, times: list[RankTime]) -> None:
        """`entry` is the attempt's last."""
        self._close_part(0)
        self.span.set(
            {
                "gen_ai.response.finish_reasons": [entry.finish],
                "ryzanstein.output_tokens": entry.position + len(entry.tokens),
            }
        )
        if self._first_step:
            for rank, (now, before) in enumerate(zip(times, self._times, strict=True)):
                self._rank(rank, now.since(before))
        if entry.finish == "error":
            self.span.fail(entry.error_code)
        self.span.end()

    def give_up(self) -> None:
        """It was replaced, and will say nothing more."""
        self._close_part(0)
        self.span.fail("replaced")
        self.span.end()

    def _prefill(self, chunk: ScheduledTokens, samples: bool, batch: int, began: int, seconds: float) -> None:
        self._chunks += 1
        if self._chunks <= MOST_CHUNKS:
            about: Attributes = {
                "ryzanstein.tokens": chunk.length,
                "ryzanstein.step_seconds": seconds,
                "ryzanstein.batch_size": batch,
            }
            self._part.event("chunk", about, at=began)
        if samples:
            self._next("decode", self._last_step)

    def _decode(self, chunk: ScheduledTokens, batch: int, began: int, seconds: float) -> None:
        self._steps += 1
        self._drafted += len(chunk.drafts)
        self._batch += batch
        self._widest = max(self._widest, batch)
        self._seconds += seconds
        self._longest = max(self._longest, seconds)
        if chunk.sequence.preempted and not self._preempted:
            self._preempted = True
            self._part.event("preempted", at=began)
        if chunk.length > 1:
            self._recomputed += chunk.length

    def _next(self, state: str, at: int) -> None:
        self._close_part(at)
        self._state = state
        self._part = tracing.under(self.span, state, at=at)

    def _close_part(self, at: int) -> None:
        if self._state == "prefill":
            self._part.set({"ryzanstein.chunks": self._chunks})
        if self._state == "decode" and self._steps:
            self._part.set(
                {
                    "ryzanstein.steps": self._steps,
                    "ryzanstein.step_seconds": self._seconds,
                    "ryzanstein.longest_step_seconds": self._longest,
                    "ryzanstein.drafted_tokens": self._drafted,
                    "ryzanstein.recomputed_tokens": self._recomputed,
                    "ryzanstein.batch_size.mean": self._batch / self._steps,
                    "ryzanstein.batch_size.max": self._widest,
                }
            )
        self._part.end(at=at)

    def _rank(self, rank: int, time_: RankTime) -> None:
        found: dict[str, Value] = {
            "ryzanstein.rank": rank,
            "ryzanstein.steps": time_.steps,
            "ryzanstein.step_seconds": time_.spent / 1e9,
            "ryzanstein.communication_seconds": time_.communicating / 1e9,
            "ryzanstein.compute_seconds": (time_.spent - time_.communicating) / 1e9,
        }
        tracing.under(self.span, f"rank {rank}", attributes=found, at=self._first_step).end(at=self._last_step)


class _TracedStep(NamedTuple):
    chunks: list[tuple[ScheduledTokens, bool]]  # of traced attempts, and whether they give a token
    began: int  # when it was sent; unix nanoseconds
    width: int


REMEMBERED = 16384  # requests whose ids are known, at most

log = structlog.get_logger(__name__)


def ids_of(rows: Sequence[SampledRow], which: Sequence[int] | None = None) -> list[str]:
    """Generations of the rows with these indices; None: of all."""
    found = rows if which is None else [rows[index] for index in which]
    return sorted({row.request.generation_id for row in found})


class Attempts:
    """Those of one ring."""

    def __init__(self, group: str, epoch: int, times: Callable[[], list[RankTime]]) -> None:
        """`times`: what the ranks have spent on traced steps so far."""
        self._group = group
        self._epoch = epoch
        self._times = times
        self._request_ids: dict[str, str] = {}  # by generation: entries name that alone
        self._live: dict[str, _Attempt] = {}  # those that are traced
        self._steps: deque[_TracedStep] = deque()
        self._over = 0  # when the last step was over; unix nanoseconds

    def on_accepted(self, request: GenerationRequest, refusal: Refusal | None, *, repeated: bool) -> None:
        """`request` was accepted, unless there is a `refusal`; `repeated`: the ring had it before."""
        if refusal is None and not repeated:
            self._request_ids[request.generation_id] = request.request_id
            if len(self._request_ids) > REMEMBERED:
                del self._request_ids[next(iter(self._request_ids))]
            if request.traceparent:
                self._begin(request)
        log.info(
            "refused" if refusal else "accepted",
            request_id=request.request_id,
            generation_id=request.generation_id,
            attempt=request.attempt,
            prompt_tokens=len(request.prompt),
            reason=refusal.code if refusal else "",
            **({} if request.sparse is None else {"sparse_attention": to_argument(request.sparse)}),
            **self._ids(request.generation_id),
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
            **self._ids(entry.generation_id),
        )
        attempt = self._live.get(entry.generation_id)
        if attempt is not None and attempt.attempt == entry.attempt:
            del self._live[entry.generation_id]
            attempt.end(entry, self._times())

    @property
    def traced(self) -> bool:
        """Whether any is."""
        return bool(self._live)

    def _ids(self, generation_id: str) -> dict[str, str]:
        attempt = self._live.get(generation_id)
        return {} if attempt is None else tracing.ids_of(attempt.span)

    def _begin(self, request: GenerationRequest) -> None:
        known = self._live.get(request.generation_id)
        if known is not None and known.attempt >= request.attempt:
            return
        span = tracing.follow(
            request.traceparent,
            request.tracestate,
            f"generate {self._group}",
            kind="server",
            attributes={
                "gen_ai.request.model": request.model,
                "ryzanstein.group": self._group,
                "ryzanstein.epoch": self._epoch,
                "ryzanstein.rank": 0,
                "ryzanstein.attempt": request.attempt,
                "ryzanstein.lane": request.lane,
                "ryzanstein.request_id": request.request_id,
                "ryzanstein.generation_id": request.generation_id,
            },
        )
        if known is not None:
            del self._live[request.generation_id]
            known.give_up()
        if span is not NONE:
            self._live[request.generation_id] = _Attempt(request, span, self._times())

    def begin_step(self, plan: StepPlan, batch: Sequence[ScheduledTokens]) -> StepPlan:
        """`plan` computes `batch`; the ranks take their times where some of it is traced."""
        live = self._live
        traced = [(chunk, chunk.samples) for chunk in batch if chunk.sequence.request.generation_id in live]
        self._steps.append(_TracedStep(traced, time.time_ns(), len(batch)))
        return msgspec.structs.replace(plan, traced=True) if traced else plan

    def end_step(self, seconds: float) -> None:
        """The oldest step that was begun is over, `seconds` after it began or the one before it was over."""
        step = self._steps.popleft()
        began, self._over = max(step.began, self._over), time.time_ns()
        for chunk, samples in step.chunks:
            attempt = self._live.get(chunk.sequence.request.generation_id)
            if attempt is not None and attempt.attempt == chunk.sequence.request.attempt:
                attempt.step(chunk, samples, step.width, began, seconds)
