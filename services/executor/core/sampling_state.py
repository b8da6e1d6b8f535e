"""What the sampler knows of one sequence, and where its random numbers come from. Free of torch.

The random number of a token depends on (seed, position) alone: whoever computes position 17 of a
generation draws what anybody else would have drawn. It is the `position`-th output of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) started at
the mixed seed, so that neighbouring seeds give unrelated streams.

`TokenBans`: tokens that must not be drawn: an end that comes too early, what is not allowed, the last token of a bad
word.

    bad word   [ 7 3 9 ]        output so far  [ ... 7 3 ]      banned now: 9

A function of the request and of its output so far, so a continuation on another ring bans the same.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.messages import SamplingParams

Int64Array = NDArray[np.int64]
Mask = NDArray[np.bool_]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
# At or below this temperature the most likely token is taken: the quotient says nothing more.
GREEDY_TEMPERATURE = 1e-5


def random_bits(seed: int, position: int) -> int:
    """64 random bits, a pure function of the two unsigned 64-bit numbers."""
    return _mix(_stream(seed) + (position + 1) * _GAMMA)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1 - 2**-52], a pure function of `seed` and `position`.

    52 bits and not 53, so that `uniform * total` is below `total` whatever the rounding.
    """
    return (random_bits(seed, position) >> 12) * 2.0**-52


@lru_cache(maxsize=4096)
def _stream(seed: int) -> int:
    """Where the stream of a seed begins: the same for all its positions."""
    return _mix(seed + _GAMMA)


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Stafford's variant 13 of MurmurHash3's)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class OutputTokenCounts:
    """Distinct tokens and how often each is in the output, as arrays that grow in place."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        """Prompt tokens are listed with count 0."""
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self._ids: Int64Array = np.zeros(max(16, len(self._slots)), np.int64)
        self._ids[: len(self._slots)] = np.fromiter(self._slots, np.int64)
        self._counts: Int64Array = np.zeros_like(self._ids)
        for token in output:
            self.add(token)

    @property
    def ids(self) -> Int64Array:
        """int64 [distinct tokens], each once. A view: do not keep it over an `add`."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Int64Array:
        """int64 [distinct tokens]: occurrences in the output, aligned with `ids`."""
        return self._counts[: len(self._slots)]

    def add(self, token: int) -> None:
        """`token` has been put out once more."""
        slot = self._slot(token)  # before the array is looked at: it may be replaced by a longer one
        self._counts[slot] += 1

    def ahead(self, tokens: Sequence[int]) -> "CountsAhead":
        """The counts once `tokens` were put out too."""
        counts = np.array(self.counts)
        more: dict[int, int] = {}
        for token in tokens:
            slot = self._slots.get(token)
            if slot is None:
                more[token] = more.get(token, 0) + 1
            else:
                counts[slot] += 1
        ids = np.concatenate((self.ids, np.fromiter(more.keys(), np.int64)))
        return CountsAhead(ids, np.concatenate((counts, np.fromiter(more.values(), np.int64))))

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token
        return slot


class CountsAhead(NamedTuple):
    ids: Int64Array
    counts: Int64Array


class Biases(NamedTuple):
    """What is added to the logits of some tokens."""

    tokens: Int64Array
    amounts: NDArray[np.float32]

    @classmethod
    def of(cls, given: Mapping[int, float]) -> "Biases | None":
        """None where there are none."""
        if not given:
            return None
        return cls(np.fromiter(given.keys(), np.int64), np.fromiter(given.values(), np.float32))


class GrammarMask(Protocol):
    """Which tokens may follow one sequence's (`GrammarState`)."""

    complete: bool  # whether the text matches and nothing can follow

    def advance(self, *tokens: int) -> None: ...

    def allowed(self) -> Mask:
        """bool [vocabulary]: which tokens may follow. Raises `InvalidGrammar` when it leads nowhere."""
        ...

    def forced(self) -> Sequence[int]:
        """The next tokens, where the grammar leaves no choice of text: as a tokenizer would give it, which the model
        may still put out in other tokens."""
        ...

    def fitting(self, drafts: Sequence[int]) -> int:
        """How many of `drafts` may follow, one after the other, with something to be drawn behind each."""
        ...

    def after_each(self, drafts: Sequence[int]) -> "Sequence[GrammarMask]":
        """Once the first one, the first two, ... of `drafts`, which fit, were put out too: for their masks, and not to
        `advance`."""
        ...


