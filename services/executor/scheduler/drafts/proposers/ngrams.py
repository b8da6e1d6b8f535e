"""What a sequence is expected to say next because it, its prompt or a prediction has said so before.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): text that repeats itself, or its prompt, is likely to go on as
it did before. The guesses of a sequence without drafts are compared with what it draws just the same: that a text has
begun to repeat itself is seen without computing a draft, and a text that does not is left alone.

Where a grammar leaves no choice of what follows, as of a JSON schema's names, that is the best draft of all
(`GrammarMask.forced`), and of all others what it forbids is cut off before it costs a row.

Where a sequence's last tokens have stood before in it is found in constant time per token (`NgramIndex`):

    tokens   . . . A B C D E . . . A B C        the last 3-gram stood before D E: these are proposed
                         ^ source

For each n there is a table from the hash of an n-gram to the position behind its last occurrence. A table
has a slot for every two tokens at least; of n-grams that meet in a slot the newer stays. What is found is
compared with the tokens, so that a meeting costs a find and never gives a wrong one.
"""

from array import array
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.executor.core.sampling_state import GrammarMask
from services.executor.scheduler.drafts.proposer import DraftingContext, Result
from services.executor.scheduler.drafts.speculation import Offer, Rate
from services.executor.scheduler.sequence import Sequence, SequenceState

_MEMORY = 0.9  # weight of what was seen, after each further guess: about the last ten count
_RING_MEMORY = 0.99
_PRIOR = 2.0  # guesses that the ring's experience counts for, in a sequence
FORCED = 0  # stands for the length of a match where a grammar leaves no choice of text
# Before there is any experience, by the length of the match.
_FIRST_RATES = {FORCED: 0.9, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5, 6: 0.5, 7: 0.6, 8: 0.7}
_FIRST_WEIGHT = 4.0
# A sequence that has looked in vain so many times in a row looks at every fourth step only: between steps
# of the model a look takes some 15 microseconds, since nothing of it is left in the processor's caches.
_PATIENCE, _PAUSE = 16, 4


LONGEST, SHORTEST = 4, 2  # lengths of the n-grams that are looked for
MOST_COMPARED = 8  # a match is measured back to this many tokens

# Odd 32-bit numbers: the sum of four products with tokens stays below 2**64.
_WEIGHTS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
# Of the number of a table's slots: tables of a long text grow to 3 MiB together. Beyond it n-grams that meet in a
# slot are lost, the older ones.
_SMALLEST_BITS, _LARGEST_BITS = 8, 18
_FEW = 32  # so many new tokens, or more, are indexed by arrays and not one by one

UInt64Array = NDArray[np.uint64]


class Estimates:
    """How likely a guess is right, by the number of tokens that agreed before it."""

    def __init__(self, ring: "Estimates | None" = None) -> None:
        """A sequence's estimates begin with those of its `ring`."""
        self._ring = ring
        self._rates = {length: Rate() for length in _FIRST_RATES}

    def of(self, length: int) -> float:
        """Probability that the next guess is right after `length` tokens that agreed."""
        length = min(length, MOST_COMPARED)
        if self._ring is None:
            return self._rates[length].value(_FIRST_RATES[length], _FIRST_WEIGHT)
        return self._rates[length].value(self._ring.of(length), _PRIOR)

    def add(self, length: int, hit: bool) -> None:
        """A guess after `length` tokens that agreed was right, or not."""
        length = min(length, MOST_COMPARED)
        self._rates[length].add(hit, _MEMORY if self._ring is not None else _RING_MEMORY)
        if self._ring is not None:
            self._ring.add(length, hit)


