"""How far the journal is behind, by what it has stored and what it has not."""

from services.gateway.lifecycle.records import WINDOW, JournalLag


def test_what_waits_counts_with_its_age_and_what_is_stored_with_the_time_it_took() -> None:
    lag = JournalLag()
    assert lag.seconds(0) == 0
    lag.given(10.0)
    lag.given(11.0)
    assert lag.seconds(12.0) == 2.0
    lag.stored(12.5)
    assert lag.seconds(12.5) == 2.5, "longer than the age of the other"
    lag.stored(12.6)
    assert lag.seconds(13.0) == 2.5, "the slowest of the second"
    assert lag.seconds(12.5 + WINDOW) == 2.5
    assert lag.seconds(12.7 + WINDOW) == 0


def test_many_records_of_a_second_take_no_room() -> None:
    lag = JournalLag()
    for number in range(10_000):
        lag.given(number / 1000)
        lag.stored(number / 1000 + 0.0005)
    assert len(lag._slowest) <= WINDOW + 1
