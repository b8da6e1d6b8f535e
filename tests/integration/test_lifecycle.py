"""A service's life on a real NATS: ready, heartbeats, signals, faults, taken ports."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from shared import tasks
from shared.config import CommonSettings
from shared.errors import InternalError, PortInUse
from shared.messages import Heartbeat
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.service import lifecycle
from tests.example_service import Example
from tests.processes import service_process


async def _beats(bus: Bus) -> "asyncio.Queue[Heartbeat]":
    queue: asyncio.Queue[Heartbeat] = asyncio.Queue()
    await bus.subscribe(subjects.ALL_BEATS, Heartbeat, queue.put)
    await bus.flush()
    return queue


async def _until_state(queue: "asyncio.Queue[Heartbeat]", state: str) -> Heartbeat:
    async with asyncio.timeout(10):
        while (beat := await queue.get()).state != state:
            pass
    return beat


async def test_ready_draining_gone(bus: Bus, nats_settings: CommonSettings) -> None:
    queue = await _beats(bus)
    service = Example(nats_settings)
    running = asyncio.create_task(service.run())
    beat = await _until_state(queue, "ready")
    assert (beat.service, beat.instance, beat.pid) == ("scheduler", service.instance, os.getpid())
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = (await client.get(f"http://{beat.address}/ready")).json()
        assert answer == {"service": "scheduler", "instance": service.instance, "state": "ready", "ready": True}
        assert (await client.head(f"http://{beat.address}/metrics")).content == b""
        metrics = (await client.get(f"http://{beat.address}/metrics")).text
        assert "ryzanstein_service_ready 1.0" in metrics
        assert "ryzanstein_nats_connected 1.0" in metrics
    service.end()
    await _until_state(queue, "draining")
    await _until_state(queue, "gone")
    await running
    assert service.stopped


async def test_a_broken_task_ends_the_service_with_its_error(bus: Bus, nats_settings: CommonSettings) -> None:
    service = Example(nats_settings)
    service.fault = InternalError("It broke.")
    with pytest.raises(InternalError, match="It broke"):
        await asyncio.wait_for(service.run(), 10)
    assert service.stopped


async def test_a_taken_port_is_named(nats_settings: CommonSettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        service = Example(nats_settings.model_copy(update={"ops_port": port}))
        with pytest.raises(PortInUse, match=f"Port {port} on 127.0.0.1 is taken"):
            await service.run()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_ends_well_on_a_signal(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, number: signal.Signals
) -> None:
    async with service_process(bus, nats_settings, "tests.example_service", tmp_path, instance="example") as process:
        await process.wait_ready()
        assert await process.end(number) == 0
    events = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert [event["event"] for event in events] == ["ready", "stopped"]
    assert {event["instance"] for event in events} == {"example"}


async def test_what_is_expected_to_go_wrong_is_one_sentence(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    nowhere = ["--nats-url", "nats://127.0.0.1:1", "--nats-connect-timeout", "0.3"]
    async with service_process(
        bus, nats_settings, "tests.example_service", tmp_path, *nowhere, instance="example"
    ) as process:
        assert await asyncio.wait_for(process.process.wait(), 20) == 1
    lines = process.log.read_text().splitlines()
    assert lines[-1].startswith("error: NATS at nats://127.0.0.1:1 did not answer within 0.3 s")
    assert not any("Traceback" in line for line in lines)


async def _until_answered(client: httpx.AsyncClient, url: str) -> httpx.Response:
    async with asyncio.timeout(30):
        while True:
            try:
                return await client.get(url)
            except httpx.ConnectError:
                await asyncio.sleep(0.02)


async def test_before_nats_is_there_the_port_answers_and_a_signal_ends_it(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nowhere = ["--nats-url", "nats://127.0.0.1:1", "--nats-connect-timeout", "600", "--ops-port", str(port)]
    async with service_process(
        bus, nats_settings, "tests.example_service", tmp_path, *nowhere, instance="example"
    ) as process:
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await _until_answered(client, f"http://127.0.0.1:{port}/health")).status_code == 200
            answer = await client.get(f"http://127.0.0.1:{port}/ready")
            metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        assert "ryzanstein_service_ready 0.0" in metrics
        assert "ryzanstein_nats_connected 0.0" in metrics
        assert answer.status_code == 503
        assert answer.json()["reason"] == "the service is starting; NATS is not connected"
        assert await process.end(signal.SIGTERM) == 0
    assert "Traceback" not in process.log.read_text()


class Slow(Example):
    """Never completes its start."""

    async def start(self) -> None:
        await super().start()
        self.begun.set()
        await asyncio.Event().wait()

    begun: asyncio.Event


async def test_an_end_during_the_start_cancels_it_and_stops_in_order(nats_settings: CommonSettings) -> None:
    service = Slow(nats_settings)
    service.begun = asyncio.Event()
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(service.begun.wait(), 10)
    assert service.state == "starting"
    service.end()
    await asyncio.wait_for(running, 10)
    assert service.stopped
    assert service.state == "gone"


class BadAtStopping(Example):
    async def stop(self) -> None:
        await super().stop()
        raise ValueError("not the cause")


async def test_a_fault_while_stopping_does_not_hide_the_cause(nats_settings: CommonSettings) -> None:
    service = BadAtStopping(nats_settings)
    service.fault = InternalError("The cause.")
    with pytest.raises(InternalError, match="The cause"):
        await asyncio.wait_for(service.run(), 10)
    assert service.state == "gone"


async def test_a_fault_while_stopping_is_a_fault(bus: Bus, nats_settings: CommonSettings) -> None:
    queue = await _beats(bus)
    service = BadAtStopping(nats_settings)
    running = asyncio.create_task(service.run())
    await _until_state(queue, "ready")
    service.end()
    with pytest.raises(ValueError, match="not the cause"):
        await asyncio.wait_for(running, 10)
    assert service.state == "gone"


class Stubborn(Example):
    """Has a task that does not end when it is told to."""

    async def start(self) -> None:
        await super().start()
        self.release = asyncio.Event()
        self.task = self.spawn(self._stay(), "stubborn")
        self.end()

    async def _stay(self) -> None:
        while not self.release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.release.wait()


async def test_a_task_that_does_not_end_is_left_behind(
    nats_settings: CommonSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "CANCEL_TIMEOUT", 0.1)
    service = Stubborn(nats_settings)
    with capture_logs() as logs:
        await asyncio.wait_for(service.run(), 10)
    assert [line["tasks"] for line in logs if line["event"] == "tasks_did_not_stop"] == [["stubborn"]]
    service.release.set()
    await service.task


class Broken(Example):
    def __init__(self, settings: CommonSettings) -> None:
        super().__init__(settings)
        raise KeyError("a secret")


def test_a_fault_of_its_own_is_logged_and_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with capture_logs() as logs:
        assert lifecycle.main(Broken, CommonSettings, "ryzanstein serve example", []) == 1
    (line,) = logs
    assert (line["event"], line["exc_info"]) == ("unexpected_error", True)
    assert capsys.readouterr().err == (
        "error: `ryzanstein serve example` failed with an internal error (KeyError); see the log above, and please "
        "report it.\n"
    )


async def test_an_empty_address_is_one_sentence(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> None:
    async with service_process(
        bus, nats_settings, "tests.example_service", tmp_path, "--nats-url", "", instance="example"
    ) as process:
        assert await asyncio.wait_for(process.process.wait(), 20) == 1
    text = process.log.read_text()
    assert "error: No NATS address is set" in text
    assert "Traceback" not in text