class PromptLookup:
    """What one sequence is expected to say next."""

    def __init__(
        self, tokens: "array[int]", ring: Estimates, prediction: Seq[int] = (), grammar: GrammarMask | None = None
    ) -> None:
        """`tokens` is the sequence's own array; `prediction`: what is expected to follow those that it has now;
        `grammar`: what it is held to."""
        self._own = tokens
        self._grammar = grammar
        # The prediction behind the end of the prompt, and behind that the sequence's tokens: looked through as one.
        self._known = array("i", [*tokens[-LONGEST:], *prediction]) if prediction else array("i")
        self._before = len(self._known)
        self._index = NgramIndex(self._known if prediction else tokens)
        self._estimates = Estimates(ring)
        self.guesses: list[int] = []  # what it expects, where it has looked; empty otherwise
        self._length = 0
        self._forced = 0  # how many of the first tokens of the guess the grammar forces
        self._in_vain = 0
        self._steps = 0
        # Whether the last drafts were its guesses, and all right: it needs no draft model for now.
        self.copies = False

    def rests(self, skipped: int = 0) -> bool:
        """Whether it does not look for guesses in this step, having found none for long. `skipped`: steps before
        this one in which nobody was asked."""
        self._steps += 1 + skipped
        if self._in_vain < _PATIENCE or self._steps % _PAUSE <= skipped:
            return False
        if self._grammar is not None and self.is_forced:
            return False
        self.forget()
        return True

    def guess(self, most: int) -> None:
        """Looks for the next `most` tokens, and one more to learn from."""
        if self._before:
            self._known.extend(self._own[len(self._known) - self._before :])
        match = self._index.find()
        self.guesses = [] if match is None else self._index.continuation(match.source, most + 1)
        self._length = 0 if match is None else match.length
        if self._grammar is not None:
            self._follow(self._grammar, most)

    def _follow(self, grammar: GrammarMask, most: int) -> None:
        """Has the guess begin with what the grammar forces, and leaves out what it forbids."""
        forced = list(grammar.forced())[: most + 1]
        self._forced = len(forced)
        if self.guesses[: len(forced)] != forced:
            self.guesses = forced
        self.guesses = self.guesses[: grammar.fitting(self.guesses)]

    @property
    def is_forced(self) -> bool:
        """Whether the grammar leaves no choice of what comes next."""
        return self._grammar is not None and bool(self._grammar.forced())

    def look(self, most: int, least: float) -> list[float]:
        """`guess`, and `chances` of that."""
        self.guess(most)
        return self.chances(most, least)

    def chances(self, most: int, least: float) -> list[float]:
        """For j from 1 to `most`: the probability that the first j guesses are all right, while it is above
        `least`."""
        chances: list[float] = []
        chance = 1.0
        for ahead in range(min(most, len(self.guesses))):
            chance *= self._estimates.of(self._agreed(ahead))
            if chance <= least:
                break
            chances.append(chance)
        self._in_vain = 0 if chances else self._in_vain + 1
        return chances

    def _agreed(self, ahead: int) -> int:
        """How many tokens agree before this one of the guess, or `FORCED`."""
        return FORCED if ahead < self._forced else self._length + ahead

    def learn(self, drawn: Iterable[int]) -> None:
        """These tokens were drawn where `guess` had looked."""
        for ahead, (guess, token) in enumerate(zip(self.guesses, drawn, strict=False)):
            self._estimates.add(self._agreed(ahead), guess == token)
            if guess != token:
                break
        if self._forced >= len(self.guesses):
            self.copies = False  # how the text goes on behind that is another question
        self.forget()

    def forget(self) -> None:
        """Nothing is learnt of the last guess."""
        self.guesses = []


