"""A batch in the whole house while its gateway, a ring and NATS are killed: each line once, generated once."""

import asyncio
import json
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.messages import TokenFrame
from shared.messages.batches import BatchJob
from shared.messages.records import GenerationRecords
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.journal import StartPosition, SubjectReader
from shared.nats.kv import Bucket
from shared.nats.tenants import tenant_key
from tests.chaos.cluster_fixture import House, Plan

LINES = 800
OVER = ("completed", "failed", "expired", "cancelled")


def input_file() -> bytes:
    def line(number: int) -> dict[str, Any]:
        body = {"model": "stub", "max_tokens": 20, "seed": number, "prompt": f"line {number}"}
        return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}

    return "".join(json.dumps(line(number)) + "\n" for number in range(LINES)).encode()


async def ask(house: House, method: str, path: str, **options: Any) -> httpx.Response:
    """Of whichever gateway answers."""
    async with asyncio.timeout(120), httpx.AsyncClient(timeout=20, trust_env=False) as http:
        while True:
            for _, address in house.addresses():
                try:
                    answer = await http.request(method, f"http://{address}{path}", **options)
                except httpx.TransportError:
                    continue
                if answer.status_code < 500:
                    return answer.raise_for_status()
            await asyncio.sleep(0.2)


async def until_done(house: House, batch: str, lines: int) -> dict[str, Any]:
    """The batch once so many lines are done, or it is over."""
    async with asyncio.timeout(300):
        while True:
            found: dict[str, Any] = (await ask(house, "GET", f"/v1/batches/{batch}")).json()
            if found["request_counts"]["completed"] >= lines or found["status"] in OVER:
                return found
            await asyncio.sleep(0.2)


async def identities(bus: Bus) -> dict[str, set[str]]:
    """The generations of each line, by request id, as the journal has them."""
    found: dict[str, set[str]] = defaultdict(set)
    async for message in SubjectReader(bus, subjects.ALL_RECORDS, GenerationRecords).read(StartPosition()):
        for record in message.records:
            found[record.requests[0].request_id].add(record.identity)
    return found


async def ends(bus: Bus) -> dict[str, int]:
    """How often each generation was brought to its end by a ring."""
    seen: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
    async for frame in SubjectReader(bus, subjects.ALL_TOKENS, TokenFrame).read(StartPosition()):
        for entry in frame.entries:
            if entry.finish in ("stop", "length"):
                seen[entry.generation_id].add((frame.group, frame.epoch, entry.attempt))
    return {generation: len(rings) for generation, rings in seen.items()}


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_everything_dies_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    async with House(tmp_path / "house", Plan(tp=1, step_ms=40.0)) as house:
        files = {"file": ("input.jsonl", input_file())}
        sent = await ask(house, "POST", "/v1/files", data={"purpose": "batch"}, files=files)
        body = {
            "input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h",
        }  # fmt: skip
        batch = (await ask(house, "POST", "/v1/batches", json=body)).json()["id"]
        for step, victim in enumerate(("gateway", "executor-0", "nats", "gateway"), 1):
            await until_done(house, batch, LINES * step // 8)
            await kill(house, batch, victim)
        done = await until_done(house, batch, LINES)
        while done["status"] not in OVER:
            done = await until_done(house, batch, LINES + 1)
        assert done["status"] == "completed", done
        assert done["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        text = (await ask(house, "GET", f"/v1/files/{done['output_file_id']}/content")).text
        answers = [json.loads(each) for each in text.splitlines()]
        assert sorted(each["custom_id"] for each in answers) == sorted(f"c{n}" for n in range(LINES))
        generations = await identities(house.bus)
        assert len(generations) == LINES
        assert [line for line, found in generations.items() if len(found) > 1] == []
        twice = [generation for generation, count in (await ends(house.bus)).items() if count > 1]
        assert len(twice) <= LINES // 100, twice  # what two rings had at the same moment


async def owner_of(house: House, batch: str) -> str:
    """The gateway that runs it; for a moment after a loss there is none."""
    bucket = await Bucket.open(house.bus, subjects.BATCHES_BUCKET, BatchJob, plain=True)
    async with asyncio.timeout(60):
        while True:
            entry = await bucket.get(tenant_key("", batch))
            assert entry is not None
            assert entry.value.status not in OVER, "it was over before everything had died"
            if entry.value.owner in house.members:
                return entry.value.owner
            await asyncio.sleep(0.1)


async def kill(house: House, batch: str, victim: str) -> None:
    if victim == "nats":
        await house.broker.kill()
        await house.broker.up()
        await house.all_ready()
        return
    if victim == "gateway":
        victim = await owner_of(house, batch)
    member = house.members[victim]
    member.signal(signal.SIGKILL)
    await member.ended()
    await house.start(victim)
