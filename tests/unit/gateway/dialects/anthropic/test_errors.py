"""What Anthropic's clients are told beside OpenAI's headers."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from services.gateway.api.dialect import PLAIN, Dialects
from services.gateway.core.errors import unsupported
from services.gateway.dialects.anthropic import errors
from services.gateway.dialects.anthropic.dialect import ANTHROPIC
from services.gateway.dialects.registry import DIALECTS
from services.gateway.ratelimit.limiter import duration, limit_headers


@pytest.mark.parametrize("seconds", [0.12, 0.999, 1.5, 59.9, 60, 61, 3600, 3661, 7322])
def test_durations_are_read_as_they_are_written(seconds: float) -> None:
    assert errors._seconds(duration(seconds)) == pytest.approx(seconds)


def scope(*headers: tuple[bytes, bytes], path: str = "/v1/messages") -> Any:
    return {"type": "http", "path": path, "headers": list(headers)}


def test_limits_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: datetime(2026, 1, 1, tzinfo=UTC).timestamp())
    told = errors.anthropic_headers(scope(), "req-1", limit_headers("tokens", 100, 40, 90.0))
    assert told == {
        "request-id": "req-1",
        "anthropic-ratelimit-tokens-limit": "100",
        "anthropic-ratelimit-tokens-remaining": "40",
        "anthropic-ratelimit-tokens-reset": "2026-01-01T00:01:30Z",
    }
    for version in errors.KNOWN_VERSIONS:
        known = scope((errors.VERSION, version.encode()))
        assert errors.anthropic_headers(known, "r", {}) == {"request-id": "r"}
    other = errors.anthropic_headers(scope((errors.VERSION, b"\xe9\r\n<")), "r", {})
    assert other["x-ryzanstein-warning"].startswith("anthropic-version ???? is not known here")


def test_a_list_of_models_is_whose_asks_for_it() -> None:
    spoken, version = Dialects(DIALECTS), (errors.VERSION, b"2023-06-01")
    assert spoken.of_request(scope(path="/v1/models")) is PLAIN
    assert spoken.of_request(scope(version, path="/v1/models/x")) is ANTHROPIC
    assert spoken.of_request(scope(version, path="/v1/chat/completions")) is PLAIN


def test_a_thread_is_refused_so_that_clients_go_on_without_it() -> None:
    told = ANTHROPIC.describe(unsupported("thread"), "req-1")
    body = msgspec.json.decode(msgspec.json.encode(told))
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    other = ANTHROPIC.describe(unsupported("container"), "req-1")
    assert "details" not in msgspec.json.decode(msgspec.json.encode(other))["error"]
