"""Gateways with somebody who trains."""

from pathlib import Path

import pytest

from shared.nats.bus import Bus
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.training.fake_trainer import FakeTrainer


@pytest.fixture
async def trainer(bus: Bus, gateway: RunningGateway, tmp_path: Path) -> FakeTrainer:
    made = FakeTrainer(bus, tmp_path)
    await made.start()
    return made
