"""The bus on a real NATS: typed messages, buckets, objects, the journal."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.errors import Error as NatsError
from nats.errors import SlowConsumerError
from nats.js.api import RetentionPolicy, StreamConfig
from nats.js.errors import APIError
from structlog.testing import capture_logs

from services.cli.supervision.nats_server import LocalNats
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, ConfigurationError, LinkLost, NobodyThere, PayloadTooLarge
from shared.messages import Cancel, ControlCommand, ControlReply, Drain, SessionPin, TokenEntry, TokenFrame
from shared.nats import bus as bus_module
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from shared.nats.journal import StartPosition, replay
from shared.nats.kv import Bucket, KvChange, KvEntry
from shared.nats.objects import MissingObject, Objects
from shared.nats.streams import ensure_streams
from tests.chaos.links import Forwarder


@pytest.fixture
def nats_settings(own_nats: CommonSettings) -> CommonSettings:
    """Of a server whose room and connections are the test's subject."""
    return own_nats


async def test_request_is_answered_by_type(bus: Bus) -> None:
    async def handle(command: ControlCommand) -> ControlReply:
        return ControlReply(ok=isinstance(command, Drain))

    await bus.subscribe(subjects.control("g"), ControlCommand, handle)  # type: ignore[arg-type]
    assert (await bus.request(subjects.control("g"), Drain(), ControlReply, timeout=30)).ok
    assert not (await bus.request(subjects.control("g"), Cancel(["x"]), ControlReply, timeout=30)).ok


async def test_request_without_responder_says_so(bus: Bus) -> None:
    with pytest.raises(NobodyThere, match=r"Nobody listens on groups\.none\.control"):
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
    assert [frame async for frame in replay(bus, "gateway-1", StartPosition(since=since))] == frames
    assert [frame async for frame in replay(bus, "gateway-3", StartPosition(since=since))] == []


