"""From a checked, tokenized request to its record, and to the `StreamReader` that hands it in and reads it."""

import math
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from services.gateway.auth.authenticator import ANONYMOUS, Principal
from services.gateway.core.catalog import Resolved
from services.gateway.core.errors import InvalidField, InvalidParameter, check_range, unsupported
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.headers import EXACT_HEADER
from services.gateway.intake.prompts.kv_cache import cache_salt, cache_ttl, session_named, session_of, sparse_of
from services.gateway.intake.sampling.params import prompt_logprobs, sampling_params, stop_token_ids, told_stop_ids
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from services.gateway.lifecycle.generation import Generation
from services.gateway.lifecycle.request_state import RequestState, new_identity, prefix_of, requests_of
from services.gateway.lifecycle.request_tracker import RequestTracker
from services.gateway.lifecycle.token_stream import limits_of
from services.gateway.ratelimit.limiter import RequestAdmission
from services.gateway.streams.reading import Presentations, View
from services.gateway.streams.stream_reader import StreamReader
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tracing.generations import traced
from shared import limits, tracing
from shared.engine_features import refusal_of
from shared.errors import ContextLengthExceeded, PayloadTooLarge
from shared.limits import GENERATION_BYTES, GRAMMAR_BYTES, PROMPT_TOKENS
from shared.messages import GenerationRequest, Grammar, Lane, ModelCard, SamplingParams
from shared.messages.records import GenerationRecord, Parsing, ResponseRecord
from shared.nats.bus import encode

log = structlog.get_logger(__name__)

SHOWN_OF_USER = 64  # characters of `user` that logs show: it is a client's text
# Output tokens that are reserved of a limit where the client names no `max_tokens`; more is counted at the end.
UNNAMED_OUTPUT = 512

_as_json = msgspec.json.Encoder().encode
# Bytes of a token on the wire, and of all else in a generation, at most.
_TOKEN_BYTES, _OTHER_BYTES = 5, GRAMMAR_BYTES.value + (64 << 10)


class Context(msgspec.Struct):
    """What a request brings besides its body, and what is found out about it on its way: made once, then filled."""

    request_id: str
    session: str = ""  # the X-Session-ID header
    # Seconds for which the generation goes on while nobody listens; 0: for the short grace alone.
    background: float = 0.0
    key: str = ""  # the Idempotency-Key header
    tenant: str = ""  # whose request and idempotency keys these are: the principal's
    # The Last-Event-ID header: where the client stands in what its key stands for.
    after: Sequence[int] | None = None
    idempotency: str = ""  # the key's entry in the bucket `idempotency`
    lane: Lane = "interactive"
    deadline: float = math.inf  # Unix seconds until which the client waits
    view: View | None = None  # how it wants to see the answer; None: in the format of its endpoint
    principal: Principal = ANONYMOUS
    # Gets what the answer's head should say of limits, by the time that the answer begins.
    answer_headers: dict[str, str] = {}
    # Returns when the client has gone, where nothing else ends what waits for it.
    gone: Callable[[], Awaitable[object]] | None = None
    admission: RequestAdmission | None = None  # set by the intake, where something is limited
    model: Resolved = Resolved("")  # what the request's `model` stands for, to its end; set by the intake
    # The X-Ryzanstein-Progress header: whether its stream tells how much of the prompts is computed.
    return_progress: bool = False
    endpoint: str = ""  # of the API that a chat or completion is translated for; empty: it is OpenAI's own
    # Whether its client may ask for more tokens than the context has room for, and gets what it has.
    capped: bool = False
    body_bytes: int = 0  # set by the intake


