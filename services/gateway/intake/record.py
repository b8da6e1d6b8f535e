"""From a checked, tokenized request to its record, and to the `StreamReader` that hands it in and reads it."""

import math
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

import msgspec

from services.gateway.auth.authenticator import ANONYMOUS, Principal
from services.gateway.core.errors import InvalidParameter
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake import extra_fields, sampling, validation
from services.gateway.intake.sampling import cache_salt, session_of
from services.gateway.intake.schemas import ChatCompletionRequest, GenerationFields
from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.request_state import PREFIXES, RequestState, new_identity, requests_of
from services.gateway.lifecycle.request_tracker import RequestTracker
from services.gateway.lifecycle.token_stream import limits_of
from services.gateway.ratelimit.limiter import Admission
from services.gateway.streams.reading import Presentations, View
from services.gateway.streams.stream_reader import StreamReader
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tracing.generations import traced
from shared import tracing
from shared.errors import ContextLengthExceeded, PayloadTooLarge
from shared.limits import GENERATION_BYTES, GRAMMAR_BYTES, PROMPT_TOKENS
from shared.messages import GenerationRequest, Grammar, Lane, ModelCard, SamplingParams, SparseAttention
from shared.messages.records import GenerationRecord, Parsing, RecordedEndpoint, ResponseRecord
from shared.nats.bus import encode

UNNAMED_OUTPUT = 512
"""Output tokens that are reserved of a limit where the client names no `max_tokens`; more is counted at the end."""

_TOKEN_BYTES, _OTHER_BYTES = 5, GRAMMAR_BYTES.value + (64 << 10)
"""Bytes of a token on the wire, and of all else in a generation, at most."""


class Context(msgspec.Struct):
    """What a request brings besides its body, and what is found out about it on its way: made once, then filled."""

    request_id: str
    session: str = ""
    """The X-Session-ID header."""
    background: float = 0.0
    """Seconds for which the generation goes on while nobody listens; 0: for the short grace alone."""
    key: str = ""
    """The Idempotency-Key header."""
    tenant: str = ""
    """Whose request and idempotency keys these are: the principal's."""
    after: Sequence[int] | None = None
    """The Last-Event-ID header: where the client stands in what its key stands for."""
    idempotency: str = ""
    """The key's entry in the bucket `idempotency`."""
    lane: Lane = "interactive"
    deadline: float = math.inf
    """Unix seconds until which the client waits."""
    view: View | None = None
    """How it wants to see the answer; None: in the format of its endpoint."""
    principal: Principal = ANONYMOUS
    answer_headers: dict[str, str] = {}
    """Gets what the answer's head should say of limits, by the time that the answer begins."""
    gone: Callable[[], Awaitable[object]] | None = None
    """Returns when the client has gone, where nothing else ends what waits for it."""
    admission: Admission | None = None
    """Set by the intake, where something is limited."""
    adapter: str = ""
    """Digest of the LoRA adapter that the request names; set by the intake."""
    adapter_name: str = ""
    sparse: SparseAttention | None = None
    """What requests leave out of their choice, as the model's entry has it; set by the intake."""
    sparse_unasked: bool = False
    """Whether requests that say nothing attend so; set by the intake."""
    return_progress: bool = False
    """The X-Ryzanstein-Progress header: whether its stream tells how much of the prompts is computed."""
    endpoint: RecordedEndpoint | Literal[""] = ""
    """Of the API that a chat or completion is translated for; empty: it is OpenAI's own."""
    capped: bool = False
    """Whether its client may ask for more tokens than the context has room for, and gets what it has."""
    body_bytes: int = 0
    """Set by the intake."""


class RunDependencies:
    """What every run is made with."""

    __slots__ = ("answers", "limits", "metrics", "presentations", "settings")

    def __init__(
        self,
        settings: GatewaySettings,
        answers: RequestTracker,
        metrics: GatewayMetrics,
        presentations: Presentations,
    ) -> None:
        self.presentations = presentations
        self.settings = settings
        self.answers = answers
        self.metrics = metrics
        self.limits = limits_of(settings)


