"""A gateway with a registry, and hosts that say what a test lets them say."""

import pytest

from shared.nats.bus import Bus
from tests.integration.gateway.models.fake_hosts import FakeHosts


@pytest.fixture
async def hosts(bus: Bus) -> FakeHosts:
    fake = FakeHosts(bus)
    await fake.start()
    return fake