async def test_a_flush_is_asked_behind_what_was_published_and_subscribed(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, transport = bytearray(), bus.client._transport
    write, writelines = transport.write, transport.writelines
    monkeypatch.setattr(transport, "write", lambda data: (sent.extend(data), write(data))[1])
    monkeypatch.setattr(transport, "writelines", lambda data: (sent.extend(b"".join(data)), writelines(data))[1])

    async def handle(frame: TokenFrame) -> None: ...

    await bus.subscribe(subjects.tokens("here"), TokenFrame, handle)
    await bus.publish(subjects.tokens("there"), TokenFrame("g", 1, 1, []))
    await bus.flush()
    question = sent.index(b"PING\r\n")
    assert sent.index(b"SUB tokens.here") < question
    assert sent.index(b"PUB tokens.there") < question


@pytest.mark.parametrize("asked", [False, True])
async def test_a_flush_that_is_cancelled_ends_its_caller_and_nothing_else(bus: Bus, asked: bool) -> None:
    """Before nats-py has asked the server, or while it waits for the answer."""
    flushing = asyncio.create_task(bus.flush())
    await asyncio.sleep(0)
    while asked and not bus.client._pongs:  # noqa: ASYNC110  # nobody tells of it
        await asyncio.sleep(0)
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    with capture_logs() as logs:
        await bus.jetstream().stream_info(subjects.INTAKE_STREAM)
        await bus.flush()
    assert not logs


async def test_a_flush_that_is_answered_late_ends_nothing(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    read, process = asyncio.Event(), bus.client._process_pong

    async def late() -> None:
        await read.wait()
        await process()

    monkeypatch.setattr(bus.client, "_process_pong", late)
    with capture_logs() as logs:
        with monkeypatch.context() as patched:
            patched.setattr("shared.nats.bus.FLUSH_TIMEOUT", 0.01)
            with pytest.raises(BrokerUnavailable, match="has read what was sent"):
                await bus.flush()
        read.set()
        await bus.flush()
        await bus.jetstream().stream_info(subjects.INTAKE_STREAM)
    assert not logs


async def test_a_close_that_is_answered_late_tells_of_no_error(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, client = asyncio.Event(), bus.client
    process, close = client._process_pong, client.close

    async def late() -> None:
        await read.wait()
        await process()

    async def close_behind_it() -> None:
        read.set()
        while client._pongs:  # noqa: ASYNC110  # nobody tells of it
            await asyncio.sleep(0)
        await close()

    monkeypatch.setattr(client, "_process_pong", late)
    monkeypatch.setattr(client, "close", close_behind_it)
    monkeypatch.setattr("shared.nats.bus.CLOSE_TIMEOUT", 0.01)
    await bus.close()
    assert client.is_closed
    assert not caplog.records


async def test_a_flush_that_nobody_answers_says_that_the_broker_is_away(bus: Bus) -> None:
    await bus.close()
    with pytest.raises(BrokerUnavailable, match="has read what was sent"):
        await bus.flush()


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
    assert [frame.step async for frame in replay(bus, "slow", StartPosition(since=time.time() - 10))] == list(range(50))


async def test_compare_and_set_has_one_winner(bus: Bus) -> None:
    pins = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin, ttl=60)
    assert await pins.get("a session/with any: name") is None
    first, second = await asyncio.gather(pins.create("s", SessionPin("g1", 1)), pins.create("s", SessionPin("g2", 1)))
    assert (first is None) != (second is None)
    entry = await pins.get("s")
    assert await pins.update("s", SessionPin("g3", 1), entry.revision)
    assert await pins.update("s", SessionPin("g4", 1), entry.revision) is None
    assert (await pins.items())["s"].group == "g3"


async def test_changes_of_one_key_at_once_are_all_made(bus: Bus) -> None:
    pins = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin)

    def counted(known: KvEntry[SessionPin] | None) -> SessionPin:
        return SessionPin("g", 1 if known is None else known.value.epoch + 1)

    await asyncio.gather(*(pins.change("count", counted) for _ in range(5)))
    entry = await pins.get("count")
    assert entry.value == SessionPin("g", 5)
    same = await pins.change("count", lambda known: known.value if known else None)
    assert same == KvChange(entry, entry)
    assert await pins.change("count", lambda known: None) == KvChange(entry, None)
    assert await pins.change("count", lambda known: None) == KvChange(None, None)
    with pytest.raises(ZeroDivisionError):
        await pins.change("count", lambda known: SessionPin("g", 1 // 0))
    assert await pins.get("count") is None


async def test_a_change_that_is_overtaken_each_time_ends(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin)

    async def overtaken(*_: object) -> None:
        return None

    monkeypatch.setattr(pins, "create", overtaken)
    with pytest.raises(BrokerUnavailable, match="change 'count' in the bucket sessions too often"):
        await pins.change("count", lambda known: SessionPin("g", 1))


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


async def test_a_key_that_is_being_written_is_among_the_items(bus: Bus) -> None:
    bucket = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin)
    names = ["a", "b", "c"]
    for name in [*names, "gone"]:
        await bucket.put(name, SessionPin("g1", 1))
    await bucket.delete("gone")
    reading = True

    async def write() -> None:
        while reading:
            for name in names:
                await bucket.put(name, SessionPin("g2", 1))

    writer = asyncio.create_task(write())
    readings = [sorted(await bucket.items()) for _ in range(50)]
    reading = False
    await writer
    assert readings == [names] * 50


async def test_objects_come_back_whole(bus: Bus) -> None:
    store = Objects(bus, subjects.TOKENIZERS_STORE)
    assert await store.info("missing") is None
    await store.open()
    data = bytes(range(256)) * 20_000
    await store.put("tokenizer", data)
    assert await store.get("tokenizer") == data
    with pytest.raises(MissingObject):
        await store.get("missing")


async def test_unreachable_broker_is_named_without_its_password() -> None:
    settings = CommonSettings(nats_url="nats://me:hunter2@127.0.0.1:1", nats_connect_timeout=0.3)
    with pytest.raises(BrokerUnavailable, match=r"nats://127\.0\.0\.1:1 did not answer within") as caught:
        await Bus.connect(settings, "test")
    assert "RYZANSTEIN_NATS_URL" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("", ",", " , ", "nats://", "nonsense://", "http://127.0.0.1:4222", "nats://h:notaport"),
        *("127.0.0.1:99999", "nats://:4222", "nats://me:hunter2@h:notaport", "me:hunter2@h:notaport"),
        "nats://[::1:4222",
    ],
)
async def test_what_is_no_address_is_refused_before_connecting(url: str) -> None:
    with pytest.raises(ConfigurationError, match="nats://host:port") as caught:
        await asyncio.wait_for(Bus.connect(CommonSettings(nats_url=url), "test"), 5)
    assert "hunter2" not in str(caught.value)


