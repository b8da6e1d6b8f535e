"""A gateway is killed; its clients go on at another one, and what nobody wants is cancelled."""

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from nats.js.api import DiscardPolicy

from services.gateway.lifecycle.request_state import writer_of
from shared.config import CommonSettings
from shared.messages import ServiceRecord
from shared.messages.records import Inheritance, Ownership, Unfinished
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, until
from tests.integration.gateway.resuming import (
    Event,
    Paced,
    events_of,
    finishes,
    public_id,
    read_events,
    resumed,
    text_of,
)
from tests.processes import ServiceProcess, service_process

CHAT = "/v1/chat/completions"
TEXT = "Ein Strom ist ein Log, und die Verbindung nur ein Zeiger: \u00e4\u00f6\u00fc.".encode("latin-1")


class Lost:
    """A gateway process that will be killed."""

    def __init__(self, process: ServiceProcess, address: str) -> None:
        self.process = process
        self.http = httpx.AsyncClient(base_url=f"http://{address}", timeout=30)

    async def kill(self) -> None:
        await self.process.end(signal.SIGKILL)


@contextlib.asynccontextmanager
async def gateway_process(
    bus: Bus, nats: CommonSettings, directory: Path, *options: str, instance: str = "doomed"
) -> AsyncIterator[Lost]:
    async with service_process(
        bus, nats, "services.gateway", directory, "--port", "0", *options, instance=instance
    ) as process:
        beat = await process.wait_ready()
        lost = Lost(process, beat.address)
        yield lost
        await lost.http.aclose()


@pytest.fixture
async def doomed(bus: Bus, nats_settings: CommonSettings, ring: FakeRing, tmp_path: Path) -> AsyncIterator[Lost]:
    async with gateway_process(bus, nats_settings, tmp_path) as lost:
        yield lost


async def read_until_killed(http: httpx.AsyncClient, body: dict[str, Any], events: list[Event], path: str) -> None:
    """Reads whole events until the connection breaks."""
    with contextlib.suppress(httpx.TransportError):
        async with http.stream("POST", path, json=body) as response:
            async for event in events_of(response):
                events.append(event)


async def read_and_killed(doomed: Lost, **fields: Any) -> list[Event]:
    """A stream's events up to its 12th character, when its gateway is killed."""
    events: list[Event] = []
    reader = asyncio.create_task(read_until_killed(doomed.http, body(**fields), events, CHAT))
    await until(lambda: len(text_of(events)) == 12)
    await doomed.kill()
    await reader
    return events


async def go_on(gateway: RunningGateway, events: list[Event]) -> list[Event]:
    async with gateway.http() as http:
        return await resumed(http, public_id(events), events[-1][1])


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True} | fields


async def recorded(gateway: RunningGateway, writer: str) -> None:
    """Waits until the journal has a record of the gateway `writer`: a ring may have the request before."""
    answers = gateway.service.work.answers

    async def any_is() -> bool:
        return bool((await answers.records.collect_since(writer_of(writer), 0.0))[0])

    await until(any_is)


async def adopted(bus: Bus) -> dict[str, Ownership]:
    return await (await Bucket.open(bus, subjects.GENERATIONS_BUCKET, Ownership)).items()


async def mourn(bus: Bus, lost: str) -> None:
    """What the health monitor writes when it misses a gateway's heartbeats."""
    services = await Bucket.open(bus, subjects.SERVICES_BUCKET, ServiceRecord)
    await services.put(lost, ServiceRecord("gateway", lost, 1, "gone", updated_at=time.time()))


