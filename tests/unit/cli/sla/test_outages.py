"""Outages from their causes: properties, against a count of the single seconds."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.cli.sla.periods import Interval
from services.cli.sla.report import outages_of

LINE = 40
spans = st.builds(
    lambda begin, length: Interval(float(begin), float(begin + length)), st.integers(0, LINE), st.integers(0, LINE)
)
causes = st.lists(st.tuples(spans, st.sampled_from(("silent", "failing"))), max_size=12)


def seconds(intervals: list[Interval]) -> set[int]:
    """The whole seconds that they hold: the model of a union."""
    return {at for one in intervals for at in range(int(one.begin), int(one.end))}


@given(causes, spans)
def test_outages_are_the_union_of_all_causes_within_what_is_covered(
    given: list[tuple[Interval, str]], covered: Interval
) -> None:
    found = outages_of(given, covered)  # type: ignore[arg-type]
    expected = seconds([one for one, _ in given]) & seconds([covered])
    assert seconds([Interval(one.begin, one.end) for one in found]) == expected
    assert all(one.end < two.begin for one, two in pairwise(found)), "in order, and apart"
    for outage in found:
        own = {why for one, why in given if one.begin <= outage.end and outage.begin <= one.end}
        assert outage.reasons
        assert set(outage.reasons) <= own
        assert outage.reasons == sorted(set(outage.reasons))
        assert outage.ongoing == (outage.end == covered.end)


def test_causes_that_overlap_are_one_outage_with_both_reasons() -> None:
    found = outages_of([(Interval(5, 20), "silent"), (Interval(15, 35), "failing")], Interval(0, 30))
    assert [(one.begin, one.end, one.reasons, one.ongoing) for one in found] == [(5, 30, ["failing", "silent"], True)]
