"""The command line as a user sees it: up, status, chat, models, and what goes wrong."""

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from services.cli.groups import app
from services.cli.target import read_run_file
from shared.model_store.catalog import DEFAULT_MODEL
from shared.process import VERSION
from tests.e2e.stack import CLI, Stack, run_cli
from tests.monitoring.prometheus import until

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_up_leaves_nothing_behind(tmp_path: Path) -> None:
    with Stack(tmp_path, "--engine", "stub", "--no-smoke-test", "--served-model-name", "mine") as stack:
        served = json.loads(run_cli("models", "list", "--json", "--data-dir", str(tmp_path)).stdout)
        assert [model["name"] for model in served["models"]] == ["mine"]
        processes = stack.descendants()
        names = " ".join(" ".join(process.cmdline()) for process in processes)
        for part in ("nats-server", "gateway", "scheduler", "health_monitor", "services.executor", "rank"):
            assert part in names
        assert stack.url in stack.output
        second = run_cli("up", "--data-dir", str(tmp_path), "--port", "0")
        assert second.returncode == 1
        assert second.stderr.startswith("error: Another stack already runs on the data directory")
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(60) == 0
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive
    assert read_run_file(tmp_path) is None
    assert "Stopped." in stack.output


@pytest.mark.slow
def test_nothing_outlives_a_killed_head(tmp_path: Path) -> None:
    with Stack(tmp_path, "--engine", "stub", "--no-smoke-test") as stack:
        processes = stack.descendants()
        stack.process.kill()
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive


@pytest.mark.slow
def test_up_proves_itself(two_groups: Stack) -> None:
    assert "distributed system" in two_groups.output, "one answer is streamed as a smoke test"


@pytest.mark.slow
def test_status_has_its_promised_shape(two_groups: Stack) -> None:
    where = ("--data-dir", str(two_groups.data_dir))
    status = json.loads(run_cli("status", "--json", *where).stdout)
    assert set(status) == {"services", "groups", "hosts"}
    assert {one["name"] for one in status["services"]} == {"gateway", "scheduler", "health-monitor", "executor"}
    for service in status["services"]:
        assert set(service) == {"name", "instance", "pid", "state", "version"}
        assert service["state"] == "ready"
        assert psutil.pid_exists(service["pid"])
    assert len(status["groups"]) == 2
    for group in status["groups"]:
        assert set(group) == {
            "group",
            "model",
            "state",
            "running",
            "waiting",
            "kv_used",
            "ranks",
            "kv_bytes",
            "message",
            "kernels",
            "streamed",
            "traits",
        }
        assert group["traits"]["sparse"] == ["window"]
        assert group["model"] == DEFAULT_MODEL
        assert [set(rank) for rank in group["ranks"]] == [{"rank", "pid", "step"}]
    table = run_cli("status", *where, COLUMNS="160").stdout
    assert "group-0" in table
    assert "health-monitor-0" in table
    assert "group-0: computes sparse attention by window" in table
    told = run_cli("models", "show", DEFAULT_MODEL, *where).stdout
    assert "computes sparse attention by window" in told