class RunDependencies:
    """What every run is made with."""

    __slots__ = ("answers", "limits", "metrics", "presentations", "settings")

    def __init__(
        self, settings: GatewaySettings, answers: RequestTracker, metrics: GatewayMetrics, presentations: Presentations
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
    grammar: Grammar | None = None,
    parsing: Parsing | None = None,
    response: OuterResponse | None = None,
    bad_words: list[list[int]] = [],  # noqa: B006
    prediction: list[int] = [],  # noqa: B006
) -> GenerationRecord:
    """The record of a checked, tokenized request. Choice c of prompt p has the index p * n + c, as in OpenAI's API.

    `parsing`: how a chat's text is taken apart; `response`: what the chat is inside of, if it is a response;
    `bad_words`, `prediction`: in tokens. Raises `InvalidRequest`.
    """
    started_at, settings = time.time(), parts.settings
    count = _candidates(request)
    best = count > (request.n or 1)
    if grammar is not None:
        _check_beside_grammar(request)
    params = sampling_params(request, card, bad_words=bad_words, best=best)
    stops, told_stops = stop_token_ids(request, card), told_stop_ids(request, card)
    most_logprobs = prompt_logprobs(request)
    first = GenerationRequest(
        generation_id=response.identity if response else new_identity(parts.answers.writer, started_at),
        request_id=context.request_id,
        model=card.model,
        consumer=parts.answers.consumer,
        prompt=[],
        max_tokens=0,
        sampling=params,
        stop_token_ids=stops,
        session=session_of(context.tenant, context.session or session_named(request), context.model.adapter),
        cache_salt=cache_salt(request.cache_salt, context.tenant if settings.isolate_tenant_cache else ""),
        cache_ttl=cache_ttl(request),
        lane="batch" if request.service_tier == "flex" else context.lane,
        tenant=context.tenant,
        deadline=_deadline(started_at, context, settings),
        grammar=grammar,
        prompt_logprobs=most_logprobs,
        priority=request.priority or 0,
        adapter=context.model.adapter,
        sparse=sparse_of(request.sparse_attention, context.model, card),
        prediction=prediction,
    )
    if (refused := refusal_of(first, card.engine)) is not None:
        raise refused
    fitting_prompts = [fitting(prompt, request, card, settings, capped=context.capped) for prompt in prompts]
    requests = [
        msgspec.structs.replace(
            first,
            generation_id=f"{first.generation_id}-{index * count}",
            # a list of numbers takes ten times as much for as long as the stream lasts
            prompt=array("I", prompt),
            max_tokens=most,
        )
        for index, (prompt, most) in enumerate(fitting_prompts)
    ]
    if most_logprobs >= 0:
        _check_prompt_logprobs(requests, count)
    if request.return_token_ids:
        _check_prompt_ids(requests, count)
    _check_size(requests, count, settings.generation_bytes)
    return GenerationRecord(
        identity=first.generation_id,
        created=started_at,
        requests=requests,
        choices=count,
        prompts=len(prompts),
        background=context.background,
        idempotency=context.idempotency,
        tenant=context.tenant,
        parsing=parsing,
        response=response.record(params) if response else None,
        adapter=context.model.name,
        capped=context.capped and requests[0].max_tokens < (asked_tokens(request) or 0),
        stop_token_ids=told_stops,
        return_progress=context.return_progress or bool(request.return_progress),
        **_shown(request, card, context.endpoint or _own_endpoint(request, response), first.lane, best=best),
    )


def _own_endpoint(request: GenerationFields, response: OuterResponse | None) -> str:
    if response is not None:
        return "responses"
    return "chat.completions" if isinstance(request, ChatCompletionRequest) else "completions"


def _candidates(request: GenerationFields) -> int:
    """Choices that are generated of each prompt."""
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return best_of or request.n or 1


