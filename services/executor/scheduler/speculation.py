"""Speculative decoding: which tokens are worth checking ahead, and how many.

Pure: no clock, no I/O. A step computes a sequence's last token and, behind it, drafts of the next ones; at each of them
the sampler draws as ever, and drafts count as long as they are what was drawn (Leviathan, Kalman and Matias, "Fast
inference from transformers via speculative decoding", ICML 2023, for draws that are functions of the position). So
drafts change the time that a text takes, and never the text. What decides is:

    p(j)     probability that the first j drafts of a sequence are all right     learnt by `Estimates`
    C(T)     seconds of a step of T tokens                                       learnt by `StepCost`
    E        tokens that the step is expected to give

A draft is worth its place when it raises E / C: when p(j) / E > dC/dT / C. The most probable drafts of all
sequences are taken first. The guesses of a sequence without drafts are compared with what it draws just
the same: that a text has begun to repeat itself is seen without computing a draft, and a text that does
not is left alone.

A draft model (`DraftModel`) is asked before the step is planned, for k tokens of each sequence that takes part. k has
the largest E / C of all, where each further token of a sequence costs a pass of the draft model too, which all of them
share. Where no k pays, the draft model does nothing, and is looked at again now and then. Its proposals are then
weighed as above: p(j) is what its own probabilities for them have meant so far.

Where a grammar leaves no choice of what follows, as of a JSON schema's names, that is the best draft of all
(`Grammar.forced`), and of all others what it forbids is cut off before it costs a row.

Other drafts come from where a sequence's last tokens have stood before in it (`NgramIndex`), found in constant time per
token: prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): text that repeats itself, or its prompt, is likely
to go on as it did before.

    tokens   . . . A B C D E . . . A B C        the last 3-gram stood before D E: these are proposed
                         ^ source

For each n there is a table from the hash of an n-gram to the position behind its last occurrence. A table
has a slot for every two tokens at least; of n-grams that meet in a slot the newer stays. What is found is
compared with the tokens, so that a meeting costs a find and never gives a wrong one.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.executor.core.engine import DraftToken
from services.executor.core.sampling_state import Grammar

_MEMORY = 0.9
"""Weight of what was seen, after each further guess: about the last ten count."""
_RING_MEMORY = 0.99
_PRIOR = 2.0
"""Guesses that the ring's experience counts for, in a sequence."""
FORCED = 0
"""Stands for the length of a match where a grammar leaves no choice of text."""
_FIRST_RATES = {FORCED: 0.9, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5, 6: 0.5, 7: 0.6, 8: 0.7}
"""Before there is any experience, by the length of the match."""
_FIRST_WEIGHT = 4.0

_FIRST_AGREEMENT = 0.6
"""Share of a draft model's proposals that are right, before there is any experience."""
_AGREEMENT_PRIOR, _AGREEMENT_MEMORY = 8.0, 0.97
_BUCKETS = 10
"""Of a draft model's probability for what it proposes."""
_FIRST_PASS = 0.2
"""Before a pass of the draft model was timed: what it takes, of a step."""
_PAYS, _STILL_PAYS = 1.05, 1.0
"""Tokens per second with the draft model, against those without it, from which it is used, and down to which."""
_TRIAL = 16
"""Steps for which a draft model that does not pay is tried again."""
_FIRST_REST, _LONGEST_REST = 512, 16384
"""Steps until then: twice as many after each trial in vain."""

_MARGIN = 1.5
"""A draft must promise so much more than it costs: of many estimates the largest are too large."""
_SUNK = 1.4
"""What a proposal of the draft model counts for against a guess: its pass has been paid, for this very row."""
_PATIENCE, _PAUSE = 16, 4
"""A sequence that has looked in vain so many times in a row looks at every fourth step only: between steps
of the model a look takes some 15 microseconds, since nothing of it is left in the processor's caches."""


class Rate:
    """A share that follows what is seen: of the last guesses, how many were right."""

    __slots__ = ("hits", "tries")

    def __init__(self) -> None:
        self.hits = self.tries = 0.0

    def add(self, hit: bool, memory: float) -> None:
        self.hits = self.hits * memory + hit
        self.tries = self.tries * memory + 1

    def value(self, prior: float, weight: float) -> float:
        return (self.hits + prior * weight) / (self.tries + weight)


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


