"""The house around a scheduler, on a NATS of the test's own."""

import pytest

from shared.nats.bus import Bus
from tests.integration.scheduler.cluster_fixture import House


@pytest.fixture
async def house(bus: Bus) -> House:
    return await House.open(bus)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of schedulers in this process: what nobody tells them they see at the next look."""
    monkeypatch.setattr("services.scheduler.models.controller.TICK", 0.2)
    monkeypatch.setattr("services.scheduler.models.wanted_adapters.LATER", 0.2)