async def test_a_bare_address_is_one(nats_settings: CommonSettings) -> None:
    bare = nats_settings.nats_url.removeprefix("nats://")
    connection = await Bus.connect(nats_settings.model_copy(update={"nats_url": f" {bare} ,"}), "test")
    assert connection.connected
    await connection.close()


class NatsWithoutJetStream(LocalNats):
    """As somebody may have it running already."""

    def _write_config(self) -> Path:
        config = super()._write_config()
        lines = config.read_text().splitlines()
        config.write_text("\n".join(line for line in lines if not line.startswith("jetstream")))
        return config


async def test_a_broker_without_jetstream_is_told_with_the_remedy(tmp_path: Path) -> None:
    server = NatsWithoutJetStream(tmp_path)
    await server.start()
    try:
        settings = server.settings()
        connection = await Bus.connect(settings, "test")
        with pytest.raises(ConfigurationError, match="without JetStream; start nats-server with -js"):
            await ensure_streams(connection)
        with pytest.raises(BrokerUnavailable, match="without JetStream; start nats-server with -js"):
            await Bucket.open(connection, subjects.GROUPS_BUCKET, SessionPin)
        with pytest.raises(BrokerUnavailable, match="tokenizers: it runs without JetStream"):
            await Objects(connection, subjects.TOKENIZERS_STORE).get("a")
        await connection.close()
    finally:
        await server.stop()


@pytest.mark.parametrize(
    "stream",
    [
        StreamConfig(name=subjects.INTAKE_STREAM, subjects=[subjects.ALL_INTAKE]),
        StreamConfig(name="OTHER", subjects=["intake.batch.*"], retention=RetentionPolicy.LIMITS),
    ],
    ids=["another retention", "overlapping subjects"],
)
async def test_a_stream_in_the_way_is_named(nats_settings: CommonSettings, stream: StreamConfig) -> None:
    connection = await Bus.connect(nats_settings, "test")
    try:
        await connection.jetstream().add_stream(stream)
        with pytest.raises(ConfigurationError, match=r"the stream INTAKE as required \(.+\); delete"):
            await ensure_streams(connection)
    finally:
        await connection.close()


async def test_a_broker_without_room_says_so(nats_settings: CommonSettings) -> None:
    settings = nats_settings.model_copy(update={"journal_max_bytes": 1 << 60})
    connection = await Bus.connect(settings, "test")
    try:
        with pytest.raises(BrokerUnavailable, match=r"create the stream JOURNAL: .*; free disk space"):
            await ensure_streams(connection)
    finally:
        await connection.close()


@pytest.mark.parametrize("change", [True, False])
async def test_a_stream_that_exists_needs_no_room_again(nats_settings: CommonSettings, change: bool) -> None:
    connection = await Bus.connect(nats_settings.model_copy(update={"journal_max_bytes": 8 << 20}), "test")
    try:
        await ensure_streams(connection)
        for bits in range(60, 20, -1):  # what NATS has left to set aside, but for less than 2 MiB
            ballast = StreamConfig(name=f"B{bits}", subjects=[f"b{bits}"], max_bytes=1 << bits)
            with contextlib.suppress(APIError):
                await connection.jetstream().add_stream(ballast)
        await ensure_streams(connection, change=change)
    finally:
        await connection.close()


async def test_what_repeats_is_logged_with_its_number(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "REPEAT_INTERVAL", 0.02)
    subscription = await bus.client.subscribe("slow")
    with capture_logs() as logs:
        for _ in range(100):
            await bus._on_error(SlowConsumerError("slow", "", 1, subscription))
        assert len(logs) == 1
        async with asyncio.timeout(30):
            while bus._repeats:
                await bus.flush()
    assert [line.get("times") for line in logs] == [None, 99]


async def test_wrong_password_is_told_at_once(nats_settings: CommonSettings) -> None:
    settings = CommonSettings(nats_url=nats_settings.nats_url, nats_user="x", nats_password="secret")
    with pytest.raises(BrokerUnavailable, match="refused the user name or password") as caught:
        await Bus.connect(settings, "test")
    assert "secret" not in str(caught.value)


async def test_a_subscription_that_ended_hears_of_no_gap(bus: Bus) -> None:
    gaps = []

    async def ignore(frame: TokenFrame) -> None:
        pass

    kept = await bus.subscribe("tokens.a", TokenFrame, ignore, on_gap=lambda: gaps.append("a"))
    for _ in range(100):
        ended = await bus.subscribe("tokens.b", TokenFrame, ignore, on_gap=lambda: gaps.append("b"))
        await ended.unsubscribe()
    await bus._on_reconnected()
    assert gaps == ["a"]
    assert len(bus._gap_callbacks) == 1
    await kept.unsubscribe()
    await kept.unsubscribe()
    assert not bus._gap_callbacks


