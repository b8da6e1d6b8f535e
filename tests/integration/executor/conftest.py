"""What tests of executors share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.config import CommonSettings
from shared.messages import TokenFrame
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.executor.reader import Reader
from tests.integration.executor.rings import Rings, rings


@pytest.fixture
async def reader(bus: Bus) -> Reader:
    """Of all tokens for the consumer `me`."""
    found = Reader()
    await bus.subscribe(subjects.tokens("me"), TokenFrame, found.on_frame)
    return found


@pytest.fixture
async def house(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> AsyncIterator[Rings]:
    """Rings of the test's own."""
    async with rings(bus, nats_settings, tmp_path) as made:
        yield made
