"""A service's life on a real NATS: ready, heartbeats, signals, faults, taken ports."""

import asyncio
import os
import signal
import socket
from typing import ClassVar

import httpx
import pytest

from shared import lifecycle, subjects
from shared.bus import Bus
from shared.config import CommonSettings
from shared.errors import InternalError, PortInUse
from shared.lifecycle import Service
from shared.messages import Heartbeat, ServiceName
from tests.threads import nats_in_thread


class Example(Service):
    name: ClassVar[ServiceName] = "scheduler"
    fault: BaseException | None = None

    async def start(self) -> None:
        self.stopped = False
        if self.fault is not None:
            self.spawn(self._break(self.fault), "break")

    async def stop(self) -> None:
        self.stopped = True

    async def _break(self, fault: BaseException) -> None:
        raise fault


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
def test_main_ends_on_a_signal(number: signal.Signals) -> None:
    class SignalsItself(Example):
        async def start(self) -> None:
            await super().start()
            os.kill(os.getpid(), number)

    with nats_in_thread() as (url, user, password):
        arguments = ["--nats-url", url, "--nats-user", user, "--nats-password", password]
        assert lifecycle.main(SignalsItself, CommonSettings, "test", arguments) == 0


def test_main_prints_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--nats-url", "nats://127.0.0.1:1", "--nats-connect-timeout", "0.3"]
    assert lifecycle.main(Example, CommonSettings, "test", arguments) == 1
    error = capfd.readouterr().err
    assert error.splitlines()[-1].startswith("error: NATS at nats://127.0.0.1:1 did not answer within 0.3 s")
    assert "Traceback" not in error