class Agreement:
    """How often the draft model proposes what is drawn, in one sequence."""

    def __init__(self, ring: Rate) -> None:
        """It begins with that of the ring."""
        self._ring = ring
        self._own = Rate()

    @property
    def value(self) -> float:
        """Probability that the next proposal is right."""
        return self._own.value(self._ring.value(_FIRST_AGREEMENT, _FIRST_WEIGHT), _AGREEMENT_PRIOR)

    def add(self, hit: bool) -> None:
        self._own.add(hit, _AGREEMENT_MEMORY)
        self._ring.add(hit, _RING_MEMORY)


class Guesser:
    """What one sequence is expected to say next."""

    def __init__(
        self,
        tokens: "array[int]",
        ring: Estimates,
        prediction: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """`tokens` is the sequence's own array; `prediction`: what is expected to follow those that it has now;
        `grammar`: what it is held to."""
        self._own = tokens
        self._grammar = grammar
        self._known = array("i", [*tokens[-LONGEST:], *prediction]) if prediction else array("i")
        """The prediction behind the end of the prompt, and behind that the sequence's tokens: looked through as one."""
        self._before = len(self._known)
        self._index = NgramIndex(self._known if prediction else tokens)
        self._estimates = Estimates(ring)
        self.guesses: list[int] = []
        """What it expects, where it has looked; empty otherwise."""
        self._length = 0
        self._forced = 0
        """How many of the first tokens of the guess the grammar forces."""
        self._in_vain = 0
        self._steps = 0
        self.copies = False
        """Whether the last drafts were its guesses, and all right: it needs no draft model for now."""

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

    def _follow(self, grammar: Grammar, most: int) -> None:
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

    def drafts(self, count: int) -> list[int]:
        return self.guesses[:count]

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


class StepCost:
    """Seconds of a step as a straight line over its tokens, fitted to the latest steps."""

    _MEMORY = 0.98
    _RISE = 0.05
    """Before tokens have varied: a further token costs this share of a step of none."""
    _RISE_WEIGHT = 8.0
    _HICCUP = 3.0
    """A step that took so many times what was expected is counted as that."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = 0.0
        self._spread = self._slant = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens, each with a row of logits, took `seconds`."""
        if tokens < 1 or seconds <= 0:
            return
        if self._weight > 4:
            seconds = min(seconds, self._HICCUP * self.of(tokens))
        self._weight = self._weight * self._MEMORY + 1
        off, late = tokens - self._tokens, seconds - self._seconds
        self._tokens += off / self._weight
        self._seconds += late / self._weight
        self._spread = self._spread * self._MEMORY + off * (tokens - self._tokens)
        self._slant = self._slant * self._MEMORY + off * (seconds - self._seconds)

    @property
    def known(self) -> bool:
        """Whether any step was observed."""
        return self._weight > 0

    @property
    def rise(self) -> float:
        """Seconds that one more token costs."""
        expected = self._RISE * self._seconds / (1 + self._RISE * self._tokens)
        weight = self._RISE_WEIGHT
        fitted = (self._slant + weight * expected) / (self._spread + weight)
        return max(fitted, 1e-3 * self._seconds)

    def of(self, tokens: int) -> float:
        """Seconds of a step of `tokens` tokens; 0 before any was observed."""
        rise = self.rise
        return max(self._seconds + rise * (tokens - self._tokens), rise * tokens)


class Proposal(NamedTuple):
    """What the draft model has proposed for one sequence."""

    agreement: Agreement
    drafted: Sequence[DraftToken]
    sampled: bool
    """Whether the sequence's temperature is above 0."""

    def tokens(self, count: int) -> list[int]:
        return [one.token for one in self.drafted[:count]]


class DraftModel:
    """Whether a ring's draft model is used, and how much it proposes: as long as it pays."""

    def __init__(self, most: int, cost: StepCost) -> None:
        """`most`: proposals for one sequence at most; `cost`: of the steps of the model that is served."""
        self._most = most
        self._cost = cost
        self._ring = Rate()
        self._meant = [[Rate() for _ in range(_BUCKETS)] for _ in range(2)]
        """By whether the sequence is sampled, and the draft model's own probability: how many were right."""
        self._passes = StepCost()
        self._rest, self._rested, self._trial = _FIRST_REST, 0, _TRIAL
        self.used = True
        """Whether it keeps up with what steps compute, and proposes."""

    def agreement(self) -> Agreement:
        """For a sequence that begins."""
        return Agreement(self._ring)

    @property
    def trial(self) -> bool:
        """Whether it is used to see whether it would pay, and not because it does."""
        return self._trial > 0

    def takes_on(self, agreement: Agreement, decodes: int) -> bool:
        """Whether a sequence with this experience is worth a pass, in a step of `decodes` sequences."""
        return self.trial or self._gain(1, decodes, decodes, agreement.value) >= _STILL_PAYS

    def count(self, decodes: int, agreements: Sequence[Agreement], most: int) -> int:
        """How many tokens to propose for each of these sequences, `most` at most, in a step of `decodes` sequences; 0:
        none."""
        right = sum(agreement.value for agreement in agreements) / max(1, len(agreements))
        best, count = (0.0 if self.trial else 1.0), 0
        for k in range(1, min(most, self._most) + 1 if self._cost.known else 1):
            gain = self._gain(k, decodes, len(agreements), right)
            if gain <= best:
                break  # each further token brings less than the one before it, and costs as much
            best, count = gain, k
        return count

    def chances(self, offer: Proposal, least: float) -> list[float]:
        """For j from 1: the probability that the first j proposals are all right, while it is above `least`."""
        usual = offer.agreement.value / max(self._ring.value(_FIRST_AGREEMENT, _FIRST_WEIGHT), 1e-3)
        chances: list[float] = []
        chance = 1.0
        for one in offer.drafted:
            bucket = _bucket(one.probability)
            meant = self._meant[offer.sampled][bucket].value((bucket + 0.5) / _BUCKETS, _FIRST_WEIGHT)
            chance *= min(1.0, usual * meant)
            if chance <= least:
                break
            chances.append(chance)
        return chances

    def learn(self, offer: Proposal, drawn: Sequence[int]) -> int:
        """`drawn` are the tokens where `offer` was made. Returns how many of its tokens were right, one after the
        other."""
        for right, (one, token) in enumerate(zip(offer.drafted, drawn, strict=False)):
            hit = one.token == token
            offer.agreement.add(hit)
            self._meant[offer.sampled][_bucket(one.probability)].add(hit, _RING_MEMORY)
            if not hit:
                return right
        return min(len(offer.drafted), len(drawn))

    def proposed(self, passes: int, sequences: int, seconds: float) -> None:
        """So many passes over `sequences` sequences took `seconds` in all."""
        self._passes.observe(sequences, seconds / max(1, passes))

    def without_following(self, seconds: float, rows: int) -> float:
        """What a step of so many rows would have taken, had the draft model not computed them too."""
        following = self._passes.of(rows) if self._passes.known else seconds * _FIRST_PASS / (1 + _FIRST_PASS)
        return max(seconds - following, seconds / 2)

    def step_over(self, running: int) -> None:
        """A step is over, of a batch of `running` sequences: decides on the next ones."""
        if not running or not self._cost.known:
            return
        right = self._ring.value(_FIRST_AGREEMENT, _FIRST_WEIGHT)
        gain = max(self._gain(k, running, running, right) for k in (1, 2, 4))
        pays = gain >= (_STILL_PAYS if self.used and not self.trial else _PAYS)
        if self.trial:
            self._trial -= 1
            if pays:
                self._rest, self._trial = _FIRST_REST, 0
            elif not self._trial:
                self._rest, self._rested = min(2 * self._rest, _LONGEST_REST), 0
        elif not pays:
            self._rested = 0 if self.used else self._rested + 1
            self._trial = _TRIAL if self._rested >= self._rest else 0
        self.used = pays or self._trial > 0

    def _gain(self, count: int, decodes: int, drafting: int, right: float) -> float:
        """Tokens per second of a step where `drafting` of its `decodes` sequences have `count` proposals, of which each
        is right with this probability, against those of a step without."""
        plain = self._cost.of(decodes)
        draft = self._passes.of(drafting) if self._passes.known else _FIRST_PASS * plain
        expected = decodes + drafting * sum(right**j for j in range(1, count + 1))
        seconds = self._cost.of(decodes + drafting * count) + count * draft
        return expected / seconds / (decodes / plain) if plain else 1.0


def _bucket(probability: float) -> int:
    return min(_BUCKETS - 1, max(0, int(probability * _BUCKETS)))


class Speculation:
    """Decides for each step of a ring how many drafts each of its sequences carries."""

    def __init__(self, most: int) -> None:
        """`most`: drafts of one sequence at most."""
        self._most = most
        self._ring = Estimates()
        self.cost = StepCost()
        self.model = DraftModel(most, self.cost)
        """For rings that have a draft model."""

    def guesser(
        self, tokens: "array[int]", prediction: Sequence[int] = (), grammar: Grammar | None = None
    ) -> Guesser:
        """For a sequence with these tokens (its own array), which is expected to go on with `prediction`, and held to
        `grammar`."""
        return Guesser(tokens, self._ring, prediction, grammar)

    def worth_looking(self, decodes: int) -> bool:
        """Whether drafts could pay in a step of `decodes` sequences, were they as good as certain."""
        return self.least_chance(decodes) < 0.95

    def least_chance(self, decodes: int, expected: float = 0.0, drafts: int = 0) -> float:
        """What a further draft's probability must exceed to pay, in a step of `decodes` sequences with
        `drafts` drafts, of which `expected` are right. 1 while no step has been timed."""
        seconds = self.cost.of(decodes + drafts)
        if not seconds:
            return 1.0
        return _MARGIN * self.cost.rise * (decodes + expected) / seconds

    def choose(
        self,
        guessers: Sequence[Guesser],
        limits: Sequence[int],
        budget: int,
        skipped: int = 0,
        proposals: Sequence[Proposal | None] = (),
    ) -> list[list[int]]:
        """The drafts of each sequence: `limits` of each at most, `budget` in all. `skipped`: steps since the last
        choice for which nobody was asked. `proposals`: of the draft model, for each sequence or for none."""
        decodes, counts, expected = len(guessers), [0] * len(guessers), 0.0
        if not self.worth_looking(decodes):
            for guesser in guessers:
                guesser.forget()
            return [[] for _ in guessers]
        least = self.least_chance(decodes)
        chances = []
        offers = proposals or [None] * decodes
        for at, (guesser, limit, offer) in enumerate(zip(guessers, limits, offers, strict=True)):
            most = min(limit, self._most)
            of_model = [] if offer is None else self.model.chances(offer, least / _SUNK)[:most]
            of_guesser = [] if guesser.rests(skipped) else guesser.look(most, least)
            guesser.copies = sum(of_guesser) > sum(of_model)
            if guesser.copies:
                chances += [(chance, chance, at) for chance in of_guesser]
            else:
                chances += [(_SUNK * chance, chance, at) for chance in of_model]
        # A later draft is never more probable than the one before it, so the order keeps them in a row.
        chances.sort(key=lambda worth: -worth[0])
        for drafts, (worth, chance, at) in enumerate(chances[: max(budget, 0)]):
            if worth <= self.least_chance(decodes, expected, drafts):
                break
            counts[at] += 1
            expected += chance
        return [
            guesser.drafts(count) if guesser.copies or offer is None else offer.tokens(count)
            for guesser, offer, count in zip(guessers, offers, counts, strict=True)
        ]


LONGEST, SHORTEST = 4, 2
"""Lengths of the n-grams that are looked for."""
MOST_COMPARED = 8
"""A match is measured back to this many tokens."""

_WEIGHTS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
"""Odd 32-bit numbers: the sum of four products with tokens stays below 2**64."""
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SMALLEST_BITS, _LARGEST_BITS = 8, 18
"""Of the number of a table's slots: tables of a long text grow to 3 MiB together. Beyond it n-grams that meet in a
slot are lost, the older ones."""
_FEW = 32
"""So many new tokens, or more, are indexed by arrays and not one by one."""

UInt64Array = NDArray[np.uint64]


class Match(NamedTuple):
    """An earlier occurrence of the sequence's end."""

    source: int
    """Position of the token that followed it."""
    length: int
    """Tokens that agree, `MOST_COMPARED` at most."""


class NgramIndex:
    """The n-grams of one sequence. Follows its tokens as they grow; nothing is scanned twice."""

    def __init__(self, tokens: "array[int]") -> None:
        """`tokens` (int32, not negative) is the sequence's own array."""
        self._tokens = tokens
        self._indexed = 0
        """n-grams that end at this position, or before, are in the tables."""
        self._bits = 0
        self._tables: list[array[int]] = []
        """For n from `SHORTEST` up: by hash, the position behind the n-gram; 0: none."""
        self._last: tuple[int, list[int]] = (0, [])
        """(position, slots of the n-grams before it) that `find` has looked at last."""

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
