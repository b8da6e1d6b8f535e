"""How the time of a GPU run is divided."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.on_gpu.budget import END, Section, allot, soft_limit
from benchmarks.on_gpu.sections import SECTIONS

FIRST = Section("first", "", most=50, least=20)
SECOND = Section("second", "", most=100, least=40)


def test_a_section_gets_its_most_where_there_is_enough() -> None:
    assert allot(FIRST, [SECOND], 570) == 50


def test_those_after_it_keep_their_least() -> None:
    assert allot(SECOND, [FIRST], END + 80) == 60


def test_an_earlier_section_goes_before_the_least_of_later_ones() -> None:
    assert allot(SECOND, [FIRST, FIRST], END + 45) == 40


def test_a_section_that_does_not_fit_is_skipped() -> None:
    assert allot(SECOND, [], END + 39.9) is None


@given(st.lists(st.floats(0, 1), min_size=len(SECTIONS), max_size=len(SECTIONS)), st.floats(10, 600))
def test_the_sections_never_take_more_than_the_budget(shares: list[float], budget: float) -> None:
    """Whatever part of its limit each takes."""
    left = budget
    for at, (section, share) in enumerate(zip(SECTIONS, shares, strict=True)):
        limit = allot(section, SECTIONS[at + 1 :], left)
        if limit is not None:
            assert section.least <= limit <= section.most
            left -= share * limit
    assert left >= min(budget, END) - 1e-6


def test_all_sections_fit_the_budget_even_if_every_one_hangs() -> None:
    left = 570.0
    for at, section in enumerate(SECTIONS):
        limit = allot(section, SECTIONS[at + 1 :], left)
        assert limit is not None, f"{section.name} is lost where those before it hang"
        left -= limit


def test_a_section_stops_on_its_own_before_it_is_ended() -> None:
    assert soft_limit(100) == 90
    assert soft_limit(20) == 16
