"""What a comparison has found, and the figures that follow from it. Pure functions."""

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks.peers.servers import Memory
from benchmarks.serve.stats import Summary, median_round


class PeerResult(msgspec.Struct, kw_only=True):
    """One peer. It grows while the comparison runs."""

    name: str
    title: str
    dtype: str
    versions: dict[str, str] = {}
    rounds: dict[str, list[Summary]] = {}
    """By workload: a summary of each round."""
    ready_seconds: list[float] = []
    """Of every start."""
    memory: list[Memory] = []
    """After every workload of every start."""
    remarks: list[str] = []
    left_out: str | None = None
    """Why it was measured no further."""

    def summaries(self) -> dict[str, Summary]:
        """By workload: medians over the rounds."""
        return {name: median_round(each) for name, each in self.rounds.items()}

    def peak_rss(self) -> int | None:
        return max((each.peak_rss for each in self.memory), default=None)

    def ready(self) -> float | None:
        return statistics.median(self.ready_seconds) if self.ready_seconds else None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Ours against one peer; above 1 ours is ahead. Only workloads that both have measured."""

    peer: str
    tokens_per_second: dict[str, float]
    """By workload: ours divided by theirs."""
    first_token: dict[str, float]
    """By workload, medians over requests: theirs divided by ours."""
    first_token_by_turn: dict[str, list[float]]
    """The same for each turn, for workloads that have several."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Where, when and how a comparison was made."""

    date: str
    command: str
    machine: str
    model: str
    threads: int
    rounds: int
    seed: int
    versions: dict[str, str]
    """Of the load client."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a run; written as it is by `--json`."""

    setting: Setting
    peers: list[PeerResult]
    medians: dict[str, dict[str, Summary]]
    """By peer and workload."""
    ratios: list[Ratio]


def compare(setting: Setting, peers: Sequence[PeerResult], ours: str) -> Comparison:
    """The medians of every peer, and the ratios of the peer named `ours` to each of the others."""
    medians = {peer.name: peer.summaries() for peer in peers}
    mine = medians.get(ours, {})
    ratios = [ratio(mine, medians[peer.name], peer.name) for peer in peers if peer.name != ours]
    return Comparison(setting=setting, peers=list(peers), medians=medians, ratios=ratios if mine else [])


def ratio(ours: dict[str, Summary], theirs: dict[str, Summary], name: str) -> Ratio:
    tokens: dict[str, float] = {}
    first: dict[str, float] = {}
    turns: dict[str, list[float]] = {}
    for workload in ours.keys() & theirs.keys():
        mine, other = ours[workload], theirs[workload]
        if mine.first_token_ms is None or other.first_token_ms is None:
            continue  # no request of one of them succeeded
        tokens[workload] = mine.output_tokens_per_second / other.output_tokens_per_second
        first[workload] = other.first_token_ms.p50 / mine.first_token_ms.p50
        if mine.turns and other.turns:
            turns[workload] = [
                b.first_token_ms / a.first_token_ms for a, b in zip(mine.turns, other.turns, strict=False)
            ]
    return Ratio(peer=name, tokens_per_second=tokens, first_token=first, first_token_by_turn=turns)