def _shown(request: GenerationFields, card: ModelCard, endpoint: str, lane: Lane, *, best: bool) -> dict[str, Any]:
    """The fields of the record that are about how the answer is shown. `best`: the best of more candidates are."""
    options = request.stream_options
    shown: dict[str, Any] = {
        "endpoint": endpoint,
        "stop": [request.stop] if isinstance(request.stop, str) else request.stop or [],
        "skip_special_tokens": request.skip_special_tokens is not False,
        "stream": bool(request.stream),
        "include_usage": bool(options and options.include_usage),
        "best": (request.n or 1) if best else 0,
        "hide_logprobs": best and getattr(request, "logprobs", None) is None,
        "echo": bool(getattr(request, "echo", None)),
        "include_stop": bool(request.include_stop_str_in_output),
        "continues": bool(getattr(request, "continue_final_message", None))
        or (isinstance(request, CompletionRequest) and endpoint != "completions"),
        "continuous_usage": bool(options and options.continuous_usage_stats),
        "obfuscate": bool(options and options.include_obfuscation),
        "fingerprint": card.fingerprint,
        "service_tier": _tier(lane) if request.service_tier is not None else "",
        "store": bool(request.store),
        "metadata": request.metadata or {},
        "user": request.safety_identifier or request.user or "",
        "tokens_as_ids": bool(request.return_tokens_as_token_ids),
        "token_ids": bool(request.return_token_ids),
        "prompt_logprobs": -1 if request.prompt_logprobs is None else request.prompt_logprobs,
    }
    if request.store and isinstance(request, ChatCompletionRequest):
        shown["messages"] = _as_json(request.messages)
    return shown


def _tier(lane: Lane) -> str:
    """What OpenAI's API calls the lane, of a request that asks for a tier."""
    return "flex" if lane == "batch" else "default"


def _check_beside_grammar(request: GenerationFields) -> None:
    """What a grammar demands and what may not be drawn could leave nothing, so they do not go together. Raises
    `InvalidParameter`."""
    for name in ("min_tokens", "allowed_token_ids", "bad_words"):
        if getattr(request, name):
            raise unsupported(name, "it cannot be combined with a grammar; leave one out")


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
        record, trace = traced(record, prefix_of(record.endpoint) + record.identity, choices)
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


def text_run(
    record: GenerationRecord,
    request: GenerationFields,
    card: ModelCard,
    tokenizer: Tokenizer,
    context: Context,
    parts: RunDependencies,
) -> StreamReader:
    """As `run_of`, of a request for text."""
    tell_exact(card, context)
    if record.user:
        log.info("generation_user", generation_id=record.identity, user=record.user[:SHOWN_OF_USER])
    return run_of(record, may_cost(record, request), card, tokenizer, context, parts)


def tell_exact(card: ModelCard, context: Context) -> None:
    """In the answer's head."""
    context.answer_headers[EXACT_HEADER] = "true" if card.exact else "false"


def may_cost(record: GenerationRecord, request: GenerationFields) -> int:
    """Tokens that it may come to; where the client names no limit, what answers usually are."""
    most = record.requests[0].max_tokens if asked_tokens(request) else UNNAMED_OUTPUT
    cost = 0
    for item in record.requests:
        cost += len(item.prompt) + min(most, item.max_tokens) * record.choices
    return cost


def _check_prompt_logprobs(prompts: Sequence[GenerationRequest], choices: int) -> None:
    """Raises `InvalidParameter` when more is asked for of `prompts`, each for so many choices, than is told."""
    name = "prompt_logprobs" if prompts[0].sampling.logprobs < 0 else "logprobs"
    counts = [len(one.prompt) * (one.prompt_logprobs + 1) for one in prompts]
    for whose, count, limit in (
        ("one prompt", max(counts), limits.PROMPT_LOGPROBS),
        ("all prompts", sum(counts) * choices, limits.REQUEST_PROMPT_LOGPROBS),
    ):
        if count > limit.value:
            raise InvalidParameter(
                f"Invalid '{name}': it asks for {count:,} log probabilities of the tokens of {whose}, of each token "
                "and of the most likely ones in its place; send fewer or shorter prompts, or ask for fewer of the "
                f"most likely tokens ({limit.cited()}).",
                param=name,
                reason="array_above_max_length",
            )


