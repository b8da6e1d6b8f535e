"""How many tokens of a long prompt a step has time for, beside decodes that somebody waits for.

    step without it     [ decodes ]                                     seconds: learnt of such steps
    step with it        [ decodes | n prompt tokens ]                   at most `stretch` times as long, or `gap`
                                    more keys to attend to: fewer tokens

What n tokens behind k others cost beyond the decodes is taken for c + e * (k + n) + a * n + b * n * (k + n / 2): what a
step with any prompt costs by itself (on GPUs, that no CUDA graph fits), what it costs to read the keys that are there,
however many tokens attend to them, what each token costs, and what each key that it attends to does. The four are
fitted to what steps took, relative to their length, so that small chunks count as much as large ones. The latest steps
count most; older ones are not quite forgotten, as they have seen other depths.

What was never tried is tried with care: no chunk is much more work than the largest one that was timed. And since the
decodes' own time changes while a prompt is computed for minutes, a step now and then goes without it.

Pure: no clock, no I/O. Nothing here changes what tokens are drawn, only when a prompt's are computed.
"""

from collections.abc import Collection
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from services.executor.scheduler.drafts.speculation import StepCost

PATIENCE = 8  # steps after which a prompt goes on, whatever that costs: it ends at any depth, on any machine
QUIET_EVERY = 16  # steps of which one goes without long prompts, to see what the decodes take by themselves
# The same, behind one that took another time than expected, by a larger share than `_SURPRISE`.
QUIET_SOON = 4
_SURPRISE = 0.1
_FEW = 5  # steps without prompts that tell how fast the machine is now
_KNOWN = 4  # steps without prompts from which their time is known well enough
_CAREFUL = 16  # tokens of the first chunk, before any was timed
# A chunk may be so many times the work of the largest that was timed, which counts so much less after each other.
_LEAP, _SHRINK = 2.0, 0.9
# What is not told apart by what was seen is put down to the tokens, then to attending to keys, to the step, and last
# to reading keys: as chunks grow with the depth, all of their time would look like that.
_CERTAIN = np.diag((1e-3, 1e-2, 1e-6, 1e-5))
_MARGIN = 0.85  # share of the time allowed that is planned with: estimates are off by some, either way
_HICCUP = 3.0  # a step that took so many times what was expected says nothing; the second in a row does
# Weights of what was seen, after each further chunk, and of the older against the latest.
_SHORT, _LONG, _PAST = 0.93, 0.998, 0.002


_Terms = NDArray[np.float64]  # [4], as `_work` has them, or [4, 4]


class PrefillPace:
    """One ring's. Learns by `observe`; `tokens` decides."""

    def __init__(self, stretch: float, gap: float = 0.0) -> None:
        """`stretch`: how many times as long as without it a step with part of a long prompt may take, above 1. `gap`:
        seconds that it may take in any case."""
        self._stretch = stretch
        self._gap = gap
        self._decodes = StepCost()
        self._level = 1.0  # what the latest steps without prompts took, against that: they are few
        self._quiet_seen = 0
        self.knows_decodes = False  # whether it knows what steps without prompts take
        self._cost = _ChunkCost()
        self._since_quiet = 0  # steps with prompt tokens since the last one without
        self._credit = 0.0  # seconds saved up for a chunk that costs more than one step allows
        self._waited = 0

    def observe(self, decodes: int, chunks: Collection[tuple[int, int]], seconds: float) -> None:
        """A step of `decodes` rows and, for each prompt in it, `length` tokens behind `start` others, took `seconds`;
        0: nobody knows."""
        if seconds <= 0:
            return
        if not chunks:
            if decodes:
                self._decodes.observe(decodes, seconds)
                off = min(seconds / self._decodes.of(decodes), _HICCUP) - self._level
                self._level += off / min(self._quiet_seen + 1, _FEW)
                self._quiet_seen += 1
                self.knows_decodes = self._quiet_seen >= _KNOWN
                self._since_quiet = QUIET_EVERY - QUIET_SOON if abs(off) > _SURPRISE * self._level else 0
            return
        self._since_quiet += 1
        if self.knows_decodes:
            work = np.sum([_work(start, length) for start, length in chunks], axis=0)
            work[0] = 1.0  # one step, however many prompts
            self._cost.observe(work, max(0.0, seconds - self._quiet(decodes)), seconds)

    def _quiet(self, decodes: int) -> float:
        """Seconds of a step without prompts."""
        return self._level * self._decodes.of(decodes)

    def tokens(self, decodes: int, start: int, remaining: int) -> int:
        """Of a prompt with `start` tokens computed and `remaining` to compute, in the next step beside `decodes`
        rows; 0: the step goes without it. Called once for each step that could have some."""
        if self._since_quiet >= (QUIET_EVERY if self.knows_decodes else 1):
            self._since_quiet = 0
            return 0
        if not self.knows_decodes or not self._cost.most_pairs:
            return min(remaining, _CAREFUL)
        quiet = self._quiet(decodes)
        allowed = _MARGIN * max((self._stretch - 1) * quiet, self._gap - quiet)
        if (needed := self._cost.of(1, start)) > allowed:  # such a chunk is paid for by several steps
            needed = max(needed, 2 * self._cost.of(0, start))
            self._credit += allowed
            self._waited += 1
            if self._credit < needed and self._waited < PATIENCE:
                return 0
            allowed = needed
        self._credit, self._waited = 0.0, 0
        bold = ceil(_solve(_LEAP * self._cost.most_pairs, start))
        return min(remaining, max(1, int(min(self._cost.tokens(allowed, start), bold))))