class OuterResponse(Protocol):
    """The response that a chat completion is inside of."""

    @property
    def identity(self) -> str: ...

    def record(self, sampling: SamplingParams) -> ResponseRecord:
        """What is recorded of it, once the sampling of its chat is known."""
        ...

    def own_name(self, field: str) -> str:
        """What a field of its chat is called in its request."""
        ...


def record_of(
    prompts: Sequence[list[int]],
    request: GenerationFields,
    card: ModelCard,
    context: Context,
    parts: RunDependencies,
    *,
    session: str,
    grammar: Grammar | None = None,
    parsing: Parsing | None = None,
    response: OuterResponse | None = None,
    extras: extra_fields.Extras = extra_fields.NO_EXTRAS,
) -> GenerationRecord:
    """The record of a checked, tokenized request. Choice c of prompt p has the index p * n + c, as in OpenAI's API.

    `parsing`: how a chat's text is taken apart; `response`: what the chat is inside of, if it is a response. Raises
    `InvalidParameter`, `ContextLengthExceeded`, `PayloadTooLarge`.
    """
    started_at, options = time.time(), request.stream_options
    params = sampling.sampling_params(request, card)
    stop_token_ids = sampling.stop_token_ids(request, card)
    lane = extra_fields.lane_of(request, context.lane)
    capped = context.capped
    most_logprobs = sampling.prompt_logprobs(request)
    first = GenerationRequest(
        generation_id=response.identity if response else new_identity(parts.answers.writer, started_at),
        request_id=context.request_id,
        model=card.model,
        consumer=parts.answers.consumer,
        prompt=[],
        max_tokens=0,
        sampling=params,
        stop_token_ids=stop_token_ids,
        session=session_of(context.tenant, session, context.adapter),
        lane=lane,
        tenant=context.tenant,
        deadline=_deadline(started_at, context, parts.settings),
        grammar=grammar,
        prompt_logprobs=most_logprobs,
        cache_salt=_cache_salt(request.cache_salt, context, parts.settings),
        priority=request.priority or 0,
        adapter=context.adapter,
        sparse=extra_fields.sparse_of(
            request.sparse_attention, context.sparse, card, unasked=context.sparse_unasked
        ),
        prediction=extras.prediction,
        cache_ttl=extra_fields.cache_ttl(request),
    )
    stops = validation.stop_strings(request)
    count = extra_fields.candidates(request)
    best = count > (request.n or 1)
    fitting = [_fitting(prompt, request, card, parts, capped=capped) for prompt in prompts]
    if grammar is not None:
        extra_fields.check_beside_grammar(request)
    chosen = extra_fields.with_chosen(params, request, card, extras, stop_token_ids, best=best)
    requests = [
        msgspec.structs.replace(
            first,
            generation_id=f"{first.generation_id}-{index * count}",
            # a list of numbers takes ten times as much for as long as the stream lasts
            prompt=array("I", prompt),
            max_tokens=most,
            sampling=chosen,
        )
        for index, (prompt, most) in enumerate(fitting)
    ]
    if most_logprobs >= 0:
        validation.check_prompt_logprobs(requests, count)
    if request.return_token_ids:
        validation.check_prompt_ids(requests, count)
    _check_size(requests, count, parts.settings.generation_bytes)
    endpoint: RecordedEndpoint = context.endpoint or _own_endpoint(request, response)
    return GenerationRecord(
        identity=first.generation_id,
        endpoint=endpoint,
        created=started_at,
        requests=requests,
        choices=count,
        prompts=len(prompts),
        stop=stops,
        skip_special_tokens=request.skip_special_tokens is not False,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        background=context.background,
        idempotency=context.idempotency,
        tenant=context.tenant,
        parsing=parsing,
        response=response.record(params) if response else None,
        adapter=context.adapter_name,
        capped=capped and requests[0].max_tokens < _asked(request),
        return_progress=context.return_progress or bool(request.return_progress),
        **extra_fields.notes_of(request, card, endpoint, lane, best=best),
    )