class NgramProposer:
    """A ring's proposer from its sequences' own texts."""

    name = "ngrams"

    def __init__(self) -> None:
        self._ring = Estimates()
        # Those that have guessed, or whose last drafts were right, since they were told of a token.
        self._open: dict[Sequence, PromptLookup] = {}

    @property
    def expects(self) -> bool:
        return bool(self._open)

    def propose(self, sequences: Seq[Sequence], limits: Seq[int], least: float, skipped: int) -> list[Offer | None]:
        if self._open:  # a step has failed, which may have been some sequence's last
            self._open = {one: own for one, own in self._open.items() if one.state is not SequenceState.ENDED}
        offers: list[Offer | None] = []
        for sequence, limit in zip(sequences, limits, strict=True):
            lookup = self._of(sequence)
            lookup.copies = False
            chances = [] if lookup.rests(skipped) else lookup.look(limit, least)
            offers.append(Offer(lookup.guesses, chances) if chances else None)
            if lookup.guesses:
                self._open[sequence] = lookup
        return offers

    def chosen(self, sequences: Collection[Sequence]) -> None:
        for sequence in sequences:
            self._of(sequence).copies = True

    def pass_over(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            lookup = self._of(sequence)
            if lookup.guesses:
                lookup.forget()

    def learn(self, results: Seq[Result]) -> None:
        for sequence, drafts, drawn in results:
            lookup = self._open.get(sequence)
            if lookup is None:
                continue
            if len(drawn) <= len(drafts) or not drafts:
                lookup.copies = False
            lookup.learn(drawn)
            if not lookup.copies:
                del self._open[sequence]

    def is_sure(self, sequence: Sequence) -> bool:
        lookup = sequence.proposing.get(self.name)
        return lookup is not None and (lookup.copies or lookup.is_forced)

    def must_look(self, sequences: Seq[Sequence]) -> bool:
        return any(sequence.request.prediction for sequence in sequences)

    def _of(self, sequence: Sequence) -> PromptLookup:
        """Which it has from now on."""
        lookup: PromptLookup | None = sequence.proposing.get(self.name)
        if lookup is None:
            lookup = PromptLookup(sequence.tokens, self._ring, sequence.request.prediction, sequence.sampling.grammar)
            sequence.proposing[self.name] = lookup
        return lookup


def ngrams(context: DraftingContext) -> NgramProposer:
    return NgramProposer()


class Match(NamedTuple):
    """An earlier occurrence of the sequence's end."""

    source: int  # position of the token that followed it
    length: int  # tokens that agree, `MOST_COMPARED` at most


class NgramIndex:
    """The n-grams of one sequence. Follows its tokens as they grow; nothing is scanned twice."""

    def __init__(self, tokens: "array[int]") -> None:
        """`tokens` (int32, not negative) is the sequence's own array."""
        self._tokens = tokens
        self._indexed = 0  # n-grams that end at this position, or before, are in the tables
        self._bits = 0
        # For n from `SHORTEST` up: by hash, the position behind the n-gram; 0: none.
        self._tables: list[array[int]] = []
        # (position, slots of the n-grams before it) that `find` has looked at last.
        self._last: tuple[int, list[int]] = (0, [])

    def find(self) -> Match | None:
        """The newest earlier occurrence of the longest n-gram that the tokens end with."""
        self._grow()
        tokens, end = self._tokens, len(self._tokens)
        slots = self._slots(end)
        self._last = (end, slots)
        for at in range(len(slots) - 1, -1, -1):
            source = self._tables[at][slots[at]]
            n = at + SHORTEST
            if source and tokens[source - n : source] == tokens[end - n :]:
                return Match(source, self._measure(source, end, n))
        return None

    def continuation(self, source: int, count: int) -> list[int]:
        """`count` tokens from `source` on. Where the tokens end before, they go on as from `source`: what
        has begun to repeat itself may do so again and again."""
        period = self._tokens[source : source + count].tolist()
        return (period * (count // len(period) + 1))[:count]

    def _measure(self, source: int, end: int, length: int) -> int:
        tokens, most = self._tokens, min(MOST_COMPARED, source)
        while length < most and tokens[source - length - 1] == tokens[end - length - 1]:
            length += 1
        return length

    # --- tables ----------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Takes up the n-grams that have been followed by a token since the last call."""
        ready = len(self._tokens) - 1
        if 2 * ready >= 1 << self._bits and self._bits < _LARGEST_BITS:
            self._bits = min(max(_SMALLEST_BITS, (4 * ready).bit_length()), _LARGEST_BITS)
            self._tables = [array("i", bytes(4 << self._bits)) for _ in range(SHORTEST, LONGEST + 1)]
            self._indexed, self._last = 0, (0, [])
        if ready - self._indexed >= _FEW:
            self._index_many(ready)
        else:
            for end in range(self._indexed + 1, ready + 1):
                slots = self._last[1] if self._last[0] == end else self._slots(end)
                for table, slot in zip(self._tables, slots, strict=False):
                    table[slot] = end
        self._indexed = max(ready, 0)

    def _slots(self, end: int) -> list[int]:
        """Where the tables have the n-grams before `end`, the shortest first; fewer at the very beginning."""
        shift, slots, total = 64 - self._bits, [], 0
        for ahead, token in enumerate(reversed(self._tokens[max(end - LONGEST, 0) : end])):
            total += _WEIGHTS[ahead] * token
            if ahead + 1 >= SHORTEST:
                slots.append((total * _SPREAD & _MASK) >> shift)
        return slots

    def _index_many(self, ready: int) -> None:
        """The same for many n-grams at once."""
        first = self._indexed
        # A copy: while an array is viewed it cannot grow.
        tokens = np.array(self._tokens[max(first - LONGEST, 0) : ready], np.uint64)
        for table, n in zip(self._tables, range(SHORTEST, LONGEST + 1), strict=True):
            count = min(ready - first, len(tokens) - n + 1)
            totals: UInt64Array = np.zeros(count, np.uint64)
            for back in range(n):
                begin = len(tokens) - count - back
                totals += np.uint64(_WEIGHTS[back]) * tokens[begin : begin + count]
            slots = (totals * np.uint64(_SPREAD)) >> np.uint64(64 - self._bits)
            ends = np.arange(ready - count + 1, ready + 1, dtype=np.int32)
            np.frombuffer(table, np.int32)[slots] = ends  # of equal slots the last one counts
