"""Copies of what stands elsewhere are those of today."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from k8s import generate
from tests.unit.k8s import manifests, test_schemas

RULES = """\
groups:
  - name: ryzanstein
    rules:
      - alert: RingGone
        expr: up{job="ryzanstein-executor"} == 0
        for: 1m
        labels: {severity: page}
        annotations: {summary: "{{ $labels.group }} is gone", runbook_url: docs/runbooks/ring-gone.md}
"""


def test_every_copy_is_current() -> None:
    """`python -m k8s.generate` makes them so."""
    assert generate.stale(generate.ROOT) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with rules and two dashboards."""
    shutil.copytree(manifests.FOLDER, tmp_path / "k8s", ignore=shutil.ignore_patterns("__pycache__", "*.env"))
    for folder in ("rules", "dashboards"):
        (tmp_path / "monitoring" / folder).mkdir(parents=True)
    (tmp_path / "monitoring/rules/ryzanstein.yml").write_text(RULES)
    for name in ("overview", "rings"):
        (tmp_path / f"monitoring/dashboards/{name}.json").write_text(json.dumps({"title": name}))
    for path, text in generate.generated(tmp_path).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_rules_become_a_rule_of_the_operator_and_dashboards_config_maps(tree: Path) -> None:
    assert generate.stale(tree) == []
    overlay = tree / "k8s/overlays/watched"
    overlay.mkdir()
    content = {"resources": ["../cpu"], "components": ["../../components/monitoring"]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
    resources = list(yaml.load_all(manifests.kustomize(overlay), yaml.CSafeLoader))
    (rule,) = [one for one in resources if one["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load(RULES)
    test_schemas.check_model(rule)
    dashboards = {
        one["metadata"]["name"]: one["data"]
        for one in resources
        if "grafana_dashboard" in one["metadata"].get("labels", {})
    }
    assert dashboards == {
        f"dashboard-{name}": {f"{name}.json": json.dumps({"title": name})} for name in ("overview", "rings")
    }


def test_a_change_is_told(tree: Path) -> None:
    (tree / "monitoring/rules/ryzanstein.yml").write_text(RULES.replace("1m", "2m"))
    (tree / "monitoring/dashboards/third.json").write_text("{}")
    assert {str(path) for path in generate.stale(tree)} == {
        "k8s/components/monitoring/generated/prometheus-rule.yaml",
        "monitoring/kustomization.yaml",
    }
