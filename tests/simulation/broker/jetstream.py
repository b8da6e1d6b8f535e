"""JetStream of one server: its streams and consumers, and the timers that move them.

a stream's subject ──▶ stored, acknowledged ──▶ consumers that have something to deliver now
$JS.API.>          ──▶ `api`
$JS.ACK.>          ──▶ consumers
"""

import asyncio
import json
import random
import time
from collections.abc import Iterable
from typing import Any, Protocol

from tests.simulation.broker import api
from tests.simulation.broker.configs import (
    NO_RESOURCES,
    NOT_ENABLED,
    SECOND,
    ConsumerConfig,
    Refused,
    StreamConfig,
    overlap,
    text_of,
)
from tests.simulation.broker.consumers import Consumer, Delivery
from tests.simulation.broker.disk import Disk
from tests.simulation.broker.streams import Stream
from tests.simulation.broker.subjects import MOST_CACHED

STORE = 64 << 30  # bytes that streams may set aside together
EXPIRY = 0.25  # seconds between two looks at what is too old
_ADVISORY = "$JS.EVENT.ADVISORY"


class Clients(Protocol):
    """Where answers go."""

    name: str

    def route(self, subject: str, reply: str, header: bytes, payload: bytes, to: str = "") -> bool: ...

    def interested(self, subject: str) -> bool: ...

    def say(self, subject: str, content: dict[str, Any]) -> None: ...

    def flush(self) -> None: ...


