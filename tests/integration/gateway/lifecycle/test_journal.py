"""Reading the journal: each frame once, whatever else is in it."""

import asyncio
import time
from types import SimpleNamespace

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js.api import StreamConfig
from nats.js.client import JetStreamContext

from services.gateway.lifecycle.records import Misses
from services.gateway.lifecycle.token_logs import TokenConsumer
from shared.messages import TokenEntry, TokenFrame
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.journal import JournalReader, StartPosition
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing, until
from tests.integration.gateway.lifecycle.test_gateway_lost import CHAT, TEXT, body, go_on
from tests.integration.gateway.resuming import Paced, public_id, read_events, text_of

GATEWAY = "gateway-1"


async def record(bus: Bus, *steps: int) -> None:
    for step in steps:
        frame = TokenFrame("g1", 1, step, [TokenEntry("g", 0, step, [7])])
        await bus.publish_durable(subjects.tokens(GATEWAY), frame)


async def steps_of(reader: JournalReader, begin: StartPosition) -> list[int]:
    return [frame.step async for frame in reader.read(begin)]


async def test_what_was_read_is_not_read_twice(bus: Bus) -> None:
    reader, begin = JournalReader(bus, GATEWAY), StartPosition(since=time.time() - 5)
    assert await steps_of(reader, begin) == []
    await record(bus, *range(300))
    assert await steps_of(reader, begin) == list(range(300))
    assert await steps_of(reader, begin) == []
    await record(bus, 300, 301)
    assert await steps_of(reader, begin) == [300, 301]
    assert await steps_of(JournalReader(bus, GATEWAY), begin) == list(range(302))


async def test_a_reading_begins_behind_a_number_whatever_the_clocks_say(bus: Bus) -> None:
    await record(bus, *range(5))
    late = time.time() + 3600
    assert await steps_of(JournalReader(bus, GATEWAY), StartPosition(3, late)) == [3, 4]
    assert await steps_of(JournalReader(bus, GATEWAY), StartPosition(0, late)) == list(range(5))
    assert await steps_of(JournalReader(bus, GATEWAY), StartPosition(5, late)) == []
    assert await steps_of(JournalReader(bus, GATEWAY), StartPosition(6, 0.0)) == list(range(5)), "it was made anew"


async def test_readings_leave_no_consumer_behind(bus: Bus) -> None:
    await record(bus, *range(5))
    for _ in range(20):
        assert await steps_of(JournalReader(bus, GATEWAY), StartPosition()) == list(range(5))
        await anext(JournalReader(bus, GATEWAY).read(StartPosition()))
    await until(lambda: has_no_consumer(bus))


async def test_looking_for_an_id_makes_no_consumer(gateway: RunningGateway, bus: Bus) -> None:
    """An id is all that it takes, and anybody can make one up."""
    made = []

    async def on_created(message: Msg) -> None:
        made.append(message.subject)

    await bus.client.subscribe(f"$JS.API.CONSUMER.CREATE.{subjects.JOURNAL_STREAM}.>", cb=on_created)
    await bus.flush()
    async with gateway.http() as http:
        for number in range(20):
            answer = await http.get(f"/v1/generations/{number:032x}")
            assert answer.status_code == 404, answer.text
    await bus.flush()
    assert made == []
    assert await has_no_consumer(bus)


