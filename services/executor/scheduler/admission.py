"""Whether a request can be taken at all: what a ring refuses before it costs anything, and what has ended before."""

from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter

import msgspec

from services.executor.core.engine import EngineSpec
from services.executor.core.sampling_state import problem_with, problem_with_bans, token_bans_of
from services.executor.core.sparse_attention import problem_with as problem_with_choice
from services.executor.scheduler.sequence import finish_reason
from shared import limits
from shared.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    InvalidRequest,
    QueueFull,
    RyzansteinError,
)
from shared.messages import GenerationRequest, Refusal, TokenEntry
from shared.messages.registry import DIGEST_DIGITS, is_digest


class BatchSettings(msgspec.Struct, frozen=True):
    """How much a ring takes on at once."""

    max_batch_tokens: int = 512
    """Tokens that one step computes at most, prefill and decode together."""
    max_sequences: int = 64
    """Sequences that run at once."""
    max_waiting: int = 1024
    """Accepted sequences that wait for a place; more are refused, to be tried elsewhere or later. Those of the
    batch lane count against batch requests alone."""
    session_ttl: float = 0.0
    """Seconds after its last use for which a session's blocks are kept before others'."""
    max_drafts: int = 0
    """Tokens that one sequence's step checks ahead at most (`speculation.py`); 0: none."""
    prefill_stretch: float = 0.0
    """How many times as long as without it a step with part of a long prompt may take, beside decodes that somebody
    waits for (`prefill_pace.py`), above 1; 0: any time."""
    prefill_gap: float = 0.0
    """Seconds that it may take in any case."""

    def validate(self) -> None:
        """Raises `ConfigurationError` where they do not go together."""
        if self.max_batch_tokens < self.max_sequences:
            raise ConfigurationError(
                f"max_batch_tokens is {self.max_batch_tokens}, fewer than max_sequences "
                f"({self.max_sequences}); every running sequence needs a token in each step."
            )


_NAMES = (
    "generation_id",
    "request_id",
    "model",
    "consumer",
    "session",
    "cache_salt",
    "tenant",
    "traceparent",
    "tracestate",
    "suspected",
    "adapter",
)
"""Fields of a request that a ring keeps, and says again in events and logs."""
_TEXTS: Callable[[GenerationRequest], tuple[str, ...]] = attrgetter(*_NAMES)


def malformed(request: GenerationRequest, spec: EngineSpec) -> RyzansteinError | None:
    """Why no ring of this model could compute the request; a bad token id would take a GPU down."""
    if not request.prompt:
        return InvalidRequest("The prompt has no tokens; send at least one.")
    if request.max_tokens < 0:
        return InvalidRequest(f"max_tokens is {request.max_tokens}; ask for 0 or more.")
    if not -1 <= request.prompt_logprobs <= spec.vocab_size:
        return InvalidRequest(
            f"prompt_logprobs is {request.prompt_logprobs} and must be between -1 and {spec.vocab_size}."
        )
    if (large := _oversized(request, spec)) is not None:
        return large
    given = (
        ("prompt", request.prompt),
        ("generated", request.generated),
        ("prediction", request.prediction),
        ("logprob_token_ids", request.logprob_token_ids),
    )
    for name, tokens in given:
        if tokens and not (min(tokens) >= 0 and max(tokens) < spec.vocab_size):
            return InvalidRequest(
                f"The request's {name} has a token outside the model's vocabulary of {spec.vocab_size}; "
                "use the model's own tokenizer."
            )
    if request.adapter and (wrong := _adapter_problem(request.adapter, spec)) is not None:
        return wrong
    if (wrong := _task_problem(request, spec) or _sparse_problem(request, spec)) is not None:
        return wrong
    if (
        request.grammar is not None
        and token_bans_of(request.sampling, request.stop_token_ids, ()) is not None
    ):
        return InvalidRequest("A grammar cannot be combined with min_tokens, allowed_token_ids or bad_words.")
    problem = problem_with(request.sampling, spec.vocab_size) or problem_with_bans(
        request.sampling, request.stop_token_ids, spec.vocab_size
    )
    return InvalidRequest(f"The sampling parameter {problem}.") if problem else None


def _task_problem(request: GenerationRequest, spec: EngineSpec) -> InvalidRequest | None:
    """Whether the request asks for what the model does not do, or for two things at once."""
    if spec.generates and not (request.pools or request.second_segment):
        return None  # nearly always
    tasks = spec.tasks
    if request.embed and "embed" not in tasks:
        return InvalidRequest("This model makes no vectors; choose one whose pooling is mean, last or cls.")
    if request.classify and "classify" not in tasks:
        return InvalidRequest("This model has no classification head; choose one that has.")
    if not request.embed and not request.classify and "generate" not in tasks:
        return InvalidRequest(
            f"This model generates no text (it does {' and '.join(tasks)}); choose a language model."
        )
    if request.embed + request.classify + bool(request.logprob_token_ids) > 1:
        return InvalidRequest("embed, classify and logprob_token_ids exclude each other; send one.")
    if request.pools and request.prompt_logprobs >= 0:
        return InvalidRequest("prompt_logprobs cannot be combined with embed, classify or logprob_token_ids.")
    if not 0 <= request.second_segment <= len(request.prompt):
        return InvalidRequest(
            f"second_segment is {request.second_segment} and must be between 0 and the prompt's "
            f"{len(request.prompt)} tokens."
        )
    return None


