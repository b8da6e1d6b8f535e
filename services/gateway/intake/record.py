"""From a checked, tokenized request to its generations and the `Run` that reads them."""

import math
import time
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import structlog

from services.gateway.auth.authenticator import ANONYMOUS, Principal
from services.gateway.core.errors import InvalidParameter
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake import extra_fields, sampling, validation
from services.gateway.intake.sampling import cache_salt, session_of
from services.gateway.intake.schemas import ChatCompletionRequest, GenerationFields
from services.gateway.lifecycle.answer import PREFIXES, Answer, new_identity, requests_of
from services.gateway.lifecycle.answers import Answers
from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.token_stream import limits_of
from services.gateway.ratelimit.limiter import Admission
from services.gateway.streams.reading import View, new_run
from services.gateway.streams.run import Run
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tracing.generations import traced
from shared.errors import ContextLengthExceeded, PayloadTooLarge
from shared.limits import GENERATION_BYTES, GRAMMAR_BYTES, PROMPT_TOKENS
from shared.messages import GenerationRequest, Grammar, Lane, ModelCard, SamplingParams
from shared.messages.records import GenerationRecord, Parsing, ResponseRecord
from shared.nats.bus import encode

SHOWN_OF_USER = 64
"""Characters of `user` that logs show: it is a client's text."""
UNNAMED_OUTPUT = 512
"""Output tokens that are reserved of a limit where the client names no `max_tokens`; more is counted at the end."""

_TOKEN_BYTES, _OTHER_BYTES = 5, GRAMMAR_BYTES.value + (64 << 10)
"""Bytes of a token on the wire, and of all else in a generation, at most."""

log = structlog.get_logger(__name__)


class Context(msgspec.Struct, frozen=True):
    """What a request brings besides its body."""

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
    admission: Admission | None = None
    """Set by the intake, where something is limited."""


class Parts(msgspec.Struct, frozen=True):
    """What every run is made with."""

    settings: GatewaySettings
    answers: Answers
    metrics: GatewayMetrics


class OuterResponse(Protocol):
    """The response that a chat completion is inside of."""

    @property
    def identity(self) -> str: ...

    def record(self, sampling: SamplingParams) -> ResponseRecord:
        """What is recorded of it, once the sampling of its chat is known."""
        ...