class JetStream:
    def __init__(self, clients: Clients, draw: random.Random, *, store: int = STORE, disk: Disk | None = None) -> None:
        """`store`: bytes that there are; `disk`: what is left of an earlier run is there again; None: an empty one."""
        self.clients, self.draw, self.store, self.disk = clients, draw, store, disk or Disk()
        self.streams: dict[str, Stream] = {}
        self.enabled = True
        self.full = ""  # the name of a stream whose quota is reached; empty: none is
        self.lost_acks = 0.0  # the share of acknowledgements that do not arrive
        self.cluster: Any = None  # who keeps streams with others; None: it is alone
        self._by_subject: dict[str, Stream | None] = {}
        self._timers: dict[tuple[str, str], tuple[float, asyncio.TimerHandle]] = {}
        self._pushes: dict[str, list[Consumer]] = {}  # by the subject that they deliver to
        self._fresh: list[Consumer] = []
        self._recover()

    def stop(self) -> None:
        """Nothing moves any more."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    # --- from clients ------------------------------------------------------------------------------

    def handle(self, subject: str, reply: str, header: bytes, payload: bytes) -> bool:
        """False: nobody here listens to that."""
        if subject.startswith("$JS."):
            return self._handle_own(subject, reply, payload)
        stream = self.stream_of(subject)
        if stream is None:
            return False
        self.store_message(stream, subject, reply, header, payload)
        return True

    def _handle_own(self, subject: str, reply: str, payload: bytes) -> bool:
        if not self.enabled:
            if subject.startswith("$JS.API.") and reply:
                self.clients.route(reply, "", b"", api.refusal(subject, NOT_ENABLED))
            return subject.startswith("$JS.API.")
        if subject.startswith("$JS.API."):
            return api.handle(self, subject.split(".")[2:], reply, payload)
        if subject.startswith("$JS.ACK."):
            self._acknowledge(subject.split("."), reply, payload)
            return True
        return subject.startswith("$JS.FC.")

    def stream_of(self, subject: str) -> Stream | None:
        """Which stream takes it."""
        if not self.enabled:
            return None
        if subject in self._by_subject:
            return self._by_subject[subject]
        found = next((stream for stream in self.streams.values() if stream.takes(subject)), None)
        if len(self._by_subject) >= MOST_CACHED:
            self._by_subject.clear()
        self._by_subject[subject] = found
        return found

    def store_message(self, stream: Stream, subject: str, reply: str, header: bytes, payload: bytes) -> None:
        """Stores it, says so to who wants to know, and delivers it."""
        name = stream.config.name
        try:
            if self.disk.full:
                self._out_of_space()
                raise Refused(*NO_RESOURCES)
            if name == self.full:
                raise Refused(503, 10077, "maximum bytes exceeded")
            if self.store < STORE and self.used() > self.store:
                raise Refused(*NO_RESOURCES)
            stored = stream.publish(subject, header, payload, time.time_ns())
        except Refused as error:
            answer = json.dumps({"error": error.as_dict(), "stream": name, "seq": 0}).encode()
        else:
            duplicate = ',"duplicate": true' if stored.duplicate else ""
            answer = f'{{"stream":"{name}","seq":{stored.sequence}{duplicate}}}'.encode()
            if not stored.duplicate:
                self.disk.changed()
        if reply and not stream.config.no_ack:
            self.clients.route(reply, "", b"", answer)
        self._deliver_from(stream)

    def _out_of_space(self) -> None:
        """nats-server switches JetStream off, until it is started again with room on its disk."""
        self.enabled = False
        self._by_subject.clear()
        self.stop()

    # --- streams -----------------------------------------------------------------------------------------

    def every(self) -> dict[str, Stream]:
        """Those that others of its cluster lead too."""
        return self.streams if self.cluster is None else self.cluster.streams

    def adopt(self, stream: Stream) -> None:
        """It leads this stream from now on."""
        name, now = stream.config.name, asyncio.get_running_loop().time()
        if name in self.streams:
            return
        self.streams[name] = stream
        self._by_subject.clear()
        for consumer in self.consumers(stream):
            self._listen(consumer, None, consumer.config.deliver_subject)
            self._arm((name, consumer.name), now, now)
        self._arm_stream(stream)

    def release(self, stream: Stream) -> None:
        """It leads this stream no more."""
        self.streams.pop(stream.config.name, None)
        self._by_subject.clear()
        self._cancel((stream.config.name, ""))
        for consumer in self.consumers(stream):
            self._listen(consumer, consumer.config.deliver_subject, None)
            self._cancel((stream.config.name, consumer.name))

    def reserved(self, without: str = "") -> int:
        """Bytes that streams have set aside."""
        configs = [stream.config for stream in self.every().values() if stream.config.name != without]
        return sum(max(0, config.max_bytes) for config in configs)

    def used(self) -> int:
        return sum(stream.bytes for stream in self.every().values())

    def check_room(self, config: StreamConfig, without: str = "") -> None:
        """Raises `Refused`."""
        reserved = self.reserved(without)
        if reserved >= self.store or reserved + config.max_bytes > self.store:
            raise Refused(500, 10047, "insufficient storage resources available")

    def create(self, config: StreamConfig) -> Stream:
        """Finds it where it is there with the same settings. Raises `Refused`."""
        config = config.normal()
        known = self.every().get(config.name)
        if known is not None:
            if known.config != config:
                self.check_room(config, without=config.name)
                what = "stream name already in use with a different configuration"
                raise Refused(400, 10058, what)
            return known
        self.check_room(config)
        overlap(config, [stream.config for stream in self.every().values()])
        stream = Stream(config, time.time_ns())
        if self.cluster is not None:
            self.cluster.place(stream)
            return stream
        self.streams[stream.config.name] = stream
        self._by_subject.clear()
        self.disk.add(stream)
        return stream

    def update(self, stream: Stream, config: StreamConfig) -> None:
        """Raises `Refused`."""
        config = config.normal()
        stream.config.changed(config)
        self.check_room(config, without=config.name)
        overlap(config, [other.config for other in self.every().values()])
        stream.update(config)
        self._by_subject.clear()
        if self.cluster is not None:
            self.cluster.changed()
        self._deliver_from(stream)

    def delete(self, stream: Stream) -> None:
        for consumer in self.consumers(stream):
            self.delete_consumer(consumer)
        self.release(stream)
        if self.cluster is not None:
            self.cluster.forget(stream.config.name)
        self.disk.delete(stream.config.name)

    def changed(self, stream: Stream) -> None:
        """Messages have gone."""
        self.disk.changed()
        self._deliver_from(stream)

    # --- consumers -----------------------------------------------------------------------------------------

    def consumers(self, stream: Stream) -> list[Consumer]:
        return [watcher for watcher in stream.watchers.values() if isinstance(watcher, Consumer)]

    def create_consumer(self, stream: Stream, config: ConsumerConfig, name: str, action: str) -> Consumer:
        """Finds or changes one that is there. Raises `Refused`."""
        config = config.normal(name)
        known = stream.watchers.get(name)
        if isinstance(known, Consumer):
            if action == "create" and known.config != config:
                raise Refused(400, 10148, "consumer already exists")
            known.config.changed(config)
            config.check(stream.config, [consumer.config for consumer in self.consumers(stream)])
            self._listen(known, known.config.deliver_subject, config.deliver_subject)
            known.reconfigure(config)
            self.run(known)
            return known
        if action == "update":
            raise Refused(400, 10149, "consumer does not exist")
        config.check(stream.config, [consumer.config for consumer in self.consumers(stream)])
        consumer = Consumer(config, stream, time.time_ns(), asyncio.get_running_loop().time())
        stream.watchers[name] = consumer
        self._listen(consumer, None, config.deliver_subject)
        self._fresh.append(consumer)
        return consumer

    def begin(self) -> None:
        """Consumers that were made deliver, now that whoever made them knows of them."""
        fresh, self._fresh = self._fresh, []
        for consumer in fresh:
            self.disk.changed()
            self.run(consumer)

    def _listen(self, consumer: Consumer, before: str | None, after: str | None) -> None:
        if before is not None and consumer in self._pushes.get(before, []):
            self._pushes[before].remove(consumer)
            if not self._pushes[before]:
                del self._pushes[before]
        if after is not None:
            self._pushes.setdefault(after, []).append(consumer)

    def delivers_to(self, subject: str) -> bool:
        """Whether a push consumer does."""
        return subject in self._pushes

    def listened(self, subject: str) -> None:
        """Somebody has subscribed to it."""
        for consumer in self._pushes.get(subject, ()):
            self.run(consumer)

    def delete_consumer(self, consumer: Consumer, why: str = "Consumer Deleted") -> None:
        stream = consumer.stream.config.name
        self._send(consumer.closed(409, why))
        consumer.stream.watchers.pop(consumer.name, None)
        self._listen(consumer, consumer.config.deliver_subject, None)
        self._cancel((stream, consumer.name))
        if consumer.stream.config.retention == "interest":
            for number in list(consumer.stream.messages):
                self._settle(consumer.stream, number)
        self.disk.changed()

    def _acknowledge(self, tokens: list[str], reply: str, payload: bytes) -> None:
        stream = self.streams.get(tokens[2]) if len(tokens) == 9 and tokens[5].isdigit() else None
        consumer = stream.watchers.get(tokens[3]) if stream is not None else None
        if stream is None or not isinstance(consumer, Consumer):
            return
        if self.lost_acks and self.draw.random() < self.lost_acks:
            return
        number, word, _ = int(tokens[5]), *payload.partition(b" ")[::2]
        now = asyncio.get_running_loop().time()
        if word == b"+WPI":
            consumer.touch(number, now)
        elif word == b"-NAK":
            told = json.loads(payload[5:] or b"{}") if payload[5:].startswith(b"{") else {}
            consumer.refuse(number, now, told.get("delay", 0) / SECOND)
        else:
            for done in consumer.acknowledge(number, time.time_ns()):
                self._settle(stream, done)
        self.disk.changed()
        if reply:
            self.clients.route(reply, "", b"", b"")
        self.run(consumer)

    def _settle(self, stream: Stream, number: int) -> None:
        """A consumer is done with a message: it goes where nobody else needs it."""
        if stream.config.retention == "workqueue":
            stream.remove(number)
        elif stream.config.retention == "interest":
            message = stream.messages.get(number)
            if message is None:
                return
            for consumer in self.consumers(stream):
                open_ = number in consumer.pending or number >= consumer.next
                if open_ and consumer.taken.takes(message.subject):
                    return
            stream.remove(number)

    # --- what is delivered -----------------------------------------------------------------------------------

    def _deliver_from(self, stream: Stream) -> None:
        for watcher in list(stream.watchers.values()):
            if isinstance(watcher, Consumer) and watcher.awake:
                self.run(watcher)
        self._arm_stream(stream)

    def run(self, consumer: Consumer) -> None:
        """Sends what is to be sent now, and comes back when there may be more."""
        now, wall = asyncio.get_running_loop().time(), time.time_ns()
        stream = consumer.stream.config.name
        if consumer.unused(now, self.clients.interested):
            self.delete_consumer(consumer)
            return
        self._send(consumer.work(now, wall, self.clients.interested), consumer.config.headers_only)
        for number, times in consumer.exceeded:
            self.tell(
                f"CONSUMER.MAX_DELIVERIES.{stream}.{consumer.name}",
                "max_deliver",
                {"stream": stream, "consumer": consumer.name, "stream_seq": number, "deliveries": times},
            )
        consumer.exceeded.clear()
        self._arm((stream, consumer.name), consumer.due(), now)

    def _send(self, deliveries: Iterable[Delivery], headers_only: bool = False) -> None:
        route = self.clients.route
        for delivery in deliveries:
            message = delivery.message
            if message is None:
                route(delivery.to, "", delivery.header, b"")
            elif headers_only:
                route(message.subject, delivery.reply, _with_size(message.header, message.data), b"", delivery.to)
            else:
                route(message.subject, delivery.reply, message.header, message.data, delivery.to)

    def tell(self, subject: str, kind: str, content: dict[str, Any]) -> None:
        """An advisory."""
        head = {
            "type": f"io.nats.jetstream.advisory.v1.{kind}",
            "id": f"{time.time_ns()}",
            "timestamp": text_of(time.time_ns()),
        }
        self.clients.say(f"{_ADVISORY}.{subject}", head | content)

    # --- time ------------------------------------------------------------------------------------------------

    def _arm_stream(self, stream: Stream) -> None:
        due = stream.due()
        if due is not None:
            now = asyncio.get_running_loop().time()
            left = (due - time.time_ns()) / SECOND
            self._arm((stream.config.name, ""), now + max(EXPIRY, left), now)

    def _arm(self, key: tuple[str, str], due: float | None, now: float) -> None:
        known = self._timers.get(key)
        if due is None or (known is not None and known[0] <= due):
            return
        if known is not None:
            known[1].cancel()
        timer = asyncio.get_running_loop().call_at(max(due, now), self._fire, key)
        self._timers[key] = (due, timer)

    def _cancel(self, key: tuple[str, str]) -> None:
        known = self._timers.pop(key, None)
        if known is not None:
            known[1].cancel()

    def _fire(self, key: tuple[str, str]) -> None:
        self._timers.pop(key, None)
        stream = self.streams.get(key[0])
        if stream is None:
            return
        if key[1]:
            consumer = stream.watchers.get(key[1])
            if isinstance(consumer, Consumer):
                self.run(consumer)
        else:
            before = len(stream.messages)
            stream.expire(time.time_ns())
            if len(stream.messages) != before:
                self.disk.changed()
            self._deliver_from(stream)
        self.clients.flush()

    # --- after a start -------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        now = asyncio.get_running_loop().time()
        for stream in self.disk.load(now):
            self.streams[stream.config.name] = stream
            for consumer in self.consumers(stream):
                self._listen(consumer, None, consumer.config.deliver_subject)
                self._arm((stream.config.name, consumer.name), consumer.due(), now)
            self._arm_stream(stream)


def _with_size(header: bytes, data: bytes) -> bytes:
    """Of a message that is delivered without its data."""
    size = f"Nats-Msg-Size: {len(data)}\r\n\r\n".encode()
    return (header[:-2] if header else b"NATS/1.0\r\n") + size