async def test_many_streams_go_on_elsewhere_whole(
    doomed: Lost, gateway: RunningGateway, ring: FakeRing, bus: Bus
) -> None:
    ring.behave = paced = Paced(TEXT, 20)
    streams: list[list[Event]] = [[] for _ in range(24)]
    bodies = [
        ({"model": MODEL, "prompt": "x", "stream": True, "stop": ["nur ein"], "max_tokens": 200}, "/v1/completions")
        if number % 3 == 0
        else (body(n=1 + number % 2, stream_options={"include_usage": True}), CHAT)
        for number in range(24)
    ]
    readers = [
        asyncio.create_task(read_until_killed(doomed.http, sent, events, path))
        for (sent, path), events in zip(bodies, streams, strict=True)
    ]
    await until(lambda: all(len(text_of(events)) > 15 for events in streams))
    paced.allow(30)
    await doomed.kill()
    await asyncio.gather(*readers)
    going_on = [asyncio.create_task(go_on(gateway, events)) for events in streams]
    answers = gateway.service.work.answers
    await until(lambda: len([answer for answer in answers.all() if answer.owned]) == 24)
    paced.allow()
    for number, (events, task) in enumerate(zip(streams, going_on, strict=True)):
        rest = await task
        whole = TEXT.decode("latin-1")
        expected = whole[: whole.index("nur ein")] if number % 3 == 0 else whole
        for choice in range(1 if number % 3 == 0 else 1 + number % 2):
            assert text_of(events, choice) + text_of(rest, choice) == expected
        assert rest[-1][0] == "[DONE]"
    assert {ownership.owner for ownership in (await adopted(bus)).values()} == {gateway.service.instance}


async def test_the_ring_is_lost_while_its_owner_is_dead(doomed: Lost, gateway: RunningGateway, ring: FakeRing) -> None:
    ring.behave = Paced(TEXT, 12)
    events = await read_and_killed(doomed, seed=4)
    await ring.die()
    ring.behave = Paced(TEXT, len(TEXT) + 1)
    ring.resume()
    rest = await go_on(gateway, events)
    assert text_of(events) + text_of(rest) == TEXT.decode("latin-1")
    assert finishes(events + rest) == ["stop"]
    first, second = ring.requests
    assert (second.attempt, second.consumer) == (1, gateway.service.instance)
    assert (second.sampling, second.prompt) == (first.sampling, first.prompt)
    assert bytes(second.generated) == TEXT[: len(second.generated)]
    assert len(second.generated) == 12


@pytest.mark.slow
async def test_two_claim_and_one_wins(
    doomed: Lost, gateway: RunningGateway, nats_settings: CommonSettings, ring: FakeRing, bus: Bus
) -> None:
    ring.behave = paced = Paced(TEXT, 12)
    events = await read_and_killed(doomed)
    async with run_gateway(nats_settings) as third:
        readings = [asyncio.create_task(go_on(each, events)) for each in (gateway, third, gateway)]
        owners = [each.service.work.answers for each in (gateway, third)]
        await until(lambda: sum(answer.owned for one in owners if one for answer in one.all()) == 1)
        paced.allow()
        for reading in readings:
            assert text_of(events) + text_of(await reading) == TEXT.decode("latin-1")
    assert len(await adopted(bus)) == 1
    assert len(ring.requests) == 1


async def test_a_request_that_never_reached_a_ring_is_handed_in_again(
    doomed: Lost, gateway: RunningGateway, ring: FakeRing
) -> None:
    """Its gateway died between the record and the queue, as far as anybody can tell."""
    ring.behave = Paced(TEXT, 0)
    key = {"Idempotency-Key": "once"}
    sent = body(stream=False)
    post = asyncio.create_task(doomed.http.post(CHAT, json=sent, headers=key))
    await until(lambda: ring.requests)
    await recorded(gateway, "doomed")
    await doomed.kill()
    with pytest.raises(httpx.TransportError):
        await post
    await ring.stop()
    ring.behave = Paced(TEXT, len(TEXT) + 1)
    ring.resume()
    async with gateway.http() as http:
        answer = (await http.post(CHAT, json=sent, headers=key)).json()
    assert answer["choices"][0]["message"]["content"] == TEXT.decode("latin-1")
    assert [request.attempt for request in ring.requests] == [0, 1]


