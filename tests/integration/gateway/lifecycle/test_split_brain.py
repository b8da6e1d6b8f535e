"""A gateway that was away and comes back: what another one owns by now is not its to end."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.chaos.links import Forwarder
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import FakeRing, until
from tests.integration.gateway.lifecycle.test_gateway_lost import CHAT, TEXT, body, gateway_process, go_on
from tests.integration.gateway.resuming import Event, Paced, finishes, read_events, text_of

GRACE = 0.3


@pytest.fixture
async def link(nats_settings: CommonSettings) -> AsyncIterator[Forwarder]:
    host, _, port = nats_settings.nats_url.rpartition("/")[2].rpartition(":")
    forwarder = Forwarder((host, int(port)))
    yield forwarder
    await forwarder.close()


@pytest.fixture
async def remote(link: Forwarder, nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    """A gateway whose link to NATS can be cut."""
    url = f"nats://127.0.0.1:{await link.listen('127.0.0.1')}"
    settings = nats_settings.model_copy(update={"nats_url": url})
    async with run_gateway(settings, instance="remote", resume_grace=GRACE) as running:
        yield running
        link.heal()


def owned(gateway: RunningGateway) -> int:
    answers = gateway.service.work.answers
    return sum(answer.owned and not answer.ended for answer in answers.all())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["silence", "broken connection"])
async def test_a_gateway_that_was_cut_off_ends_nothing_that_another_one_owns(
    remote: RunningGateway, gateway: RunningGateway, link: Forwarder, ring: FakeRing, how: str
) -> None:
    ring.behave = paced = Paced(TEXT, 12)
    async with remote.http() as http, http.stream("POST", CHAT, json=body()) as response:
        events = await read_events(response, 12)
        if how == "silence":
            link.cut()
        else:
            link.sever()
    reading = asyncio.create_task(go_on(gateway, events))
    await until(lambda: owned(gateway) == 1, 20)
    await until(lambda: ring.claimed.get(ring.requests[0].generation_id))
    link.heal()
    await until(lambda: owned(remote) == 0, 20)
    paced.allow()
    rest = await reading
    assert text_of(events) + text_of(rest) == TEXT.decode("latin-1")
    assert finishes(events + rest) == ["stop"]
    generations = remote.service.work.generations
    await until(lambda: generations.cancellations.idle)
    assert ring.commands == []
    assert not ring.cancelled


async def test_a_request_that_a_broken_connection_has_lost_is_handed_in_again(
    remote: RunningGateway, link: Forwarder, ring: FakeRing
) -> None:
    """Its client is not told to come again, and does not wait until the broker's time is up."""
    requester = remote.service.bus._requester
    link.cut()
    async with remote.http() as http:
        asked = asyncio.create_task(http.post(CHAT, json=body(stream=False)))
        await until(requester.waiting)
        link.sever()
        await until(lambda: not remote.service.bus.connected)
        link.heal()
        answer = await asked
    assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"
    assert [request.attempt for request in ring.requests] == [1]


@pytest.mark.slow
async def test_a_gateway_that_was_stopped_ends_nothing_that_another_one_owns(
    bus: Bus,
    nats_settings: CommonSettings,
    gateway: RunningGateway,
    ring: FakeRing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its reader had left: the first thing it finds when it wakes is that the grace has passed."""
    ring.behave = paced = Paced(TEXT, 12)
    monkeypatch.setenv("RYZANSTEIN_RESUME_GRACE", "2")  # over before another gateway takes it for lost
    async with gateway_process(bus, nats_settings, tmp_path) as doomed:
        async with doomed.http.stream("POST", CHAT, json=body()) as response:
            events: list[Event] = await read_events(response, 12)
        doomed.process.process.send_signal(signal.SIGSTOP)
        reading = asyncio.create_task(go_on(gateway, events))
        await until(lambda: owned(gateway) == 1, 20)
        doomed.process.process.send_signal(signal.SIGCONT)
        log = doomed.process.log
        await until(lambda: re.search("ownership_lost|cancelled", log.read_text()), 20)
        paced.allow()
        rest = await reading
    assert text_of(events) + text_of(rest) == TEXT.decode("latin-1")
    assert finishes(events + rest) == ["stop"]
    assert ring.commands == []
