"""`ryzanstein launch`: what each client is told, what is said before it starts, and its end."""

import json
import shlex
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from services.cli.commands.launch import command
from services.cli.commands.launch.clients import CLIENTS, Target
from services.cli.commands.launch.served import Served
from services.cli.groups import GROUPS, command_line
from shared.errors import ConfigurationError, RyzansteinError, Unavailable


class Gateway(ThreadingHTTPServer):
    """Says what a test has for /v1/models, and for a request with a tool."""

    models: tuple[int, Any] = (200, {"data": [{"id": "small", "max_model_len": 65_536}, {"id": "tiny"}]})
    chat: tuple[int, Any] = (200, {})
    keys: list[str | None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self._say(self.server.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._say(self.server.chat)

    def _say(self, answer: tuple[int, Any]) -> None:
        self.server.keys.append(self.headers.get("authorization"))
        body = json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said: object) -> None:
        return


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(("127.0.0.1", 0), _Handler) as server:
        server.keys = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def app() -> typer.Typer:
    return command_line([group for group in GROUPS if "launch" in group.commands or "doctor" in group.commands])


def launch(app: typer.Typer, tmp_path: Path, *arguments: str, **environment: str) -> Any:
    options = ["launch", arguments[0], "--data-dir", str(tmp_path / "data"), *arguments[1:]]
    return CliRunner().invoke(app, options, env={"RYZANSTEIN_URL": "", "RYZANSTEIN_API_KEY": "", **environment})


def program(tmp_path: Path, name: str, script: str) -> str:
    """A PATH on which `name` is a shell script."""
    directory = tmp_path / "bin"
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


@pytest.mark.parametrize("name", CLIENTS)
def test_each_client_is_told_all_and_its_own_files_are_below_ours(name: str, tmp_path: Path) -> None:
    target = Target("http://host:1", "a model", "key-1", 32_768, tmp_path / "ours")
    setup = CLIENTS[name].setup(target)
    told = "\n".join([*setup.arguments, *setup.environment.values(), *setup.files.values()])
    assert "http://host:1" in told
    assert "a model" in told
    if name != "zed":  # which asks for it, and keeps it itself
        assert "key-1" in told
    assert all(not Path(file).is_absolute() and ".." not in Path(file).parts for file in setup.files)
    for content in setup.files.values():
        assert json.loads(content)


def test_the_client_runs_with_its_settings_and_its_exit_code_is_ours(
    gateway: Gateway, app: typer.Typer, tmp_path: Path
) -> None:
    path = program(tmp_path, "crush", f'cat "$CRUSH_GLOBAL_CONFIG/crush.json" > {tmp_path}/seen; echo "$@"; exit 7')
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.cli", "launch", "crush", "--url", gateway.url, "--model", "small"),
            *("--data-dir", str(tmp_path / "data"), "--", "run", "it"),
        ],
        env={"PATH": path, "RYZANSTEIN_API_KEY": "secret-key"},
        cwd=Path(__file__).parents[5],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip().splitlines()[-1]) == (7, "run it"), done.stderr
    seen = json.loads((tmp_path / "seen").read_text())["providers"]["ryzanstein"]
    assert (seen["base_url"], seen["api_key"]) == (f"{gateway.url}/v1", "secret-key")
    assert seen["models"][0]["context_window"] == 65_536
    file = tmp_path / "data" / "launch" / "crush" / "crush.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert set(gateway.keys) == {"Bearer secret-key"}


def test_print_shows_lines_for_a_shell_without_the_key_and_starts_nothing(
    gateway: Gateway, app: typer.Typer, tmp_path: Path
) -> None:
    shown = launch(app, tmp_path, "claude", "--url", gateway.url, "--print", RYZANSTEIN_API_KEY="secret-key").output
    lines = shown.splitlines()
    assert f"export ANTHROPIC_BASE_URL={gateway.url}" in lines
    assert 'export ANTHROPIC_AUTH_TOKEN="${RYZANSTEIN_API_KEY}"' in lines
    assert lines[-1] == "claude"
    shown = launch(app, tmp_path, "crush", "--url", gateway.url, "--print", RYZANSTEIN_API_KEY="secret-key").output
    assert '"api_key": "${RYZANSTEIN_API_KEY}"' in shown
    assert "secret-key" not in shown
    shown = launch(app, tmp_path, "codex", "--url", gateway.url, "--print", "--", "two words").output
    assert shlex.split(shown.splitlines()[-1])[-1] == "two words"
    assert not (tmp_path / "data").exists()


def test_what_does_not_suit_is_said(gateway: Gateway, app: typer.Typer, tmp_path: Path) -> None:
    gateway.models = (200, {"data": [{"id": "small", "max_model_len": 2048}]})
    gateway.chat = (400, {"error": {"message": "The model small has no tool parser."}})
    shown = launch(app, tmp_path, "aider", "--url", gateway.url, "--print").output
    assert "aider needs a context of some 8,000 tokens for its instructions and a task, and small has 2,048" in shown
    assert "calls no tools" not in shown, "nor does aider"
    shown = launch(app, tmp_path, "goose", "--url", gateway.url, "--print").output
    assert "small calls no tools here (The model small has no tool parser): goose can chat" in shown


@pytest.mark.parametrize(
    ("models", "named", "kind", "sentence"),
    [
        ((401, {}), "", ConfigurationError, "asks for an API key"),
        ((200, {"data": []}), "", Unavailable, "serves no model yet"),
        ((503, {}), "", Unavailable, "serves no model yet"),
        ((200, {"data": [{"id": "a"}]}), "b", ConfigurationError, "serves no model b; it serves: a"),
    ],
    ids=["key", "none", "starting", "another"],
)
def test_gateways_that_will_not_do(
    gateway: Gateway, models: tuple[int, Any], named: str, kind: type[RyzansteinError], sentence: str
) -> None:
    gateway.models = models
    served = Served(gateway.url, "", True)
    with pytest.raises(kind, match=sentence):
        served.model(named)
    served.close()
    gateway.shutdown()


def test_no_gateway_no_client_no_program(app: typer.Typer, tmp_path: Path) -> None:
    cases = {
        ("emacs",): "There is no client 'emacs' to launch; it is one of: claude, codex",
        ("zed",): "zed is not installed: no program zed; see https://zed.dev/download",
        ("zed", "--print", "--url", "http://127.0.0.1:1"): "The gateway at http://127.0.0.1:1 did not answer",
    }
    for arguments, sentence in cases.items():
        done = launch(app, tmp_path, *arguments, PATH=str(tmp_path))
        assert isinstance(done.exception, RyzansteinError)
        assert sentence in str(done.exception)


def test_a_stack_that_does_not_start_is_told_with_its_last_words(app: typer.Typer, tmp_path: Path) -> None:
    path = program(tmp_path, "zed", "exit 0")
    done = launch(app, tmp_path, "zed", "--model", str(tmp_path / "nothing"), PATH=path)
    assert isinstance(done.exception, ConfigurationError)
    assert "The stack did not start: " in str(done.exception)
    assert "nothing" in str(done.exception)
    assert command.find_stack(tmp_path / "data") is None
