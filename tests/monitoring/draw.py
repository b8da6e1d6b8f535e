"""`python -m tests.monitoring.draw`: pictures of the dashboards, drawn from their JSON and a real Prometheus.

It is not Grafana that draws them: the panels lie where the JSON says, and show what their queries give.
"""

import argparse
import io
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
from PIL import Image

from tests.monitoring.dashboards import ROOT, Dashboard, Panel, Query, dashboards, expanded, scrape_interval
from tests.monitoring.observed import Observed, Traffic, observed, seconds_until_shown, submit_batch
from tests.monitoring.prometheus import Prometheus, until
from tests.prometheus import PROMETHEUS

mpl.use("agg")

from matplotlib import pyplot as plt  # after the choice of what it draws with
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SCRAPE = scrape_interval()
STEP = 5.0
COLUMN, ROW = 0.5, 0.3  # inches of Grafana's grid
COLORS = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642")
INK, LINE, PAPER = "#24292e", "#d8dade", "#ffffff"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.monitoring.draw", description=__doc__)
    parser.add_argument("--seconds", type=float, default=150, help="how long the stack is watched")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "images")
    given = parser.parse_args(arguments)
    if PROMETHEUS is None:
        print(
            "error: there is no `prometheus` on the path; install it (Debian: apt install prometheus).", file=sys.stderr
        )
        return 1
    with (
        tempfile.TemporaryDirectory() as directory,
        observed(Path(directory), "--replicas", "2", step_ms=10, scrape=SCRAPE) as house,
    ):
        began = time.time()
        delays = _live(house, given.seconds)
        print(f"a request was in Prometheus after {', '.join(f'{delay:.1f}' for delay in delays)} s", flush=True)
        assert house.prometheus is not None
        for board in dashboards():
            path = given.into / f"dashboard-{board.name}.png"
            _save(_drawn(board, house.prometheus, began, time.time()), path)
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", flush=True)
    return 0


def _live(house: Observed, seconds: float) -> list[float]:
    """Load that rises and falls, a batch job, a ring that is killed, and first some requests that are waited for until
    Prometheus has them: returns how long that took."""
    expr = "sum(ryzanstein_gateway_requests_total)"
    url, delays = house.stack.url, []
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        for _ in range(5):
            time.sleep(0.7)
            assert http.post("/v1/completions", json={"model": "stub", "prompt": "x", "max_tokens": 1}).is_success
            before = float(house.prometheus.query(expr)[0]["value"][1]) if _known(house, expr) else 0.0
            delays.append(seconds_until_shown(house, expr, before))
        end = time.monotonic() + seconds
        with Traffic(url, 6, pause=0.3):
            _rest(seconds / 3)
            submit_batch(http, lines=1500)
            with Traffic(url, 12, pause=0.15):
                _rest(seconds / 6)
                _kill_a_ring(house)
                _rest(seconds / 6)
            _rest(end - time.monotonic())
    return delays


def _kill_a_ring(house: Observed) -> None:
    """Another goes on with what it had, and it comes back."""
    ranks = [process for process in house.stack.descendants() if "services.executor.rank" in process.cmdline()]
    ranks[0].kill()


def _known(house: Observed, expr: str) -> bool:
    return house.prometheus is not None and bool(house.prometheus.query(expr))


def _rest(seconds: float) -> None:
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() >= end, seconds + 10)


# --- drawing ---------------------------------------------------------------------------------------


def _drawn(board: Dashboard, prometheus: Prometheus, begin: float, end: float) -> Figure:
    rows = max(panel.place["y"] + panel.place["h"] for panel in board.panels)
    figure = plt.figure(figsize=(24 * COLUMN, (rows + 1.4) * ROW), facecolor=PAPER)
    whole = rows + 1.4
    figure.text(0.008, 1 - 0.5 / whole, board.title, fontsize=11, color=INK, weight="bold", va="center")
    for panel in board.panels:
        place = panel.place
        x, y = place["x"] / 24, 1 - (place["y"] + 1.2 + place["h"]) / whole
        if panel.type == "row":
            figure.text(0.008, y + 0.5 / whole, panel.title, fontsize=8, color=INK, weight="bold", va="center")
            continue
        box = (x + 0.004, y + 0.1 / whole, place["w"] / 24 - 0.008, (place["h"] - 0.2) / whole)
        if panel.type == "stat":
            _stat(figure.add_axes(box), panel, prometheus, end)
        else:
            _graph(figure, box, whole, panel, prometheus, begin, end)
    return figure


