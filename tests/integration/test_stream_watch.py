"""Watches of buckets on a real NATS: what is lost on the way is noticed, and a burst waits at the broker."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from shared.messages import SessionPin
from shared.nats import streams, subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.streams import StreamWatch

STREAM = f"KV_{subjects.SESSIONS_BUCKET}"
LARGE = 256 << 10


@pytest.fixture
async def pins(bus: Bus) -> Bucket[SessionPin]:
    return await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin)


@contextlib.asynccontextmanager
async def watching(pins: Bucket[SessionPin]) -> AsyncIterator[AsyncGenerator[tuple[str, int] | None, None]]:
    """What is there has been shown; then keys, each with its epoch."""

    async def keys() -> AsyncGenerator[tuple[str, int] | None, None]:
        async with contextlib.aclosing(pins.watch_revisions()) as updates:
            async for update in updates:
                yield None if update is None else (update[0], update[1].epoch if update[1] else 0)

    async with contextlib.aclosing(keys()) as shown, asyncio.timeout(30):
        while await anext(shown) is not None:
            pass
        yield shown


async def test_a_consumer_that_the_broker_has_lost_is_missed(
    bus: Bus, pins: Bucket[SessionPin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT", 0.2)
    async with watching(pins) as shown:
        (consumer,) = await bus.jetstream().consumers_info(STREAM)
        await bus.jetstream().delete_consumer(STREAM, consumer.name)
        await pins.put("written", SessionPin("g", 1))
        assert await anext(shown) == ("written", 1)


async def test_heartbeats_keep_a_watch_where_nothing_happens(
    bus: Bus, pins: Bucket[SessionPin], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than a watch lives without them."""
    monkeypatch.setattr(streams, "HEARTBEAT", 0.2)
    monkeypatch.setattr(streams, "MISSED", 10)
    beats: asyncio.Queue[Msg] = asyncio.Queue()
    on_status = StreamWatch._on_status

    async def counted(watch: StreamWatch, message: Msg) -> None:
        await on_status(watch, message)
        beats.put_nowait(message)

    monkeypatch.setattr(StreamWatch, "_on_status", counted)
    async with watching(pins) as shown:
        for _ in range(12):
            await beats.get()
        await pins.put("written", SessionPin("g", 1))
        assert await anext(shown) == ("written", 1)
        assert len(await bus.jetstream().consumers_info(STREAM)) == 1


@pytest.mark.parametrize(("heartbeat", "follows"), [(600.0, True), (0.2, False)], ids=["by the next", "by a heartbeat"])
async def test_a_message_that_was_lost_on_the_way_is_missed(
    pins: Bucket[SessionPin], monkeypatch: pytest.MonkeyPatch, heartbeat: float, follows: bool
) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT", heartbeat)
    take, lost = StreamWatch._take, asyncio.Event()

    async def without_one(watch: StreamWatch, message: Msg) -> None:
        if message.subject.endswith(".lost") and not lost.is_set():
            lost.set()
        else:
            await take(watch, message)

    monkeypatch.setattr(StreamWatch, "_take", without_one)
    async with watching(pins) as shown:
        await pins.put("lost", SessionPin("g", 1))
        await lost.wait()
        if follows:
            await pins.put("next", SessionPin("g", 2))
        assert await anext(shown) == ("lost", 1)
        if follows:
            assert await anext(shown) == ("next", 2)


@pytest.mark.skipif(
    os.environ.get("RYZANSTEIN_TEST_NATS") == "model", reason="the model of the broker has no flow control"
)
async def test_a_reader_that_is_slow_has_the_broker_wait(bus: Bus, pins: Bucket[SessionPin]) -> None:
    """Three times as much as the broker sends without an answer."""
    names = [f"key-{number}" for number in range(400)]
    for name in names:
        await bus.jetstream().publish(f"$KV.{subjects.SESSIONS_BUCKET}.{name}", b"x" * LARGE)
    shown, most = [], 0
    async with asyncio.timeout(60), StreamWatch.open(bus, STREAM, "$KV.*.>") as watch:
        async for message in watch:
            if message is None:
                break
            shown.append(message.subject.rpartition(".")[2])
            await bus.flush()  # by then the broker has sent what it would
            most = max(most, watch._waiting.qsize() * LARGE)
    assert shown == names
    assert 0 < most <= 32 << 20


async def test_a_watch_that_cannot_begin_leaves_nothing_behind(bus: Bus) -> None:
    before = len(bus.client._subs)
    with pytest.raises(NotFoundError):
        async with StreamWatch.open(bus, "missing", ">"):
            pass
    assert (len(bus.client._subs), len(bus.watchdog._watched)) == (before, 0)


async def test_many_watches_have_one_timer(bus: Bus, pins: Bucket[SessionPin]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        timers = set()
        for _ in range(5):
            await stack.enter_async_context(watching(pins))
            timers.add(bus.watchdog._timer)
        assert len(bus.watchdog._watched) == 5
        assert len(timers) == 1
    assert bus.watchdog._timer is None