def _check_prompt_ids(prompts: Sequence[GenerationRequest], choices: int) -> None:
    """Raises `InvalidParameter` when the token ids of `prompts`, shown with so many choices each, are too many."""
    count = choices * sum(len(one.prompt) for one in prompts)
    if count > limits.PROMPT_TOKEN_IDS.value:
        raise InvalidParameter(
            f"Invalid 'return_token_ids': with all choices it asks for {count:,} token ids of prompts; send fewer or "
            f"shorter prompts, or ask for fewer choices ({limits.PROMPT_TOKEN_IDS.cited()}).",
            param="return_token_ids",
            reason="array_above_max_length",
        )


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


# --- how many tokens -----------------------------------------------------------------------------


COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


def max_tokens(
    request: GenerationFields, card: ModelCard, prompt_tokens: int, default: int, *, capped: bool = False
) -> int:
    """Output tokens at most. `default` 0: what the context leaves. `capped`: more than the context leaves is not
    refused, and means what it leaves; a completion has the same default as a chat. Raises `ContextLengthExceeded`."""
    room = card.context_length - prompt_tokens
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    asked = asked_tokens(request)
    if room < (asked != 0):  # what is told of a prompt alone needs no room behind it
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.context_length} tokens, and your {param} "
            f"resulted in {prompt_tokens} tokens; shorten the {param}.",
            param=param,
        )
    if asked is None and not capped and not isinstance(request, ChatCompletionRequest):
        return min(COMPLETION_MAX_TOKENS, room)
    if asked is None:
        return min(default, room) if default else room
    if asked > room and capped:
        return room
    if asked > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.context_length} tokens, and you requested "
            f"{prompt_tokens + asked} ({prompt_tokens} in the {param}, {asked} in the completion); "
            f"reduce the {param} or max_tokens.",
            param=param,
        )
    return asked


def asked_tokens(request: GenerationFields) -> int | None:
    """`max_tokens` under either of its names. Raises `InvalidParameter` when the two disagree."""
    asked = request.max_tokens
    if not isinstance(request, ChatCompletionRequest) or request.max_completion_tokens is None:
        return asked
    if asked not in (None, request.max_completion_tokens):
        raise InvalidParameter(
            f"Invalid 'max_tokens': it is {asked} and 'max_completion_tokens' is "
            f"{request.max_completion_tokens}; give one of the two, the latter preferably.",
            param="max_tokens",
        )
    return request.max_completion_tokens


def fitting(
    prompt: list[int], request: GenerationFields, card: ModelCard, settings: GatewaySettings, *, capped: bool
) -> tuple[list[int], int]:
    """A prompt as far as it is read, and the output tokens that it may have."""
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    if not prompt:
        raise InvalidField(param, "it resulted in no token; send at least one character.", reason="empty_prompt")
    most = settings.prompt_limit
    if request.truncate_prompt_tokens is not None:
        prompt = truncated(request, card, prompt)
    if most and len(prompt) > most:
        raise ContextLengthExceeded(
            f"This server takes prompts of at most {most} tokens, and yours has {len(prompt)}; shorten it "
            f"({PROMPT_TOKENS.cited(most)}).",
            param=param,
        )
    limit = max_tokens(request, card, len(prompt), settings.default_max_tokens, capped=capped)
    if request.min_tokens is not None:
        check_range("min_tokens", request.min_tokens, 0, limit)
    return prompt, limit


def truncated(request: GenerationFields, card: ModelCard, prompt: list[int]) -> list[int]:
    """The end of `prompt` that `truncate_prompt_tokens` leaves. Raises `ContextLengthExceeded`."""
    count = request.truncate_prompt_tokens
    assert count is not None, "it is asked for"
    if count > card.context_length:
        raise ContextLengthExceeded(
            f"truncate_prompt_tokens is {count} and this model's maximum context length is {card.context_length} "
            "tokens; ask for fewer.",
            param="truncate_prompt_tokens",
        )
    if count < 0:
        chat_limit = getattr(request, "max_completion_tokens", None)
        count = max(1, card.context_length - (chat_limit or request.max_tokens or 1))
    return prompt[:count] if request.truncation_side == "right" else prompt[-count:]
