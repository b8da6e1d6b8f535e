"""One request that ends every ring which computes it, among twenty: two rings die, and nobody else is hurt."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.executor.worker.stub import FAULT_TOKEN
from shared.messages import GroupEvent
from shared.nats import subjects
from tests.chaos.cluster_fixture import House, Plan

CAUSES = {"crash": "crashed", "exit": "crashed", "error": "out_of_memory", "hang": "hung"}
INNOCENT = 19


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["crash", *(pytest.param(name, marks=pytest.mark.chaos) for name in ("exit", "error", "hang"))]
)
async def test_a_fatal_request_ends_two_rings_and_gets_an_error(fault: str, tmp_path: Path) -> None:
    arguments = ("--engine", "stub", "--served-model-name", "stub", "--stub-step-ms", "20", "--stub-fault", fault)
    plan = Plan(gateways=2, schedulers=1, monitors=2, executors=3, tp=1, executor_arguments=arguments)
    downs: dict[tuple[str, int], str] = {}
    async with House(tmp_path / "house", plan) as house:

        async def note(event: GroupEvent) -> None:
            if event.kind == "down":
                downs.setdefault((event.group, event.epoch), event.death.cause if event.death else "")

        await house.bus.subscribe(subjects.HEALTH_EVENTS, GroupEvent, note)
        addresses = [address for _, address in house.addresses()]
        async with httpx.AsyncClient(timeout=120) as http:

            async def complete(number: int, prompt: list[int], **headers: str) -> httpx.Response:
                body: dict[str, Any] = {"model": "stub", "prompt": prompt, "max_tokens": 60, "seed": 7}
                url = f"http://{addresses[number % len(addresses)]}/v1/completions"
                return await http.post(url, json=body, headers=headers)

            innocent = [asyncio.create_task(complete(n, [9, 8, n + 10])) for n in range(INNOCENT)]
            key = {"idempotency-key": "poison"}
            answer = await complete(0, [9, 8, FAULT_TOKEN], **key)
            answers = await asyncio.gather(*innocent)
            again = await complete(0, [9, 8, FAULT_TOKEN], **key)
        assert {one.status_code for one in answers} == {200}, house.logs()
        assert len({one.json()["choices"][0]["text"] for one in answers}) == 1
        assert {one.json()["usage"]["completion_tokens"] for one in answers} == {60}
        for failed in (answer, again):
            assert failed.status_code == 400, failed.text
            error = failed.json()["error"]
            assert (error["code"], error["type"]) == ("fatal_request", "invalid_request_error")
            assert "crashed two executor groups" in error["message"]
        assert sorted(downs.values()) == [CAUSES[fault]] * 2, house.logs()
