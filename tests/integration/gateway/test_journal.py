"""Reading the journal: each frame once, whatever else is in it."""

import asyncio
import time

import nats.errors
import pytest
from nats.js.api import StreamConfig
from nats.js.client import JetStreamContext

from services.gateway.life.consumer import TokenConsumer
from shared import subjects
from shared.bus import Bus
from shared.journal import JournalReader
from shared.messages import TokenEntry, TokenFrame
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing

GATEWAY = "gateway-1"


async def record(bus: Bus, *steps: int) -> None:
    for step in steps:
        frame = TokenFrame("g1", 1, step, [TokenEntry("g", 0, step, [7])])
        await bus.publish_durable(subjects.tokens(GATEWAY), frame)


async def steps_of(reader: JournalReader, since: float) -> list[int]:
    return [frame.step async for frame in reader.read(since)]


async def test_what_was_read_is_not_read_twice(bus: Bus) -> None:
    reader, since = JournalReader(bus, GATEWAY), time.time() - 5
    assert await steps_of(reader, since) == []
    await record(bus, *range(300))
    assert await steps_of(reader, since) == list(range(300))
    assert await steps_of(reader, since) == []
    await record(bus, 300, 301)
    assert await steps_of(reader, since) == [300, 301]
    assert await steps_of(JournalReader(bus, GATEWAY), since) == list(range(302))


async def test_a_reading_that_was_not_finished_does_not_count(bus: Bus) -> None:
    reader, since = JournalReader(bus, GATEWAY), time.time() - 5
    await record(bus, 0, 1)
    frames = reader.read(since)
    assert (await anext(frames)).step == 0
    await frames.aclose()  # type: ignore[attr-defined]
    assert await steps_of(reader, since) == [0, 1]


async def test_a_journal_that_was_made_anew_is_read_from_the_time(bus: Bus) -> None:
    reader, since = JournalReader(bus, GATEWAY), time.time() - 5
    await record(bus, *range(5))
    assert len(await steps_of(reader, since)) == 5
    await bus.jetstream().delete_stream(subjects.JOURNAL_STREAM)
    await bus.jetstream().add_stream(
        StreamConfig(name=subjects.JOURNAL_STREAM, subjects=[subjects.ALL_TOKENS])
    )
    await record(bus, 9)
    assert await steps_of(reader, since) == [9]


async def test_an_undecodable_frame_is_left_out(bus: Bus) -> None:
    await record(bus, 0)
    await bus.jetstream().publish(subjects.tokens(GATEWAY), b"\xc1 no frame")
    await record(bus, 1)
    assert await steps_of(JournalReader(bus, GATEWAY), time.time() - 5) == [0, 1]


async def test_a_message_lost_on_the_way_makes_the_reading_fail(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, since = JournalReader(bus, GATEWAY), time.time() - 5
    await record(bus, 0, 1, 2)
    fetch = JetStreamContext.PullSubscription.fetch

    async def lossy(*args: object, **options: object) -> object:
        messages = await fetch(*args, **options)  # type: ignore[arg-type]
        return [messages[0], messages[2]]

    monkeypatch.setattr(JetStreamContext.PullSubscription, "fetch", lossy)
    with pytest.raises(nats.errors.Error, match="cut"):
        await steps_of(reader, since)
    monkeypatch.undo()
    assert await steps_of(reader, since) == [0, 1, 2]


async def test_a_failed_reading_is_tried_again_before_anybody_is_told(
    bus: Bus, gateway: RunningGateway
) -> None:
    generations = gateway.service.work.generations
    assert generations is not None
    consumer: TokenConsumer = generations.tokens
    failures = [TimeoutError(), TimeoutError()]

    def since() -> float | None:
        if failures:
            return 0.0
        return None

    async def fail(*_: object, **__: object) -> None:
        raise failures.pop()

    consumer._replay_since = since
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
        replay_since=lambda: None,
        on_replayed=lambda: wholes.append(len(seen)),
        pending_frames=10,
    )
    reading = asyncio.create_task(consumer.run())
    begin = time.time() - 5
    await asyncio.wait_for(consumer.catch_up(begin, lambda: 3 in seen), 20)
    assert (seen, wholes) == ([0, 1, 2, 3], [])
    seen.clear()
    both = [consumer.catch_up(begin, lambda: 3 in seen), consumer.catch_up(begin, lambda: False)]
    await asyncio.wait_for(asyncio.gather(*both), 20)
    assert (seen, wholes) == (list(range(300)), [300])
    reading.cancel()


async def test_an_undecodable_frame_does_not_end_the_gateway(gateway: RunningGateway, ring: FakeRing) -> None:
    generations = gateway.service.work.generations
    assert generations is not None
    await ring.bus.jetstream().publish(subjects.tokens(gateway.service.instance), b"\xc1 no frame")
    generations.tokens._replay_since = lambda: time.time() - 5
    await generations.tokens.replayed()
    assert generations.tokens.replays == 1
    assert not gateway.task.done()
