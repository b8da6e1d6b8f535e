"""Object stores on a real NATS: what has no room, what cannot be read, and a broker that does not answer."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from structlog.testing import capture_logs

from shared.errors import BrokerUnavailable, StorageFull
from shared.nats import objects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.nats.objects import CHUNK, MissingObject, Objects
from shared.nats.streams import ensure_streams
from tests.chaos.broker import Broker


async def parts(*given: bytes) -> AsyncIterator[bytes]:
    for part in given:
        yield part


async def whole(store: Objects, name: str) -> bytes:
    return b"".join([part async for part in store.read(name)])


async def test_a_store_gets_what_room_there_is(bus: Bus) -> None:
    """And one that is opened again stays as it is."""
    store = Objects(bus, "files", max_bytes=1 << 60)
    with capture_logs() as logs:
        await store.open()
    assert [line["event"] for line in logs] == ["stream_max_bytes_reduced"]
    room = await store.capacity()
    assert 1 << 20 <= room < 1 << 60
    await Objects(bus, "files", max_bytes=1 << 20).open()
    assert await store.capacity() == room


async def test_a_store_leaves_room_for_those_after_it(tmp_path: Path) -> None:
    """A broker that has set all of its room aside makes no stream more, and halves of a bound often come to just that:
    gateways did not start."""
    broker = Broker(tmp_path, quota=8 << 20)
    await broker.up()
    bus = await Bus.connect(broker.settings(journal_max_bytes=4 << 20), "test")
    try:
        await ensure_streams(bus)
        await Objects(bus, "files", max_bytes=4 << 30).open()
        await Bucket.open(bus, "batches", int)
    finally:
        await bus.close()
        await broker.down()


async def test_a_store_that_a_cluster_does_not_show_yet_is_waited_for(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway has created it, and one of the servers does not know that yet."""
    store = Objects(bus, "files", max_bytes=1 << 20)
    await store.open()
    look, asked = JetStreamContext.stream_info, []

    async def late(self: JetStreamContext, name: str, *arguments: Any) -> Any:
        asked.append(name)
        if len(asked) == 1:
            raise NotFoundError(code=404, description="stream not found")
        return await look(self, name, *arguments)

    monkeypatch.setattr(JetStreamContext, "stream_info", late)
    with pytest.raises(BrokerUnavailable, match="stream not found"):
        await store.capacity()
    asked.clear()
    monkeypatch.setattr(Bus, "clustered", True)
    assert await store.capacity() == 1 << 20
    assert len(asked) == 2


async def test_a_full_store_says_so_and_keeps_nothing_of_what_did_not_fit(bus: Bus) -> None:
    store = Objects(bus, "files", max_bytes=3 * CHUNK)
    await store.open()
    await store.write("small", parts(b"x" * CHUNK), nuid="1")
    with pytest.raises(StorageFull, match=r"files is full .*delete files that are not needed"):
        await store.write("large", parts(b"y" * 3 * CHUNK), nuid="2")
    assert await store.info("large") is None
    assert await whole(store, "small") == b"x" * CHUNK


async def test_what_cannot_be_read_is_not_there(bus: Bus) -> None:
    store = Objects(bus, "files")
    await store.open()
    await store.write("file", parts(b"x"), nuid="1")
    await bus.jetstream().publish(store._meta("file"), b"no JSON")
    assert await store.info("file") is None
    with pytest.raises(MissingObject):
        await whole(store, "file")


class Broken:
    """A JetStream context whose next answers do not come."""

    def __init__(self, jetstream: JetStreamContext, lost: int) -> None:
        self._jetstream = jetstream
        self.lost = lost

    def __getattr__(self, name: str) -> Any:
        if self.lost:
            self.lost -= 1
            raise TimeoutError
        return getattr(self._jetstream, name)


async def test_a_reader_with_patience_asks_again(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "READ_PAUSE", 0.001)
    store = Objects(bus, "files")
    await store.open()
    data = bytes(range(256)) * (CHUNK // 128)
    await store.write("file", parts(data), nuid="1")
    broken = Broken(bus.jetstream(), 2)
    monkeypatch.setattr(bus, "jetstream", lambda: broken)
    patient = store.read("file", patience=60)
    read = await anext(patient)
    broken.lost = 2
    assert read + b"".join([part async for part in patient]) == data
    broken.lost = 1
    with pytest.raises(BrokerUnavailable, match="did not read an object of files"):
        await whole(store, "file")
    hasty = store.read("file")
    await anext(hasty)
    broken.lost = 1
    with pytest.raises(BrokerUnavailable, match="did not read an object of files"):
        await anext(hasty)


class Stopped(Exception):
    """Its writer ends before it hears that a message is stored."""


async def test_who_is_stopped_while_the_name_is_stored_leaves_the_object_whole(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer finds the name, keeps what is there, and must not be left with a name without content."""
    store, first = Objects(bus, "files"), Objects(bus, "files")
    await store.open()
    await first.open()
    publish = first._publish

    async def stopped_at_the_name(subject: str, data: bytes, headers: dict[str, str]) -> None:
        await publish(subject, data, headers)
        if subject == first._meta("file"):
            raise Stopped

    monkeypatch.setattr(first, "_publish", stopped_at_the_name)
    with pytest.raises(Stopped):
        await first.write("file", parts(b"content"), nuid="1", fresh=True)
    await store.write("file", parts(b"content"), nuid="2", fresh=True)
    assert await whole(store, "file") == b"content"
    assert await store.writings("") == ["1"]
