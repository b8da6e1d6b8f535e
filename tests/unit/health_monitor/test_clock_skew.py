"""Clocks that differ are told from heartbeats that are late."""

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.health_monitor.detector import LARGE, WINDOW, Clocks


@given(st.floats(-1e4, 1e4), st.lists(st.floats(0, 100), min_size=WINDOW, max_size=3 * WINDOW))
def test_what_was_delayed_least_counts(ahead: float, delays: list[float]) -> None:
    clocks = Clocks()
    for beat, delay in enumerate(delays):
        clocks.observe("a", 1e6 + beat + ahead, 1e6 + beat + delay)
    ((name, found),) = clocks.ahead()
    assert name == "a"
    assert abs(found - (ahead - min(delays[-WINDOW:]))) < 1e-6


def test_a_clock_that_differs_is_told_once_and_once_that_it_agrees_again() -> None:
    clocks = Clocks()
    with capture_logs() as logs:
        for ahead in (LARGE + 1, 0.0, -LARGE - 1):
            for beat in range(3 * WINDOW):
                clocks.observe("a", 100.0 + beat + ahead, 100.0 + beat)
                clocks.observe("b", 100.0 + beat, 100.0 + beat)
    assert [(line["event"], line["instance"]) for line in logs] == [
        ("clock_skew_detected", "a"),
        ("clock_skew_resolved", "a"),
        ("clock_skew_detected", "a"),
    ]


def test_who_says_no_time_or_is_gone_is_not_compared() -> None:
    clocks = Clocks()
    for _ in range(2 * WINDOW):
        clocks.observe("old", 0.0, 5.0)
        clocks.observe("gone", 5.0, 5.0)
    assert dict(clocks.ahead()) == {"gone": 0.0}
    clocks.keep(["old"])
    assert not dict(clocks.ahead())
