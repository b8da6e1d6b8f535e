"""The commands of docs/kubernetes.md, as far as they can be checked without a cluster."""

import functools
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.k8s import manifests
from tests.unit.k8s.manifests import name_of

PAGE = (manifests.ROOT / "docs" / "kubernetes.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]
KUBECTL = [
    *(command for line in LINES for command in re.findall(r"kubectl [^|)&]*", line)),
    *re.findall(r"`(kubectl --namespace [^`]*)`", PAGE),
]
KINDS = {
    "deployment": "Deployment",
    "statefulset": "StatefulSet",
    "service": "Service",
    "secret": "Secret",
    "pod": "Pod",
    "pvc": "PersistentVolumeClaim",
}


@functools.cache
def known_options(*command: str) -> str:
    """What kubectl's help says of a command, and of all."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("THE COMMANDS OF docs/kubernetes.md ARE NOT CHECKED: kubectl is not installed")
    done = subprocess.run([program, *command, "--help"], capture_output=True, text=True, check=True)
    everywhere = subprocess.run([program, "options"], capture_output=True, text=True, check=True)
    return done.stdout + everywhere.stdout


def command_of(words: list[str]) -> list[str]:
    """The words of a kubectl line that name its command."""
    rest = words[3:] if words[1] == "--namespace" else words[1:]
    two = rest[0] in ("rollout", "create")
    return rest[: 3 if rest[:2] == ["create", "secret"] else 2 if two else 1]


@pytest.mark.parametrize("line", KUBECTL)
def test_kubectl_has_these_commands_and_options(line: str) -> None:
    words = shlex.split(line)
    text = known_options(*command_of(words))
    for word in words:
        if word.startswith("--"):
            assert f"{word.partition('=')[0]}=" in text, word
    if "-k" in words:
        assert "-k, --kustomize" in text


def test_folders_that_are_named_can_be_built() -> None:
    folders = {folder for line in LINES for folder in re.findall(r"k8s/overlays/[\w-]+", line)}
    assert folders
    for folder in folders:
        assert manifests.build(folder.removeprefix("k8s/")).resources
    for folder in re.findall(r"`(components|overlays)/([\w-]+)`", PAGE):
        assert (manifests.FOLDER / Path(*folder) / "kustomization.yaml").is_file(), folder


def test_every_component_and_overlay_is_named() -> None:
    for name in (*manifests.COMPONENTS, *manifests.OVERLAYS):
        assert re.search(rf"\b{name}\b", PAGE), name


def test_resources_that_are_named_are_there() -> None:
    builds = [manifests.build(name) for name in manifests.BUILDS]
    there = {(one["kind"], name_of(one)) for build in builds for one in build.resources}
    there |= {("Secret", "ryzanstein-nats"), ("Secret", "ryzanstein-hub")}
    for build in builds:
        for workload in build.of_kind("StatefulSet"):
            pod = f"{name_of(workload)}-0"
            there.add(("Pod", pod))
            for claim in workload["spec"].get("volumeClaimTemplates", []):
                there.add(("PersistentVolumeClaim", f"{name_of(claim)}-{pod}"))
    named = re.findall(rf"\b({'|'.join(KINDS)})[/ ]([a-z][\w-]*\d?)\b", "\n".join(KUBECTL))
    named = [(kind, name) for kind, name in named if name != "generic"]
    assert len(named) > 10
    for kind, name in named:
        assert (KINDS[kind], name) in there, f"{kind}/{name}"


def test_the_overlay_that_is_shown_can_be_built(tmp_path: Path) -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "yaml" and "components:" in text]
    own = manifests.copy(tmp_path / "tree") / "k8s/overlays/own"
    own.mkdir()
    (own / "kustomization.yaml").write_text(text)
    resources = list(yaml.load_all(manifests.kustomize(own), yaml.CSafeLoader))
    (executor,) = [
        one["data"]
        for one in resources
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].startswith("executor-")
    ]
    assert executor["RYZANSTEIN_MODEL"] == "Qwen/Qwen3-8B"
    assert executor["RYZANSTEIN_DEVICE"] == "cuda"
