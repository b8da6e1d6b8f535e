"""A stream that is read while messages of it are replaced, as the broker tells of it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from nats.js.api import ConsumerConfig

from shared.nats.streams import read_stream


class Consumer:
    """Of a stream that has one message more than is pending by the broker's count, as long as `hidden` questions."""

    _consumer = "c"

    def __init__(self, messages: int, hidden: int) -> None:
        self.left, self.hidden, self.delivered = messages, hidden, 0

    def pending(self) -> int:
        return max(0, self.left - (self.hidden > 0))

    async def consumer_info(self) -> Any:
        pending, self.hidden = self.pending(), self.hidden - 1
        return SimpleNamespace(num_pending=pending)

    async def fetch(self, batch: int, timeout: float) -> list[Any]:
        messages = []
        for _ in range(batch):
            self.left, self.delivered = self.left - 1, self.delivered + 1
            sequence = SimpleNamespace(consumer=self.delivered)
            messages.append(SimpleNamespace(metadata=SimpleNamespace(sequence=sequence, num_pending=self.pending())))
        return messages

    async def unsubscribe(self) -> None:
        return


@pytest.mark.parametrize("count", [0, 1])
async def test_a_message_that_is_being_replaced_is_not_left_out(count: int) -> None:
    consumer = Consumer(count, hidden=1)

    async def subscribe(subject: str, **options: Any) -> Consumer:
        return consumer

    async def publish(subject: str) -> None:
        await asyncio.sleep(0)

    jetstream, client = SimpleNamespace(pull_subscribe=subscribe), SimpleNamespace(publish=publish)
    bus: Any = SimpleNamespace(jetstream=lambda: jetstream, client=client)
    reading = read_stream(bus, "KV_x", "$KV.x.>", ConsumerConfig(), timeout=1)
    assert len([message async for message in reading]) == count
