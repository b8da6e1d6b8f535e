"""The workloads, as data, and what they expand to: sessions of user messages, and arrival times.

| name | clients | requests | prompt | output | note |
| --- | --- | --- | --- | --- | --- |
| W1 | 1 | 5 | 128 | 128 | one at a time |
| W2 | 16 | 48 | 256, all distinct | 128 | |
| W3 | 64 | 128 | 64, all distinct | 64 | |
| W4 | 8 sessions at once | 4 turns each | +100 tokens a turn | 64 | answers stay in the history |
| W4s | 8 sessions one after another | 4 turns each | +100 tokens a turn | 64 | |

A single request is a session of one turn, so that one load loop serves all of them. Prompt sizes are
in tokens of the rendered chat template. Everything here is pure: the same seed gives the same load.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.serve.prompts import PromptSource


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of load. `rate` set means open loop: sessions start at Poisson arrivals, whatever the
    server does; otherwise `clients` clients each start their next session when the last has ended."""

    name: str
    clients: int
    requests: int
    prompt_tokens: int
    """Tokens that each turn adds: the whole rendered prompt in a first turn."""
    output_tokens: int
    turns: int = 1
    rate: float | None = None
    """Sessions per second."""

    @property
    def sessions(self) -> int:
        return self.requests // self.turns

    def resized(self, *, requests: int | None = None, clients: int | None = None) -> "Workload":
        """The same kind of load with other numbers; requests are rounded up to whole sessions."""
        sessions = self.sessions if requests is None else -(-requests // self.turns)
        return replace(self, requests=sessions * self.turns, clients=clients or self.clients)


@dataclass(frozen=True, slots=True)
class Session:
    """User messages to be sent in order, each after the answer to the one before."""

    session_id: str | None
    """Sent as X-Session-ID; None for a session of one turn."""
    messages: tuple[str, ...]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("W1", clients=1, requests=5, prompt_tokens=128, output_tokens=128),
        Workload("W2", clients=16, requests=48, prompt_tokens=256, output_tokens=128),
        Workload("W3", clients=64, requests=128, prompt_tokens=64, output_tokens=64),
        Workload("W4", clients=8, requests=32, prompt_tokens=100, output_tokens=64, turns=4),
        Workload("W4s", clients=1, requests=32, prompt_tokens=100, output_tokens=64, turns=4),
    )
}


def sessions(workload: Workload, source: PromptSource, label: str) -> list[Session]:
    """The sessions of one round; `label` makes their ids unique across rounds and runs."""
    return [_session(workload, source, f"{label}-{index}") for index in range(workload.sessions)]


def _session(workload: Workload, source: PromptSource, session_id: str) -> Session:
    first = source.prompt(workload.prompt_tokens)
    later = [source.follow_up(workload.prompt_tokens) for _ in range(workload.turns - 1)]
    return Session(session_id if later else None, (first, *later))


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Endless arrival times in seconds from the start, the first at 0, with exponential gaps of mean
    1 / `rate`."""
    generator = random.Random(seed)
    at = 0.0
    while True:
        yield at
        at += generator.expovariate(rate)
