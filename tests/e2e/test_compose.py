"""The stack of compose/ in a real Docker engine, on the real model: killed and crashed while answers stream.

Where no engine answers, the summary says so. Images are built where they are missing, which takes minutes once.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.model_store.catalog import DEFAULT_MODEL
from tests.e2e.compose_stack import ComposeStack, why_no_engine
from tests.monitoring.prometheus import until

MISSING = why_no_engine()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"COMPOSE STACK NOT TRIED, no Docker engine: {MISSING}"),
    pytest.mark.timeout(1800),
]
SERVICES = ("gateway", "scheduler", "health-monitor", "executor")
TOKENS = 400


def question(tokens: int) -> dict[str, Any]:
    return {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": "Tell me about rivers."}],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": tokens,
    }


def ask(url: str, tokens: int = 8) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json=question(tokens), timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == tokens


class Stream:
    """One streamed answer of `TOKENS` tokens."""

    def __init__(self, url: str) -> None:
        body = {**question(TOKENS), "stream": True, "stream_options": {"include_usage": True}}
        self._asked = httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60)
        self.request_id = ""
        self._events: Iterator[dict[str, Any]] = iter(())

    def __enter__(self) -> "Stream":
        response = self._asked.__enter__()
        assert response.status_code == 200
        self.request_id = response.headers["x-request-id"]
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        self._events = (json.loads(line) for line in lines if line != "[DONE]")
        return self

    def __exit__(self, *_: object) -> None:
        self._asked.__exit__(None, None, None)

    def begin(self) -> None:
        """Reads the first few events."""
        for _ in range(3):
            assert "error" not in next(self._events)

    def end(self) -> None:
        """Reads the rest: it has the tokens that were asked for, and ends in good order."""
        *_, usage = rest = list(self._events)
        assert not [event for event in rest if "error" in event]
        assert usage["usage"]["completion_tokens"] == TOKENS
        reasons = [choice["finish_reason"] for event in rest for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["length"]


def targets(url: str) -> dict[str, list[str]]:
    """Health of what Prometheus reads, by job."""
    found: dict[str, list[str]] = {}
    for target in httpx.get(f"{url}/api/v1/targets").json()["data"]["activeTargets"]:
        found.setdefault(target["labels"]["job"], []).append(target["health"])
    return found


def test_a_service_that_crashes_comes_back(tmp_path: Path, model_directory: Path) -> None:
    with ComposeStack(tmp_path, model_directory.parent, "cpu") as stack:
        ask(stack.url("gateway", 8000))
        assert {one["name"] for one in stack.commands("status", "--json")["services"]} == set(SERVICES)
        for service in SERVICES:
            find = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
            has_torch = stack.run("exec", "-T", service, "python3", "-c", find).strip()
            assert has_torch == str(service == "executor")
            stack.crash(service)
        for service in SERVICES:
            until(lambda service=service: stack.state(service) == (1, "healthy"), 90)
        ask(stack.url("gateway", 8000))


def test_two_of_each_go_on_when_one_is_killed(tmp_path: Path, model_directory: Path) -> None:
    with ComposeStack(tmp_path, model_directory.parent, "ha") as stack:
        url = stack.url("gateway", 8000)
        with Stream(url) as stream:
            stream.begin()
            names = [name for name in ("executor", "executor-2") if stream.request_id in stack.logs(name)]
            assert len(names) == 1, "the group that answers says so in its log"
            for name in (*names, "scheduler", "health-monitor", "nats-1"):
                stack.kill(name)
            stream.end()
        ask(stack.url("gateway-2", 8000))
        stack.up()
        stack.up("prometheus")
        wanted = {f"ryzanstein-{service}": ["up", "up"] for service in SERVICES} | {"prometheus": ["up"]}
        until(lambda: targets(stack.url("prometheus", 9090)) == wanted, 90)
        ask(url)