def _sparse_problem(request: GenerationRequest, spec: EngineSpec) -> InvalidRequest | None:
    wanted = request.sparse
    return None if wanted is None else problem_with_choice(wanted, spec.block_size, spec.sparse)


def _adapter_problem(adapter: str, spec: EngineSpec) -> InvalidRequest | None:
    if not is_digest(adapter):
        return InvalidRequest(
            f"The request's adapter is not a digest of {DIGEST_DIGITS} hexadecimal digits in lower case."
        )
    if not spec.max_adapters:
        return InvalidRequest(
            "This group computes no LoRA adapters; start it with --max-adapters above 0, or ask for the model alone."
        )
    return None


def _oversized(request: GenerationRequest, spec: EngineSpec) -> InvalidRequest | None:
    """Whether a field is larger than any gateway sends it: its cost is the whole group's, step by step. What it
    would cost to look further into such a request is not spent."""
    sampling = request.sampling
    sizes = [
        ("prediction", len(request.prediction), limits.PREDICTION, spec.context_length),
        ("stop_token_ids", len(request.stop_token_ids), limits.RING_STOP_TOKENS, None),
        ("logit_bias", len(sampling.logit_bias), limits.LOGIT_BIASES, None),
        ("allowed_token_ids", len(sampling.allowed_token_ids), limits.ALLOWED_TOKENS, None),
        ("bad_words", len(sampling.bad_words), limits.RING_BAD_WORDS, None),
        ("logprob_token_ids", len(request.logprob_token_ids), limits.LOGPROB_TOKEN_IDS, None),
        (
            "prompt_logprobs",
            len(request.prompt) * (request.prompt_logprobs + 1),
            limits.PROMPT_LOGPROBS,
            None,
        ),
    ]
    if request.grammar is not None:
        sizes.append(("grammar", len(request.grammar.text), limits.GRAMMAR_BYTES, None))
    texts = _TEXTS(request)
    if sum(map(len, texts)) > limits.RING_TEXT.value:  # seldom
        sizes += [(name, len(text), limits.RING_TEXT, None) for name, text in zip(_NAMES, texts, strict=True)]
    sizes += [("bad_words", len(word), limits.BAD_WORD_TOKENS, None) for word in sampling.bad_words[:256]]
    for name, size, limit, most in sizes:
        if size > (limit.value if most is None else most):
            return InvalidRequest(
                f"The request's {name} has {size:,} {limit.unit}; send fewer ({limit.cited(most)})."
            )
    return None


def finished_before(request: GenerationRequest, spec: EngineSpec) -> TokenEntry | None:
    """The end of a generation that an earlier attempt has finished: it was lost after its last token, and
    before saying so. Or of one that asks for nothing. None where there is something left to do."""
    last = request.generated[-1] if request.generated else None
    stops = request.stop_token_ids
    finish = finish_reason(request, stops, len(request.generated), last, spec.context_length)
    if not request.max_tokens and (request.prompt_logprobs < 0 or len(request.prompt) == 1):
        finish = "length"  # there is nothing to tell of the prompt
    if not finish:
        return None
    return TokenEntry(request.generation_id, request.attempt, len(request.generated), [], finish=finish)


def too_long(request: GenerationRequest, spec: EngineSpec) -> RyzansteinError | None:
    """Whether not even one more token fits the context or the KV cache."""
    tokens = len(request.prompt) + len(request.generated)
    nothing_follows = (
        request.pools or not request.max_tokens
    )  # what is told of a prompt needs no room behind it
    if tokens >= spec.context_length + nothing_follows:
        return ContextLengthExceeded(
            f"The prompt has {tokens} tokens and the model's context is {spec.context_length}, answer "
            "included; send a shorter prompt."
        )
    return kv_exhausted(tokens, spec)


def kv_exhausted(tokens: int, spec: EngineSpec) -> RyzansteinError | None:
    """Whether `tokens` tokens are more than the whole KV cache holds."""
    if tokens <= spec.capacity:
        return None
    return ContextLengthExceeded(
        f"{tokens} tokens do not fit the group's KV cache of {spec.capacity} tokens; shorten the "
        "request or give the group more KV blocks."
    )


def queue_full(waiting: int) -> RyzansteinError:
    """For a request that finds `waiting` others before it, as many as may wait."""
    return QueueFull(f"The group has {waiting} waiting requests and takes no more; try again later.")


def refusal(request: GenerationRequest, error: RyzansteinError) -> Refusal:
    return Refusal(request.generation_id, error.code, error.message, error.retryable)


class RecentlyEnded:
    """The last attempts of the `capacity` generations that ended last."""

    def __init__(self, capacity: int = 4096) -> None:
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._capacity = capacity

    def add(self, request: GenerationRequest) -> None:
        """This attempt is over; the oldest generation is forgotten when there are too many."""
        self._attempts[request.generation_id] = request.attempt
        self._attempts.move_to_end(request.generation_id)
        if len(self._attempts) > self._capacity:
            self._attempts.popitem(last=False)

    def attempt(self, generation_id: str) -> int:
        """The attempt that ended; -1 for a generation that is not known."""
        return self._attempts.get(generation_id, -1)

    def __len__(self) -> int:
        return len(self._attempts)
