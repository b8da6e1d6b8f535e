"""Targets, and how a report is shown."""

from zoneinfo import ZoneInfo

import msgspec
import pytest
from rich.console import Console

from services.cli.sla.periods import Interval
from services.cli.sla.report import (
    Outage,
    Percentiles,
    Quantile,
    Report,
    ReportScope,
    Requests,
    Tokens,
    judge,
    markdown,
    print_report,
    seconds,
)

NONE = Percentiles(0)
ZONE = ZoneInfo("Europe/Zurich")


def scope(model: str = "", **changes: object) -> ReportScope:
    fields: dict[str, object] = {
        "model": model,
        "requests": Requests(1000, 1),
        "error_rate": 1 / 1001,
        "availability": 0.9995,
        "downtime": 43.0,
        "outages": [],
        "repaired": 0,
        "mttr": None,
        "first_token": NONE,
        "between_tokens": NONE,
        "end_to_end": NONE,
        "tokens": Tokens(),
    }
    return ReportScope(**(fields | changes))  # type: ignore[arg-type]


def test_targets_are_judged_by_the_worst_scope() -> None:
    scopes = [
        scope(),
        scope("good", availability=1.0, error_rate=0.0),
        scope("bad", availability=0.99, error_rate=0.002),
    ]
    found = {verdict.indicator: verdict for verdict in judge({"availability": 0.999, "error_rate": 0.001}, scopes)}
    assert (found["availability"].model, found["availability"].met) == ("bad", False)
    assert (found["error_rate"].model, found["error_rate"].met) == ("bad", False)
    met = judge({"availability": 0.99, "error_rate": 0.002}, scopes)
    assert [verdict.met for verdict in met] == [True, True], "a target that is just reached is met"


def test_what_is_not_shown_is_not_met() -> None:
    (verdict,) = judge({"error_rate": 0.001}, [scope(error_rate=None)])
    assert (verdict.met, verdict.actual) == (False, None)
    (verdict,) = judge({"end_to_end_p95": 5.0}, [scope()])
    assert not verdict.met


@pytest.mark.parametrize(("target", "met"), [(0.2, True), (0.19, False)])
def test_a_percentile_against_its_target(target: float, met: bool) -> None:
    some = Percentiles(5, Quantile(0.1, 0.1, 0.1), Quantile(0.2, 0.1, 0.25), Quantile(0.3, 0.25, None))
    (verdict,) = judge({"first_token_p95": target}, [scope(), scope("m", first_token=some)])
    assert (verdict.met, verdict.model) == (met, "m")


def test_an_outage_that_goes_on_has_not_been_repaired() -> None:
    assert judge({"mttr": 300}, [scope()])[0].met, "nothing had to be repaired"
    assert judge({"mttr": 300}, [scope(mttr=299.0)])[0].met
    open_end = Outage(0.0, 400.0, ["silent"], ongoing=True)
    assert not judge({"mttr": 300}, [scope(mttr=10.0, outages=[open_end])])[0].met


def report() -> Report:
    outages = [Outage(1_774_780_000.0 + 100 * at, 1_774_780_030.0 + 100 * at, ["silent"], False) for at in range(25)]
    some = Percentiles(5, Quantile(0.0123, 0.01, 0.02), Quantile(0.2, 0.1, 0.25), Quantile(120.0, 120.0, None))
    scopes = [scope(outages=outages, first_token=some), scope("a|b", outages=outages[:1], mttr=30.0, repaired=1)]
    return Report(
        "journal",
        1_774_776_000.0,
        1_774_783_200.0,
        [Interval(1_774_779_600.0, 1_774_783_200.0)],
        scopes,
        ["something to know"],
        judge({"availability": 0.9999, "first_token_p95": 1.0}, scopes),
    )


def test_the_table_has_everything() -> None:
    screen = Console(width=60, record=True, force_terminal=False)
    print_report(report(), screen, ZONE)
    text = screen.export_text()
    for said in (
        "Covered: 50.0% of it",
        "2026-03-29 12:20:00+02:00",
        "99.950%",
        "0.100%",
        "12.3 ms / 200 ms / over 2 min",
        "5 more",
        "silent (a|b)",
        "something to know",
    ):
        assert said in text, said
    assert [line for line in text.splitlines() if line.startswith("availability ")][-1].endswith("NO")


def test_markdown_has_tables_whose_rows_are_as_long_as_their_heads() -> None:
    text = markdown(report(), ZONE)
    sections = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(sections) == 6
    for rows in sections:
        assert len({row.replace("\\|", "").count("|") for row in rows}) == 1


def test_json_is_read_again() -> None:
    assert msgspec.json.decode(msgspec.json.encode(report()), type=Report) == report()


@pytest.mark.parametrize(
    ("value", "shown"), [(0.00123, "1.23 ms"), (0.25, "250 ms"), (90, "90 s"), (600, "10 min"), (86_400, "24 h")]
)
def test_times(value: float, shown: str) -> None:
    assert seconds(value) == shown
