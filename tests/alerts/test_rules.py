"""The rules are whole: each alert says what it must, has its runbook and a test of fire and of quiet."""

import re
import subprocess
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.alerts import rules
from tests.alerts.page import alerts_table, index_table
from tests.alerts.prometheus import need

DOCUMENT = rules.load()
ALERTS = rules.alerts(DOCUMENT)
# Milliseconds that a page waits at most: with a scrape and an evaluation it comes within two minutes.
LONGEST = 60_000


@pytest.fixture(params=ALERTS, ids=lambda alert: alert["alert"])
def alert(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def test_there_are_enough_each_once() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(names) == len(set(names)) >= 12


def test_each_says_what_it_must(alert: dict[str, Any]) -> None:
    assert alert["alert"].startswith("Ryzanstein")
    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in ("page", "ticket")
    notes = alert["annotations"]
    assert notes.keys() == {"summary", "description", "runbook_url"}
    assert all(isinstance(note, str) and note for note in notes.values())
    assert notes["summary"].endswith(".")
    assert notes["description"].endswith(".")


def test_each_has_its_runbook(alert: dict[str, Any]) -> None:
    name = rules.kebab(alert["alert"])
    assert alert["annotations"]["runbook_url"].endswith(f"docs/runbooks/{name}.md")
    text = (rules.MONITORING.parent / "docs" / "runbooks" / f"{name}.md").read_text()
    assert text.startswith(f"# {alert['alert']}\n\n**{alert['labels']['severity']}** · ")
    headings = ["What it means", "Impact", "Check", "Causes", "What to do", "It is over when"]
    assert re.findall(r"(?m)^## (.+)$", text) == headings
    assert "**Expected**: " in text


def test_a_page_comes_within_two_minutes(alert: dict[str, Any]) -> None:
    if alert["labels"]["severity"] == "page":
        assert rules.milliseconds(alert.get("for", "0s")) <= LONGEST


def test_every_recorded_series_is_read_and_every_read_one_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules.rules(DOCUMENT) if "record" in rule}
    read = {name for rule in rules.rules(DOCUMENT) for name in rules.names_in(rule["expr"]) if ":" in name}
    assert read == recorded


def test_each_is_tested_in_fire_and_in_quiet(alert: dict[str, Any]) -> None:
    fire, quiet = [], []
    for path in rules.TESTS.glob("*.yml"):
        for test in yaml.safe_load(path.read_text())["tests"]:
            for one in test["promql_expr_test"]:
                fire += [sample["labels"] for sample in one["exp_samples"]]
                quiet += [] if one["exp_samples"] else re.findall(r'alertname=~?"([^"]+)"', one["expr"])
    assert any(f'alertname="{alert["alert"]}"' in labels for labels in fire)
    assert any(re.fullmatch(pattern, alert["alert"]) for pattern in quiet)


def test_promtool_finds_no_fault_in_the_rules() -> None:
    run_promtool("check", "rules", str(rules.RULES))


@pytest.mark.nightly
def test_promtool_tests_the_rules() -> None:
    run_promtool("test", "rules", *map(str, sorted(rules.TESTS.glob("*.yml"))))


def run_promtool(*arguments: str) -> None:
    command = [need("promtool"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


# --- the harness itself ------------------------------------------------------------------------------


def test_names_are_found_in_expressions() -> None:
    text = 'sum by (job) (rate(ryzanstein_a_total{job="ryzanstein-x"}[5m])) / ryzanstein:b:ratio_rate5m > up'
    assert rules.names_in(text) == {"ryzanstein_a_total", "ryzanstein:b:ratio_rate5m", "up"}


def test_a_shorter_rule_has_the_same_expression() -> None:
    fast = rules.scaled(DOCUMENT, 10, {"RyzansteinBatchesStuck": 60})
    by_name = {rule["alert"]: rule for rule in rules.alerts(fast)}
    assert by_name["RyzansteinRecoveryStorm"]["for"] == "24000ms"
    assert by_name["RyzansteinBatchesStuck"]["for"] == "10000ms"
    assert fast["groups"][0]["interval"] == "500ms"
    for slow, quick in zip(rules.rules(DOCUMENT), rules.rules(fast), strict=True):
        assert re.sub(r"\[\w+\]", "[]", slow["expr"]) == re.sub(r"\[\w+\]", "[]", quick["expr"])
        for before, after in zip(*(re.findall(r"\[(\w+)\]", r["expr"]) for r in (slow, quick)), strict=True):
            assert rules.milliseconds(after) < rules.milliseconds(before)
    assert rules.load() == DOCUMENT


@given(st.integers(0, 30), st.integers(0, 59))
def test_durations_are_read_as_prometheus_writes_them(minutes: int, seconds: int) -> None:
    assert rules.milliseconds(f"{minutes}m{seconds}s") == (minutes * 60 + seconds) * 1000


def test_the_tables_of_the_pages_have_every_alert() -> None:
    for table in (alerts_table(), index_table()):
        assert table.count("\n") == 1 + len(list(rules.alerts(DOCUMENT)))