class SamplingState:
    """How one sequence's next token is chosen. Costs nothing for parameters that are off."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int], stops: Sequence[int] = ()
    ) -> None:
        """`generated`: output tokens so far, those of earlier attempts included; `stops`: tokens that end it."""
        self.params = params
        # What may not be drawn; None: there is never anything.
        self.bans = token_bans_of(params, stops, generated)
        self.biases = Biases.of(params.logit_bias)
        self._raises = bool(params.logit_bias) and max(params.logit_bias.values()) > 0
        self.position = len(generated)  # index of the next output token, counted over all attempts
        self.greedy = params.temperature <= GREEDY_TEMPERATURE or params.top_k == 1
        # Tokens that penalties apply to; None without penalties.
        self.counts: OutputTokenCounts | CountsAhead | None = None
        self.grammar: GrammarMask | None = None  # which tokens may follow at all; None: any
        if params.repetition_penalty != 1.0:
            self.counts = OutputTokenCounts(prompt, generated)
        elif params.presence_penalty or params.frequency_penalty:
            self.counts = OutputTokenCounts((), generated)

    @property
    def edits_logits(self) -> bool:
        """Whether penalties, biases or bans change the logits."""
        if self.counts is not None or self.params.logit_bias:
            return True
        return self.has_allowed_tokens or (self.bans is not None and bool(len(self.bans.banned)))

    @property
    def has_allowed_tokens(self) -> bool:
        """Whether no others may be drawn."""
        return self.bans is not None and self.bans.allowed is not None

    @property
    def edited(self) -> Int64Array:
        """Tokens, ascending, whose logits penalties, biases or bans change; without those that are not allowed."""
        counted = _NONE if self.counts is None else self.counts.ids
        biased = _NONE if self.biases is None else self.biases.tokens
        kinds = [one for one in (counted, biased, _NONE if self.bans is None else self.bans.banned) if len(one)]
        return np.sort(kinds[0]) if len(kinds) == 1 else np.unique(np.concatenate((_NONE, *kinds)))

    @property
    def needs_host(self) -> bool:
        """Whether the token is not a function of logits, parameters and position alone, or more than it is asked
        for: what samples on a device (`gpu/sampling.py`) leaves to the host."""
        return not self.foreseeable or self.params.logprobs >= 0

    @property
    def foreseeable(self) -> bool:
        """Whether the token after the next one can be chosen without knowing the next one beforehand, and without
        edits of logits: nothing but seed and position decides beside the logits."""
        return self.counts is None and self.bans is None and self.grammar is None and not self.params.logit_bias

    @property
    def candidates(self) -> int:
        """How many of the largest logits decide the token and its log probabilities, for sure; 0: all.
        Negative where the log-sum-exp of all is needed too.

        A token whose logit an edit lowers gives up its place to the next one, so one more is needed for
        each of them. What raises a logit may lift any token to the top, and so may a grammar. Without top-k see
        `margin`.
        """
        if self.grammar is not None:
            return 0
        params = self.params
        needed = 1 if self.greedy else params.top_k
        if not self.needs_host:  # nothing is edited or told: most rows of most steps
            return needed
        lowered = self._lowered()
        if not needed or lowered is None:
            return 0
        needed = max(needed + lowered, params.logprobs)
        return -needed if params.logprobs >= 0 else needed

    def margin(self, vocab_size: int) -> float:
        """How far below the largest logit a token may be drawn from, top-k aside; 0: any token may.

        With weights relative to the most likely token's: min-p drops those below min_p. All tokens below
        w = (1 - p) / vocabulary weigh less than 1 - p together, and the sum of all is at least 1, so those
        from w on hold a share p: the nucleus is among them. Half of either, for what rounding may do.
        """
        params = self.params
        if self.greedy or self.edits_logits or params.logprobs >= 0 or self.grammar is not None:
            return 0.0
        least = max(params.min_p, (1 - params.top_p) / vocab_size)
        return params.temperature * math.log(2 / least) if least > 0 else 0.0

    def _lowered(self) -> int | None:
        """Tokens whose logits edits may lower; None when some may be raised."""
        params = self.params
        penalties = min(params.repetition_penalty - 1, params.presence_penalty, params.frequency_penalty)
        if penalties < 0 or self._raises or self.has_allowed_tokens:
            return None
        banned = 0 if self.bans is None else len(self.bans.banned)
        return len(params.logit_bias) + (0 if self.counts is None else len(self.counts.ids)) + banned

    def uniform(self) -> float:
        """The random number of the next token, in [0, 1)."""
        return uniform(self.params.seed, self.position)

    def advance(self, token: int) -> None:
        """`token` has been put out."""
        self.position += 1
        if isinstance(self.counts, OutputTokenCounts):
            self.counts.add(token)
        if self.bans is not None:
            self.bans.advance(token)
        if self.grammar is not None:
            self.grammar.advance(token)

    def later(self) -> "SamplingState":
        """The state once one more token was put out, whatever it is; of one that is `foreseeable`. To sample with
        and not to `advance`."""
        state = object.__new__(SamplingState)
        state.__dict__.update(self.__dict__)
        state.position += 1
        return state

    def of_draft(self) -> "SamplingState":
        """How a draft model draws the next token: at the same position after the same temperature and filters, without
        a grammar and edits of logits, and with its log probability."""
        params = self.params
        state = SamplingState(
            SamplingParams(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=params.seed,
                logprobs=0,
            ),
            (),
            (),
        )
        state.position = self.position
        return state

    def after_each(self, drafts: Sequence[int]) -> "list[SamplingState]":
        """The states once the first one, the first two, ... of `drafts` were put out too, to sample with and not to
        `advance`."""
        states = [self._ahead(drafts[:count]) for count in range(1, len(drafts) + 1)]
        if self.grammar is not None and drafts:
            for state, grammar in zip(states, self.grammar.after_each(drafts), strict=True):
                state.grammar = grammar
        return states

    def _ahead(self, tokens: Sequence[int]) -> "SamplingState":
        state = copy(self)
        state.position += len(tokens)
        if isinstance(self.counts, OutputTokenCounts):
            state.counts = self.counts.ahead(tokens)
        if self.bans is not None:
            state.bans = self.bans.ahead(tokens)
        return state


def problem_with(params: SamplingParams, vocab_size: int) -> str | None:
    """What is wrong with `params`, as half a sentence; None when they can be sampled with."""
    checks = (
        ("temperature", params.temperature, 0.0, 1e6),
        ("top_k", params.top_k, 0, 1 << 31),
        ("top_p", params.top_p, 0.0, 1.0),
        ("min_p", params.min_p, 0.0, 1.0),
        ("seed", params.seed, 0, _MASK),
        ("repetition_penalty", params.repetition_penalty, 1e-6, 1e6),
        ("presence_penalty", params.presence_penalty, -1e6, 1e6),
        ("frequency_penalty", params.frequency_penalty, -1e6, 1e6),
        ("logprobs", params.logprobs, -1, vocab_size),
        *((f"logit_bias[{token}]", bias, -1e6, 1e6) for token, bias in params.logit_bias.items()),
        *(("a token of logit_bias", token, 0, vocab_size - 1) for token in params.logit_bias),
    )
    for name, value, least, most in checks:
        if not least <= value <= most:  # NaN fails this too
            return f"{name} is {value} and must be between {least:g} and {most:g}"
    return None


_NONE: Int64Array = np.zeros(0, np.int64)


class TokenBans:
    """What one sequence may not draw. Follows its output."""

    def __init__(self, params: SamplingParams, stops: Sequence[int], generated: Sequence[int]) -> None:
        """`stops`: the request's stop tokens; `generated`: output tokens so far."""
        self._min_tokens = params.min_tokens
        self._stops: Int64Array = np.unique(np.array(stops, np.int64)) if params.min_tokens else _NONE
        self._words, self._lengths = _by_beginning(params.bad_words)
        self._memory = max((len(word) for word in params.bad_words), default=1) - 1
        self._tail = list(generated[len(generated) - self._memory :]) if self._memory else []
        self._position = len(generated)
        # The only tokens that may be drawn, ascending; None: all.
        self.allowed: Int64Array | None = (
            np.unique(np.array(params.allowed_token_ids, np.int64)) if params.allowed_token_ids else None
        )

    @property
    def banned(self) -> Int64Array:
        """Tokens that may not be drawn next, ascending, each once."""
        stops = self._stops if self._position < self._min_tokens else _NONE
        begun = [
            ends for length in self._lengths if (ends := self._words.get(tuple(self._tail[len(self._tail) - length :])))
        ]
        words = [end for ends in begun for end in ends]
        return np.union1d(stops, np.array(words, np.int64)) if words else stops

    def advance(self, token: int) -> None:
        self._position += 1
        if self._memory:
            self._tail = [*self._tail, token][-self._memory :]

    def ahead(self, tokens: Sequence[int]) -> "TokenBans":
        later = copy(self)
        for token in tokens:
            later.advance(token)
        return later


