"""What a comparison has found, the figures that follow from it, and their tables. Pure but for `show`."""

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.harness import Report, Sheet
from benchmarks.peers.servers import Memory
from benchmarks.report import number, remarks, spread
from benchmarks.serve.stats import Summary, median_round
from benchmarks.serve.workloads import WORKLOADS


class PeerResult(msgspec.Struct, kw_only=True):
    """One peer. It grows while the comparison runs."""

    name: str
    title: str
    dtype: str
    versions: dict[str, str] = {}
    rounds: dict[str, list[Summary]] = {}  # by workload: a summary of each round
    ready_seconds: list[float] = []  # of every start
    cpu_ms: dict[str, list[float]] = {}  # by workload: of each round, CPU time per output token
    memory: list[Memory] = []  # after every workload of every start
    remarks: list[str] = []
    left_out: str | None = None  # why it was measured no further
    against: tuple[str, ...] = ()  # of ours: peers that it is compared with

    def summaries(self) -> dict[str, Summary]:
        """By workload: medians over the rounds."""
        return {name: median_round(each) for name, each in self.rounds.items()}

    def peak_rss(self) -> int | None:
        return max((each.peak_rss for each in self.memory), default=None)

    def cpu(self, workload: str) -> float | None:
        found = self.cpu_ms.get(workload)
        return statistics.median(found) if found else None

    def ready(self) -> float | None:
        return statistics.median(self.ready_seconds) if self.ready_seconds else None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One of ours against one peer; above 1 ours is ahead. Only workloads that both have measured."""

    ours: str
    peer: str
    tokens_per_second: dict[str, float]  # by workload: ours divided by theirs
    first_token: dict[str, float]  # by workload, medians over requests: theirs divided by ours
    first_token_by_turn: dict[str, list[float]]  # the same for each turn, for workloads that have several


class Setting(Report, frozen=True, kw_only=True):
    """Where, when and how a comparison was made; versions are those of the load client."""

    model: str
    threads: int
    rounds: int
    seed: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a run; written as it is by `--json`."""

    setting: Setting
    peers: list[PeerResult]
    medians: dict[str, dict[str, Summary]]  # by peer and workload
    ratios: list[Ratio]


def compare(setting: Setting, peers: Sequence[PeerResult]) -> Comparison:
    """The medians of every peer, and the ratios of ours to those that they are compared with."""
    medians = {peer.name: peer.summaries() for peer in peers}
    pairs = [(mine.name, peer.name) for mine in peers for peer in peers if peer.name in mine.against]
    ratios = [ratio(medians[mine], medians[peer], mine, peer) for mine, peer in pairs if medians[mine]]
    return Comparison(setting=setting, peers=list(peers), medians=medians, ratios=ratios)


def ratio(ours: dict[str, Summary], theirs: dict[str, Summary], name: str, peer: str) -> Ratio:
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
    return Ratio(ours=name, peer=peer, tokens_per_second=tokens, first_token=first, first_token_by_turn=turns)


_GIGABYTE = 1e9
RATIO_NOTE = (
    "Ours against each peer, medians of the same run; above 1 ours is ahead."
    " Rate: our output tokens/s divided by theirs. First token: their time divided by ours."
)


def workloads(peers: Sequence[PeerResult]) -> list[str]:
    """Those that anybody was measured with, in the order of their definition."""
    found = {name for peer in peers for name in peer.rounds}
    return [name for name in WORKLOADS if name in found]


def header(names: Sequence[str]) -> list[str]:
    return ["peer", "dtype", *map(_heading, names), "peak RSS", "ready"]


def _heading(name: str) -> str:
    if WORKLOADS[name].turns > 1:
        return f"{name} first token by turn"
    return f"{name} tok/s, first token, gap, pause, CPU a token"


