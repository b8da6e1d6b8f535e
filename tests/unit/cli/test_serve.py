"""`ryzanstein probe`: what a container's health check says."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from services.cli import serve
from services.cli.serve import probe
from shared.errors import ConfigurationError


@contextlib.contextmanager
def answering(status: int, text: str, context: ssl.SSLContext | None = None) -> Iterator[str]:
    """A service whose /ready says this; yields its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            """Tests are quiet."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield str(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_ready_service() -> None:
    with answering(200, "{}") as port:
        assert probe(["gateway"], {"RYZANSTEIN_PORT": port}) == 0
        assert probe(["executor"], {"RYZANSTEIN_OPS_PORT": port, "RYZANSTEIN_HOST": "0.0.0.0"}) == 0


@pytest.mark.parametrize("text", ["true", "1", "Yes"])
def test_a_gateway_that_shares_its_port_is_asked_on_its_own(text: str) -> None:
    with answering(200, "{}") as port:
        environment = {"RYZANSTEIN_SHARE_PORT": text, "RYZANSTEIN_OPS_PORT": port, "RYZANSTEIN_PORT": "1"}
        assert probe(["gateway"], environment) == 0


def test_a_service_that_is_not_ready_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(503, "NATS is not connected") as port:
        assert probe(["scheduler"], {"RYZANSTEIN_OPS_PORT": port}) == 1
    assert capsys.readouterr().err == "not ready: NATS is not connected\n"


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    assert probe(["executor"], {"RYZANSTEIN_OPS_PORT": port}) == 1
    assert f"127.0.0.1:{port} gives no answer" in capsys.readouterr().err


@pytest.mark.parametrize("asks_for_certificate", [False, True])
def test_a_gateway_with_a_certificate(tmp_path: Path, asks_for_certificate: bool) -> None:
    authority, chain, key = trustme.CA(), tmp_path / "chain.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("gateway.example.org")
    chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain, key)
    environment = {"RYZANSTEIN_TLS_CERTIFICATE": str(chain), "RYZANSTEIN_TLS_KEY": str(key)}
    if asks_for_certificate:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        environment["RYZANSTEIN_TLS_CLIENT_CA"] = "authorities.pem"
    with answering(200, "{}", context) as port:
        assert probe(["gateway"], {**environment, "RYZANSTEIN_PORT": port}) == 0


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        ([], {}, "takes the name of a service"),
        (["postgres"], {}, "takes the name of a service"),
        (["executor"], {}, "RYZANSTEIN_OPS_PORT is not set"),
        (["gateway"], {"RYZANSTEIN_SHARE_PORT": "on"}, "RYZANSTEIN_OPS_PORT is not set"),
        (["gateway"], {"RYZANSTEIN_PORT": "0"}, "RYZANSTEIN_PORT is '0'"),
        (["gateway"], {"RYZANSTEIN_PORT": "http"}, "RYZANSTEIN_PORT is 'http'"),
        (
            ["gateway"],
            {"RYZANSTEIN_TLS_CERTIFICATE": "/nowhere/chain.pem", "RYZANSTEIN_TLS_CLIENT_CA": "ca.pem"},
            "/nowhere/chain.pem cannot be presented",
        ),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        probe(arguments, environment)


def test_the_command(tmp_path: Path) -> None:
    """As the health check runs it; where the command line's packages are missing it works as well."""
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(name='typer')")
    with answering(503, "starting") as port:
        ended = subprocess.run(
            [sys.executable, "-m", "services.cli", "probe", "gateway"],
            env={**os.environ, "RYZANSTEIN_PORT": port, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (1, "not ready: starting\n")


@pytest.mark.parametrize(
    ("options", "engine", "url", "needs"),
    [
        ([], "", "", True),
        (["--engine", "torch"], "vllm", "", True),
        (["--engine=vllm"], "", "", False),
        (["--model", "m", "--engine", "vllm"], "", "", False),
        (["--engine-url", "http://a:1"], "", "", False),
        ([], "vllm", "", False),
        ([], "", "http://a:1", False),
    ],
)
def test_an_executor_around_an_engine_needs_no_torch(
    monkeypatch: pytest.MonkeyPatch, options: list[str], engine: str, url: str, needs: bool
) -> None:
    monkeypatch.setenv("RYZANSTEIN_ENGINE", engine)
    monkeypatch.setenv("RYZANSTEIN_ENGINE_URL", url)
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(ConfigurationError, match="as torch") if needs else contextlib.nullcontext():
        serve.require_packages("executor", "executor", options)
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'ryzanstein\[executor\]'"):
        serve.require_packages("executor", "executor", options)
