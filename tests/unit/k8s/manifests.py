"""What kustomize makes of k8s/, and how to find one's way in it."""

import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s import passwords

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "k8s"
OVERLAYS = sorted(path.parent.name for path in (FOLDER / "overlays").glob("*/kustomization.yaml"))
COMPONENTS = sorted(path.parent.name for path in (FOLDER / "components").glob("*/kustomization.yaml"))

# Names for `build`: the base, each overlay, and each component upon the overlay `cpu`.
BUILDS = ("base", *(f"overlays/{name}" for name in OVERLAYS), *(f"overlays/cpu+{name}" for name in COMPONENTS))

# `BUILDS` for tests that take a second each: upon the overlays alone with the fast tests.
SOME = [pytest.param(name, marks=pytest.mark.slow if "+" in name or name == "overlays/ha" else ()) for name in BUILDS]

Resource = dict[str, Any]


@dataclass(frozen=True)
class Build:
    """All resources of one build."""

    name: str
    resources: tuple[Resource, ...]

    def of_kind(self, *kinds: str) -> list[Resource]:
        return [resource for resource in self.resources if resource["kind"] in kinds]

    def names(self, kind: str) -> set[str]:
        return {name_of(resource) for resource in self.of_kind(kind)}

    def get(self, kind: str, name: str) -> Resource:
        return next(resource for resource in self.of_kind(kind) if name_of(resource) == name)

    def workloads(self) -> list[Resource]:
        return self.of_kind("Deployment", "StatefulSet", "Job", "LeaderWorkerSet")

    def pods(self) -> list["Pod"]:
        return [Pod(workload) for workload in self.workloads()]

    def component(self, name: str) -> "Pod":
        return next(pod for pod in self.pods() if pod.component == name)


@dataclass(frozen=True)
class Pod:
    """The pods of one workload."""

    workload: Resource

    @property
    def template(self) -> Resource:
        if self.workload["kind"] == "LeaderWorkerSet":
            return self.workload["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        return self.workload["spec"]["template"]

    @property
    def spec(self) -> Resource:
        return self.template["spec"]

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Resource]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def main(self) -> Resource:
        """The container that has the component's name: sidecars have others."""
        return next(one for one in self.spec["containers"] if one["name"] == self.component)

    @property
    def ports(self) -> dict[str, int]:
        return {
            port["name"]: port["containerPort"]
            for container in self.spec["containers"]
            for port in container.get("ports", [])
        }

    def __str__(self) -> str:
        return name_of(self.workload)


def name_of(resource: Resource) -> str:
    return str(resource["metadata"]["name"])


def selects(selector: Resource, labels: dict[str, str]) -> bool:
    """Whether a label selector takes in what has `labels`. An empty one takes in all."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(_holds(expression, labels) for expression in selector.get("matchExpressions", []))


def _holds(expression: Resource, labels: dict[str, str]) -> bool:
    assert expression["operator"] == "In", "the others are not in use"
    return labels.get(expression["key"]) in expression["values"]


def environment(build: Build, container: Resource) -> dict[str, str]:
    """The container's variables; those whose values come with the pod, or from a Secret, are empty."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= build.get("ConfigMap", source["configMapRef"]["name"])["data"]
    return found | {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}


@functools.cache
def build(name: str) -> Build:
    """What `kustomize build` makes of it. Skips the test where there is no kustomize."""
    folder, _, component = name.partition("+")
    with tempfile.TemporaryDirectory() as directory:
        tree = copy(Path(directory) / "tree") / "k8s"
        lines = [f"{key}={value}\n" for key, value in passwords.passwords().items()]
        (tree / "components" / "secrets" / "nats.env").write_text("".join(lines))
        path = tree / folder
        if component:
            path = tree / "overlays" / "combined"
            path.mkdir()
            content = {
                "resources": [os.path.relpath(tree / folder, path)],
                "components": [f"../../components/{component}"],
            }
            (path / "kustomization.yaml").write_text(yaml.safe_dump(content))
        return Build(name, tuple(yaml.load_all(kustomize(path), yaml.CSafeLoader)))


def copy(directory: Path) -> Path:
    """Copies all that kustomize reads to `directory`, where tests may change it; returns it."""
    shutil.copytree(FOLDER, directory / "k8s", ignore=shutil.ignore_patterns("__pycache__", "*.env"))
    if (ROOT / "monitoring").is_dir():
        shutil.copytree(ROOT / "monitoring", directory / "monitoring")
    return directory


def kustomize(path: Path) -> str:
    """Its output. Skips the test where neither kustomize nor kubectl is installed."""
    if program := shutil.which("kustomize"):
        command = [program, "build", str(path)]
    elif program := shutil.which("kubectl"):
        command = [program, "kustomize", str(path)]
    else:
        pytest.skip("THE MANIFESTS OF k8s/ ARE NOT TESTED: neither kustomize nor kubectl is installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
