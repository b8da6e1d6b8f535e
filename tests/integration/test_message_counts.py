"""How many messages a stack stores for a request: what grows here, every broker pays for each request."""

import asyncio
from pathlib import Path

import httpx
import pytest

from benchmarks.regressions.counts import grown, load
from shared.config import CommonSettings
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.rollout.cluster_fixture import House, until_answered

REQUESTS, TOKENS = 20, 12
WHAT = f"NATS: {REQUESTS} requests of {TOKENS} tokens"


async def stored(bus: Bus) -> dict[str, int]:
    """Messages so far, by what they are."""
    stream = bus.jetstream()
    queued = (await stream.stream_info(subjects.INTAKE_STREAM)).state.last_seq
    state = (await stream.stream_info(subjects.JOURNAL_STREAM, subjects_filter=">")).state
    by_kind = {"records": 0, "tokens": 0}
    for subject, count in (state.subjects or {}).items():
        by_kind[subject.partition(".")[0]] += count
    return {
        f"{WHAT}, queued, messages": queued,
        f"{WHAT}, records, messages": by_kind["records"],
        f"{WHAT}, token frames, messages": by_kind["tokens"],
    }


@pytest.mark.slow
async def test_a_request_costs_the_broker_no_more_messages(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    """One after the other, at 10 ms a step: steps are too far apart to share frames, and one says that the
    request was taken. A busy machine may bring some
    together, which makes them fewer and never more."""
    async with House(bus, nats_settings, tmp_path) as house:
        await house.begin("monitor-0", "services.health_monitor")
        await house.begin("scheduler-0", "services.scheduler")
        await house.begin("executor-0", "services.executor", "--engine", "stub", "--stub-step-ms", "10")
        await house.begin("gateway-0", "services.gateway", "--port", "0")
        await asyncio.gather(*(process.wait_ready() for process in house.processes.values()))
        await until_answered(house.url("gateway-0"))
        before = await stored(bus)
        async with httpx.AsyncClient(base_url=house.url("gateway-0"), trust_env=False, timeout=60) as http:
            body = {"model": "stub", "prompt": "x", "max_tokens": TOKENS, "seed": 7, "stream": True}
            for _ in range(REQUESTS):
                assert (await http.post("/v1/completions", json=body)).text.rstrip().endswith("[DONE]")
        after = await stored(bus)
    found = {name: after[name] - before[name] for name in after}
    recorded = {name: count for name, count in load().items() if name in found}
    assert grown(recorded, found) == []
    assert found[f"{WHAT}, token frames, messages"] >= REQUESTS, "they have been counted"
