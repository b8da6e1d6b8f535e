"""Hung or busy, by progress alone."""

from hypothesis import given
from hypothesis import strategies as st

from shared.process import ProgressWatch

LIMIT = 5.0
gaps = st.lists(st.floats(0.01, 4.9), min_size=1, max_size=50)


@given(gaps)
def test_who_moves_is_never_hung(pauses: list[float]) -> None:
    watch, now = ProgressWatch(LIMIT), 0.0
    for count, pause in enumerate(pauses):
        assert not watch.stands_still("r", (count,), True, now)
        now += pause


@given(gaps)
def test_who_has_nothing_to_do_is_never_hung(pauses: list[float]) -> None:
    watch, now = ProgressWatch(LIMIT), 0.0
    for pause in pauses:
        assert not watch.stands_still("r", (1,), False, now)
        now += pause


@given(gaps, st.floats(LIMIT + 0.01, 100))
def test_who_stands_still_with_work_is_hung_at_the_limit(pauses: list[float], more: float) -> None:
    watch, now = ProgressWatch(LIMIT), 0.0
    for count, pause in enumerate(pauses):
        watch.stands_still("r", (count,), True, now)
        last, now = now, now + pause
    stuck = (len(pauses) - 1,)
    assert not watch.stands_still("r", stuck, True, last + LIMIT - 0.01)
    assert watch.stands_still("r", stuck, True, last + more)


@given(st.floats(LIMIT, 100))
def test_idle_time_does_not_count(idle: float) -> None:
    watch = ProgressWatch(LIMIT)
    assert not watch.stands_still("r", (1,), False, 0.0)
    assert not watch.stands_still("r", (1,), True, idle), "only from now on it must move"
    assert watch.stands_still("r", (1,), True, idle + LIMIT + 0.01)


def test_keys_that_are_no_longer_observed_are_dropped() -> None:
    watch = ProgressWatch(LIMIT)
    for epoch in range(100):
        for rank in range(4):
            watch.stands_still((epoch, rank), (0,), True, epoch * 3.0 * LIMIT)
    assert len(watch) == 4
