"""How long requests spend in each stage of a ring.

    accepted ──queue──▶ in the batch ──prefill──▶ first token ──decode──▶ end
                                                       └─ the only one: no decode

A sequence that gives up its blocks is in the stage that it was in; one that is cancelled tells nothing more.
No clock: the time (seconds, monotonic) comes in.
"""

from collections.abc import Iterable
from typing import Protocol

from services.executor.engine.sequence import Sequence
from services.executor.figures import Kind


class Figures(Protocol):
    """Where it is written down."""

    def observe(self, kind: Kind, value: float) -> None: ...

    def add_queried(self, tokens: int) -> None: ...


class _Nowhere:
    def observe(self, kind: Kind, value: float) -> None:
        return

    def add_queried(self, tokens: int) -> None:
        return


class Stages:
    """Observes each stage once per attempt, when it is over."""

    def __init__(self, figures: Figures | None = None) -> None:
        self._figures = figures or _Nowhere()

    def admitted(self, sequences: Iterable[Sequence], now: float) -> None:
        """These have a place in the batch now; one that had to give it up and has it again changes nothing."""
        for sequence in sequences:
            if not sequence.times.admitted:
                sequence.times.admitted = now
                self._figures.observe(Kind.QUEUE, max(0.0, now - sequence.times.accepted))
                self._figures.add_queried(sequence.prompt_tokens)

    def drawn(self, sequence: Sequence, now: float, *, finished: bool) -> None:
        """`sequence` has its first token (or its vector), or its last, or both."""
        times = sequence.times
        if not times.first_token:
            times.first_token = now
            self._figures.observe(Kind.PREFILL, max(0.0, now - times.admitted))
        elif finished:
            self._figures.observe(Kind.DECODE, max(0.0, now - times.first_token))
