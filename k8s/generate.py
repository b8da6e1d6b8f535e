"""Writes what the manifests repeat of other files: `python -m k8s.generate`, from the repository's root.

    shared/nats/permissions.py      ──▶ base/nats/ryzanstein.conf            users of NATS and their rights
    monitoring/rules/*.yml     ──▶ components/monitoring/generated/     PrometheusRule
    monitoring/dashboards/*    ──▶ monitoring/kustomization.yaml        a ConfigMap per dashboard, for Grafana's sidecar

kustomize reads no file outside its folder and writes no YAML into YAML, hence the copies. A test says when one is old.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from services.cli.supervision.nats_server import deployed

ROOT = Path(__file__).parent.parent
_RULES, _DASHBOARDS = Path("monitoring/rules"), Path("monitoring/dashboards")
_GENERATED = Path("k8s/components/monitoring/generated")
_HEAD = "# Made by `python -m k8s.generate`.\n"


def generated(root: Path) -> dict[Path, str]:
    """What each generated file must hold, by its path below `root`."""
    rules = sorted((root / _RULES).glob("*.yml"))
    dashboards = sorted((root / _DASHBOARDS).glob("*.json"))
    files = {
        Path("k8s/base/nats/ryzanstein.conf"): deployed(listen="0.0.0.0:4222", store="/data/jetstream", tls={}),
        _GENERATED / "kustomization.yaml": _component(bool(rules), bool(dashboards)),
    }
    if rules:
        files[_GENERATED / "prometheus-rule.yaml"] = _rule(rules)
    if dashboards:
        files[Path("monitoring/kustomization.yaml")] = _config_maps(path.name for path in dashboards)
    return files


def stale(root: Path) -> list[Path]:
    """Generated files that hold something else than they must, or are missing."""
    return [path for path, text in generated(root).items() if _read(root / path) != text]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _component(rules: bool, dashboards: bool) -> str:
    resources = [*(["prometheus-rule.yaml"] if rules else []), *(["../../../../monitoring"] if dashboards else [])]
    return _yaml({"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "resources": resources})


def _rule(files: Iterable[Path]) -> str:
    groups = [group for file in files for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]]
    return _yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {
                "name": "ryzanstein",
                "namespace": "ryzanstein",
                "labels": {"app.kubernetes.io/part-of": "ryzanstein"},
            },
            "spec": {"groups": groups},
        }
    )


def _config_maps(dashboards: Iterable[str]) -> str:
    """Without a hash in their names: Grafana's sidecar sees a change, and would keep the old ones beside it."""
    return _yaml(
        {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "ryzanstein",
            "generatorOptions": {
                "disableNameSuffixHash": True,
                "labels": {"app.kubernetes.io/part-of": "ryzanstein", "grafana_dashboard": "1"},
            },
            "configMapGenerator": [
                {"name": f"dashboard-{Path(name).stem}", "files": [f"{_DASHBOARDS.name}/{name}"]} for name in dashboards
            ],
        }
    )


def _yaml(content: dict[str, Any]) -> str:
    return _HEAD + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def main() -> None:
    for path in stale(ROOT):
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(generated(ROOT)[path], encoding="utf-8")
        sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
