"""Models come and go on a running local stack, by the commands of its user."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import make_adapter
from tests.e2e.stack import Stack, run_cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FILE = """\
models:
  - {name: declared, source: org/declared, least: 1, aliases: [gpt], adapters: {sql: HERE/sql}}
  - {name: idle, source: org/idle, adapters: {late: HERE/late}}
"""


def with_file(directory: Path) -> Stack:
    """A stack that is to be started with the models of `FILE`."""
    for number, name in enumerate(("sql", "late")):
        make_adapter(directory / name, number)
    (directory / "models.yaml").write_text(FILE.replace("HERE", str(directory)))
    return Stack(directory / "data", "--engine", "stub", "--models-file", str(directory / "models.yaml"))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with with_file(tmp_path_factory.mktemp("models")) as running:
        yield running


def models(stack: Stack, *arguments: str) -> str:
    done = run_cli("models", *arguments, "--data-dir", str(stack.data_dir))
    assert done.returncode == 0, done.stderr
    return done.stdout


def states(stack: Stack) -> dict[str, str]:
    listed = json.loads(models(stack, "list", "--json"))["models"]
    return {model["name"]: model["status"]["state"] for model in listed}


def ask(stack: Stack, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": "Hi", "max_tokens": 4}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def until_read(stack: Stack, adapter: str) -> None:
    """Asks again and again: each call takes a second."""
    for _ in range(60):
        shown = run_cli("adapters", "show", adapter, "--json", "--data-dir", str(stack.data_dir))
        if shown.returncode == 0 and json.loads(shown.stdout)["digest"]:
            return
    raise AssertionError(f"{adapter} was not read: {shown.stdout}{shown.stderr}")


def test_models_come_and_go_while_the_stack_runs(stack: Stack, tmp_path: Path) -> None:
    assert "declared: loaded" in stack.output
    assert states(stack) == {"declared": "loaded", "idle": "unloaded", "stub": "loaded"}
    assert ask(stack, "gpt")["usage"]["completion_tokens"] == 4
    assert ask(stack, "sql")["model"] == "sql", "it was read before the start was over"
    until_read(stack, "late")
    assert ask(stack, "late")["model"] == "late", "it was read though nobody had its base in memory"
    models(stack, "unload", "idle", "--timeout", "60")
    assert "idle is loaded on executor-0." in models(stack, "load", "idle", "--timeout", "60")
    assert ask(stack, "idle")["usage"]["completion_tokens"] == 4
    assert "idle is unloaded" in models(stack, "unload", "idle", "--timeout", "60")
    assert states(stack) == {"declared": "loaded", "idle": "unloaded", "stub": "loaded"}

    models(stack, "add", "mine", "--source", "org/mine", "--least", "1", "--timeout", "60")
    assert states(stack)["mine"] == "loaded"
    assert "mine is removed" in models(stack, "remove", "mine", "--timeout", "60")
    assert "mine" not in states(stack)
    (tmp_path / "more.yaml").write_text("models: [{name: mine, source: org/mine}]")
    assert models(stack, "apply", "-f", str(tmp_path / "more.yaml")) == "mine: added\n"

    refused = run_cli("models", "remove", "stub", "--data-dir", str(stack.data_dir))
    assert refused.stderr == (
        "error: executor-0 was started with the model stub; `ryzanstein models unload stub` first.\n"
    )
    assert "stub is unloaded" in models(stack, "unload", "stub", "--timeout", "60")
    assert ask(stack, "stub")["usage"]["completion_tokens"] == 4, "a request loads it again"
    unknown = run_cli("models", "load", "idel", "--data-dir", str(stack.data_dir))
    assert unknown.stderr == "error: There is no model 'idel' in the registry; idle may be meant.\n"


def test_a_request_has_its_model_loaded_and_waits(stack: Stack, http: httpx.Client) -> None:
    """One that was unloaded goes into the queue; one that never was loaded is held by the gateway."""
    entry = {"source": "org/fresh", "aliases": ["gpt-fresh"]}
    assert http.put("/v1/registry/models/fresh", json=entry).status_code == 200
    assert ask(stack, "gpt-fresh")["model"] == "fresh"
    assert http.get("/v1/models/fresh").json()["status"]["value"] == "loaded"
    assert http.post("/models/unload", json={"model": "fresh"}).json() == {"success": True}
    assert "fresh is unloaded" in models(stack, "unload", "fresh", "--timeout", "60")
    assert ask(stack, "gpt-fresh")["model"] == "fresh"
    assert http.delete("/v1/models/fresh").json()["deleted"]
    assert "fresh" not in states(stack)


def test_the_next_start_keeps_what_was_added_and_no_more(tmp_path: Path) -> None:
    with with_file(tmp_path) as first:
        models(first, "add", "mine", "--source", "org/mine")
        assert states(first) == {"declared": "loaded", "idle": "unloaded", "mine": "unloaded", "stub": "loaded"}
    with Stack(tmp_path / "data", "--engine", "stub") as stack:
        assert states(stack) == {"mine": "unloaded", "stub": "loaded"}
        listed = {
            model["id"] for model in httpx.get(f"{stack.url}/v1/models", trust_env=False, timeout=60).json()["data"]
        }
        assert listed == {"mine", "stub"}, "adapters of the last start are gone with their bases"


def test_a_models_file_with_errors_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("models:\n  - name: a\n    tp: 1\n  - least: 2\n")
    done = run_cli(
        "up", "--data-dir", str(tmp_path / "data"), "--models-file", str(tmp_path / "models.yaml"), "--port", "0"
    )
    assert done.returncode == 1
    assert "has 2 errors; nothing was applied:\n  line 3: There is no `tp`" in done.stderr
    assert not (tmp_path / "data").exists()
