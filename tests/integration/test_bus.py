"""The bus on a real NATS: typed messages, buckets, objects, the journal."""

import asyncio
import time

import pytest

from shared import subjects
from shared.bus import Bus
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, PayloadTooLarge
from shared.journal import replay
from shared.messages import Cancel, ControlCommand, ControlReply, Drain, SessionPin, TokenEntry, TokenFrame
from shared.stores import Bucket, ObjectStore


async def test_request_is_answered_by_type(bus: Bus) -> None:
    async def handle(command: ControlCommand) -> ControlReply:
        return ControlReply(ok=isinstance(command, Drain))

    await bus.subscribe(subjects.control("g"), ControlCommand, handle)  # type: ignore[arg-type]
    assert (await bus.request(subjects.control("g"), Drain(), ControlReply, timeout=2)).ok
    assert not (await bus.request(subjects.control("g"), Cancel(["x"]), ControlReply, timeout=2)).ok


async def test_request_without_responder_says_so(bus: Bus) -> None:
    with pytest.raises(BrokerUnavailable, match=r"Nobody answered on groups\.none\.control"):
        await bus.request(subjects.control("none"), Drain(), ControlReply, timeout=1)


async def test_too_large_a_message_is_refused_before_it_is_sent(bus: Bus) -> None:
    with pytest.raises(PayloadTooLarge, match="NATS takes at most"):
        await bus.publish("tokens.x", b"x" * (bus.max_payload + 1))


async def test_frames_are_recorded_as_they_are_published(bus: Bus) -> None:
    since = time.time() - 1
    frames = [TokenFrame("g", 1, step, [TokenEntry("gen", 0, step, [step])]) for step in range(700)]
    for frame in frames:
        await bus.publish(subjects.tokens("gateway-1"), frame)
    await bus.publish(subjects.tokens("gateway-2"), frames[0])
    await bus.flush()
    assert [frame async for frame in replay(bus, "gateway-1", since)] == frames
    assert [frame async for frame in replay(bus, "gateway-3", since)] == []


async def test_a_slow_consumer_is_told_of_the_gap(bus: Bus) -> None:
    gap, release, seen = asyncio.Event(), asyncio.Event(), []

    async def handle(frame: TokenFrame) -> None:
        await release.wait()
        seen.append(frame.step)

    await bus.subscribe(subjects.tokens("slow"), TokenFrame, handle, on_gap=gap.set, pending_messages=4)
    for step in range(50):
        await bus.publish(subjects.tokens("slow"), TokenFrame("g", 1, step, []))
    await asyncio.wait_for(gap.wait(), 5)
    release.set()
    assert [frame.step async for frame in replay(bus, "slow", time.time() - 10)] == list(range(50))


async def test_compare_and_set_has_one_winner(bus: Bus) -> None:
    pins = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin, ttl=60)
    assert await pins.get("a session/with any: name") is None
    first, second = await asyncio.gather(
        pins.create("s", SessionPin("g1", 1)), pins.create("s", SessionPin("g2", 1))
    )
    assert (first is None) != (second is None)
    entry = await pins.get("s")
    assert entry is not None
    assert await pins.update("s", SessionPin("g3", 1), entry.revision)
    assert await pins.update("s", SessionPin("g4", 1), entry.revision) is None
    assert (await pins.items())["s"].group == "g3"


async def test_watch_shows_what_is_there_then_changes(bus: Bus) -> None:
    pins = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin)
    await pins.put("org/model v1", SessionPin("g1", 1))
    seen = []
    async for update in pins.watch():
        seen.append(update)
        if update is None:
            await pins.delete("org/model v1")
        if len(seen) == 3:
            break
    assert seen == [("org/model v1", SessionPin("g1", 1)), None, ("org/model v1", None)]


async def test_objects_come_back_whole(bus: Bus) -> None:
    store = ObjectStore(bus, subjects.TOKENIZERS_STORE)
    assert await store.get("missing") is None
    data = bytes(range(256)) * 20_000
    await store.put("tokenizer", data)
    assert await store.get("tokenizer") == data
    assert await store.get("missing") is None


@pytest.mark.parametrize(
    ("url", "message"),
    [("nats://127.0.0.1:1", "did not answer within"), ("nonsense://", "is not one|did not answer")],
)
async def test_unreachable_broker_is_named_without_its_password(url: str, message: str) -> None:
    settings = CommonSettings(nats_url=url, nats_connect_timeout=0.5)
    with pytest.raises(BrokerUnavailable, match=message) as caught:
        await Bus.connect(settings, "test")
    assert "RYZANSTEIN_NATS_URL" in str(caught.value) or "nats://host:port" in str(caught.value)


async def test_wrong_password_is_told_at_once(nats_settings: CommonSettings) -> None:
    settings = CommonSettings(nats_url=nats_settings.nats_url, nats_user="x", nats_password="secret")
    with pytest.raises(BrokerUnavailable, match="refused the user name or password") as caught:
        await Bus.connect(settings, "test")
    assert "secret" not in str(caught.value)
