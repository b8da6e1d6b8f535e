"""Operations by `shared/nats`: what the services call."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

from shared.messages import Cancel, ControlCommand, ControlReply, SessionPin, TokenEntry, TokenFrame
from shared.messages.records import GenerationRecords
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.journal import JournalEnd, StartPosition, recorded_in, replay
from shared.nats.kv import Bucket, KvEntry
from shared.nats.objects import Objects
from shared.nats.streams import ensure_stream, ensure_streams, read_stream
from tests.simulation.conformance.plain import PATIENCE


class Services:
    """Over one connection. Values of buckets are pins of sessions: `value` is the group's name."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._buckets: dict[str, Bucket[SessionPin]] = {}
        self._stores: dict[str, Objects] = {}
        self._watches: dict[str, AsyncIterator[tuple[str, SessionPin | None, int] | None]] = {}
        self._frames: dict[str, asyncio.Queue[TokenFrame]] = {}
        self.gaps = 0  # how often a subscription was told that it may have missed something

    # --- bus ---------------------------------------------------------------------------------------

    async def obeying(self, group: str) -> None:
        """A group that does what it is told by `order`."""

        async def handle(command: Any) -> ControlReply:
            return ControlReply(ok=isinstance(command, Cancel))

        await self._bus.subscribe(subjects.control(group), ControlCommand, handle)  # type: ignore[arg-type]
        await self._bus.flush()

    async def order(self, group: str) -> Any:
        command = Cancel(["x"])
        return (await self._bus.request(subjects.control(group), command, ControlReply, timeout=PATIENCE)).ok

    async def hear(self, consumer: str) -> None:
        frames = self._frames[consumer] = asyncio.Queue()

        async def handle(frame: TokenFrame) -> None:
            frames.put_nowait(frame)

        await self._bus.subscribe(subjects.tokens(consumer), TokenFrame, handle, on_gap=self._on_gap)
        await self._bus.flush()

    def _on_gap(self) -> None:
        self.gaps += 1

    async def gaps_heard(self) -> int:
        return self.gaps

    async def heard(self, consumer: str, count: int) -> Any:
        async with asyncio.timeout(PATIENCE):
            return [(await self._frames[consumer].get()).step for _ in range(count)]

    async def publish_frame(self, consumer: str, step: int) -> None:
        frame = TokenFrame("g", 1, step, [TokenEntry("one", 0, step, [step])])
        await self._bus.publish(subjects.tokens(consumer), frame)
        await self._bus.flush()

    async def publish_durable(self, subject: str, group: str) -> Any:
        return await self._bus.publish_durable(subject, SessionPin(group, 1), timeout=PATIENCE)

    # --- streams and journal -----------------------------------------------------------------------

    async def ensure_streams(self, change: bool = True) -> None:
        await ensure_streams(self._bus, change=change)

    async def ensure_stream(self, name: str, all_of: str, change: bool = True, **limits: Any) -> None:
        config = StreamConfig(
            name=name, subjects=[all_of], retention=RetentionPolicy.LIMITS, storage=StorageType.FILE, **limits
        )
        await ensure_stream(self._bus, config, change=change)

    async def replayed(self, consumer: str, behind: int = -1) -> Any:
        return [frame.step async for frame in replay(self._bus, consumer, StartPosition(behind=behind))]

    async def journal_end(self) -> Any:
        return await JournalEnd(self._bus).look()

    async def record(self, writer: str, slot: str) -> Any:
        return await self._bus.publish_durable(subjects.records(writer, slot), GenerationRecords([]))

    async def recorded(self, writer: str, slot: str) -> Any:
        return len([records async for records in recorded_in(self._bus, writer, slot)])

    async def pages(self, stream: str, subject: str, **config: Any) -> Any:
        reading = read_stream(self._bus, stream, subject, ConsumerConfig(**config), timeout=PATIENCE)
        async with contextlib.aclosing(reading) as messages:
            return [message.metadata.sequence.stream async for message in messages]

    # --- buckets -----------------------------------------------------------------------------------

    async def bucket(self, name: str, **options: Any) -> None:
        self._buckets[name] = await Bucket.open(self._bus, name, SessionPin, **options)

    async def read(self, bucket: str, key: str) -> Any:
        return _entry(await self._buckets[bucket].get(key))

    async def put(self, bucket: str, key: str, value: str) -> Any:
        return await self._buckets[bucket].put(key, SessionPin(value, 1))

    async def create(self, bucket: str, key: str, value: str) -> Any:
        return await self._buckets[bucket].create(key, SessionPin(value, 1))

    async def update(self, bucket: str, key: str, value: str, revision: int) -> Any:
        return await self._buckets[bucket].update(key, SessionPin(value, 1), revision)

    async def remove(self, bucket: str, key: str, revision: int | None = None) -> Any:
        return await self._buckets[bucket].delete(key, revision)

    async def change(self, bucket: str, key: str, value: str) -> Any:
        """Has the key hold one more letter than before; no value: nothing."""

        def made(known: KvEntry[SessionPin] | None) -> SessionPin | None:
            return SessionPin((known.value.group if known else "") + value, 1) if value else None

        change = await self._buckets[bucket].change(key, made)
        return [_entry(change.before), _entry(change.after)]

    async def purge(self, bucket: str, key: str, before: int = 0) -> None:
        await self._buckets[bucket].purge(key, before)

    async def items(self, bucket: str) -> Any:
        return {key: pin.group for key, pin in sorted((await self._buckets[bucket].items()).items())}

    async def scan(self, bucket: str, keys: str = ">") -> Any:
        return [_entry(entry) async for entry in self._buckets[bucket].scan(keys)]

    async def sizes(self, bucket: str, keys: str = ">") -> Any:
        return [list(found) async for found in self._buckets[bucket].sizes(keys)]

    async def watch(self, name: str, bucket: str, keys: str = ">") -> None:
        self._watches[name] = self._buckets[bucket].watch_revisions(keys)

    async def changes(self, name: str, count: int) -> Any:
        found: list[Any] = []
        for _ in range(count):
            async with asyncio.timeout(PATIENCE):
                change = await anext(self._watches[name])
            if change is None:
                found.append(None)
            else:
                key, pin, revision = change
                found.append([key, None if pin is None else pin.group, revision])
        return found

    async def unwatch(self, name: str) -> None:
        await self._watches.pop(name).aclose()  # type: ignore[attr-defined]

    # --- objects -----------------------------------------------------------------------------------

    async def store(self, name: str, max_bytes: int = 0) -> Any:
        store = self._stores[name] = Objects(self._bus, name, max_bytes=max_bytes)
        await store.open()
        return await store.capacity()

    async def write_object(
        self, store: str, name: str, nuid: str, count: int, fresh: bool = False, limit: int = 0
    ) -> Any:
        """`count` bytes."""

        async def parts() -> AsyncIterator[bytes]:
            yield bytes(count)

        return await self._stores[store].write(name, parts(), nuid=nuid, limit=limit, fresh=fresh)

    async def read_object(self, store: str, name: str) -> Any:
        return [len(part) async for part in self._stores[store].read(name)]

    async def object_info(self, store: str, name: str) -> Any:
        info = await self._stores[store].info(name)
        return None if info is None else [info.name, info.nuid, info.size, info.digest]

    async def objects(self, store: str) -> Any:
        return sorted(await self._stores[store].names())

    async def writings(self, store: str, prefix: str) -> Any:
        return sorted(await self._stores[store].writings(prefix))

    async def delete_object(self, store: str, name: str) -> None:
        await self._stores[store].delete(name)

    async def close_watches(self) -> None:
        for name in list(self._watches):
            await self.unwatch(name)


def _entry(entry: KvEntry[SessionPin] | None) -> Any:
    if entry is None:
        return None
    return {"key": entry.key, "value": entry.value.group, "revision": entry.revision}
