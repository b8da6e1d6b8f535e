"""Who is measured when, and about how long it takes. Pure functions.

Rounds are interleaved: every peer once, then every peer again. So a machine that slows down for a while slows
all of them down, and the median over rounds forgets it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.catalog import Peer
from benchmarks.serve.workloads import Workload

_OVERHEAD_SECONDS = 4.0
"""Of each server: its end, and the warm-up requests."""


@dataclass(frozen=True, slots=True)
class Step:
    """One start of one server."""

    round: int
    peer: Peer
    slots: int
    workloads: tuple[Workload, ...]


def schedule(peers: Sequence[Peer], workloads: Sequence[Workload], rounds: int) -> list[Step]:
    """All steps in order. A peer is started once a round, or once for each number of slots that it needs."""
    return [step for at in range(rounds) for peer in peers for step in _steps_of_round(peer, workloads, at)]


def _steps_of_round(peer: Peer, workloads: Sequence[Workload], at: int) -> list[Step]:
    by_slots: dict[int, list[Workload]] = {}
    for workload in workloads:
        by_slots.setdefault(peer.slots_for(workload.clients), []).append(workload)
    return [Step(at, peer, slots, tuple(group)) for slots, group in by_slots.items()]


def expected_seconds(step: Step, measured: Mapping[tuple[str, int], float]) -> float:
    """Of one step: what it took before (by peer and slots), else what the catalog's pace says."""
    known = measured.get((step.peer.name, step.slots))
    if known is not None:
        return known
    pace = step.peer.pace
    loads = sum(
        each.requests * each.output_tokens / (pace.alone if each.clients == 1 else pace.together)
        for each in step.workloads
    )
    return _OVERHEAD_SECONDS + pace.ready + loads


def prompt_seed(seed: int, at: int, workload: str) -> int:
    """The seed of a workload's prompts: the same for every peer of a round, another in every round."""
    return seed + 1_000_003 * at + sum(byte << (8 * place) for place, byte in enumerate(workload.encode()))


def duration(seconds: float) -> str:
    """For a reader: `40 s`, `12 min`, `1 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