def _stat(axes: Axes, panel: Panel, prometheus: Prometheus, end: float) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(LINE)
    (result,) = [prometheus.query_range(_expanded(query), end, end, STEP) for query in panel.queries]
    values = [float(sample["values"][-1][1]) for sample in result]
    shown = _with_unit(values[0], panel.unit) if values else "No data"
    axes.text(0.5, 0.42, shown, ha="center", va="center", fontsize=14, color="#1f78c1", weight="bold")
    axes.text(0.04, 0.88, panel.title, ha="left", va="center", fontsize=6.5, color=INK)


def _graph(
    figure: Figure,
    box: tuple[float, float, float, float],
    whole: float,
    panel: Panel,
    prometheus: Prometheus,
    begin: float,
    end: float,
) -> None:
    x, y, width, height = box
    axes = figure.add_axes((x + 0.032, y + 1.25 / whole, width - 0.036, height - 2.2 / whole))
    figure.text(x + 0.002, y + height - 0.45 / whole, panel.title, fontsize=7, color=INK, va="center")
    lines = [
        (_legend(query, sample["metric"]), [(float(at) - end, float(value)) for at, value in sample["values"]])
        for query in panel.queries
        for sample in prometheus.query_range(_expanded(query), begin, end, STEP)
    ]
    colors = [COLORS[index % len(COLORS)] for index in range(len(lines))]
    if panel.stacked and lines:
        _stack(axes, lines, colors, begin - end)
    else:
        for (name, points), color in zip(lines, colors, strict=True):
            axes.plot(*zip(*points, strict=True), color=color, linewidth=0.9, label=name, clip_on=False)
    if not lines:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", fontsize=7, color="#888888")
    axes.set_xlim(begin - end, 0)
    top = axes.get_ylim()[1]
    axes.set_ylim(0, panel.maximum if panel.maximum is not None else max(top, 1e-9))
    _axis(axes, panel)
    if lines:
        axes.legend(
            loc="upper left", bbox_to_anchor=(-0.08, -0.13), ncols=min(4, len(lines)), fontsize=5, frameon=False,
            handlelength=1, columnspacing=0.8, handletextpad=0.4, borderpad=0, labelspacing=0.2,
        )  # fmt: skip


def _stack(axes: Axes, lines: list[tuple[str, list[tuple[float, float]]]], colors: list[str], begin: float) -> None:
    times = [begin + STEP * index for index in range(math.floor(-begin / STEP) + 1)]
    heights = []
    for _, points in lines:
        at = {round((moment - begin) / STEP): value for moment, value in points}
        known = [at.get(index, 0.0) for index in range(len(times))]
        heights.append([0.0 if math.isnan(value) else value for value in known])
    axes.stackplot(times, *heights, labels=[name for name, _ in lines], colors=colors, alpha=0.6, linewidth=0.4)


def _axis(axes: Axes, panel: Panel) -> None:
    axes.tick_params(labelsize=5, colors="#666666", length=0, pad=1)
    axes.grid(color=LINE, linewidth=0.4)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.yaxis.set_major_locator(plt.MaxNLocator(4))
    axes.yaxis.set_major_formatter(lambda value, _: _with_unit(value, panel.unit))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s" if value else "now")


def _expanded(query: Query) -> str:
    return expanded(query.expr, f"{4 * SCRAPE:g}s")


def _legend(query: Query, labels: Mapping[str, Any]) -> str:
    found = query.legend or " ".join(labels.values())
    for name, value in labels.items():
        found = found.replace("{{" + name + "}}", value)
    return found


def _with_unit(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "s":
        return _seconds(value)
    if unit == "percentunit":
        return f"{value * 100:.4g}%"
    if unit == "bytes":
        return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB"))
    suffix = {"reqps": " req/s", "ops": " /s"}.get(unit, "")
    return _scaled(value, 1000, ("", " K", " M", " G")) + suffix


def _seconds(value: float) -> str:
    if value == 0 or value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def _scaled(value: float, base: int, names: Sequence[str]) -> str:
    for name in names[:-1]:
        if abs(value) < base:
            return f"{value:.3g}{name}"
        value /= base
    return f"{value:.3g}{names[-1]}"


def _save(figure: Figure, path: Path) -> None:
    """With few colours: a picture in a repository is to be small."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100, facecolor=PAPER)
    plt.close(figure)
    image = Image.open(buffer).convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE)
    image.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