@pytest.mark.parametrize("what", ["a request", "a message for a stream", "an entry of a bucket"])
async def test_what_a_broken_connection_has_lost_is_told_when_it_is_back(
    nats_settings: CommonSettings, what: str
) -> None:
    host, _, port = nats_settings.nats_url.rpartition("/")[2].rpartition(":")
    link = Forwarder((host, int(port)))
    url = f"nats://127.0.0.1:{await link.listen('127.0.0.1')}"
    bus = await Bus.connect(nats_settings.model_copy(update={"nats_url": url}), "test")
    await ensure_streams(bus)
    pins = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin)
    link.cut()
    asked: asyncio.Future[object] = asyncio.ensure_future(
        {
            "a request": lambda: bus.request("nobody", Drain(), ControlReply, timeout=600),
            "a message for a stream": lambda: bus.publish_durable("tokens.a", Drain(), timeout=600),
            "an entry of a bucket": lambda: pins.get("a"),
        }[what]()
    )
    lost = asyncio.Event()
    bus._client._disconnected_cb = _then(bus._client._disconnected_cb, lost.set)
    await asyncio.wait([asked], timeout=0.05)
    link.sever()
    await asyncio.wait_for(lost.wait(), 10)
    link.heal()
    kind = BrokerUnavailable if what == "an entry of a bucket" else LinkLost
    with pytest.raises(kind, match="connection"):
        await asyncio.wait_for(asked, 20)
    assert await bus.publish_durable("tokens.a", Drain()) == 1, "what was lost is not sent after all"
    await bus.close()
    await link.close()


def _then(first: Any, second: Callable[[], None]) -> Any:
    async def both() -> None:
        await first()
        second()

    return both


@pytest.fixture
async def restartable(tmp_path: Path) -> AsyncIterator[LocalNats]:
    """A server that keeps its port and store when it is stopped and started again."""
    first = LocalNats(tmp_path / "nats")
    await first.start()
    await first.stop()
    server = LocalNats(tmp_path / "nats", port=int(first.url.rpartition(":")[2]))
    await server.start()
    yield server
    await server.stop()


async def test_a_watcher_sees_changes_at_once_after_the_broker_was_away(restartable: LocalNats) -> None:
    settings = restartable.settings()
    bus, other = await Bus.connect(settings, "test"), await Bus.connect(settings, "other")
    pins = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin)
    for key in ("stays", "goes"):
        await pins.put(key, SessionPin(key, 1))
    seen: asyncio.Queue[object] = asyncio.Queue()

    async def follow() -> None:
        async for update in pins.watch():
            seen.put_nowait(update)

    following = asyncio.create_task(follow())
    try:
        async with asyncio.timeout(30):
            while await seen.get() is not None:
                pass
        again = [asyncio.Event(), asyncio.Event()]
        for connection, event in zip((bus, other), again, strict=True):
            connection.on_reconnect(event.set)
        await restartable.stop()
        await restartable.start()
        async with asyncio.timeout(30):
            for event in again:
                await event.wait()
        theirs = await Bucket.open(other, subjects.SESSIONS_BUCKET, SessionPin)
        await theirs.delete("goes")
        await theirs.put("new", SessionPin("new", 2))
        left = {("goes", None), ("new", SessionPin("new", 2)), ("stays", SessionPin("stays", 1))}
        async with asyncio.timeout(30):
            while left:
                left.discard(await seen.get())  # type: ignore[arg-type]
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await bus.close()
        await other.close()


async def test_an_abandoned_watcher_leaves_nothing_behind(bus: Bus) -> None:
    pins = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin)
    await pins.get("a")
    before = len(bus.client._subs), len(bus._gap_callbacks)
    for _ in range(3):
        watching = pins.watch()
        assert await anext(watching) is None
        await watching.aclose()  # type: ignore[attr-defined]
        assert await pins.items() == {}
    assert (len(bus.client._subs), len(bus._gap_callbacks)) == before