class _ChunkCost:
    """Seconds that a step's prompt tokens add to it."""

    def __init__(self) -> None:
        self._short, self._long = _Sums(), _Sums()
        self._suspicious = False
        self._terms: _Terms | None = None
        self.most_pairs = 0.0  # of tokens and keys, of the largest chunk that was timed lately

    def observe(self, work: _Terms, added: float, seconds: float) -> None:
        """`work`, the sum over a step's prompts, added so many of the `seconds` that it took."""
        if self.most_pairs:
            suspicious = seconds > _HICCUP * (seconds - added + float(self.terms @ work))
            if suspicious and not self._suspicious:
                self._suspicious = True
                return
            self._suspicious = suspicious
        self.most_pairs = max(_SHRINK * self.most_pairs, float(work[-1]))
        self._short.add(work, added, 1 / seconds, _SHORT)
        self._long.add(work, added, 1 / seconds, _LONG)
        self._terms = None

    @property
    def terms(self) -> _Terms:
        """Seconds of each of `_work`; none is below 0."""
        if self._terms is None:
            products = self._short.products + _PAST * self._long.products
            results = self._short.results + _PAST * self._long.results
            self._terms = _not_negative(products, results)
        return self._terms

    def of(self, tokens: int, start: int) -> float:
        """Of so many tokens behind `start` others; of none, what any would cost besides."""
        return float(self.terms @ _work(start, tokens))

    def tokens(self, seconds: float, start: int) -> float:
        """How many tokens behind `start` others take so long; infinity where they cost nothing."""
        _, key, token, pair = self.terms
        left = max(0.0, seconds - self.of(0, start))
        if pair:
            return _solve(left / pair, (token + key) / pair + start)
        return left / (token + key) if token + key else float("inf")


class _Sums:
    """Of a fit by least squares that forgets."""

    def __init__(self) -> None:
        self.products: _Terms = np.zeros((4, 4))
        self.results: _Terms = np.zeros(4)

    def add(self, work: _Terms, value: float, weight: float, memory: float) -> None:
        self.products = self.products * memory + weight * np.outer(work, work)
        self.results = self.results * memory + weight * value * work


def _not_negative(products: _Terms, results: _Terms) -> _Terms:
    """The solution of least squares without the terms that would be below 0."""
    solution = np.zeros(4)
    used = [0, 1, 2, 3]
    while used:
        part = products[np.ix_(used, used)]
        scale = np.sqrt(part.diagonal())  # terms differ by many powers of ten
        unit = part / np.outer(scale, scale) + _CERTAIN[np.ix_(used, used)]
        found = np.linalg.solve(unit, results[used] / scale) / scale
        worst = int(np.argmin(found * scale))
        if found[worst] >= 0:
            solution[used] = found
            break
        del used[worst]
    return solution


def _work(start: int, length: int) -> _Terms:
    """Of `length` tokens behind `start` others: a step, keys that are read, tokens, and pairs of a token and a key that
    it attends to."""
    return np.array((1.0, start + length, length, length * (start + length / 2)))


def _solve(pairs: float, before: float) -> float:
    """The n for which n * (before + n / 2) is `pairs`."""
    return 2 * pairs / (before + sqrt(before**2 + 2 * pairs)) if pairs > 0 else 0.0
