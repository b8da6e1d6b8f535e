"""Everything is restarted, one after the other, and no request fails."""

from pathlib import Path

import pytest

from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.integration.rollout.cluster_fixture import STUB, House, Load, long_answer

CONTROL = ("gateway", "scheduler", "monitor")


async def restart_both(house: House, service: str, load: Load) -> None:
    for number in range(2):
        await house.restart(f"{service}-{number}")
        await load.more(8)


@pytest.mark.slow
async def test_a_rolling_restart_of_everything_fails_no_request(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    async with House(bus, nats_settings, tmp_path) as house:
        await house.start_two_of_each((*STUB, "--stub-context-length", "16384"))
        before = {name: process.process.pid for name, process in house.processes.items()}
        async with Load(house.urls()).running() as load:
            for service in CONTROL:
                await restart_both(house, service, load)
            # The groups must hand it back, more often than it may be lost.
            async with long_answer(house.url("gateway-0"), tokens=12000):
                for _ in range(3):
                    await restart_both(house, "executor", load)
        after = {name: process.process.pid for name, process in house.processes.items()}
        assert not set(before.items()) & set(after.items()), "each is another process"
        assert load.moves, "clients have met gateways that had left"
        assert '"event": "recovering"' in house.logs("gateway-*.log"), (
            "groups have handed back what they could not finish"
        )