async def test_who_looks_for_ids_that_are_not_there_is_held_up(
    gateway: RunningGateway, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = gateway.service.work.answers
    monkeypatch.setattr(answers, "_misses", Misses(2))
    ring.behave = paced = Paced(TEXT, 12)
    async with gateway.http() as http, http.stream("POST", CHAT, json=body()) as response:
        first = await read_events(response, 4)
        statuses = [(await http.get(f"/v1/generations/{number:032x}")).status_code for number in range(4)]
        assert statuses == [404, 404, 429, 429]
        refused = await http.get(f"/v1/responses/resp_{0:032x}")
        assert refused.status_code == 429
        assert "unknown_ids: 600 per minute" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 1
        assert (await http.get(f"/v1/generations/{public_id(first)}")).status_code == 200, "it is at hand"
        paced.allow()


async def has_no_consumer(bus: Bus) -> bool:
    """Whether the journal has none."""
    return (await bus.jetstream().stream_info(subjects.JOURNAL_STREAM)).state.consumer_count == 0


async def test_a_reading_that_was_not_finished_does_not_count(bus: Bus) -> None:
    reader, begin = JournalReader(bus, GATEWAY), StartPosition(since=time.time() - 5)
    await record(bus, 0, 1)
    frames = reader.read(begin)
    assert (await anext(frames)).step == 0
    await frames.aclose()  # type: ignore[attr-defined]
    assert await steps_of(reader, begin) == [0, 1]


async def test_a_journal_that_was_made_anew_is_read_from_the_time(bus: Bus) -> None:
    reader, begin = JournalReader(bus, GATEWAY), StartPosition(since=time.time() - 5)
    await record(bus, *range(5))
    assert len(await steps_of(reader, begin)) == 5
    await bus.jetstream().delete_stream(subjects.JOURNAL_STREAM)
    await bus.jetstream().add_stream(StreamConfig(name=subjects.JOURNAL_STREAM, subjects=[subjects.ALL_TOKENS]))
    await record(bus, 9)
    assert await steps_of(reader, begin) == [9]


async def test_an_undecodable_frame_is_left_out(bus: Bus) -> None:
    await record(bus, 0)
    await bus.jetstream().publish(subjects.tokens(GATEWAY), b"\xc1 no frame")
    await record(bus, 1)
    assert await steps_of(JournalReader(bus, GATEWAY), StartPosition(since=time.time() - 5)) == [0, 1]


async def test_a_message_lost_on_the_way_makes_the_reading_fail(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, begin = JournalReader(bus, GATEWAY), StartPosition(since=time.time() - 5)
    await record(bus, 0, 1, 2)
    fetch = JetStreamContext.PullSubscription.fetch

    async def lossy(*args: object, **options: object) -> object:
        messages = await fetch(*args, **options)  # type: ignore[arg-type]
        return [messages[0], messages[2]]

    monkeypatch.setattr(JetStreamContext.PullSubscription, "fetch", lossy)
    with pytest.raises(nats.errors.Error, match="cut"):
        await steps_of(reader, begin)
    monkeypatch.undo()
    assert await steps_of(reader, begin) == [0, 1, 2]


async def test_a_failed_reading_is_tried_again_before_anybody_is_told(gateway: RunningGateway) -> None:
    generations = gateway.service.work.generations
    consumer: TokenConsumer = generations.tokens
    failures = [TimeoutError(), TimeoutError()]

    def begin() -> StartPosition | None:
        return StartPosition() if failures else None

    async def fail(*_: object, **__: object) -> None:
        raise failures.pop()

    consumer._replay_from = begin
    consumer._replay = fail  # type: ignore[method-assign]
    await consumer.replayed()
    assert failures == []


async def test_what_ended_long_ago_is_not_read_up_to_now(bus: Bus) -> None:
    """Else a look-up would take the longer the older the generation is."""
    end = TokenFrame("g1", 1, 3, [TokenEntry("g", 0, 3, [7], "stop")])
    await record(bus, 0, 1, 2)
    await bus.publish_durable(subjects.tokens(GATEWAY), end)
    await record(bus, *range(4, 300))
    seen: list[int] = []
    wholes: list[int] = []
    consumer = TokenConsumer(
        bus,
        GATEWAY,
        on_frame=lambda frame: None,
        on_recorded=lambda frame: seen.append(frame.step),
        replay_from=lambda: None,
        on_replayed=lambda: wholes.append(len(seen)),
        pending_frames=10,
    )
    reading = asyncio.create_task(consumer.run())
    begin = StartPosition(since=time.time() - 5)
    await asyncio.wait_for(consumer.catch_up(begin, lambda: 3 in seen), 20)
    assert (seen, wholes) == ([0, 1, 2, 3], [])
    seen.clear()
    both = [consumer.catch_up(begin, lambda: 3 in seen), consumer.catch_up(begin, lambda: False)]
    await asyncio.wait_for(asyncio.gather(*both), 20)
    assert (seen, wholes) == (list(range(300)), [300])
    reading.cancel()


async def test_an_undecodable_frame_does_not_end_the_gateway(gateway: RunningGateway, ring: FakeRing) -> None:
    generations = gateway.service.work.generations
    await ring.bus.jetstream().publish(subjects.tokens(gateway.service.instance), b"\xc1 no frame")
    generations.tokens._replay_from = lambda: StartPosition(since=time.time() - 5)
    await generations.tokens.replayed()
    assert generations.tokens.replays == 1
    assert not gateway.task.done()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are taken by a clock that is a minute ahead of the broker's."""
    clock = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + 60)
    monkeypatch.setattr("services.gateway.intake.record.time", clock)


@pytest.mark.usefixtures("ahead")
async def test_a_gateway_whose_clock_is_ahead_is_followed_from_the_first_token(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = paced = Paced(TEXT, 12)
    async with gateway.http() as http, http.stream("POST", CHAT, json=body()) as response:
        first = await read_events(response, 12)
        paced.allow()
        rest = await asyncio.wait_for(go_on(other, first[:2]), 20)
        assert text_of(first[:2]) + text_of(rest) == TEXT.decode("latin-1")


@pytest.mark.usefixtures("ahead")
async def test_a_gateway_whose_clock_is_ahead_fills_its_own_gaps(gateway: RunningGateway) -> None:
    generations = gateway.service.work.generations
    generations.tokens._on_frame = lambda frame: None  # nothing comes live
    async with gateway.http() as http:
        asked = asyncio.create_task(http.post(CHAT, json=body(stream=False)))
        await until(lambda: generations.tokens.request_replay() or asked.done())
        answer = await asked
    assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"