@pytest.mark.slow
def test_chat_answers(two_groups: Stack) -> None:
    where = ("--data-dir", str(two_groups.data_dir))
    one = run_cli("chat", "What is the capital of France?", "--temperature", "0", "--max-tokens", "20", *where)
    assert one.returncode == 0
    assert "Paris" in one.stdout
    talk = subprocess.run(
        [*CLI, "chat", "--max-tokens", "8", *where],
        input="Hello!\n\nAnd you?\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert talk.returncode == 0, talk.stderr
    assert DEFAULT_MODEL in talk.stdout


@pytest.mark.slow
def test_every_service_answers_its_operations_paths(two_groups: Stack) -> None:
    urls = {
        word.strip(";") for word in two_groups.output.replace("│", " ").split() if word.startswith("http://127.0.0.1")
    }
    bases = {"/".join(url.split("/")[:3]) for url in urls}
    assert len(bases) == 5, two_groups.output
    for base in bases:
        for path in ("/health", "/ready", "/metrics"):
            assert httpx.get(f"{base}{path}", trust_env=False).status_code == 200, f"{base}{path}"


@pytest.mark.slow
def test_one_request_id_is_in_every_log(two_groups: Stack) -> None:
    body = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    headers = {"x-request-id": "follow-me"}
    reply = httpx.post(f"{two_groups.url}/v1/chat/completions", json=body, headers=headers, trust_env=False, timeout=60)
    assert reply.headers["x-request-id"] == "follow-me"
    for service in ("gateway", "scheduler", "executor"):
        # A request is told of once its answer has been written, which a client may have read by then.
        until(lambda service=service: "follow-me" in two_groups.logs(f"{service}-*.log"), 30)


def test_models_list_shows_what_is_there(model_directory: Path) -> None:
    listed = run_cli("models", "list", COLUMNS="200")
    assert DEFAULT_MODEL in listed.stdout
    assert "MB" in listed.stdout
    pulled = run_cli("models", "pull")
    assert pulled.returncode == 0
    assert "is ready in" in pulled.stdout


def test_a_taken_port_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run_cli("up", "--engine", "stub", "--port", port, "--data-dir", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == (
        f"error: Port {port} on 127.0.0.1 is taken by another program; stop it, or choose another with --port.\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int3"], "--dtype cannot be 'int3'; it is one of auto, bf16, fp32."),
        pytest.param(["--nats-url", "what"], "is no NATS address", marks=pytest.mark.slow),
        (["--nats-url", "nats://127.0.0.1:1", "--engine", "stub"], "did not answer within"),
        (["--model", "/nowhere/at/all"], "'/nowhere/at/all' is not a model"),
        pytest.param(["--model", "/nowhere/model.gguf"], "does not exist; check the path", marks=pytest.mark.slow),
        pytest.param(["--model", "/etc/hostname"], "is neither a model directory nor a GGUF", marks=pytest.mark.slow),
    ],
)
def test_wrong_options_are_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run_cli("up", "--port", "0", "--data-dir", str(tmp_path), *arguments, RYZANSTEIN_NATS_CONNECT_TIMEOUT="1")
    assert result.returncode == 1
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr + result.stdout


@pytest.mark.nightly
def test_a_corrupt_weights_file_is_said_and_nothing_is_left(tmp_path: Path, model_directory: Path) -> None:
    broken = tmp_path / "broken-model"
    shutil.copytree(model_directory, broken)
    weights = broken / "model.gguf"
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    result = run_cli("up", "--port", "0", "--data-dir", str(tmp_path / "data"), "--model", str(broken))
    assert result.returncode == 1
    assert "model.gguf" in result.stderr
    assert "Traceback" not in result.stderr
    assert read_run_file(tmp_path / "data") is None


@pytest.mark.slow
def test_a_corrupt_tokenizer_is_said_and_nothing_is_left(tmp_path: Path, model_directory: Path) -> None:
    broken = tmp_path / "broken-model"
    broken.mkdir()
    for file in model_directory.iterdir():
        (broken / file.name).symlink_to(file)
    (broken / "tokenizer.json").unlink()
    (broken / "tokenizer.json").write_text('{"a":')
    result = run_cli("up", "--port", "0", "--data-dir", str(tmp_path / "data"), "--model", str(broken))
    assert result.returncode == 1
    assert "tokenizer.json is not JSON" in result.stderr
    assert "Serving." not in result.stdout
    assert read_run_file(tmp_path / "data") is None


def test_a_directory_that_is_no_model_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run_cli("up", "--port", "0", "--data-dir", str(tmp_path), "--model", str(tmp_path / "empty"))
    assert result.returncode == 1
    assert "holds no config.json" in result.stderr


def test_status_without_a_stack_says_what_to_do(tmp_path: Path) -> None:
    result = run_cli("status", "--data-dir", str(tmp_path))
    assert result.returncode == 1
    assert "start one with `ryzanstein up`" in result.stderr


def test_help_is_there_for_every_command() -> None:
    for command in ([], ["up"], ["status"], ["chat"], ["models"], ["models", "pull"], ["serve"], ["probe"]):
        result = CliRunner().invoke(app, [*command, "--help"])
        assert result.exit_code == 0, command
        assert "sage" in result.stdout
    for service in ("gateway", "scheduler", "health-monitor", "executor"):
        result = run_cli("serve", service, "--help")
        assert result.returncode == 0, result.stderr
        assert "--nats-url" in result.stdout


def test_the_version_and_the_commands_in_the_order_of_their_use() -> None:
    assert run_cli("--version").stdout == f"ryzanstein {VERSION}\n"
    commands = run_cli("--help").stdout.partition("Commands:")[2].split("\n")
    names = [line.split()[0] for line in commands if line.startswith("  ") and line[2] != " "]
    assert names[0] == "up"
