"""A running stack, its /metrics, and every query of the dashboards in a real Prometheus."""

import math
import shutil
import subprocess
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.monitoring.catalogue import series
from tests.monitoring.dashboards import Panel, dashboards, expanded
from tests.monitoring.observed import JOBS, RULES, Observed, Traffic, observed, seconds_until_shown
from tests.monitoring.prometheus import Prometheus, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

INTERVAL = "4s"  # of a rate: four scrapes
MAY_BE_EMPTY = "GPUs (where there are any)"  # the row of what this machine need not have
BOARDS = {board.name: board for board in dashboards()}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    with observed(tmp_path_factory.mktemp("observed")) as found:
        yield found


@pytest.fixture(scope="module")
def busy(house: Observed) -> Iterator[Observed]:
    """With clients."""
    with Traffic(house.stack.url) as traffic:
        until(lambda: traffic.answers > 20, 60)
        yield house


@pytest.fixture
def prometheus(busy: Observed) -> Prometheus:
    if busy.prometheus is None:
        pytest.skip("There is no `prometheus` on the path: NO QUERY OF A DASHBOARD WAS RUN. Debian has a package.")
    return busy.prometheus


def test_every_metric_of_a_running_service_is_in_the_catalogue(busy: Observed) -> None:
    known = series()
    for text in chain.from_iterable(map(busy.metrics, JOBS)):
        found = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
        assert found - known == set(), "add it to tests/monitoring/catalogue.py"
        assert "ryzanstein_service_ready" in found


def test_promtool_finds_nothing_to_say(busy: Observed) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("There is no `promtool` on the path: ONLY OUR OWN RULES FOR NAMES WERE CHECKED.")
    for text in chain.from_iterable(map(busy.metrics, JOBS)):
        ours = "".join(line + "\n" for line in text.splitlines() if "vllm:" not in line)  # the colon is theirs
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=ours, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_what_has_happened_is_in_the_scrapes_behind_it(house: Observed) -> None:
    """Nothing but the second for which a text is kept stands between what has happened and a scrape."""
    body = {"model": "stub", "prompt": "x", "max_tokens": 3}
    before = {name: value(house, *name) for name in COUNTED}
    assert httpx.post(f"{house.stack.url}/v1/completions", json=body, trust_env=False).status_code == 200
    until(lambda: all(value(house, *name) > before[name] for name in COUNTED), 20)


COUNTED = (
    ("ryzanstein-executor", "ryzanstein_executor_output_tokens_total"),
    ("ryzanstein-executor", "ryzanstein_executor_prefill_seconds_count"),
    ("ryzanstein-gateway", "ryzanstein_gateway_requests_total"),
    ("ryzanstein-scheduler", "ryzanstein_scheduler_dispatched_total"),
)


def value(house: Observed, job: str, name: str) -> float:
    """The sum of a metric's samples."""
    return sum(
        sample.value
        for text in house.metrics(job)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


def numbers(result: list[Any]) -> list[float]:
    values = [float(sample["value"][1]) for sample in result]
    return [value for value in values if not math.isnan(value)]


def empty(prometheus: Prometheus, panel: Panel) -> list[str]:
    """The panel's queries that show nothing. Fails on one that Prometheus refuses."""
    return [query.expr for query in panel.queries if not numbers(prometheus.query(expanded(query.expr, INTERVAL)))]


def must_show(panel: Panel) -> bool:
    return bool(panel.queries) and panel.row != MAY_BE_EMPTY


def test_every_panel_of_a_dashboard_shows_something(prometheus: Prometheus) -> None:
    panels = [panel for board in BOARDS.values() for panel in board.panels]
    for panel in panels:
        empty(prometheus, panel)  # no query is refused, whether there must be data or not
    wanted = [panel for panel in panels if must_show(panel)]

    def missing() -> dict[str, list[str]]:
        return {panel.title: found for panel in wanted if (found := empty(prometheus, panel))}

    try:
        until(lambda: not missing(), 30, 0.5)
    except AssertionError:
        assert missing() == {}


def test_every_variable_of_a_dashboard_has_values(prometheus: Prometheus) -> None:
    for board in BOARDS.values():
        for variable in board.variables:
            found = prometheus.label_values(expanded(variable.metric, INTERVAL), variable.label)
            assert any(found), variable.name


def test_every_rule_can_be_evaluated(prometheus: Prometheus) -> None:
    """Those of monitoring/rules: Prometheus has loaded them, and refuses none of their queries."""
    rules = [rule for group in prometheus.asked("/api/v1/rules")["groups"] for rule in group["rules"]]
    written = sum(path.read_text(encoding="utf-8").count(" expr:") for path in RULES.glob("*.yml"))
    assert len(rules) == written
    for rule in rules:
        prometheus.query(rule["query"])


def test_vllms_names_are_answered(prometheus: Prometheus) -> None:
    for expr in (
        'sum by (model_name) (vllm:num_requests_waiting{model_name="stub"})',
        'vllm:num_requests_running{model_name="stub"}',
        f"histogram_quantile(0.9, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[{INTERVAL}])))",
        f'rate(vllm:request_success_total{{finished_reason="length"}}[{INTERVAL}])',
    ):
        until(lambda asked=expr: bool(numbers(prometheus.query(asked))), 30, 0.5)  # type: ignore[misc]


def test_a_request_is_on_the_dashboard_soon(house: Observed, prometheus: Prometheus) -> None:
    """How soon is said by `python -m tests.monitoring.draw`; here, that it comes."""
    expr = "sum(ryzanstein_gateway_requests_total)"
    (before,) = numbers(prometheus.query(expr))
    seconds_until_shown(house, expr, before)
