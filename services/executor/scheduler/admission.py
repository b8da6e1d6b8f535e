"""Whether a request can be taken at all: what a ring refuses before it costs anything, and what has ended before."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import NamedTuple

import msgspec

from services.executor.core.engine import EngineSpec
from services.executor.core.sampling_state import problem_with, problem_with_bans, token_bans_of
from services.executor.scheduler.sequence import finish_reason
from shared import limits
from shared.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest, QueueFull, RyzansteinError
from shared.messages import GenerationRequest, Refusal, TokenEntry


class BatchSettings(msgspec.Struct, frozen=True):
    """How much a ring takes on at once."""

    max_batch_tokens: int = 512  # tokens that one step computes at most, prefill and decode together
    max_sequences: int = 64  # sequences that run at once
    # Accepted sequences that wait for a place; more are refused, to be tried elsewhere or later. Those of the
    # batch lane count against batch requests alone.
    max_waiting: int = 1024
    # Seconds after its last use for which a session's blocks are kept before others'.
    session_ttl: float = 0.0
    # Tokens that one sequence's step checks ahead at most (`drafts/speculation.py`); 0: none.
    max_drafts: int = 0
    # How many times as long as without it a step with part of a long prompt may take, beside decodes that somebody
    # waits for (`planning/prefill_pace.py`), above 1; 0: any time.
    prefill_stretch: float = 0.0
    prefill_gap: float = 0.0  # seconds that it may take in any case

    def validate(self) -> None:
        """Raises `ConfigurationError` where they do not go together."""
        if self.max_batch_tokens < self.max_sequences:
            raise ConfigurationError(
                f"max_batch_tokens is {self.max_batch_tokens}, fewer than max_sequences "
                f"({self.max_sequences}); every running sequence needs a token in each step."
            )


# A field, how large it is, its bound, and what is in place of the bound's value where the model decides.
FieldSize = tuple[str, int, limits.Limit, int | None]
Check = Callable[[GenerationRequest, EngineSpec], InvalidRequest | None]


class RequestChecks(NamedTuple):
    """What a feature of steps demands of requests. `Admission` asks every feature for one of these before it asks the
    first for the next, in this order."""

    numbers: Check | None = None  # of numbers that `sizes` are made of
    sizes: Callable[[GenerationRequest], Iterable[FieldSize]] | None = None
    tokens: tuple[str, ...] = ()  # fields that hold ids of tokens
    check: Check | None = None  # all else


NO_CHECKS = RequestChecks()
_TOKENS = ("prompt", "generated", "prediction")
# Fields of a request that a ring keeps, and says again in events and logs.
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
_TEXTS: Callable[[GenerationRequest], tuple[str, ...]] = attrgetter(*_NAMES)


class Admission:
    """Whether a ring can compute a request at all: its own checks, and those of its features in their order."""

    def __init__(self, spec: EngineSpec, features: Iterable[RequestChecks]) -> None:
        self._spec = spec
        brought = list(features)
        self._numbers = [one.numbers for one in brought if one.numbers is not None]
        self._sizes = [one.sizes for one in brought if one.sizes is not None]
        self._checks = [one.check for one in brought if one.check is not None]
        self._tokens = (*_TOKENS, *(name for one in brought for name in one.tokens))
        self._ids: Callable[[GenerationRequest], tuple[Seq[int], ...]] = attrgetter(*self._tokens)

    def malformed(self, request: GenerationRequest) -> RyzansteinError | None:
        """Why no ring of this model could compute the request; a bad token id would take a GPU down."""
        if not request.prompt:
            return InvalidRequest("The prompt has no tokens; send at least one.")
        if request.max_tokens < 0:
            return InvalidRequest(f"max_tokens is {request.max_tokens}; ask for 0 or more.")
        for check in self._numbers:
            if (wrong := check(request, self._spec)) is not None:
                return wrong
        if (wrong := self._oversized(request)) is not None:
            return wrong
        vocabulary = self._spec.vocab_size
        for name, tokens in zip(self._tokens, self._ids(request), strict=True):
            if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
                return InvalidRequest(
                    f"The request's {name} has a token outside the model's vocabulary of {vocabulary}; "
                    "use the model's own tokenizer."
                )
        for check in self._checks:
            if (wrong := check(request, self._spec)) is not None:
                return wrong
        return _sampling_problem(request, vocabulary)

    def _oversized(self, request: GenerationRequest) -> InvalidRequest | None:
        """Whether a field is larger than any gateway sends it: its cost is the whole group's, step by step. What it
        would cost to look further into such a request is not spent."""
        sampling = request.sampling
        sizes: list[FieldSize] = [
            ("prediction", len(request.prediction), limits.PREDICTION, self._spec.context_length),
            ("stop_token_ids", len(request.stop_token_ids), limits.RING_STOP_TOKENS, None),
            ("logit_bias", len(sampling.logit_bias), limits.LOGIT_BIASES, None),
            ("allowed_token_ids", len(sampling.allowed_token_ids), limits.ALLOWED_TOKENS, None),
            ("bad_words", len(sampling.bad_words), limits.RING_BAD_WORDS, None),
        ]
        for of_feature in self._sizes:
            sizes += of_feature(request)
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


def _sampling_problem(request: GenerationRequest, vocabulary: int) -> InvalidRequest | None:
    if request.grammar is not None and token_bans_of(request.sampling, request.stop_token_ids, ()) is not None:
        return InvalidRequest("A grammar cannot be combined with min_tokens, allowed_token_ids or bad_words.")
    problem = problem_with(request.sampling, vocabulary) or problem_with_bans(
        request.sampling, request.stop_token_ids, vocabulary
    )
    return InvalidRequest(f"The sampling parameter {problem}.") if problem else None


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
    nothing_follows = request.pools or not request.max_tokens  # what is told of a prompt needs no room behind it
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