class Build:
    """The generations of one request. Choice c of prompt p has the index p * n + c, as in OpenAI's API."""

    def __init__(
        self,
        parts: Parts,
        request: GenerationFields,
        card: ModelCard,
        tokenizer: Tokenizer,
        context: Context,
        session: str,
        grammar: Grammar | None = None,
        parsing: Parsing | None = None,
        response: OuterResponse | None = None,
        extras: extra_fields.Extras = extra_fields.Extras(),  # noqa: B008  # frozen
    ) -> None:
        """`parsing`: how a chat's text is taken apart; `response`: what the chat is inside of, if it is a
        response. Raises `InvalidParameter`."""
        self._extras = extras
        self._parts = parts
        self._request = request
        self._card = card
        self._tokenizer = tokenizer
        self._context = context
        self._session = session_of(context.tenant, session)
        self._grammar = grammar
        self._parsing = parsing
        self._chat = isinstance(request, ChatCompletionRequest)
        self._sampling = sampling.sampling_params(request, card)
        self._stop_ids = sampling.stop_token_ids(request, card)
        self._stops = validation.stop_strings(request)
        self._now, self._started_at = time.monotonic(), time.time()
        self._response = response
        self._identity = (
            response.identity if response else new_identity(parts.answers.writer, self._started_at)
        )

    def run(self, prompts: Sequence[list[int]]) -> Run:
        """Raises `InvalidParameter`, `ContextLengthExceeded`."""
        parts, request, options = self._parts, self._request, self._request.stream_options
        count = extra_fields.candidates(request)
        record = GenerationRecord(
            identity=self._identity,
            endpoint=self._endpoint(),
            created=self._started_at,
            requests=[self._wire(index * count, prompt) for index, prompt in enumerate(prompts)],
            choices=count,
            prompts=len(prompts),
            stop=self._stops,
            skip_special_tokens=request.skip_special_tokens is not False,
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            background=self._context.background,
            idempotency=self._context.idempotency,
            tenant=self._context.tenant,
            parsing=self._parsing,
            response=self._response.record(self._sampling) if self._response else None,
        )
        validation.check_prompt_logprobs(record.requests, count)
        if request.return_token_ids:
            validation.check_prompt_ids(record.requests, count)
        self._check_wire(record.requests, count)
        record = extra_fields.noted(record, request, self._card)
        self._context.answer_headers[validation.EXACT_HEADER] = "true" if self._card.exact else "false"
        record, trace = traced(record, PREFIXES[record.endpoint] + record.identity, len(prompts) * count)
        if record.user:
            log.info("generation_for", generation_id=self._identity, user=record.user[:SHOWN_OF_USER])
        settings = parts.settings
        limits = limits_of(settings)
        generations = [
            Generation(wire, index, limits, now=self._now, started_at=self._started_at)
            for index, wire in enumerate(requests_of(record))
        ]
        answer = Answer(
            record,
            generations,
            owner=parts.answers.consumer,
            owned=True,
            now=self._now,
            trace=trace,
            admission=self._context.admission,
            may_cost=self._may_cost(record),
        )
        metrics = parts.metrics.of_model(self._card.model)
        return new_run(answer, self._tokenizer, parts.answers, metrics=metrics, view=self._context.view)

    def _check_wire(self, requests: Sequence[GenerationRequest], count: int) -> None:
        """Raises `PayloadTooLarge` where `count` generations of each of `requests` are too much for the queue."""
        most = self._parts.settings.generation_bytes
        tokens = sum(len(one.prompt) + len(one.prediction) for one in requests)
        if count * (len(requests) * _OTHER_BYTES + tokens * _TOKEN_BYTES) <= most:
            return
        size = count * sum(len(encode(one)) for one in requests)
        if size > most:
            raise PayloadTooLarge(
                f"The request's {count * len(requests)} generations have {size:,} bytes together, each with the whole "
                f"prompt and prediction; ask for fewer choices ({GENERATION_BYTES.cited(most)}).",
                param="n" if count > 1 else None,
            )

    def _may_cost(self, record: GenerationRecord) -> int:
        """Tokens that it may come to; where the client names no limit, what answers usually are."""
        request = self._request
        named = request.max_tokens or getattr(request, "max_completion_tokens", None)
        most = record.requests[0].max_tokens if named else UNNAMED_OUTPUT
        outputs = (min(most, item.max_tokens) * record.choices for item in record.requests)
        return sum(len(item.prompt) for item in record.requests) + sum(outputs)

    def _endpoint(self) -> Literal["chat.completions", "completions", "responses"]:
        if self._response is not None:
            return "responses"
        return "chat.completions" if self._chat else "completions"

    def _wire(self, index: int, prompt: list[int]) -> GenerationRequest:
        """The request of choice 0 of a prompt."""
        settings = self._parts.settings
        if not prompt:
            param = "messages" if self._chat else "prompt"
            raise InvalidParameter(
                f"Invalid '{param}': it resulted in no token; send at least one character.",
                param=param,
                reason="empty_prompt",
            )
        prompt = extra_fields.truncated(self._request, self._card, prompt)
        if settings.prompt_limit and len(prompt) > settings.prompt_limit:
            raise ContextLengthExceeded(
                f"This server takes prompts of at most {settings.prompt_limit} tokens, and yours has {len(prompt)}; "
                f"shorten it ({PROMPT_TOKENS.cited(settings.prompt_limit)}).",
                param="messages" if self._chat else "prompt",
            )
        limit = sampling.max_tokens(self._request, self._card, len(prompt), settings.default_max_tokens)
        validation.check_min_tokens(self._request, limit)
        wire = GenerationRequest(
            generation_id=f"{self._identity}-{index}",
            request_id=self._context.request_id,
            model=self._card.model,
            consumer=self._parts.answers.consumer,
            prompt=prompt,
            max_tokens=limit,
            sampling=self._sampling,
            stop_token_ids=self._stop_ids,
            session=self._session,
            lane=self._context.lane,
            tenant=self._context.tenant,
            deadline=self._deadline(),
            grammar=self._grammar,
            prompt_logprobs=sampling.prompt_logprobs(self._request),
            cache_salt=cache_salt(
                self._request.cache_salt, self._context.tenant if settings.isolate_tenant_cache else ""
            ),
            priority=self._request.priority or 0,
        )
        return extra_fields.applied(wire, self._request, self._card, self._extras)

    def _deadline(self) -> float:
        """Unix seconds until which a first token is of use. One that can be read later outlives its client."""
        given = self._started_at + self._parts.settings.token_timeout
        later = self._context.background or self._context.key
        return given if later else min(given, self._context.deadline)
