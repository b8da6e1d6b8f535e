"""Prometheus' API, and everything that may be wrong with it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs

import pytest

from services.cli.sla.periods import Interval
from services.cli.sla.prometheus import PrometheusError, ask, client_of, from_prometheus, queries
from services.cli.sla.report import NoData, ReportScope
from shared.errors import ConfigurationError, Unavailable


class Handler(BaseHTTPRequestHandler):
    """Answers every question with 1, or with what `answers` has for it, or with what `answer` says."""

    answer: ClassVar[tuple[int, bytes] | None] = None
    answers: ClassVar[dict[str, bytes]] = {}
    headers_seen: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        given = {name: values[0] for name, values in parse_qs(self._body()).items()}
        self.headers_seen.append(self.headers.get("authorization", ""))
        status, content = self.answer or (200, self.answers.get(given["query"], _series(({}, 1.0))))
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> str:
        return self.rfile.read(int(self.headers["content-length"])).decode()

    def log_message(self, *_: Any) -> None: ...


def _series(*found: tuple[dict[str, str], float]) -> bytes:
    result = [{"metric": labels, "value": [1000.0, str(value)]} for labels, value in found]
    return json.dumps({"status": "success", "data": {"result": result}}).encode()


@pytest.fixture
def server() -> Iterator[str]:
    Handler.answer, Handler.answers, Handler.headers_seen = None, {}, []
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


PERIOD = Interval(0.0, 200.0)


def report(server: str, **answers: list[tuple[dict[str, str], float]]) -> list[ReportScope]:
    """Of a Prometheus that says so, and nothing else."""
    asked = queries(PERIOD, 10.0, "gateways")
    answers.setdefault("present", [({}, 1.0)])
    answers.setdefault("covered", [({}, 20.0)])
    Handler.answers = {query: _series(*answers.get(name, [])) for name, query in asked.items()}
    with client_of(server) as client:
        found = from_prometheus(client, PERIOD, step=10.0, gateway_job="gateways", progress=lambda share: None)
    return found.scopes


def test_requests_are_told_by_their_status(server: str) -> None:
    status = {"200": 5, "101": 1, "400": 2, "429": 3, "499": 1, "500": 1, "503": 2, "504": 1, "507": 1}
    whole, single = report(server, requests=[({"model": "m", "status": code}, n) for code, n in status.items()])
    assert whole.requests == single.requests
    found = whole.requests
    assert (found.completed, found.refused, found.cancelled, found.failed) == (6, 5, 1, 5)
    assert found.error_rate == 5 / 11


def test_each_model_has_its_own_downtime(server: str) -> None:
    whole, m, n = report(
        server,
        up=[({}, 0.75)],
        up_of=[({"model": "m"}, 0.75), ({"model": "n"}, 1.0)],
        repaired=[({}, 2.0)],
        repaired_of=[({"model": "m"}, 2.0), ({"model": "n"}, 0.0)],
    )
    assert (whole.availability, whole.downtime, whole.repaired, whole.mttr) == (0.75, 50.0, 2, 25.0)
    assert (m.downtime, n.downtime, n.mttr) == (50.0, 0.0, None)


def test_percentiles_are_of_all_models_and_of_each(server: str) -> None:
    first = [({"model": model, "le": bound}, 4.0) for bound in ("0.1", "1.0", "+Inf") for model in ("a", "b")]
    whole, a, _ = report(server, first_token=first, output=[({"model": "a"}, 3.0), ({"model": "b"}, 4.0)])
    assert (whole.first_token.count, a.first_token.count) == (8, 4)
    assert whole.first_token.p50.at_most == 0.1
    assert (whole.tokens.output, a.tokens.output) == (7, 3)


def test_a_prometheus_without_our_metrics_is_told(server: str) -> None:
    with pytest.raises(NoData, match="scrape their /metrics"):
        report(server, present=[])


def test_credentials_come_from_files(server: str, tmp_path: Path) -> None:
    token, basic = tmp_path / "token", tmp_path / "basic"
    token.write_text("secret\n")
    basic.write_text("user:pass:word\n")
    for files in ((token, None), (None, basic), (None, None)):
        with client_of(server, *files) as client:
            ask(client, "q", 10)
    assert Handler.headers_seen == ["Bearer secret", "Basic dXNlcjpwYXNzOndvcmQ=", ""]


def test_what_is_wrong_with_credentials_is_told(tmp_path: Path) -> None:
    empty, nobody = tmp_path / "empty", tmp_path / "nobody"
    empty.write_text("\n")
    nobody.write_text("nobody")
    with pytest.raises(ConfigurationError, match="printable line"):
        client_of("x", empty, None)
    with pytest.raises(ConfigurationError, match="user:password"):
        client_of("x", None, nobody)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        client_of("x", tmp_path / "missing", None)
    with pytest.raises(ConfigurationError, match="name one"):
        client_of("x", empty, nobody)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://user:word@x"])
def test_what_is_no_address_is_told_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        client_of(url)
    assert "word@" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "content", "kind", "said"),
    [
        (401, b"", ConfigurationError, "--prometheus-token-file"),
        (403, b"no", ConfigurationError, "asks for credentials"),
        (404, b"<html>", PrometheusError, "not Prometheus' API"),
        (200, b"{}", PrometheusError, "not Prometheus' API"),
        (200, b'{"status":"success","data":{"result":[{"metric":{},"value":["x"]}]}}', PrometheusError, "API"),
        (400, b'{"status":"error","error":"parse error"}', PrometheusError, "refused a query: parse error"),
        (503, b'{"status":"error"}', PrometheusError, "503"),
    ],
)
def test_other_answers_are_told(server: str, status: int, content: bytes, kind: type[Exception], said: str) -> None:
    Handler.answer = status, content
    with client_of(server) as client, pytest.raises(kind, match=said):
        ask(client, "q", 10)


def test_nobody_there_is_told() -> None:
    with client_of("127.0.0.1:1") as client, pytest.raises(Unavailable, match="cannot be reached"):
        ask(client, "q", 10)
