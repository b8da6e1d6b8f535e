"""What is a regression, and what is noise."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.regressions.measures import MARGIN, Ratio, compare, left_out

ratios = st.floats(0.1, 10)
rounds = st.lists(ratios, min_size=3, max_size=12)


def verdict(now: list[float], before: list[float], better: str = "more") -> str:
    (found,) = compare({"r": Ratio.of(now)}, {"r": Ratio.of(before)}, {"r": better})  # type: ignore[dict-item]
    return found.verdict


@given(rounds)
def test_the_same_rounds_are_equal(given: list[float]) -> None:
    assert verdict(given, given) == verdict(given, given, "less") == "equal"


@given(rounds, rounds)
def test_better_one_way_is_worse_the_other(now: list[float], before: list[float]) -> None:
    opposite = {"worse": "better", "better": "worse", "equal": "equal"}
    assert verdict(now, before, "less") == opposite[verdict(now, before, "more")]


@given(ratios, st.floats(0.0, MARGIN * 0.99), st.integers(3, 10))
def test_a_change_within_the_margin_is_none(before: float, loss: float, count: int) -> None:
    assert verdict([before * (1 - loss)] * count, [before] * count) == "equal"


@given(ratios, st.floats(MARGIN * 1.01, 0.9), st.integers(3, 10))
def test_without_noise_a_loss_beyond_the_margin_is_seen(before: float, loss: float, count: int) -> None:
    assert verdict([before * (1 - loss)] * count, [before] * count) == "worse"


@given(rounds, st.floats(0.2, 5))
def test_the_unit_does_not_matter(given: list[float], scale: float) -> None:
    ratio, scaled = Ratio.of(given), Ratio.of([one * scale for one in given])
    assert scaled.median == pytest.approx(ratio.median * scale)
    assert scaled.spread == pytest.approx(ratio.spread * scale, abs=1e-9)


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.15])
def test_noise_alone_is_hardly_ever_a_regression(noise: float) -> None:
    """Two runs of the same code: fewer than 3 in a hundred are called worse, and those are measured once more."""
    source = random.Random(7)

    def run() -> list[float]:
        return [2.0 * source.lognormvariate(0, noise) for _ in range(7)]

    assert sum(verdict(run(), run()) == "worse" for _ in range(500)) < 15


def test_one_disturbed_round_changes_nothing() -> None:
    calm = [1.0, 1.01, 0.99, 1.0, 1.0]
    assert verdict([*calm, 0.1], calm) == "equal"
    assert Ratio.of([*calm, 0.1]).spread < 0.02


def test_a_ratio_that_nobody_recorded_or_measured_is_named() -> None:
    one = Ratio.of([1.0] * 3)
    (found,) = compare({"new": one}, {"old": one}, {"new": "more"})
    assert (found.verdict, found.limit) == ("not recorded", None)
    assert left_out({"new": one}, {"old": one}) == ["old"]


@pytest.mark.parametrize("given", [[], [1.0, 1.0], [1.0, 0.0, 1.0], [1.0, float("nan"), 1.0], [1.0, float("inf"), 1.0]])
def test_what_is_no_ratio_is_refused(given: list[float]) -> None:
    with pytest.raises(ValueError, match="rounds or more"):
        Ratio.of(given)
