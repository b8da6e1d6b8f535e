"""Percentiles: bounds that hold for any values, from both sources."""

import math

from hypothesis import given
from hypothesis import strategies as st

from services.cli.sla.report import GROWTH, Latencies, Percentiles, percentiles, quantile

values = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200)
percents = st.floats(0.1, 100)
BOUNDS = (0.005, 0.01, 0.1, 1.0, 10.0, 100.0, math.inf)


def nearest_rank(given: list[float], percent: float) -> float:
    return sorted(given)[max(1, math.ceil(len(given) * percent / 100)) - 1]


def sketch(given: list[float]) -> Latencies:
    found = Latencies()
    for value in given:
        found.add(value)
    return found


def cumulative(given: list[float]) -> dict[float, float]:
    return {bound: float(sum(value <= bound for value in given)) for bound in BOUNDS}


def three(found: Percentiles) -> list[tuple[float, float, float | None, float]]:
    """Percentile, bounds, value."""
    pairs = zip((50, 95, 99), (found.p50, found.p95, found.p99), strict=True)
    return [(percent, one.at_least, one.at_most, one.value) for percent, one in pairs if one is not None]


@given(values)
def test_a_percentile_of_the_journal_is_known_within_one_per_cent(given: list[float]) -> None:
    found = three(sketch(given).percentiles())
    assert len(found) == 3
    slack = 1 + 1e-9  # of the logarithm
    for percent, at_least, at_most, value in found:
        exact = nearest_rank(given, percent)
        assert at_most is not None
        assert at_least / slack <= exact <= at_most * slack
        assert at_most / at_least <= GROWTH * slack
        assert abs(value / exact - 1) <= GROWTH - 1 + 1e-9


@given(values, values)
def test_two_models_make_one(some: list[float], others: list[float]) -> None:
    whole = sketch(some)
    whole.update(sketch(others))
    assert whole.percentiles() == sketch(some + others).percentiles()


@given(values, percents)
def test_a_percentile_of_prometheus_lies_in_its_bucket(given: list[float], percent: float) -> None:
    found = quantile(cumulative(given), percent)
    exact = nearest_rank(given, percent)
    assert found.at_least < exact or found.at_least == 0
    assert exact <= (math.inf if found.at_most is None else found.at_most)
    assert found.at_least <= found.value <= (found.value if found.at_most is None else found.at_most)


@given(values)
def test_both_sources_agree_on_the_same_values(given: list[float]) -> None:
    journal, prometheus = sketch(given).percentiles(), percentiles(cumulative(given))
    assert journal.count == prometheus.count == len(given)
    for ours, theirs in ((journal.p50, prometheus.p50), (journal.p99, prometheus.p99)):
        assert ours.value >= theirs.at_least / GROWTH
        assert ours.value <= (theirs.at_most or math.inf) * GROWTH


def test_interpolation_is_that_of_histogram_quantile() -> None:
    counts = {0.1: 10.0, 0.2: 30.0, math.inf: 40.0}
    found = [quantile(counts, percent) for percent in (12.5, 50, 95)]
    assert [round(one.value, 6) for one in found if one] == [0.05, 0.15, 0.2]
    assert found[2].at_most is None, "longer than the last bound"


def test_without_values_there_are_no_percentiles() -> None:
    assert Latencies().percentiles().p50 is None
    assert percentiles({}).p99 is None
    assert percentiles({math.inf: 0.0}).count == 0
    assert quantile({1.0: 3.0}, 50) is None, "not a whole histogram"