async def test_what_a_lost_gateway_left_is_cancelled_or_driven_to_its_end(
    doomed: Lost, bus: Bus, nats_settings: CommonSettings, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT, 12)
    async with run_gateway(nats_settings, resume_grace=0.2) as gateway:
        plain: list[Event] = []
        kept: list[Event] = []
        background = {"X-Ryzanstein-Background": "60"}
        waiting = asyncio.create_task(doomed.http.post(CHAT, json=body(stream=False)))
        readers = [asyncio.create_task(read_until_killed(doomed.http, body(), plain, CHAT))]
        async with doomed.http.stream("POST", CHAT, json=body(), headers=background) as response:
            kept += await read_events(response, 4)
        await until(lambda: len(text_of(plain)) == 12 and len(ring.requests) == 3)
        by_session = {request.generation_id: request for request in ring.requests}
        await doomed.kill()
        await asyncio.gather(*readers)
        with pytest.raises(httpx.TransportError):
            await waiting
        await mourn(bus, "doomed")
        mine = public_id(kept).removeprefix("chatcmpl-") + "-0"
        await until(lambda: len(ring.commanded) == 2)
        assert ring.commanded == set(by_session) - {mine}
        paced.allow()
        rest = await go_on(gateway, kept)
        assert text_of(kept) + text_of(rest) == TEXT.decode("latin-1")


async def test_the_next_gateway_to_start_looks_after_what_nobody_was_left_for(
    doomed: Lost, bus: Bus, nats_settings: CommonSettings, ring: FakeRing
) -> None:
    ring.behave = Paced(TEXT, 12)
    await read_and_killed(doomed)
    await mourn(bus, "doomed")
    async with run_gateway(nats_settings, resume_grace=0.2):
        await until(lambda: ring.requests[0].generation_id in ring.commanded)


async def test_an_heir_takes_over_what_it_would_not_have_admitted(
    doomed: Lost, bus: Bus, nats_settings: CommonSettings, ring: FakeRing
) -> None:
    """The lost gateway had admitted it, by places of its own."""
    ring.behave = paced = Paced(TEXT, 12)
    background = {"X-Ryzanstein-Background": "60"}
    async with run_gateway(nats_settings, max_generations=1, max_tenant_generations=1) as gateway:
        streams: list[list[Event]] = []
        for _ in range(3):
            async with doomed.http.stream("POST", CHAT, json=body(), headers=background) as response:
                streams.append(await read_events(response, 4))
        await doomed.kill()
        await mourn(bus, "doomed")
        answers = gateway.service.work.answers
        await until(lambda: sum(answer.owned for answer in answers.all()) == 3)
        async with gateway.http() as http:
            refused = await http.post(CHAT, json=body(stream=False))
        assert (refused.status_code, "limit generations" in refused.text) == (429, True)
        paced.allow()
        for events in streams:
            assert text_of(events) + text_of(await go_on(gateway, events)) == TEXT.decode("latin-1")


async def test_a_gateway_that_begins_anew_under_its_name(
    doomed: Lost, nats_settings: CommonSettings, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT, 12)
    events = await read_and_killed(doomed)
    async with run_gateway(nats_settings, instance="doomed") as gateway:
        reading = asyncio.create_task(go_on(gateway, events))
        answers = gateway.service.work.answers
        await until(lambda: any(answer.owned for answer in answers.all()))
        paced.allow()
        assert text_of(events) + text_of(await reading) == TEXT.decode("latin-1")


@pytest.mark.slow
async def test_a_gateway_that_was_only_asleep_yields(doomed: Lost, gateway: RunningGateway, ring: FakeRing) -> None:
    ring.behave = paced = Paced(TEXT, 12)
    events: list[Event] = []
    reader = asyncio.create_task(read_until_killed(doomed.http, body(), events, CHAT))
    await until(lambda: len(text_of(events)) == 12)
    doomed.process.process.send_signal(signal.SIGSTOP)
    reading = asyncio.create_task(go_on(gateway, events[:2]))
    answers = gateway.service.work.answers
    await until(lambda: any(answer.owned for answer in answers.all()), 20)
    doomed.process.process.send_signal(signal.SIGCONT)
    log = doomed.process.log
    await until(lambda: re.search("ownership_lost", log.read_text()))
    paced.allow()
    assert text_of(events[:2]) + text_of(await reading) == TEXT.decode("latin-1")
    await reader
    assert text_of(events) == TEXT.decode("latin-1")  # its own client has lost nothing either
    assert len(ring.requests) == 1
    assert not ring.commanded


