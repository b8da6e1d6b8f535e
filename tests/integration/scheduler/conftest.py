"""The house around a scheduler, on a NATS of the test's own."""

import pytest

from shared.nats.bus import Bus
from tests.integration.scheduler.cluster_fixture import House


@pytest.fixture
async def house(bus: Bus) -> House:
    return await House.open(bus)
