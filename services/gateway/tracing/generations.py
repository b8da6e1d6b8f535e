"""The span of a generation, from its request to its last token, and what the gateway does for it.

    chat MODEL                          one for all choices of a request; ends with the last of them
    ├─ send intake.interactive          attempt 0 of a choice: what carries on in scheduler and ring
    ├─ send intake.recovery             attempt 1, linked to attempt 0
    └─ deliver                          in the span of each request that reads it: first token to the end

A gateway that takes a generation over from a lost one begins a `resume MODEL` within the same trace, linked to the
span that is lost with it.
"""

import time
from collections.abc import Sequence

import msgspec

from shared import tracing
from shared.messages import GenerationRequest
from shared.messages.records import GenerationRecord
from shared.nats import subjects
from shared.sparse_attention import to_argument
from shared.tracing import NONE, Span, TraceContext, Value

# By endpoint, of OpenTelemetry's conventions where these have a name for it; the others are chats.
_OPERATIONS = {
    "completions": "text_completion",
    "ollama.generate": "text_completion",
    "embeddings": "embeddings",
    "rerank": "rerank",
    "score": "score",
    "classify": "classify",
    "pooling": "pooling",
}
PROVIDER = "ryzanstein"


class AnswerTrace:
    """Made for a request that is sampled; the choices share it."""

    def __init__(self, span: Span, choices: int) -> None:
        self._span = span
        self._began = time.time_ns()
        self._left = choices
        self._sent: dict[str, TraceContext] = {}
        self._prompts: dict[int, tuple[int, int]] = {}
        self._output = 0
        self._finish: list[str] = []
        self._first_at = 0

    def handing_in(self, request: GenerationRequest) -> Span:
        """Around the publishing of `request`; its context goes with it."""
        before = self._sent.get(request.generation_id)
        span = tracing.under(
            self._span,
            f"send intake.{request.lane}",
            kind="producer",
            attributes={
                "messaging.system": "nats",
                "messaging.operation.type": "send",
                "messaging.operation.name": "publish",
                "messaging.destination.name": f"intake.{request.lane}",
                "messaging.consumer.group.name": f"scheduler-{request.lane}",
                "messaging.destination.subscription.name": subjects.INTAKE_STREAM,
                **about(request),
            },
            links=[before] if before is not None else [],
        )
        if span.context is not None:
            self._sent[request.generation_id] = span.context
        return span

    def recovering(self, group: str, request: GenerationRequest) -> None:
        """The ring that had the generation is lost; `request` is the next attempt."""
        self._span.event(
            "recovering",
            {
                "ryzanstein.group": group,
                "ryzanstein.attempt": request.attempt,
                "ryzanstein.tokens_kept": len(request.generated),
            },
        )

    def first_token(self) -> None:
        """The first token of any choice is here. Again is safe."""
        if not self._first_at:
            self._first_at = time.time_ns()
            seconds = (self._first_at - self._began) / 1e9
            self._span.event("gen_ai.first_token", {"gen_ai.response.time_to_first_chunk": seconds})
            self._span.set({"gen_ai.response.time_to_first_chunk": seconds})

    def delivered(self, *, streamed: bool, tokens: int) -> None:
        """A request that reads the answer is done with it: what was shown, from the first token on."""
        reader = tracing.edge()
        links = [self._span.context] if self._span.context is not None else []
        tracing.under(
            reader,
            "deliver",
            attributes={"gen_ai.request.stream": streamed, "gen_ai.usage.output_tokens": tokens},
            links=links,
            at=self._first_at,
        ).end()

    def ended(self, prompt: Sequence[int], output: int, cached: int, reason: str, failed: str) -> None:
        """A choice is over, or another gateway's. `output`: its tokens; `cached`: of the prompt, those that were in the
        KV cache; `reason`: of its end; `failed`: the code of its error, empty: none."""
        self._prompts[id(prompt)] = len(prompt), max(cached, self._prompts.get(id(prompt), (0, 0))[1])
        self._output += output
        self._finish.append(reason)
        if failed:
            self._span.fail(failed)
        self._left -= 1
        if self._left == 0:
            self._end()

    def _end(self) -> None:
        self._span.set(
            {
                "gen_ai.usage.input_tokens": sum(length for length, _ in self._prompts.values()),
                "gen_ai.usage.cache_read.input_tokens": sum(cached for _, cached in self._prompts.values()),
                "gen_ai.usage.output_tokens": self._output,
                "gen_ai.response.finish_reasons": self._finish,
            }
        )
        self._span.end()


def traced(record: GenerationRecord, public_id: str, choices: int) -> tuple[GenerationRecord, AnswerTrace | None]:
    """`record` with the context of the span that its generations get; as it is where nobody traces its request."""
    parent = tracing.edge()
    if not parent.recording:
        return record, None
    first = record.requests[0]
    operation = _OPERATIONS.get(record.endpoint, "chat")
    span = tracing.under(
        parent,
        f"{operation} {first.model}",
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.response.id": public_id,
            "gen_ai.request.choice.count": choices,
            "gen_ai.request.stream": record.stream,
            **_sampling(first),
            "ryzanstein.request_id": first.request_id,
            "ryzanstein.lane": first.lane,
            "ryzanstein.session": bool(first.session),
        },
    )
    requests = [
        msgspec.structs.replace(request, traceparent=span.traceparent, tracestate=span.tracestate)
        for request in record.requests
    ]
    return msgspec.structs.replace(record, requests=requests), AnswerTrace(span, choices)


def taken_over(request: GenerationRequest) -> AnswerTrace | None:
    """For a generation whose gateway is lost: its record names the span that it had."""
    original = tracing.parse(request.traceparent, request.tracestate) if tracing.on() else None
    if original is None:
        return None
    span = tracing.follow(
        request.traceparent,
        request.tracestate,
        f"resume {request.model}",
        kind="internal",
        attributes={"gen_ai.request.model": request.model, **about(request)},
        links=[original],
    )
    return AnswerTrace(span, 1) if span is not NONE else None


def about(request: GenerationRequest) -> dict[str, Value]:
    """What every span of an attempt carries."""
    return {
        "ryzanstein.request_id": request.request_id,
        "ryzanstein.generation_id": request.generation_id,
        "ryzanstein.attempt": request.attempt,
        "ryzanstein.lane": request.lane,
    }


def _sampling(request: GenerationRequest) -> dict[str, Value]:
    params = request.sampling
    return {
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": str(params.seed),  # unsigned 64 bits, and attributes are signed
        **({"ryzanstein.sparse_attention": to_argument(request.sparse)} if request.sparse is not None else {}),
    }