def row(peer: PeerResult, medians: Mapping[str, Summary], names: Sequence[str]) -> list[str]:
    """One row under `header(names)`; a dash stands for what was not measured."""
    memory, ready = peer.peak_rss(), peer.ready()
    return [
        peer.title,
        peer.dtype,
        *(_cell(medians.get(name), peer.cpu(name)) for name in names),
        f"{memory / _GIGABYTE:.1f} GB" if memory is not None else "-",
        f"{number(ready)} s" if ready is not None else "-",
    ]


def _cell(summary: Summary | None, cpu: float | None) -> str:
    if summary is None or summary.first_token_ms is None:
        return "-"
    if WORKLOADS[summary.workload].turns > 1:
        return "/".join(number(turn.first_token_ms) for turn in summary.turns) or "-"
    rate = number(summary.output_tokens_per_second)
    times = (summary.first_token_ms, summary.gap_ms, summary.pause_ms)
    return ", ".join((rate, *map(spread, times), *([] if cpu is None else [f"{number(cpu)} ms"])))


def ratio_header(names: Sequence[str]) -> list[str]:
    return ["ours", "against", *(f"{name} {kind}" for name in names for kind in _kinds(name))]


def _kinds(name: str) -> tuple[str, ...]:
    return ("first token by turn",) if WORKLOADS[name].turns > 1 else ("rate", "first token")


def ratio_row(ratio: Ratio, ours: str, peer: str, names: Sequence[str]) -> list[str]:
    """One row under `ratio_header(names)`; `ours` and `peer` are their titles."""
    cells = [ours, peer]
    for name in names:
        if WORKLOADS[name].turns > 1:
            cells.append("/".join(map(_factor, ratio.first_token_by_turn.get(name, []))) or "-")
        else:
            cells += [_factor(ratio.tokens_per_second.get(name)), _factor(ratio.first_token.get(name))]
    return cells


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def notes(comparison: Comparison) -> list[str]:
    """Remarks on every peer, what is installed, and the setting; a line each."""
    lines: list[str] = []
    for peer in comparison.peers:
        found = [*peer.remarks, *remarks(list(comparison.medians[peer.name].values()))]
        lines += [f"{peer.name}: {remark}" for remark in found]
        if peer.left_out is not None:
            lines.append(f"{peer.name} was left out: {peer.left_out}")
        if peer.versions:
            lines.append(f"{peer.name}: {_listed(peer.versions)}.")
    setting = comparison.setting
    return [
        *lines,
        f"Machine: {setting.machine}; {setting.threads} threads for every server.",
        f"Model {setting.model}, {setting.date}, medians of {setting.rounds} interleaved rounds on fresh"
        f" servers, seed {setting.seed}; load client on the same machine: {_listed(setting.versions)}.",
    ]


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def parts(comparison: Comparison) -> list[Sheet | str]:
    """For a terminal."""
    figures, *ratios = sheets(comparison)
    said = [*notes(comparison), f"Command: {comparison.setting.command}"]
    return [figures, *ratios, *([RATIO_NOTE] if ratios else []), *said]


def markdown(comparison: Comparison) -> str:
    """The same as Markdown, to be put into the documentation as it is."""
    figures, *ratios = (sheet.markdown() for sheet in sheets(comparison))
    below = [part for each in ratios for part in (RATIO_NOTE, "", each)]
    said = (f"- {line}" for line in notes(comparison))
    return "\n".join([f"`{comparison.setting.command}`", "", figures, *below, *said]) + "\n"


def sheets(comparison: Comparison) -> list[Sheet]:
    names = workloads(comparison.peers)
    peers = {peer.name: peer for peer in comparison.peers}
    figures = [row(peer, comparison.medians[peer.name], names) for peer in comparison.peers]
    ratios = [ratio_row(each, _label(peers[each.ours]), _label(peers[each.peer]), names) for each in comparison.ratios]
    beside = [Sheet(ratio_header(names), ratios, left=("against",))] if ratios else []
    return [Sheet(header(names), figures), *beside]


def _label(peer: PeerResult) -> str:
    return f"{peer.title} ({peer.dtype})"
