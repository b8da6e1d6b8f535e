"""Pictures of dashboards, from answers that are made up here."""

import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.monitoring import draw
from tests.monitoring.dashboards import Query, dashboards
from tests.monitoring.prometheus import Prometheus


class MadeUp(Prometheus):
    """Answers every query with two curves, and those of GPUs with nothing."""

    def __init__(self) -> None:
        self.asked_for: list[str] = []

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[Any]:
        self.asked_for.append(expr)
        if "gpu" in expr:
            return []
        times = [start + step * index for index in range(int((end - start) / step) + 1)]
        return [
            {"metric": {"group": name}, "values": [[at, str(height * math.sin(at / 30) ** 2)] for at in times]}
            for name, height in (("a", 1.0), ("b", 0.4))
        ]


@pytest.mark.slow
@pytest.mark.parametrize("board", dashboards(), ids=lambda board: board.name)
def test_every_query_of_a_dashboard_is_drawn(board: Any, tmp_path: Path) -> None:
    prometheus = MadeUp()
    path = tmp_path / "board.png"
    draw._save(draw._drawn(board, prometheus, 1000.0, 1120.0), path)
    assert len(prometheus.asked_for) == sum(len(panel.queries) for panel in board.panels)
    assert path.stat().st_size < 150 * 1024
    with Image.open(path) as image:
        assert image.width == 1200
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 5, "something has been drawn"


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0125, "s", "12.5 ms"),
        (0.00004, "s", "40 µs"),
        (3, "s", "3 s"),
        (0.25, "percentunit", "25%"),
        (2048, "bytes", "2 KiB"),
        (1500, "ops", "1.5 K /s"),
        (12, "short", "12"),
        (math.nan, "short", "-"),
    ],
)
def test_values_are_shown_with_their_units(value: float, unit: str, shown: str) -> None:
    assert draw._with_unit(value, unit) == shown


def test_a_legend_names_what_it_is_of() -> None:
    assert draw._legend(Query("x", "{{group}}: p95"), {"group": "g"}) == "g: p95"
    assert draw._legend(Query("x", ""), {"group": "g"}) == "g"
