"""Ratios and tables."""

import msgspec

from benchmarks.peers.results import (
    Comparison,
    PeerResult,
    Setting,
    compare,
    header,
    markdown,
    ratio,
    ratio_row,
    row,
    workloads,
)
from benchmarks.peers.servers import Memory
from benchmarks.serve.stats import Spread, Summary, Turn


def summary(workload: str, rate: float, first: float, turns: tuple[float, ...] = ()) -> Summary:
    spread = Spread(first, 2 * first)
    return Summary(
        workload=workload,
        requests=4,
        rounds=1,
        errors=0,
        error_messages={},
        seconds=1.0,
        output_tokens=rate,
        output_tokens_per_second=rate,
        requests_per_second=4.0,
        first_token_ms=spread,
        gap_ms=Spread(5.0, 50.0),
        pause_ms=Spread(60.0, 70.0),
        request_ms=spread,
        tokens_per_event=1.0,
        turns=[Turn(each, 100, 0) for each in turns],
        client_cpu=0.1,
        warnings=[],
    )


def ours() -> PeerResult:
    return PeerResult(
        name="ryzanstein",
        title="Ryzanstein",
        dtype="bf16",
        versions={"python": "3.11.7"},
        rounds={"W1": [summary("W1", rate, 50) for rate in (90, 100, 300)], "W4": [summary("W4", 50, 100, (100, 50))]},
        ready_seconds=[9.0, 5.0, 7.0],
        memory=[Memory(10**9, 10**8), Memory(3 * 10**9, 10**8)],
        against=("other", "silent", "who is not there"),
    )


def theirs() -> PeerResult:
    return PeerResult(
        name="other",
        title="Other",
        dtype="Q4_0",
        rounds={
            "W1": [summary("W1", 50, 100)],
            "W2": [summary("W2", 10, 10)],
            "W4": [summary("W4", 50, 90, (150, 25))],
        },
        remarks=["Preloaded: nothing."],
    )


def comparison() -> Comparison:
    setting = Setting(
        date="2026-01-02",
        command="python -m benchmarks.peers",
        machine="a machine",
        model="m",
        threads=2,
        rounds=3,
        seed=1,
        versions={"python": "3.11.7"},
    )
    silent = PeerResult(name="silent", title="Silent", dtype="bf16", left_out="it would not start.")
    return compare(setting, [theirs(), ours(), silent])


def test_above_one_ours_is_ahead() -> None:
    found = ratio(ours().summaries(), theirs().summaries(), "ours", "other")
    assert found.tokens_per_second == {"W1": 2.0, "W4": 1.0}
    assert found.first_token == {"W1": 2.0, "W4": 0.9}
    assert found.first_token_by_turn == {"W4": [1.5, 0.5]}


def test_what_failed_has_no_ratio() -> None:
    failed = msgspec.structs.replace(summary("W1", 0, 1), first_token_ms=None, output_tokens_per_second=0.0)
    assert ratio({"W1": failed}, theirs().summaries(), "ours", "other").tokens_per_second == {}
    assert ratio(ours().summaries(), {"W1": failed}, "ours", "other").tokens_per_second == {}


def test_a_row_has_medians_and_the_highest_memory() -> None:
    names = ["W1", "W2", "W4"]
    cells = row(ours(), ours().summaries(), names)
    assert len(cells) == len(header(names))
    assert cells == ["Ryzanstein", "bf16", "100, 50/100, 5.0/50, 60/70", "-", "100/50", "3.0 GB", "7.0 s"]


def test_a_row_of_ratios() -> None:
    found = ratio(ours().summaries(), theirs().summaries(), "ours", "other")
    cells = ratio_row(found, "Ours", "Other", ["W1", "W2", "W4"])
    assert cells == ["Ours", "Other", "2.00", "2.00", "-", "-", "1.50/0.50"]


def test_only_workloads_that_were_measured_have_a_column() -> None:
    assert workloads([ours(), theirs()]) == ["W1", "W2", "W4"]


def test_markdown_names_everything() -> None:
    text = markdown(comparison())
    assert "| Ryzanstein | bf16 | 100, 50/100, 5.0/50, 60/70 | - | 100/50 | 3.0 GB | 7.0 s |" in text
    assert "| Ryzanstein (bf16) | Other (Q4_0) | 2.00 | 2.00 | - | - | 1.50/0.50 |" in text
    assert "- other: Preloaded: nothing." in text
    assert "- silent was left out: it would not start." in text
    assert "a machine; 2 threads" in text
    assert "2026-01-02, medians of 3 interleaved rounds" in text


def test_without_our_figures_there_are_no_ratios() -> None:
    setting = comparison().setting
    assert compare(setting, [theirs()]).ratios == []


def test_each_of_ours_is_held_against_its_own_peers() -> None:
    packed = msgspec.structs.replace(ours(), name="packed", against=("ryzanstein",))
    found = compare(comparison().setting, [theirs(), ours(), packed]).ratios
    assert [(each.ours, each.peer) for each in found] == [("ryzanstein", "other"), ("packed", "ryzanstein")]


def test_json_comes_back() -> None:
    data = msgspec.json.encode(comparison())
    assert msgspec.json.decode(data, type=Comparison) == comparison()
