"""Other programs, over NATS: the example of docs/batch.md, and what is answered to requests that are wrong."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from shared.config import CommonSettings
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.gateway.batches.helpers import custom_ids, requests
from tests.integration.gateway.conftest import RunningGateway
from tests.processes import nats_address

PAGE = (Path(__file__).parents[4] / "docs" / "batch.md").read_text()


def example(contains: str) -> str:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [block for block in blocks if contains in block]
    return found


async def run(script: str, directory: Path, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, cwd=directory, env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    shown, _ = await process.communicate()
    assert process.returncode == 0, shown.decode()
    return shown.decode()


async def test_the_example_over_nats(nats_settings: CommonSettings, served: openai.AsyncOpenAI, tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(requests(30))
    shown = await run(example("import nats"), tmp_path, RYZANSTEIN_NATS_URL=nats_address(nats_settings))
    assert "completed" in shown
    lines = [json.loads(each) for each in (tmp_path / "output.jsonl").read_text().splitlines()]
    assert custom_ids(lines) == sorted(f"c{number}" for number in range(30))


@pytest.mark.slow
async def test_the_example_with_openais_client(
    gateway: RunningGateway, served: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    (tmp_path / "input.jsonl").write_bytes(requests(10))
    script = example("from openai import OpenAI").replace("http://127.0.0.1:8000", gateway.url)
    shown = await run(script, tmp_path)
    assert custom_ids([json.loads(each) for each in shown.splitlines() if each]) == sorted(
        f"c{number}" for number in range(10)
    )


async def ask(bus: Bus, subject: str, data: bytes) -> dict[str, Any]:
    answer = await bus.client.request(subject, data, timeout=10)
    decode = msgspec.json.decode if data[:1] == b"{" else msgspec.msgpack.decode
    found: dict[str, Any] = decode(answer.data)
    return found


async def test_json_and_messagepack_say_the_same(bus: Bus, served: openai.AsyncOpenAI) -> None:
    store = await bus.jetstream().object_store(subjects.FILES_STORE)
    await store.put("mine", requests(3))
    plain = {"object": "mine", "tenant": "t", "metadata": {"a": "b"}, "idempotency_key": "k"}
    first = await ask(bus, subjects.BATCH_SUBMIT, json.dumps(plain).encode())
    assert first["files"] == {"input": "mine"}
    second = await ask(bus, subjects.BATCH_SUBMIT, json.dumps(plain).encode())
    assert second["batch"]["id"] == first["batch"]["id"]
    asked = {"id": first["batch"]["id"], "tenant": "other"}
    assert (await ask(bus, subjects.BATCH_STATUS, json.dumps(asked).encode()))["status"] == 404
    asked["tenant"] = "t"
    async with asyncio.timeout(20):
        while True:
            one = await ask(bus, subjects.BATCH_STATUS, msgspec.msgpack.encode(asked))
            if one["batch"]["status"] == "completed":
                break
    assert one == await ask(bus, subjects.BATCH_STATUS, json.dumps(asked).encode())
    assert (await store.get(one["files"]["output"])).data
    listed = await ask(bus, subjects.BATCH_LIST, b'{"tenant": "t"}')
    assert [each["id"] for each in listed["batches"]] == [first["batch"]["id"]]
    again = await ask(bus, subjects.BATCH_CANCEL, json.dumps(asked).encode())
    assert (again["status"], again["error"]["code"]) == (409, "batch_is_over")


WRONG = [
    (subjects.BATCH_SUBMIT, b"{}", 400, "missing_required_parameter"),
    (subjects.BATCH_SUBMIT, b'{"object": "none"}', 404, "not_found"),
    (subjects.BATCH_SUBMIT, b'{"object": "a", "input_file_id": "b"}', 400, "missing_required_parameter"),
    (subjects.BATCH_SUBMIT, b'{"colour": 1}', 400, "unknown_parameter"),
    (subjects.BATCH_STATUS, b"{", 400, "invalid_json"),
    (subjects.BATCH_STATUS, b"\xff\xff", 400, "invalid_request_body"),
    (subjects.BATCH_STATUS, b"", 400, "invalid_request_body"),
    (subjects.BATCH_CANCEL, b'{"id": "batch_none"}', 404, "not_found"),
    (subjects.BATCH_LIST, b'{"limit": 0}', 400, "integer_below_min_value"),
]


async def test_requests_that_are_wrong(bus: Bus, gateway: RunningGateway) -> None:
    for subject, data, status, code in WRONG:
        found = await ask(bus, subject, data)
        assert (found["status"], found["error"]["code"]) == (status, code), data
