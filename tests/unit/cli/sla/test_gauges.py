"""Prometheus' samples to figures."""

import math

from hypothesis import given
from hypothesis import strategies as st

from services.cli.sla.gauges import Counters, Evidence, Gauges, lacks
from services.cli.sla.intervals import Interval
from services.cli.sla.report import Scope
from services.cli.sla.series import Samples, Series, growth, spans

STEP = 10.0
PERIOD = Interval(0.0, 200.0)
GRID = [STEP * number for number in range(21)]


def series(values: dict[float, float] | Samples, **labels: str) -> Series:
    return Series(labels, sorted(dict(values).items()))


def steady(value: float = 1.0, begin: float = 0.0, **labels: str) -> Series:
    return series({at: value for at in GRID if at >= begin}, **labels)


def counted(steps: dict[float, float], begin: float = 0.0, **labels: str) -> Series:
    """A counter that grows by so much at these moments."""
    return series(
        {at: sum(by for when, by in steps.items() if when <= at) for at in GRID if at >= begin}, **labels
    )


def evidence(requests: list[Series] = [], **gauges: list[Series]) -> list[Scope]:  # noqa: B006
    counters = Counters(requests, [], [], [], [], [], [], STEP)
    known = {"scraped": [steady()], "gateways": [steady()], "ready": [steady()], "ready_of": []} | gauges
    return Evidence(counters, Gauges(**known, step=STEP), PERIOD).scopes()


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=5))
def test_a_counter_that_restarts_loses_nothing_that_was_seen(lives: list[list[int]]) -> None:
    """Each life begins anew, and is seen first while it is still below where the last was."""
    values: list[float] = []
    grown = 0.0
    for number, life in enumerate(lives):
        first = 0.0 if number else float(life[0])
        reached = [first + sum(life[: count + 1]) for count in range(len(life))]
        values += [first, *reached]
        grown += reached[-1] - (first if not number else 0.0)
    samples = [(float(at), value) for at, value in enumerate(values)]
    assert growth(Series({}, samples), known_since=0.0) == grown


def test_a_series_that_appears_began_at_nothing() -> None:
    late = series({50.0: 2.0, 60.0: 3.0})
    assert growth(late, known_since=0.0) == 3
    assert growth(late, known_since=50.0) == 1, "it may have counted before anybody looked"


def test_a_sample_speaks_for_the_step_before_it() -> None:
    samples = [(10.0, 0.0), (20.0, 1.0), (30.0, 1.0), (40.0, 0.0), (60.0, 1.0)]
    assert spans(samples, STEP) == [Interval(10, 30), Interval(50, 60)]


def test_requests_are_told_by_their_status() -> None:
    status = {"200": 5, "101": 1, "400": 2, "429": 3, "499": 1, "500": 1, "503": 2, "504": 1, "507": 1}
    requests = [counted({50.0: float(count)}, model="m", status=code) for code, count in status.items()]
    whole, single = evidence(requests)
    assert whole.requests == single.requests
    found = whole.requests
    assert (found.completed, found.refused, found.cancelled, found.failed) == (6, 5, 1, 5)
    assert found.error_rate == 5 / 11


def test_the_first_failure_of_all_is_seen() -> None:
    """`increase()` is 0 for a series that begins with 1."""
    requests = [counted({}, model="m", status="200"), steady(1.0, begin=100.0, model="m", status="503")]
    assert evidence(requests)[0].requests.failed == 1


def test_a_model_without_a_group_is_down_and_the_others_are_not() -> None:
    up = {at: 1.0 for at in GRID if at < 50 or at > 100}
    ready_of = [series(up, model="m"), steady(model="n")]
    whole, m, n = evidence(ready_of=ready_of)
    assert [(one.begin, one.end) for one in m.outages] == [(40, 100)]
    assert (m.mttr, n.downtime, whole.downtime) == (60, 0, 60)
    assert m.outages[0].reasons == ["no ready group"]


def test_nobody_misses_a_model_before_it_was_loaded() -> None:
    assert evidence(ready_of=[steady(begin=100, model="m")])[1].outages == []


def test_without_any_group_or_gateway_all_is_down() -> None:
    ready = [series({at: float(not 30 <= at <= 50) for at in GRID})]
    gateways = [series({at: float(at != 100) for at in GRID})]
    whole = evidence(ready=ready, gateways=gateways)[0]
    assert [(one.begin, one.end, one.reasons) for one in whole.outages] == [
        (20, 50, ["no ready group"]),
        (90, 100, ["no gateway"]),
    ]
    assert whole.availability == 1 - 40 / 200
    assert whole.mttr == 20


def test_failures_in_a_row_are_an_outage() -> None:
    good = counted({30.0: 1, 110.0: 1}, model="m", status="200")
    bad = counted({30.0: 9, 60.0: 2, 80.0: 2, 150.0: 2}, model="m", status="503")
    assert [(one.begin, one.end, one.reasons) for one in evidence([good, bad])[0].outages] == [
        (50, 100, ["failing"])
    ]


def test_what_failed_before_its_model_was_known_is_an_outage_of_all() -> None:
    bad = counted({60.0: 3}, model="", status="503")
    good = counted({100.0: 1}, model="", status="200")
    whole = evidence([bad, good])
    assert [one.reasons for one in whole[0].outages] == [["failing"]]
    assert len(whole) == 1


def test_what_prometheus_has_forgotten_is_neither_up_nor_down() -> None:
    scraped = [series({at: 1.0 for at in GRID if at >= 100})]
    ready = [series({at: float(at > 150) for at in GRID if at >= 100})]
    whole = evidence(scraped=scraped, ready=ready)[0]
    assert (whole.downtime, whole.availability) == (60, 1 - 60 / 110)
    assert whole.repaired == 0, "nobody saw it begin"


def test_percentiles_are_of_all_instances() -> None:
    first = [
        counted({50.0: 4.0}, model="m", le=bound, instance=one)
        for bound in ("0.1", "1.0", "+Inf")
        for one in ("a", "b")
    ]
    counters = Counters([], first, [], [], [], [], [], STEP)
    found = Evidence(counters, Gauges([steady()], [], [], [], STEP), PERIOD).scopes()[0].first_token
    assert (found.count, found.p50.at_most if found.p50 else math.inf) == (8, 0.1)


def test_what_is_missing_is_said() -> None:
    assert len(lacks(Gauges([], [], [], [], STEP), [])) == 3
    assert lacks(Gauges([], [steady()], [steady()], [steady(model="m")], STEP), []) == []
