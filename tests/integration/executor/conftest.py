import pytest

from shared.messages import TokenFrame
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.executor.reader import Reader


@pytest.fixture
async def reader(bus: Bus) -> Reader:
    found = Reader()
    await bus.subscribe(subjects.tokens("me"), TokenFrame, found.on_frame)
    return found
