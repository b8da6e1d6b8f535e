"""A service's life on a real NATS: ready, heartbeats, signals, faults, taken ports."""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from shared import subjects
from shared.bus import Bus
from shared.config import CommonSettings
from shared.errors import InternalError, PortInUse
from shared.messages import Heartbeat
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
        assert answer == {
            "service": "scheduler",
            "instance": service.instance,
            "state": "ready",
            "ready": True,
        }
        assert (await client.head(f"http://{beat.address}/metrics")).content == b""
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
    async with service_process(
        bus, nats_settings, "tests.example_service", tmp_path, instance="example"
    ) as process:
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