def _by_beginning(words: Sequence[Sequence[int]]) -> tuple[dict[tuple[int, ...], list[int]], list[int]]:
    """By all but the last token of some words, what these end with; and how long these beginnings are. So a step
    looks once for each length, however many words there are."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for word in words:
        ends.setdefault(tuple(word[:-1]), []).append(word[-1])
    return ends, sorted({len(beginning) for beginning in ends})


def token_bans_of(params: SamplingParams, stops: Sequence[int], generated: Sequence[int]) -> TokenBans | None:
    """None where nothing is ever banned."""
    if not (params.allowed_token_ids or params.bad_words or (params.min_tokens and stops)):
        return None
    return TokenBans(params, stops, generated)


def problem_with_bans(params: SamplingParams, stops: Sequence[int], vocab_size: int) -> str | None:
    """What is wrong with them, as half a sentence; None when they can be sampled with."""
    if not (params.allowed_token_ids or params.bad_words or params.min_tokens):
        return None
    tokens = [*params.allowed_token_ids, *(token for word in params.bad_words for token in word)]
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        return "allowed_token_ids or bad_words has a token outside the model's vocabulary"
    if not all(params.bad_words):
        return "bad_words has a word without tokens"
    always = {word[0] for word in params.bad_words if len(word) == 1}
    allowed = set(params.allowed_token_ids)
    last = {word[-1] for word in params.bad_words}
    ends = set(stops) if params.min_tokens else set()
    if allowed and not allowed - last - ends:
        return "allowed_token_ids leaves nothing to draw beside bad_words and the stop tokens"
    if len(always | last | ends) >= vocab_size:
        return "bad_words leaves nothing to draw"
    return None