async def test_what_has_run_for_long_is_found_by_the_list(
    gateway: RunningGateway, nats_settings: CommonSettings, ring: FakeRing, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is older than an heir looks back."""
    ring.behave = paced = Paced(TEXT, 12)
    async with gateway.http() as http, http.stream("POST", CHAT, json=body()):
        heirs = gateway.service.work.heirs
        answers = gateway.service.work.answers
        monkeypatch.setattr("services.gateway.lifecycle.failover.LISTED_AFTER", 0.0)
        await heirs.write_list()
        lists = await Bucket.open(bus, subjects.UNFINISHED_BUCKET, Unfinished)
        entry = await lists.get(gateway.service.instance)
        assert entry.value.identities == [answer.identity for answer in answers.all()]
        late = time.time() + 1000
        await lists.put(gateway.service.instance, Unfinished(late, entry.value.identities))
        async with run_gateway(nats_settings) as other:
            heir = other.service.work.heirs
            left = await heir._left_by(gateway.service.instance, late)
            assert list(left) == entry.value.identities
            assert len(await heir._going(gateway.service.instance, list(left.values()))) == 1
            paced.allow()

            async def nothing_goes_on() -> bool:
                return await heir._going(gateway.service.instance, list(left.values())) == []

            await until(nothing_goes_on)  # the journal has the end a moment after the gateway
        await heirs.write_list()
        assert (await lists.items())[gateway.service.instance].identities == []


async def refuse_all(bus: Bus) -> None:
    """The queue has no room for any request."""
    jetstream = bus.jetstream()
    intake = (await jetstream.stream_info(subjects.INTAKE_STREAM)).config
    await jetstream.update_stream(intake.evolve(max_bytes=1, discard=DiscardPolicy.NEW))


@pytest.mark.parametrize("end", ["refused by the queue", "withdrawn from the queue"])
async def test_what_no_ring_has_spoken_for_is_not_computed_by_an_heir(
    gateway: RunningGateway, nats_settings: CommonSettings, ring: FakeRing, bus: Bus, end: str
) -> None:
    """It has a record, and no ring or scheduler that would say how it ended."""
    ring.taking.clear()
    answers = gateway.service.work.answers
    async with gateway.http() as http:
        await http.post(CHAT, json=body(stream=False))  # the last one that the ring takes
        if end == "refused by the queue":
            await refuse_all(bus)
            assert (await http.post(CHAT, json=body(stream=False))).status_code == 503
        else:
            leaving = asyncio.create_task(http.post(CHAT, json=body(stream=False)))
            await until(lambda: any(one.generations[0].state == "queued" for one in answers.all()))
            leaving.cancel()
    async with run_gateway(nats_settings) as other:
        heir = other.service.work.heirs

        async def all_have_ended() -> bool:
            left = await heir._left_by(gateway.service.instance, time.time())
            return len(left) == 2 and not await heir._going(gateway.service.instance, list(left.values()))

        await until(all_have_ended)


async def test_a_loss_has_one_heir(gateway: RunningGateway, nats_settings: CommonSettings, bus: Bus) -> None:
    async with run_gateway(nats_settings) as other:
        one, two = gateway.service.work.heirs, other.service.work.heirs
        assert one is not None
        assert two is not None
        services = await Bucket.open(bus, subjects.SERVICES_BUCKET, ServiceRecord)
        for each in (gateway, other):
            name = each.service.instance
            await services.put(name, ServiceRecord("gateway", name, 1, "ready"))
        for lost_at in (1000.0, 2000.0):  # two lives
            won = await asyncio.gather(*(heirs._claim("lost", lost_at) for heirs in (one, two)))
            assert sorted(won) == [False, True]
            heir, rest = (one, two) if won[0] else (two, one)
            assert await heir._claim("lost", lost_at)  # it has not done with it
            await heir._settle("lost", lost_at)
            assert not await heir._claim("lost", lost_at)
            assert not await rest._claim("lost", lost_at)
        await heir._inheritances.put("lost", Inheritance("nobody", 2000.0))  # type: ignore[union-attr]
        assert await rest._claim("lost", 2000.0)  # an heir that is gone itself
