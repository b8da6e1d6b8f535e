"""A house of real processes that send their spans to a collector of the tests'."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from services.cli.supervision.nats_server import LocalNats
from shared.nats.bus import Bus
from shared.nats.streams import ensure_streams
from tests.integration.rollout.cluster_fixture import House, until_answered
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
async def nats(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalNats]:
    server = LocalNats(tmp_path_factory.mktemp("nats"))
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def house_bus(nats: LocalNats) -> AsyncIterator[Bus]:
    """The tests' own connection to the house's NATS."""
    bus = await Bus.connect(nats.settings(beat_interval=0.1), "test")
    await ensure_streams(bus)
    yield bus
    await bus.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def house(
    tmp_path_factory: pytest.TempPathFactory, received: Collector, nats: LocalNats, house_bus: Bus
) -> AsyncIterator[House]:
    """One of each service, and a ring of two ranks."""
    settings = nats.settings(beat_interval=0.1)
    async with House(house_bus, settings, tmp_path_factory.mktemp("house")) as running:
        await running.begin("monitor-0", "services.health_monitor")
        await running.begin("scheduler-0", "services.scheduler")
        await running.begin("executor-0", "services.executor", "--group", "group-0", "--tp", "2", *RING)
        await running.begin("gateway-0", "services.gateway", *GATEWAY)
        for process in running.processes.values():
            await process.wait_ready()
        await until_answered(running.url("gateway-0"))
        yield running
