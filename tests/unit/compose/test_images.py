"""The Dockerfile: hadolint's rules, and what no linter knows of our images."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from services.cli.serve import AROUND_ENGINE
from tests.release.images import FILES, images, with_digests
from tests.unit.compose.dockerfile import Dockerfile

ROOT = Path(__file__).parents[3]
FILE = Dockerfile(ROOT / "Dockerfile")
SERVICES = ("gateway", "scheduler", "health-monitor", "executor")
TARGETS = (*SERVICES, "executor-gpu", "executor-vllm", "cli", "nats")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def extras_of(target: str) -> set[str]:
    """Whose requirements are installed in that image."""
    text = " ".join(one.text for stage in FILE.contents(target) for one in stage.instructions)
    return set(re.findall(r"--requirement /extras/(\S+)", text))


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower() for requirement in requirements}


def test_hadolint_finds_nothing() -> None:
    program = Path(sys.executable).parent / "hadolint"
    found = str(program) if program.exists() else shutil.which("hadolint")
    assert found, "hadolint is missing; `make install` brings it"
    ended = subprocess.run([found, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stdout + ended.stderr


def test_there_is_a_target_for_each_image() -> None:
    assert set(TARGETS) < set(FILE.stages)


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "nats"])
def test_an_image_has_the_packages_of_its_extra(target: str) -> None:
    extra = target.removesuffix("-gpu").removesuffix("-vllm")
    more = {"cli"} if extra == "executor" else set()
    assert extras_of(target) == {"core", extra} | more
    assert extra in PROJECT["optional-dependencies"]


def test_every_image_can_send_traces() -> None:
    """The default profile asks each service to."""
    script = next(one.text for one in FILE.stages["requirements"].instructions if "python3 -c" in one.text)
    assert "project['dependencies'] + extras['tracing']" in script
    assert all("core" in extras_of(target) for target in TARGETS)


def test_only_the_image_for_gpus_has_a_compiler() -> None:
    """Triton builds the launchers of its kernels where they run."""
    for target in TARGETS:
        text = " ".join(one.text for stage in FILE.lineage(target) for one in stage.instructions)
        assert ("install -y --no-install-recommends gcc" in text) == (target == "executor-gpu")


@pytest.mark.parametrize("target", ["gateway", "scheduler", "health-monitor", "cli", "nats"])
def test_only_the_executor_has_torch(target: str) -> None:
    installs = [one.text for stage in FILE.contents(target) for one in stage.instructions if "pip install" in one.text]
    assert installs
    assert not any("torch" in text for text in installs)
    extras = extras_of(target) - {"core"}
    wanted = names_of([line for name in extras for line in PROJECT["optional-dependencies"][name]])
    assert not wanted & {"torch", "transformers", "accelerate", "safetensors"}


def test_beside_vllm_is_the_executor_without_torch_and_nothing_of_vllms_moves() -> None:
    """It starts as the executor's own image does, and keeps what is compiled where a volume is."""
    assert AROUND_ENGINE not in ("accelerate", "torch", "transformers")
    text = next(one.text for one in FILE.stages["executor-vllm"].instructions if one.keyword == "ENV")
    caches = dict(re.findall(r"(\w+(?:CACHE_ROOT|CACHE_DIR|WORKSPACE_BASE))=(\S+)", text))
    assert len(caches) == 4
    assert {path.split("/")[1] for path in caches.values()} == {"kernels"}
    install = FILE.stages["executor-vllm-packages"].instructions[-1].text
    assert "sed -i -E '/^(accelerate|torch|transformers)/d' /extras/executor " in install
    assert not {"executor", "executor-packages"} & {one.name for one in FILE.contents("executor-vllm")}
    for keyword in ("ENTRYPOINT", "HEALTHCHECK", "EXPOSE"):
        assert FILE.last("executor-vllm", keyword) == FILE.last("executor", keyword)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_in_particular(target: str) -> None:
    """By number, so that Kubernetes can see that it is not root."""
    assert FILE.last(target, "USER").text == "10001:10001"


@pytest.mark.parametrize("target", TARGETS)
def test_signals_reach_the_program(target: str) -> None:
    """No shell stands between."""
    words = FILE.last(target, "ENTRYPOINT").exec_form()
    assert words[0] in ("ryzanstein", "nats-server")
    if target in SERVICES:
        assert words == ["ryzanstein", "serve", target]


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "cli"])
def test_an_image_says_how_to_see_its_health(target: str) -> None:
    check = FILE.last(target, "HEALTHCHECK")
    assert set(re.findall(r"--([a-z-]+)=", check.text)) == {"interval", "timeout", "start-period", "retries"}
    if target in SERVICES:
        assert check.exec_form() == ["ryzanstein", "probe", target]
        port = {"gateway": "RYZANSTEIN_PORT=8000"}.get(target, "RYZANSTEIN_OPS_PORT=8081")
        assert port in " ".join(one.text for one in FILE.stages[target].instructions if one.keyword == "ENV")


def test_every_base_is_an_argument_with_an_exact_tag() -> None:
    outside = {stage.base for stage in FILE.stages.values()} - set(FILE.stages)
    assert outside == {"${BASE_IMAGE}", "${NATS_IMAGE}"}
    for name in ("BASE_IMAGE", "NATS_IMAGE"):
        assert re.search(r":\d+\.\d+\.\d+", FILE.arguments[name]), name


@pytest.mark.slow
def test_an_image_is_the_same_wherever_it_is_named() -> None:
    """And named in no other file than those which `make pin-images` changes."""
    digests: dict[str, set[str]] = {}
    for _, name, digest in images():
        digests.setdefault(name, set()).add(digest)
    assert all(len(found) == 1 for found in digests.values()), digests
    assert FILE.arguments["BASE_IMAGE"].partition("@")[0] in digests
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    others = [path for path in tracked.stdout.split() if path not in FILES and not path.startswith("tests/")]
    words = re.compile("|".join(rf"(?<![\w/]){re.escape(name)}(?![\w.])" for name in digests))
    assert not [path for path in others if words.search((ROOT / path).read_text(errors="replace"))]
    manifests = (path for path in others if path.startswith(("k8s/", "compose")) and path.endswith("yaml"))
    foreign = re.compile(r"^ +image: (?!ryzanstein/|\$\{)", re.MULTILINE)
    assert not [path for path in manifests if foreign.search((ROOT / path).read_text())]


def test_digests_are_written_and_renewed_in_place() -> None:
    text = "ARG BASE_IMAGE=python:3\nX_IMAGE=a/b:1@sha256:" + "0" * 64 + "\n    image: ryzanstein/cli:1\n"
    made = with_digests(text, {"python:3": "sha256:new", "a/b:1": "sha256:newer"})
    assert made.splitlines() == [
        "ARG BASE_IMAGE=python:3@sha256:new",
        "X_IMAGE=a/b:1@sha256:newer",
        "    image: ryzanstein/cli:1",
    ]


def test_nothing_needs_a_frontend_that_would_have_to_be_fetched() -> None:
    assert "syntax=" not in (ROOT / "Dockerfile").read_text().splitlines()[0]


def test_the_context_has_what_is_copied_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    admitted = {rule[1:] for rule in rules if rule.startswith("!")}
    copies = [
        one.text.split()[:-1]
        for stage in FILE.stages.values()
        for one in stage.instructions
        if one.keyword == "COPY" and "--from" not in one.text
    ]
    assert {source for sources in copies for source in sources} == admitted
