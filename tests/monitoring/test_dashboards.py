"""The dashboards ask for what there is, and every panel says what it shows."""

import json

import pytest

from tests.monitoring.catalogue import series
from tests.monitoring.dashboards import ROOT, Dashboard, dashboards, expanded, names_in, scrape_interval

ALL = {board.name: board for board in dashboards()}


@pytest.fixture(params=sorted(ALL))
def board(request: pytest.FixtureRequest) -> Dashboard:
    return ALL[request.param]


def test_there_is_a_dashboard_for_each_question() -> None:
    assert set(ALL) == {"overview", "rings", "control-plane", "batches"}
    assert len({board.raw["uid"] for board in ALL.values()}) == len(ALL)


def test_every_metric_that_is_asked_for_exists(board: Dashboard) -> None:
    known = series()
    asked = {name for panel in board.panels for query in panel.queries for name in names_in(query.expr)}
    asked |= {name for variable in board.variables for name in names_in(variable.metric)}
    assert asked - known == set()


def test_every_panel_says_what_it_shows_and_in_which_unit(board: Dashboard) -> None:
    for panel in board.panels:
        if panel.type != "row":
            assert panel.description.endswith("."), panel.title
            assert panel.unit, panel.title
            assert panel.queries, panel.title


def test_every_variable_of_a_query_is_defined(board: Dashboard) -> None:
    defined = {given["name"] for given in board.raw["templating"]["list"]}
    assert "datasource" in defined
    text = json.dumps(board.raw["panels"])
    for name in ("model", "group"):
        assert (f"${name}" in text) <= (name in defined), name
    for panel in board.panels:
        for query in panel.queries:
            expanded(query.expr, "20s")


def test_panels_do_not_overlap_and_fit_the_grid(board: Dashboard) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in board.panels:
        place = panel.place
        assert place["x"] + place["w"] <= 24, panel.title
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel.title) == panel.title
    assert len({panel["id"] for panel in board.raw["panels"]}) == len(board.panels)


def test_every_dashboard_is_read_again_as_often_as_services_are_scraped(board: Dashboard) -> None:
    assert board.raw["refresh"] == f"{scrape_interval():g}s"


def test_the_documentation_has_a_picture_of_each(board: Dashboard) -> None:
    page = (ROOT / "docs" / "dashboards.md").read_text(encoding="utf-8")
    assert f"images/dashboard-{board.name}.png" in page
    picture = ROOT / "docs" / "images" / f"dashboard-{board.name}.png"
    assert 10_000 < picture.stat().st_size < 150 * 1024


def test_names_are_found_in_queries() -> None:
    expr = 'sum by (le) (rate(ryzanstein_a_seconds_bucket{model=~"ryzanstein_no"}[5m])) / ryzanstein_b_total'
    assert names_in(expr) == {"ryzanstein_a_seconds_bucket", "ryzanstein_b_total"}
