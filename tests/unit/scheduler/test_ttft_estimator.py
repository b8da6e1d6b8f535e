"""Expected times follow what was measured, in the right direction and in the right unit."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.request import EXPECTED_OUTPUT, cost
from services.scheduler.ttft_estimator import LEAST_WEIGHT, SEQUENCE_TOKENS, UNKNOWN_SPEED, TtftEstimator, Usual
from shared.messages import GroupLoad
from tests.unit.scheduler.tables import loads


def expected(load: GroupLoad, uncached: int = 100, *, sent: int = 0, tokens: int = 0, weight: float = 1.0) -> float:
    ttft = TtftEstimator()
    ttft.update(load, sent, tokens, weight, Usual())
    return ttft.first_token(uncached)


def test_it_is_the_time_of_the_work_that_lies_before() -> None:
    load = GroupLoad(2, 1, 700, 50, 100, 1, slots=8, step_seconds=0.03, prompt_tokens_per_second=1000.0)
    ttft = TtftEstimator()
    ttft.answered(0.002)
    ttft.update(load, 2, 300, 1.0, Usual())
    work = (700 + 300 + 100 + SEQUENCE_TOKENS * 5) / 1000
    assert ttft.first_token(100) == pytest.approx(0.002 + 0.03 * (1 + 5 / 8) + work)
    assert ttft.queue_seconds == pytest.approx(1.0)


def test_without_a_free_place_somebody_must_end_first() -> None:
    load = GroupLoad(8, 0, 0, 50, 100, 1, slots=8, step_seconds=0.1, prompt_tokens_per_second=1e9)
    assert expected(load) == pytest.approx(0.1 * 2 + EXPECTED_OUTPUT * 0.1 / 8, rel=1e-3)
    assert expected(msgspec.structs.replace(load, running=7)) == pytest.approx(0.1 * (1 + 7 / 8), rel=1e-3)


@given(loads, st.integers(0, 10_000), st.integers(1, 50), st.integers(0, 5000))
def test_more_work_never_comes_sooner(load: GroupLoad, uncached: int, more: int, tokens: int) -> None:
    base = expected(load, uncached)
    assert expected(load, uncached + more) >= base
    assert expected(load, uncached, sent=more, tokens=tokens) >= base
    assert expected(load, uncached, weight=0.5) >= base
    assert base > 0
    worse = msgspec.structs.replace(load, free_blocks=0)
    assert expected(worse, uncached) >= base


def test_of_two_rings_the_one_that_measures_a_little_faster_does_not_get_everything() -> None:
    slower = GroupLoad(0, 0, 0, 50, 100, 1, slots=64, step_seconds=0.022, prompt_tokens_per_second=1e9)
    faster = msgspec.structs.replace(slower, running=8, step_seconds=0.020)
    assert expected(slower) < expected(faster)


def test_a_new_ring_is_reckoned_with_what_its_peers_measure() -> None:
    usual, new = Usual(), TtftEstimator()
    usual.hear(GroupLoad(slots=8, step_seconds=0.005, prompt_tokens_per_second=50_000.0))
    usual.hear(GroupLoad())
    new.update(GroupLoad(), 0, 0, 1.0, usual)
    assert new.first_token(500) == pytest.approx(0.005 + 500 / 50_000)


def test_a_group_without_measurements_is_reckoned_with_constants() -> None:
    assert expected(GroupLoad(), 4000) - expected(GroupLoad(), 0) == pytest.approx(4000 / UNKNOWN_SPEED)


@given(loads, st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_the_weight_stands_in_for_what_was_not_measured(load: GroupLoad, uncached: int, weight: float) -> None:
    unmeasured = msgspec.structs.replace(load, step_seconds=0.0, prompt_tokens_per_second=0.0)
    base = expected(unmeasured, uncached)
    assert expected(unmeasured, uncached, weight=0.5) == pytest.approx(2 * base)
    assert expected(unmeasured, uncached, weight=0.0) == pytest.approx(base / LEAST_WEIGHT)
    assert expected(unmeasured, uncached, weight=7.0) == base
    measured = msgspec.structs.replace(load, step_seconds=0.05, prompt_tokens_per_second=2000.0)
    assert expected(measured, uncached, weight=weight) == expected(measured, uncached)


@given(st.lists(st.floats(0.0001, 2.0), min_size=1))
def test_the_latency_is_between_what_was_seen(seconds: list[float]) -> None:
    ttft = TtftEstimator()
    for each in seconds:
        ttft.answered(each)
    assert min(*seconds, 0.05) - 1e-9 <= ttft.latency <= max(seconds) + 1e-9
    seen = ttft.latency
    ttft.rested()
    assert ttft.latency < seen


def test_one_answer_that_was_held_up_does_not_make_a_group_slow_for_good() -> None:
    ttft = TtftEstimator()
    for seconds in (0.002, 0.002, 4.0):
        ttft.answered(seconds)
    assert ttft.latency < 0.02
    for _ in range(60):
        ttft.answered(4.0)
    assert ttft.latency == pytest.approx(4.0, rel=0.1)


@given(st.integers(0, 10_000), st.integers(-5, 100_000))
def test_a_cost_is_what_is_computed_and_bounded_by_what_is_expected(tokens: int, left: int) -> None:
    assert max(1, tokens) <= cost(tokens, left) <= max(1, tokens + EXPECTED_OUTPUT)
