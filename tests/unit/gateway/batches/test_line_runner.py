"""What becomes of a line whose endpoint, or whose result's store, fails."""

import asyncio
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from services.gateway.batches import line_runner
from services.gateway.batches.dependencies import BatchMetrics
from services.gateway.batches.line_runner import LineGate, LineRunner
from services.gateway.batches.lines import BatchLine
from services.gateway.batches.results import CompletionBitmap
from shared.errors import BrokerUnavailable, InvalidRequest
from shared.messages.batches import BatchJob, LineResult
from shared.service.endpoints import new_registry

DONE = b'{"usage":{}}'


class Endpoint:
    """Does what it was given, one after the other."""

    def __init__(self, outcomes: Sequence[bytes | Exception]) -> None:
        self._outcomes = list(outcomes)

    def check(self, body: msgspec.Raw) -> str:
        return "m"

    async def run(self, body: msgspec.Raw, context: Any, unwanted: Callable[[], bool]) -> bytes:
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Results:
    """Fails `faults` times."""

    def __init__(self, faults: int) -> None:
        self._faults = faults
        self.stored: list[LineResult] = []

    async def append(self, batch: str, result: LineResult) -> None:
        if self._faults:
            self._faults -= 1
            raise BrokerUnavailable("It is away.")
        self.stored.append(result)


async def announced() -> bool:
    return True


async def run(
    monkeypatch: pytest.MonkeyPatch, *outcomes: bytes | Exception, faults: int = 0
) -> tuple[LineResult, list[str], CompletionBitmap]:
    monkeypatch.setattr(line_runner, "backoff", lambda tries: 0.0)
    results = Results(faults)
    parts: Any = SimpleNamespace(
        results=results,
        metrics=BatchMetrics(new_registry()),
        authenticator=SimpleNamespace(vouched=lambda key, tenant: None),
        catalog=SimpleNamespace(places=lambda model: 1, has_ready_group=lambda model: True),
        own=SimpleNamespace(batch_parallelism=4),
    )
    runner, tally = LineRunner(parts, lambda: 1, LineGate()), CompletionBitmap()
    job = BatchJob("b", "", 0.0, "/v1/completions", "f", "f", "24h", time.time() + 60)
    with capture_logs() as logs:
        request = BatchLine(1, "one", msgspec.Raw(b"{}"))
        assert await runner.begin(job, request, Endpoint(outcomes), tally, announced)
        async with asyncio.timeout(30):
            await runner.drained()
    [result] = results.stored
    return result, [line["event"] for line in logs], tally


async def test_a_result_is_stored_once_the_broker_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    result, events, tally = await run(monkeypatch, DONE, faults=2)
    assert result.succeeded
    assert events == ["result_write_failed"] * 2
    assert tally.done == 1


async def test_a_fault_of_ours_is_a_result_after_three_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    result, events, _ = await run(
        monkeypatch, ValueError("a"), BrokerUnavailable("b"), ValueError("c"), ValueError("d")
    )
    assert not result.succeeded
    assert len([event for event in events if event != "line_retried"]) == 3
    assert events.count("line_retried") == 1


async def test_what_a_repeat_would_not_change_is_a_result_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    result, events, _ = await run(monkeypatch, InvalidRequest("It is wrong.", param="prompt"))
    assert not result.succeeded
    assert events == []
