"""A house of real processes that send their spans to a collector of the tests'."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from services.cli.nats_server import LocalNats
from shared.bus import Bus
from tests.integration.rollout.house import House, until_answered
from tests.otlp import Collector, collector

GATEWAY = ("--port", "0", "--grpc-port", "0")
RING = ("--engine", "stub", "--stub-step-ms", "5", "--drain-grace", "0.1", "--hung-after", "2")


@pytest.fixture(scope="package")
def received() -> Iterator[Collector]:
    """Tracing is on, in every process that is started."""
    with collector() as running, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        environment.setenv("RYZANSTEIN_LOG_LEVEL", "debug")
        yield running


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def house(tmp_path_factory: pytest.TempPathFactory, received: Collector) -> AsyncIterator[House]:
    """One of each service, and a ring of two ranks."""
    directory = tmp_path_factory.mktemp("house")
    nats = LocalNats(directory / "nats")
    await nats.start()
    settings = nats.settings(beat_interval=0.1)
    bus = await Bus.connect(settings, "test")
    await bus.ensure_streams()
    try:
        async with House(bus, settings, directory) as running:
            await running.begin("monitor-0", "services.health_monitor")
            await running.begin("scheduler-0", "services.scheduler")
            await running.begin("executor-0", "services.executor", "--group", "group-0", "--tp", "2", *RING)
            await running.begin("gateway-0", "services.gateway", *GATEWAY)
            for process in running.processes.values():
                await process.wait_ready()
            await until_answered(running.url("gateway-0"))
            yield running
    finally:
        await bus.close()
        await nats.stop()
