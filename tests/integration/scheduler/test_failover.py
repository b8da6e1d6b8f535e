"""A scheduler may die or leave at any moment: its requests go to another one."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from services.cli.supervision.nats_server import LocalNats
from services.scheduler import intake
from services.scheduler.settings import SchedulerSettings
from shared.config import CommonSettings
from shared.messages import LANES
from shared.nats import bus as bus_module
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.scheduler.cluster_fixture import House, scheduler
from tests.processes import ServiceProcess, service_process


@pytest.fixture(params=[60])
async def process(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[ServiceProcess]:
    """A scheduler process that is ready; the parameter is its `ack_wait`."""
    options = ("--ack-wait", str(request.param), "--log-format", "json")
    async with service_process(
        bus, nats_settings, "services.scheduler", tmp_path, *options, instance="victim"
    ) as running:
        await running.wait_ready()
        yield running


async def held(bus: Bus) -> int:
    info = await bus.jetstream().consumer_info(subjects.INTAKE_STREAM, "scheduler-interactive")
    return info.num_ack_pending or 0


async def until_held(bus: Bus, count: int) -> None:
    async with asyncio.timeout(15):
        while await held(bus) != count:
            await bus.flush()


@pytest.mark.parametrize("process", [1], indirect=True)
async def test_a_killed_schedulers_requests_go_to_another_one(house: House, bus: Bus, process: ServiceProcess) -> None:
    await house.ask("a")
    await house.ask("b")
    await until_held(bus, 2)
    assert await process.end(signal.SIGKILL) == -signal.SIGKILL
    leader = await house.leader()
    async with house.scheduler(ack_wait=1.0) as service:
        await house.until(lambda: leader.ids == ["a", "b"])
        await house.until_settled()
        assert service._metrics.redelivered._value.get() == 2


async def test_a_leaving_scheduler_hands_its_requests_back_at_once(
    house: House, bus: Bus, process: ServiceProcess
) -> None:
    await house.ask("a", session="s")
    await until_held(bus, 1)
    assert await process.end(signal.SIGTERM) == 0
    leader = await house.leader()
    async with house.scheduler(ack_wait=60.0):
        await house.until(lambda: leader.ids == ["a"], 10)
        await house.until_settled()


async def test_each_dispatch_is_logged_with_its_request_id(house: House, process: ServiceProcess) -> None:
    leader = await house.leader()
    await house.ask("a", request_id="from the client")
    await house.until(lambda: leader.ids == ["a"])
    await house.until_settled()
    assert await process.end(signal.SIGTERM) == 0
    lines = [line for line in process.log.read_text().splitlines() if '"dispatched"' in line]
    assert len(lines) == 1
    for part in ('"request_id": "from the client"', '"generation_id": "a"', '"group": "g"', '"victim"'):
        assert part in lines[0]


async def test_two_schedulers_share_the_work_and_lose_none_when_one_leaves(house: House) -> None:
    leaders = [await house.leader(f"g{index}") for index in range(2)]
    async with house.scheduler():
        async with house.scheduler():
            asking = [asyncio.create_task(house.ask(str(index))) for index in range(100)]
            await house.until(lambda: sum(len(leader.requests) for leader in leaders) >= 20)
        await asyncio.gather(*asking)
        await house.until(lambda: sum(len(leader.requests) for leader in leaders) >= 100)
        await house.until_settled()
    assert sorted({name for leader in leaders for name in leader.ids}, key=int) == [str(index) for index in range(100)]


@pytest.mark.parametrize("lost", ["connection", "consumer"])
async def test_what_was_lost_is_taken_up_again(house: House, bus: Bus, lost: str) -> None:
    leader = await house.leader()
    async with house.scheduler(ack_wait=0.5) as service:
        await house.ask("a")
        await house.until(lambda: leader.ids == ["a"])
        if lost == "connection":  # the socket dies; the client connects anew by itself, and pulls anew
            service.bus.client._transport.close()
        else:
            await bus.jetstream().delete_consumer(subjects.INTAKE_STREAM, "scheduler-interactive")
        await house.ask("b")
        await house.until(lambda: leader.ids == ["a", "b"])


async def test_a_scheduler_can_leave_while_nats_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "STOP_TIMEOUT", 0.2)
    monkeypatch.setattr(bus_module, "CLOSE_TIMEOUT", 0.2)
    server = LocalNats(tmp_path)
    await server.start()
    settings = server.settings()
    bus = await Bus.connect(settings, "test")
    try:
        async with scheduler(settings) as service:
            await (await House.open(bus)).ask("a")
            async with asyncio.timeout(10):
                while not service._metrics.received.labels("interactive")._value.get():
                    await bus.flush()
            await bus.close()
            await server.stop()
        assert service.state == "gone"
    finally:
        await server.stop()


async def test_metrics_are_served(house: House) -> None:
    leader = await house.leader()
    async with house.scheduler() as service:
        await house.ask("a", session="s")
        await house.until(lambda: leader.ids == ["a"])
        await house.until_settled()
        host, port = service.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    for line in (
        'ryzanstein_scheduler_received_total{lane="interactive"} 1.0',
        'ryzanstein_scheduler_dispatched_total{group="g"} 1.0',
        'ryzanstein_scheduler_placements_total{reason="least_loaded"} 1.0',
        "ryzanstein_scheduler_batch_size_count 1.0",
        "ryzanstein_scheduler_decision_seconds_count 1.0",
    ):
        assert line in text


async def test_a_pull_ends_before_what_was_given_to_it_is_given_away_again(
    bus: Bus, nats_settings: CommonSettings
) -> None:
    """So a scheduler that was stopped or cut off gets no request twice, and is asked for ever in vain."""
    pulls: list[dict[str, int]] = []
    seen = asyncio.Event()

    async def on_pull(message: Msg) -> None:
        pulls.append(json.loads(message.data))
        if len(pulls) > 2 * len(LANES):
            seen.set()

    await bus.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{subjects.INTAKE_STREAM}.*", cb=on_pull)
    await bus.flush()
    async with scheduler(nats_settings, ack_wait=0.5):
        await asyncio.wait_for(seen.wait(), 20)  # each is made anew
    assert {pull["expires"] for pull in pulls} == {500_000_000}


def test_settings_have_sane_defaults() -> None:
    settings = SchedulerSettings()
    assert settings.batch_wait <= 0.005
    assert settings.dispatch_timeout <= settings.ack_wait, "a request in a dispatch is still ours"
