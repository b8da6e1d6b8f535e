"""A ring dies in the middle of a long prompt: what another ring has of its beginning is not computed again."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.cluster_fixture import House, Plan

BEGINNING = [5 + (at * at + at // 7) % 200 for at in range(4200)]
PROMPT = BEGINNING + [5 + (3 * at) % 200 for at in range(2800)]
ARGUMENTS = ("--engine", "stub", "--served-model-name", "stub", "--stub-step-ms", "5", "--stub-us-per-token", "1000")


def body(prompt: list[int], **fields: object) -> dict[str, Any]:
    return {"model": "stub", "prompt": prompt, "max_tokens": 8, "seed": 7, **fields}


@pytest.mark.nightly
async def test_a_long_prompt_goes_on_where_its_beginning_is(tmp_path: Path) -> None:
    """Three rings: one was sent the beginning in another session, one dies in the middle, one has nothing, as has the
    one that comes up again."""
    plan = Plan(gateways=1, schedulers=1, monitors=1, executors=3, tp=1, executor_arguments=ARGUMENTS)
    async with House(tmp_path / "house", plan) as house:
        ((_, address),) = house.addresses()
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as http:
            first = await http.post("/v1/completions", json=body(BEGINNING), headers={"x-session-id": "first"})
            assert first.status_code == 200, house.logs()
            streamed = body(PROMPT, stream=True, stream_options={"include_usage": True})
            told, text, usage = [], "", {}
            async with http.stream(
                "POST", "/v1/completions", json=streamed, headers={"x-session-id": "second"}
            ) as response:
                async for line in response.aiter_lines():
                    if line.startswith(": prompt "):
                        if not told:
                            await kill_the_ring_at_work(house)
                        told.append(int(line.removeprefix(": prompt ").split("/")[0]))
                    elif line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        text += "".join(choice["text"] for choice in chunk["choices"])
                        usage = chunk["usage"] or usage
            again = await http.post("/v1/completions", json=body(PROMPT))
        assert 0 < told[0] < len(BEGINNING), "it died in the middle"
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 4096, house.logs()
        assert usage["completion_tokens"] == 8
        assert text == again.json()["choices"][0]["text"]


async def kill_the_ring_at_work(house: House) -> None:
    """SIGKILL for its rank."""
    names = [name for name, member in house.members.items() if member.service == "executor"]
    await house.watch.until(lambda: any(map(house.work, names)), 30, "a ring is at work")
    (busy,) = [name for name in names if house.work(name)]
    os.kill(house.ranks(busy)[0], signal.SIGKILL)