async def test_a_record_that_cannot_be_read_is_left_out(bus: Bus) -> None:
    pins = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin)
    await pins.put("good", SessionPin("g", 1))
    await bus.jetstream().publish("$KV.sessions.bad", b"\xc1")
    with capture_logs() as logs:
        assert await pins.get("bad") is None
        assert await pins.items() == {"good": SessionPin("g", 1)}
    assert [line["key"] for line in logs] == ["bad", "bad"]


async def test_a_closed_connection_is_no_riddle(nats_settings: CommonSettings) -> None:
    connection = await Bus.connect(nats_settings, "test")
    pins = await Bucket.open(connection, subjects.SESSIONS_BUCKET, SessionPin)
    await connection.close()
    await connection.close()
    with pytest.raises(BrokerUnavailable, match="did not read from the bucket sessions"):
        await pins.get("a")
    with pytest.raises(BrokerUnavailable, match="did not write to the bucket sessions"):
        await pins.put("a", SessionPin("g", 1))
    with pytest.raises(BrokerUnavailable, match="did not store a part of an object"):
        await Objects(connection, "files").put("a", b"x")


async def test_more_replicas_than_there_are_servers_are_refused_in_one_sentence(nats_settings: CommonSettings) -> None:
    connection = await Bus.connect(nats_settings.model_copy(update={"nats_replicas": 3}), "test")
    with pytest.raises(ConfigurationError, match=r"cannot keep 3 replicas .* RYZANSTEIN_NATS_REPLICAS"):
        await ensure_streams(connection)
    await connection.close()


async def test_a_key_is_deleted_only_as_it_is_known(bus: Bus) -> None:
    pins = await Bucket.open(bus, subjects.SESSIONS_BUCKET, SessionPin, ttl=60)
    old = await pins.put("s", SessionPin("g1", 1))
    new = await pins.put("s", SessionPin("g2", 1))
    assert not await pins.delete("s", old)
    assert await pins.get("s") is not None
    assert await pins.delete("s", new)
    assert await pins.get("s") is None
    assert await pins.delete("s")


async def test_durable_publishes_side_by_side_get_their_own_numbers(bus: Bus) -> None:
    await ensure_streams(bus)
    frames = [TokenFrame("g", 1, step, []) for step in range(300)]
    sequences = await asyncio.gather(*(bus.publish_durable(subjects.tokens("c"), frame) for frame in frames))
    assert len(set(sequences)) == len(frames)
    for step in (0, 150, 299):
        stored = await bus.jetstream().get_msg(subjects.JOURNAL_STREAM, sequences[step])
        assert stored.data == encode(frames[step])


async def test_a_durable_publish_that_no_stream_takes_says_so(bus: Bus) -> None:
    with pytest.raises(BrokerUnavailable, match=r"no\.stream"):
        await bus.publish_durable("no.stream", TokenFrame("g", 1, 0, []))


async def test_a_durable_publish_that_the_stream_refuses_says_why(bus: Bus) -> None:
    config = StreamConfig(name="SMALL", subjects=["small"], max_msg_size=16)
    await bus.jetstream().add_stream(config)
    with pytest.raises(BrokerUnavailable, match="message size exceeds maximum"):
        await bus.publish_durable("small", TokenFrame("g" * 100, 1, 0, []))


async def test_a_handler_that_fails_is_logged_and_the_next_message_is_handled(bus: Bus) -> None:
    async def handle(command: ControlCommand) -> ControlReply:
        if isinstance(command, Drain):
            raise ValueError("a fault")
        return ControlReply(ok=True)

    await bus.subscribe(subjects.control("g"), ControlCommand, handle)  # type: ignore[arg-type]
    with capture_logs() as logs:
        await bus.publish(subjects.control("g"), Drain())
        assert (await bus.request(subjects.control("g"), Cancel(["x"]), ControlReply, timeout=30)).ok
    assert [line["event"] for line in logs] == ["handler_failed"]


async def test_what_nats_forbids_is_an_error_in_the_log(bus: Bus) -> None:
    with capture_logs() as logs:
        await bus._on_error(NatsError('nats: permissions violation for publish to "intake.x"'))
    assert [(line["event"], line["log_level"]) for line in logs] == [("nats_refused", "error")]


async def test_nothing_is_published_on_a_connection_that_is_closed(nats_settings: CommonSettings) -> None:
    connection = await Bus.connect(nats_settings, "test")
    await connection.close()
    with pytest.raises(BrokerUnavailable, match="NATS did not accept a message on tokens"):
        await connection.publish("tokens.x", Drain())
