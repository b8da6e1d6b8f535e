"""The dashboards as they lie in monitoring/dashboards: panels, queries, and what Grafana makes of a query."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "monitoring" / "dashboards"


def scrape_interval() -> float:
    """Seconds between two scrapes, as monitoring/prometheus.yml has it."""
    settings = yaml.safe_load((ROOT / "monitoring" / "prometheus.yml").read_text(encoding="utf-8"))
    return float(settings["global"]["scrape_interval"].removesuffix("s"))


class Query(NamedTuple):
    """One of a panel's, as it is written."""

    expr: str
    legend: str


class Panel(NamedTuple):
    title: str
    description: str
    type: str
    unit: str
    stacked: bool
    maximum: float | None
    place: Mapping[str, int]  # x, y, w and h, in Grafana's grid of 24 columns
    queries: list[Query]
    row: str


class Variable(NamedTuple):
    """One whose values Prometheus is asked for: `label_values(metric, label)`."""

    name: str
    metric: str  # with a selector, perhaps
    label: str


class Dashboard(NamedTuple):
    name: str
    title: str
    panels: list[Panel]
    variables: list[Variable]
    raw: dict[str, Any]


def dashboards() -> list[Dashboard]:
    return [_dashboard(path) for path in sorted(DIRECTORY.glob("*.json"))]


def _dashboard(path: Path) -> Dashboard:
    raw = json.loads(path.read_text(encoding="utf-8"))
    variables = [_variable(given) for given in raw["templating"]["list"] if given["type"] == "query"]
    return Dashboard(path.stem, raw["title"], list(_panels(raw)), variables, raw)


def _variable(given: Mapping[str, Any]) -> Variable:
    matched = re.fullmatch(r"label_values\((.+), (\w+)\)", given["query"]["query"])
    assert matched, given["query"]
    return Variable(given["name"], matched[1], matched[2])


def _panels(raw: Mapping[str, Any]) -> Iterator[Panel]:
    row = ""
    for given in raw["panels"]:
        if given["type"] == "row":
            row = given["title"]
        yield _panel(given, row)


def _panel(given: Mapping[str, Any], row: str) -> Panel:
    defaults = given.get("fieldConfig", {}).get("defaults", {})
    stacking = defaults.get("custom", {}).get("stacking", {}).get("mode")
    queries = [Query(target["expr"], target["legendFormat"]) for target in given.get("targets", ())]
    return Panel(
        given["title"],
        given.get("description", ""),
        given["type"],
        defaults.get("unit", ""),
        stacking == "normal",
        defaults.get("max"),
        given["gridPos"],
        queries,
        row,
    )


def expanded(expr: str, interval: str) -> str:
    """`expr` as Grafana sends it with all models and groups chosen; `interval`: four scrapes, such as `20s`."""
    found = expr.replace("$__rate_interval", interval)
    for name in ("model", "group"):
        found = found.replace(f"${name}", ".*")
    assert "$" not in found, f"a variable that nobody has defined: {found}"
    return found


def names_in(expr: str) -> set[str]:
    """Metrics that a query asks for."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|\bby \([^)]*\)', " ", expr)
    return set(re.findall(r"\b(?:ryzanstein|vllm|process|python)[_:][a-z0-9_:]+", bare))
