"""Spans of time: properties, against a count of the single seconds."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.cli.sla.periods import Interval, length_of, merged, repairs
from services.cli.sla.report import Percentiles, Reason, Requests, Scope, Tokens, scope_of

LINE = 40
spans = st.builds(
    lambda begin, length: Interval(float(begin), float(begin + length)),
    st.integers(0, LINE),
    st.integers(0, LINE),
)
many = st.lists(spans, max_size=8)


def seconds(intervals: list[Interval]) -> set[int]:
    """The whole seconds that they hold: the model of a union."""
    return {at for one in intervals for at in range(int(one.begin), int(one.end))}


@given(many)
def test_a_union_is_in_order_apart_and_holds_the_same(intervals: list[Interval]) -> None:
    union = merged(intervals)
    assert seconds(union) == seconds(intervals)
    assert all(one.end < two.begin for one, two in pairwise(union))
    assert length_of(intervals) == len(seconds(intervals))


@given(many, spans)
def test_repairs_are_counted_where_both_ends_were_seen(outages: list[Interval], window: Interval) -> None:
    found = repairs(outages, [window])
    whole = [one for one in merged(outages) if window.begin < one.begin and one.end < window.end]
    assert found.number == len(whole)
    assert found.mean == (sum(one.seconds for one in whole) / len(whole) if whole else None)


def downtime_of(causes: Sequence[tuple[Reason, Interval]], covered: Sequence[Interval]) -> Scope:
    none = dict.fromkeys(("first_token", "between_tokens", "end_to_end"), Percentiles(0))
    return scope_of("m", Requests(), causes, covered, tokens=Tokens(), **none)


@given(many, many, many)
def test_downtime_is_the_union_of_all_causes_within_what_is_covered(
    silent: list[Interval], failing: list[Interval], covered: list[Interval]
) -> None:
    covered = merged(covered)
    causes: list[tuple[Reason, Interval]] = [("silent", one) for one in silent] + [
        ("failing", one) for one in failing
    ]
    down = downtime_of(causes, covered)
    expected = (seconds(silent) | seconds(failing)) & seconds(covered)
    assert down.downtime == len(expected)
    assert seconds([Interval(one.begin, one.end) for one in down.outages]) == expected
    if covered:
        assert down.availability is not None
        assert abs(down.availability - (1 - len(expected) / len(seconds(covered)))) < 1e-9
    else:
        assert down.availability is None
    for outage in down.outages:
        own = [name for name, some in (("failing", failing), ("silent", silent)) for one in some]
        assert set(outage.reasons) <= set(own)
        assert outage.reasons
        assert outage.ongoing == (outage.end == covered[-1].end)


def test_an_outage_is_two_where_nothing_was_recorded_between() -> None:
    down = downtime_of([("silent", Interval(5, 35))], [Interval(0, 10), Interval(30, 40)])
    assert [(one.begin, one.end, one.ongoing) for one in down.outages] == [(5, 10, False), (30, 35, False)]
    assert (down.downtime, down.availability) == (10, 0.5)
    assert (down.repaired, down.mttr) == (0, None), "nobody saw both ends of either"
