"""Prometheus' API, and everything that may be wrong with it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs

import pytest

from services.cli.sla.http import POINTS, Prometheus, PrometheusError, auth_of
from services.cli.sla.intervals import Interval
from services.cli.sla.prometheus_source import queries, steps_of
from shared.errors import ConfigurationError, Unavailable


class Handler(BaseHTTPRequestHandler):
    """Answers every question with a sample at each step, or with what `answer` says."""

    answer: ClassVar[tuple[int, bytes] | None] = None
    asked: ClassVar[list[dict[str, str]]] = []
    headers_seen: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        given = {name: values[0] for name, values in parse_qs(self._body()).items()}
        self.asked.append(given)
        self.headers_seen.append(self.headers.get("authorization", ""))
        status, content = self.answer or (200, _samples(given))
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> str:
        return self.rfile.read(int(self.headers["content-length"])).decode()

    def log_message(self, *_: Any) -> None: ...


def _samples(given: dict[str, str]) -> bytes:
    begin, end, step = (float(given[name]) for name in ("start", "end", "step"))
    count = round((end - begin) / step) + 1
    values = [[begin + step * at, "1"] for at in range(count)]
    return json.dumps(
        {"status": "success", "data": {"result": [{"metric": {"a": "b"}, "values": values}]}}
    ).encode()


@pytest.fixture
def server() -> Iterator[str]:
    Handler.answer, Handler.asked, Handler.headers_seen = None, [], []
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def test_a_long_period_is_asked_for_in_parts_without_gap_or_overlap(server: str) -> None:
    period = Interval(1000.0, 1000.0 + 2 * POINTS + 7)
    told = []
    with Prometheus(server, asked=lambda: told.append(1)) as prometheus:
        (series,) = prometheus.series("q", period, 1.0)
        assert len(told) == len(Handler.asked) == prometheus.queries(period, 1.0) == 3
    assert [at for at, _ in series.samples] == [1000.0 + at for at in range(2 * POINTS + 8)]
    assert series.labels == {"a": "b"}


def test_begin_and_end_are_samples(server: str) -> None:
    period = Interval(1000.0, 1100.0)
    for wanted in (0.0, 1.0, 7.0, 1000.0):
        counted, watched = steps_of(period, wanted)
        with Prometheus(server) as prometheus:
            assert queries(prometheus, period, wanted) == 12
            for step in (counted, watched):
                (series,) = prometheus.series("q", period, step)
                assert (series.samples[0][0], round(series.samples[-1][0], 6)) == (1000.0, 1100.0)


def test_credentials_come_from_files(server: str, tmp_path: Path) -> None:
    token, basic = tmp_path / "token", tmp_path / "basic"
    token.write_text("secret\n")
    basic.write_text("user:pass:word\n")
    for auth in (auth_of(token, None), auth_of(None, basic), auth_of(None, None)):
        with Prometheus(server, auth=auth) as prometheus:
            prometheus.series("q", Interval(0, 10), 5)
    assert Handler.headers_seen == ["Bearer secret", "Basic dXNlcjpwYXNzOndvcmQ=", ""]


def test_what_is_wrong_with_credentials_is_told(tmp_path: Path) -> None:
    empty, nobody = tmp_path / "empty", tmp_path / "nobody"
    empty.write_text("\n")
    nobody.write_text("nobody")
    with pytest.raises(ConfigurationError, match="printable line"):
        auth_of(empty, None)
    with pytest.raises(ConfigurationError, match="user:password"):
        auth_of(None, nobody)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        auth_of(tmp_path / "missing", None)
    with pytest.raises(ConfigurationError, match="name one"):
        auth_of(empty, nobody)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://user:word@x"])
def test_what_is_no_address_is_told_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Prometheus(url)
    assert "word@" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "content", "kind", "said"),
    [
        (401, b"", ConfigurationError, "--prometheus-token-file"),
        (403, b"no", ConfigurationError, "asks for credentials"),
        (404, b"<html>", PrometheusError, "not Prometheus' API"),
        (200, b"{}", PrometheusError, "not Prometheus' API"),
        (
            200,
            b'{"status":"success","data":{"result":[{"metric":{},"values":[["x"]]}]}}',
            PrometheusError,
            "API",
        ),
        (400, b'{"status":"error","error":"parse error"}', PrometheusError, "refused a query: parse error"),
        (503, b'{"status":"error"}', PrometheusError, "503"),
    ],
)
def test_other_answers_are_told(
    server: str, status: int, content: bytes, kind: type[Exception], said: str
) -> None:
    Handler.answer = status, content
    with Prometheus(server) as prometheus, pytest.raises(kind, match=said):
        prometheus.series("q", Interval(0, 10), 5)


def test_nobody_there_is_told() -> None:
    with Prometheus("127.0.0.1:1") as prometheus, pytest.raises(Unavailable, match="cannot be reached"):
        prometheus.series("q", Interval(0, 10), 5)
