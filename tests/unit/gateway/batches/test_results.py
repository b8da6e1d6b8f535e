"""Results of lines on their way to the stream."""

import asyncio
from typing import Any

import pytest

from services.gateway.batches.results import Results
from shared.messages.batches import LineResult, LineResults


class FailingBus:
    """Refuses the first message with what nobody foresaw."""

    max_payload = 1 << 20

    def __init__(self) -> None:
        self.stored: list[LineResult] = []
        self._failed = False

    async def publish_durable(self, subject: str, message: LineResults) -> int:
        if not self._failed:
            self._failed = True
            raise ValueError("no one foresaw it")
        self.stored += message.results
        return len(self.stored)


async def test_a_result_that_cannot_be_stored_holds_up_none_after_it() -> None:
    bus: Any = FailingBus()
    results, result = Results(bus, bus, 0.0), LineResult(1, True, b"{}")
    async with asyncio.timeout(10):
        with pytest.raises(ValueError, match="no one foresaw it"):
            await results.append("b", result)
        await results.append("b", result)
    assert bus.stored == [result]
