"""A slow step is one that takes several times as long as usual, or longer than was set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.executor.core.settings import (
    SLOW_STEP_BURST,
    SLOW_STEP_FACTOR,
    SLOW_STEP_INTERVAL,
    SLOW_STEP_LEAST,
    ExecutorSettings,
    SlowSteps,
)
from services.executor.leader.step_loop import ENOUGH, Throughput


def test_settings_are_understood() -> None:
    auto, off, factor = SlowSteps.of("auto"), SlowSteps.of("off"), SlowSteps.of("2.5x")
    assert auto.is_slow(SLOW_STEP_FACTOR * 0.1, 0.1)
    assert not auto.is_slow(SLOW_STEP_LEAST / 2, 0.001), "nobody misses so little"
    assert not auto.is_slow(100.0, 0.0), "what is usual is not known"
    assert not off.is_slow(1e9, 0.001)
    assert factor.is_slow(0.5, 0.2)
    assert not factor.is_slow(0.49, 0.2)
    assert SlowSteps.of("200ms").is_slow(0.2, 0.0)
    assert SlowSteps.of("0.5s").is_slow(0.5, 9.0)
    assert not SlowSteps.of("0.5s").is_slow(0.49, 0.0001)


@pytest.mark.parametrize("text", ["", "4", "x", "-1s", "0s", "0x", "1h", "1e3s", "٣s"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not auto, off"):
        SlowSteps.of(text)
    with pytest.raises(ValidationError, match="is not auto, off"):
        ExecutorSettings(slow_step=text)


@given(st.lists(st.floats(0, 2 * SLOW_STEP_INTERVAL), max_size=60))
def test_the_log_has_no_more_lines_than_agreed_and_counts_the_others(pauses: list[float]) -> None:
    slow, now, logged, told = SlowSteps.of("auto"), 0.0, 0, 0
    for pause in pauses:
        now += pause
        if slow.may_log(now):
            logged += 1
            told += slow.suppressed
            slow.suppressed = 0
    assert logged <= SLOW_STEP_BURST + now / SLOW_STEP_INTERVAL
    assert logged + told + slow.suppressed == len(pauses)


def test_what_is_usual_follows_the_pace() -> None:
    pace = Throughput()
    assert pace.expected(0) == 0.0
    for _ in range(ENOUGH):
        pace.observe(0.02, 0)
    assert pace.expected(0) == pytest.approx(0.02)
    assert pace.expected(100) == 0.0, "no prompt was seen yet"
    for _ in range(ENOUGH):
        pace.observe(0.12, 100)
    assert pace.expected(50) == pytest.approx(0.07)
