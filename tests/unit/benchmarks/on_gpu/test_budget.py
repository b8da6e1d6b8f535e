"""How the time of a GPU run is divided."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.on_gpu.sections import END, QUICK, SECTIONS, Section, allot, soft_limit, together

FIRST = Section("first", "", most=50, least=20)
SECOND = Section("second", "", most=100, least=40)


@pytest.mark.parametrize(
    ("section", "later", "left", "given"),
    [
        (FIRST, [SECOND], 570, 50),
        (SECOND, [FIRST], END + 80, 60),
        (SECOND, [FIRST, FIRST], END + 45, 40),
        (SECOND, [], END + 39.9, None),
    ],
    ids=["its most", "what leaves others their least", "its least before theirs", "not enough"],
)
def test_a_section_gets(section: Section, later: list[Section], left: float, given: float | None) -> None:
    assert allot(section, later, left) == given


def limits(sections: Sequence[Section], budget: float, shares: list[float]) -> Iterator[float | None]:
    """Of all, where each that is run takes its share of its limit."""
    left, groups = budget, together(sections)
    for at, group in enumerate(groups):
        later = [section for other in groups[at + 1 :] for section in other]
        given = [allot(section, later, left) for section in group]
        yield from given
        left -= max((share * limit for share, limit in zip(shares, given, strict=False) if limit), default=0.0)
        shares = shares[len(group) :]
    assert left >= min(budget, END) - 1e-6


@given(st.lists(st.floats(0, 1), min_size=len(SECTIONS), max_size=len(SECTIONS)), st.floats(10, 600))
def test_the_sections_never_take_more_than_the_budget(shares: list[float], budget: float) -> None:
    """Whatever part of its limit each takes."""
    for section, limit in zip(SECTIONS, limits(SECTIONS, budget, shares), strict=True):
        assert limit is None or section.least <= limit <= section.most


@pytest.mark.parametrize("sections", [SECTIONS, QUICK])
def test_all_sections_fit_the_budget_even_if_every_one_hangs(sections: Sequence[Section]) -> None:
    for section, limit in zip(sections, limits(sections, 570.0, [1.0] * len(sections)), strict=True):
        assert limit is not None, f"{section.name} is lost where those before it hang"


def test_neighbours_that_measure_no_time_run_beside_each_other() -> None:
    beside = [replace(FIRST, name=name, beside=True) for name in "ab"]
    assert together([SECOND, *beside, FIRST]) == [[SECOND], beside, [FIRST]]
    assert allot(SECOND, beside, END + 100) == 80


def test_a_section_stops_on_its_own_before_it_is_ended() -> None:
    assert soft_limit(100) == 90
    assert soft_limit(20) == 16
