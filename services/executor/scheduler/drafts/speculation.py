"""Speculative decoding: which drafts are worth checking ahead, and how many.

Pure: no clock, no I/O. A step computes a sequence's last token and, behind it, drafts of the next ones; at each of them
the sampler draws as ever, and drafts count as long as they are what was drawn (Leviathan, Kalman and Matias, "Fast
inference from transformers via speculative decoding", ICML 2023, for draws that are functions of the position). So
drafts change the time that a text takes, and never the text. What decides is:

    p(j)     probability that the first j drafts of a sequence are all right     learnt by proposers (`proposer.py`)
    C(T)     seconds of a step of T tokens                                       learnt by `StepCost`
    E        tokens that the step is expected to give

A draft is worth its place when it raises E / C: when p(j) / E > dC/dT / C. The most probable drafts of all
sequences are taken first.
"""

from collections.abc import Sequence
from typing import NamedTuple

_MARGIN = 1.5  # a draft must promise so much more than it costs: of many estimates the largest are too large


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


class StepCost:
    """Seconds of a step as a straight line over its tokens, fitted to the latest steps."""

    _MEMORY = 0.98
    _RISE = 0.05  # before tokens have varied: a further token costs this share of a step of none
    _RISE_WEIGHT = 8.0
    _HICCUP = 3.0  # a step that took so many times what was expected is counted as that

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
    def has_observations(self) -> bool:
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


class Offer(NamedTuple):
    """What a proposer expects one sequence to say next."""

    tokens: list[int]
    # For j from 1: the probability that the first j tokens are all right; never more than the one before it.
    chances: list[float]
    # What such a probability counts for: above 1 where computing the tokens has been paid already.
    worth: float = 1.0


class Speculation:
    """Decides for each step of a ring how many drafts each of its sequences carries."""

    def __init__(self) -> None:
        self.cost = StepCost()

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

    def choose(self, offers: Sequence[Offer | None], budget: int) -> list[list[int]]:
        """The drafts of each sequence, `budget` in all; `offers`: the best of each, if any."""
        decodes, counts, expected = len(offers), [0] * len(offers), 0.0
        chances = [
            (offer.worth * chance, chance, at)
            for at, offer in enumerate(offers)
            if offer is not None
            for chance in offer.chances
        ]
        # A later draft is never more probable than the one before it, so the order keeps them in a row.
        chances.sort(key=lambda worth: -worth[0])
        for drafts, (worth, chance, at) in enumerate(chances[: max(budget, 0)]):
            if worth <= self.least_chance(decodes, expected, drafts):
                break
            counts[at] += 1
            expected += chance
        return [[] if offer is None else offer.tokens[:count] for offer, count in zip(offers, counts, strict=True)]
