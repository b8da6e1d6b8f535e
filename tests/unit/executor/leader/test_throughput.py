"""The measured speed is the ring's: it is found exactly, follows a change, and is never made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.leader.step_loop import ENOUGH, FASTEST, HALF_LIFE, Throughput


def test_nothing_is_told_before_anything_was_measured() -> None:
    throughput = Throughput()
    assert (throughput.step_seconds, throughput.prompt_tokens_per_second) == (0.0, 0.0)
    for _ in range(ENOUGH - 1):
        throughput.observe(0.5, 1000)
    assert (throughput.step_seconds, throughput.prompt_tokens_per_second) == (0.0, 0.0)
    throughput.observe(0.5, 1000)
    assert (throughput.step_seconds, throughput.prompt_tokens_per_second) == (0.0, 2000.0)
    throughput.rest()
    assert (throughput.step_seconds, throughput.prompt_tokens_per_second) == (0.0, 0.0)


@given(st.floats(1e-4, 1.0), st.floats(10, 1e6), st.lists(st.integers(0, 512), min_size=1, max_size=200))
def test_a_steady_ring_is_measured_as_it_is(step: float, rate: float, prompts: list[int]) -> None:
    throughput = Throughput()
    for _ in range(ENOUGH):
        throughput.observe(step, 0)
    for tokens in prompts:
        throughput.observe(step + tokens / rate, tokens)
    assert throughput.step_seconds == pytest.approx(step)
    if sum(tokens > 0 for tokens in prompts) >= ENOUGH:
        assert throughput.prompt_tokens_per_second == pytest.approx(rate, rel=1e-3)


def test_a_ring_that_has_become_slow_is_known_for_it_after_a_few_half_lives() -> None:
    throughput = Throughput()
    for seconds, rounds in ((0.01, 1000), (0.05, 5 * HALF_LIFE)):
        for _ in range(rounds):
            throughput.observe(seconds, 0)
            throughput.observe(seconds + 100 * seconds / 10, 100)
    assert throughput.step_seconds == pytest.approx(0.05, rel=0.05)
    assert throughput.prompt_tokens_per_second == pytest.approx(200, rel=0.2)


def test_a_step_in_which_the_process_was_held_up_says_little_of_the_next() -> None:
    throughput = Throughput()
    for _ in range(2 * HALF_LIFE):
        throughput.observe(0.02, 0)
        throughput.observe(0.12, 100)
    throughput.observe(4.0, 0)
    throughput.observe(4.0, 100)
    assert throughput.step_seconds == pytest.approx(0.02, rel=0.1)
    assert throughput.prompt_tokens_per_second == pytest.approx(1000, rel=0.15)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10_000)), max_size=100))
def test_speeds_are_bounded_whatever_is_measured(steps: list[tuple[float, int]]) -> None:
    throughput = Throughput()
    for seconds, tokens in steps:
        throughput.observe(seconds, tokens)
    assert 0 <= throughput.step_seconds <= 10
    assert 0 <= throughput.prompt_tokens_per_second <= FASTEST
