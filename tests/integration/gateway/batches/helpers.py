"""Input files, and batches waited for."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai
from openai.types import Batch

from shared.messages import GroupLoad, GroupRecord
from shared.nats import subjects
from shared.nats.kv import Bucket
from tests.integration.gateway.fake_ring import MODEL, FakeRing

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    """A chat request that says its own name."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked | body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


def requests(count: int) -> bytes:
    """So many lines, the first with the custom_id `c0`."""
    return jsonl([line(f"c{number}") for number in range(count)])


async def ready(ring: FakeRing, slots: int = 16) -> None:
    """What the health monitor says of a ring that is up."""
    groups = await Bucket.open(ring.bus, subjects.GROUPS_BUCKET, GroupRecord)
    record = GroupRecord(ring.group, MODEL, "ready", ring.epoch, [], GroupLoad(slots=slots))
    await groups.put(ring.group, record)


async def submit(client: openai.AsyncOpenAI, data: bytes, **options: Any) -> Batch:
    file = await client.files.create(file=("input.jsonl", data), purpose="batch")
    given = {"endpoint": CHAT, "completion_window": "24h"} | options
    return await client.batches.create(input_file_id=file.id, **given)


async def until_status(client: openai.AsyncOpenAI, batch: str, *states: str, seconds: float = 40) -> Batch:
    """The batch once it is in one of `states`, over by default."""
    async with asyncio.timeout(seconds):
        while True:
            found = await client.batches.retrieve(batch)
            if found.status in (states or OVER):
                return found
            assert found.status not in OVER, found
            await asyncio.sleep(0.05)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file."""
    assert file_id is not None
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


def custom_ids(lines: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(each["custom_id"] for each in lines)


def text_of(answer: dict[str, Any]) -> str:
    """What the model said in a line of an output file of chats."""
    text = answer["response"]["body"]["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text