def _own_endpoint(request: GenerationFields, response: OuterResponse | None) -> RecordedEndpoint:
    if response is not None:
        return "responses"
    return "chat.completions" if isinstance(request, ChatCompletionRequest) else "completions"


def run_of(
    record: GenerationRecord,
    may_cost: int,
    card: ModelCard,
    tokenizer: Tokenizer,
    context: Context,
    parts: RunDependencies,
) -> StreamReader:
    """What hands a record's generations in and reads them. `may_cost`: tokens that they may come to."""
    now = time.monotonic()
    trace = None
    if tracing.on():
        choices = len(record.requests) * record.choices
        record, trace = traced(record, PREFIXES[record.endpoint] + record.identity, choices)
    answer = RequestState(
        record,
        [
            Generation(request, index, parts.limits, now=now, started_at=record.created, trace=trace)
            for index, request in enumerate(requests_of(record))
        ],
        owner=parts.answers.consumer,
        owned=True,
        quiet_since=now,
        consumers=[parts.answers.consumer],
        admission=context.admission,
        may_cost=may_cost,
    )
    metrics = parts.metrics.of_model(card.model)
    return parts.presentations.run(answer, tokenizer, parts.answers, metrics=metrics, view=context.view)


def may_cost(record: GenerationRecord, request: GenerationFields) -> int:
    """Tokens that it may come to; where the client names no limit, what answers usually are."""
    most = record.requests[0].max_tokens if _asked(request) else UNNAMED_OUTPUT
    cost = 0
    for item in record.requests:
        cost += len(item.prompt) + min(most, item.max_tokens) * record.choices
    return cost


def _asked(request: GenerationFields) -> int:
    return request.max_tokens or getattr(request, "max_completion_tokens", None) or 0


def _fitting(
    prompt: list[int], request: GenerationFields, card: ModelCard, parts: RunDependencies, *, capped: bool
) -> tuple[list[int], int]:
    """A prompt as far as it is read, and the output tokens that it may have."""
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    if not prompt:
        raise InvalidParameter(
            f"Invalid '{param}': it resulted in no token; send at least one character.",
            param=param,
            reason="empty_prompt",
        )
    most = parts.settings.prompt_limit
    if request.truncate_prompt_tokens is not None:
        prompt = extra_fields.truncated(request, card, prompt)
    if most and len(prompt) > most:
        raise ContextLengthExceeded(
            f"This server takes prompts of at most {most} tokens, and yours has {len(prompt)}; shorten it "
            f"({PROMPT_TOKENS.cited(most)}).",
            param=param,
        )
    limit = sampling.max_tokens(request, card, len(prompt), parts.settings.default_max_tokens, capped=capped)
    if request.min_tokens is not None:
        validation.check_min_tokens(request, limit)
    return prompt, limit


def _check_size(requests: Sequence[GenerationRequest], count: int, most: int) -> None:
    """Raises `PayloadTooLarge` where `count` generations of each of `requests` are too much for the queue."""
    tokens = 0
    for one in requests:
        tokens += len(one.prompt) + len(one.prediction)
    if count * (len(requests) * _OTHER_BYTES + tokens * _TOKEN_BYTES) <= most:
        return
    size = count * sum(len(encode(one)) for one in requests)
    if size > most:
        raise PayloadTooLarge(
            f"The request's {count * len(requests)} generations have {size:,} bytes together, each with the whole "
            f"prompt and prediction; ask for fewer choices ({GENERATION_BYTES.cited(most)}).",
            param="n" if count > 1 else None,
        )


def _deadline(started_at: float, context: Context, settings: GatewaySettings) -> float:
    """Unix seconds until which a first token is of use. One that can be read later outlives its client."""
    given = started_at + settings.token_timeout
    later = context.background or context.key
    return given if later else min(given, context.deadline)


def _cache_salt(given: str | None, context: Context, settings: GatewaySettings) -> str:
    tenant = context.tenant if settings.isolate_tenant_cache else ""
    return cache_salt(given, tenant) if given or tenant else ""
