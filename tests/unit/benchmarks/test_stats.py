import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serve.stats import Sample, Spread, gaps, median_round, percentile, summarise
from benchmarks.serve.workloads import WORKLOADS, Workload

ONE = Workload("one", clients=1, requests=2, prompt_tokens=20, output_tokens=4)

floats = st.floats(0, 1e3, allow_nan=False)


def sample(start: float = 0.0, **changes: object) -> Sample:
    """Four tokens, one an event, at 1.0, 1.1, 1.2 and 1.4 seconds after the start."""
    fields: dict[str, object] = {
        "started": start,
        "finished": start + 1.5,
        "arrivals": [start + at for at in (1.0, 1.1, 1.2, 1.4)],
        "deltas": [1, 1, 1, 1],
        "prompt_tokens": 20,
        "output_tokens": 4,
    }
    return Sample(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("quantile", "expected"), [(0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100), (0.001, 1)])
def test_percentile_is_the_nearest_rank(quantile: float, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], quantile) == expected


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 0.5)


@given(st.lists(floats, min_size=1), st.sampled_from([0.01, 0.25, 0.5, 0.9, 0.99, 1.0]))
def test_equal_weights_change_nothing(values: list[float], quantile: float) -> None:
    assert percentile(values, quantile, [2.5] * len(values)) == percentile(values, quantile)


@given(st.lists(st.tuples(floats, st.integers(1, 5)), min_size=1, max_size=30))
def test_a_weight_is_so_many_equal_samples(pairs: list[tuple[float, int]]) -> None:
    repeated = [value for value, weight in pairs for _ in range(weight)]
    values, weights = [value for value, _ in pairs], [float(weight) for _, weight in pairs]
    for quantile in (0.1, 0.5, 0.99):
        assert percentile(values, quantile, weights) == percentile(repeated, quantile)


def test_with_one_token_an_event_gaps_are_the_intervals() -> None:
    values, weights = gaps(sample())
    assert values == pytest.approx([0.1, 0.1, 0.2])
    assert weights == [1, 1, 1]


def test_an_interval_is_divided_by_the_tokens_it_brought() -> None:
    # Five events of one token; the second read held three of them.
    values, weights = gaps(sample(arrivals=[1.0, 1.3, 1.4], deltas=[1, 3, 1], output_tokens=5))
    assert values == pytest.approx([0.1, 0.1])
    assert weights == [3, 1]


@given(st.lists(st.tuples(st.floats(1e-4, 10), st.integers(1, 8)), min_size=2, max_size=20), st.integers(1, 500))
def test_gaps_add_up_to_the_time_after_the_first_token(steps: list[tuple[float, int]], tokens: int) -> None:
    arrivals, at = [], 0.0
    for step, _ in steps:
        at += step
        arrivals.append(at)
    values, weights = gaps(sample(arrivals=arrivals, deltas=[count for _, count in steps], output_tokens=tokens))
    total = math.fsum(value * weight for value, weight in zip(values, weights, strict=True))
    assert total == pytest.approx(arrivals[-1] - arrivals[0])


def test_a_summary_has_every_figure() -> None:
    found = summarise(ONE, [sample(), sample(0.5)], cpu_seconds=0.5)
    assert (found.requests, found.errors, found.output_tokens) == (2, 0, 8)
    assert found.seconds == pytest.approx(2.0)
    assert found.output_tokens_per_second == pytest.approx(4.0)
    assert found.requests_per_second == pytest.approx(1.0)
    assert found.client_cpu == pytest.approx(0.25)
    assert found.first_token_ms == Spread(pytest.approx(1000), pytest.approx(1000))
    assert found.gap_ms == Spread(pytest.approx(100), pytest.approx(200))
    assert found.request_ms == Spread(pytest.approx(1500), pytest.approx(1500))
    assert found.tokens_per_event == 1
    assert (found.turns, found.warnings) == ([], [])


def test_failed_requests_are_counted_and_give_no_tokens() -> None:
    failed = sample(error="HTTP 503: full", output_tokens=3)
    found = summarise(ONE, [sample(), failed, failed], cpu_seconds=0)
    assert (found.requests, found.errors) == (3, 2)
    assert found.error_messages == {"HTTP 503: full": 2}
    assert found.output_tokens == 4


def test_a_round_without_any_success_has_no_percentiles() -> None:
    found = summarise(ONE, [Sample(0.0, 0.0, error="broken")], cpu_seconds=0)
    assert found.errors == 1
    assert (found.first_token_ms, found.gap_ms, found.request_ms, found.tokens_per_event) == (None,) * 4
    assert found.output_tokens_per_second == 0


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"output_tokens": 3}, "1 of 1 answers had 3 output tokens instead of 4"),
        ({"prompt_tokens": 21}, "1 of 1 first prompts had 21 tokens instead of 20"),
        ({"arrivals": [1.0, 1.4], "deltas": [1, 1]}, "events held 2.0 tokens on average"),
    ],
)
def test_what_spoils_a_comparison_is_told(changes: dict[str, object], warning: str) -> None:
    [found] = summarise(ONE, [sample(**changes)], cpu_seconds=0).warnings
    assert warning in found


def test_a_busy_client_is_told() -> None:
    [found] = summarise(ONE, [sample()], cpu_seconds=1.4).warnings
    assert "93% of a core" in found


def test_turns_are_medians_over_sessions() -> None:
    samples = [
        sample(turn=turn, arrivals=[first, first + 0.1], deltas=[2, 2], prompt_tokens=100 * (turn + 1))
        for turn in range(4)
        for first in (1.0 + turn, 2.0 + turn, 9.0)
    ]
    found = summarise(WORKLOADS["W4"], samples, cpu_seconds=0)
    assert [turn.first_token_ms for turn in found.turns] == pytest.approx([2000, 3000, 4000, 5000])
    assert [turn.prompt_tokens for turn in found.turns] == [100, 200, 300, 400]


def test_rounds_give_medians_and_keep_every_error() -> None:
    rounds = [
        summarise(ONE, [sample(finished=1.4 + late), sample(error="cut" if late else None)], cpu_seconds=0)
        for late in (0.0, 1.0, 5.0)
    ]
    found = median_round(rounds)
    assert (found.rounds, found.requests, found.errors) == (3, 2, 2)
    assert found.error_messages == {"cut": 2}
    assert found.seconds == rounds[1].seconds
    assert found.request_ms == rounds[1].request_ms
    assert median_round(rounds[:1]) is rounds[0]


def test_rounds_of_failures_only_stay_without_figures() -> None:
    broken = summarise(ONE, [Sample(0.0, 1.0, error="broken")], cpu_seconds=0)
    found = median_round([broken, broken])
    assert (found.errors, found.first_token_ms, found.tokens_per_event) == (2, None, None)
