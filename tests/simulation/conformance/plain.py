"""Operations by nats-py: messages, and what JetStream's API answers."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RawStreamMsg, StreamConfig

from shared.nats import subjects
from shared.nats.accounts import API, MAPPED
from shared.nats.bus import Bus
from tests.simulation.conformance import outcomes

# Seconds for what must come. It is waited for whole only where a server does not do what the other does.
PATIENCE = 30.0

# Of the server itself: whoever hears everything is spared them, for nothing says when they come.
_NEWS = (subjects.CONNECTION_OPENED, subjects.CONNECTION_CLOSED)


class Mailbox:
    """What a subscription has received and nobody has taken yet."""

    def __init__(self, subject: str = "") -> None:
        """`subject`: what was subscribed."""
        self.subject = subject
        self.messages: list[Msg] = []
        self.subscription: Subscription | None = None
        self._news = asyncio.Event()

    async def arrived(self, message: Msg) -> None:
        if message.subject in _NEWS and message.subject != self.subject:
            return
        self.messages.append(message)
        self._news.set()

    async def take(self, count: int) -> list[Msg]:
        """The next `count`, or fewer once it has waited in vain."""
        try:
            async with asyncio.timeout(PATIENCE):
                while len(self.messages) < count:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            count = len(self.messages)
        taken, self.messages = self.messages[:count], self.messages[count:]
        return taken


class Plain:
    """Over one connection. Each method is an operation; what it returns is its outcome."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._client = bus.client
        self._js = bus.jetstream()
        self.mailboxes: dict[str, Mailbox] = {}
        self._pulls: dict[str, JetStreamContext.PullSubscription] = {}
        self._fetched: list[Msg] = []

    # --- messages ----------------------------------------------------------------------------------

    async def subscribe(self, name: str, subject: str, queue: str = "", most: int = 0) -> None:
        box = self.mailboxes[name] = Mailbox(subject)
        box.subscription = await self._client.subscribe(subject, queue, cb=box.arrived)
        if most:
            await box.subscription.unsubscribe(most)
        await self._bus.flush()

    async def answering(self, subject: str, data: str, queue: str = "") -> None:
        """From now on, whoever asks on `subject` is answered."""

        async def answer(message: Msg) -> None:
            await self._client.publish(message.reply, f"{data} {outcomes.text(message.data)}".encode())

        await self._client.subscribe(subject, queue, cb=answer)
        await self._bus.flush()

    async def unsubscribe(self, name: str) -> None:
        subscription = self.mailboxes[name].subscription
        assert subscription is not None
        await subscription.unsubscribe()
        await self._bus.flush()

    async def publish(
        self, subject: str, data: str = "", headers: Mapping[str, str] | None = None, reply: str = ""
    ) -> None:
        await self._client.publish(subject, data.encode(), reply, dict(headers) if headers else None)
        await self._bus.flush()

    async def publish_bytes(self, subject: str, count: int) -> None:
        await self._client.publish(subject, bytes(count))
        await self._bus.flush()

    async def request(self, subject: str, data: str = "") -> Any:
        return outcomes.of_message(await self._client.request(subject, data.encode(), timeout=PATIENCE))

    async def until_nobody(self, subject: str) -> None:
        """Waits until nobody listens there, as the server sees it: who left has been noticed."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    await self._client.request(subject, timeout=0.05)
                except NoRespondersError:
                    return
                except TimeoutError:
                    continue

    async def received(self, name: str, count: int, ordered: bool = True) -> list[Any]:
        found = [outcomes.of_message(message) for message in await self.mailboxes[name].take(count)]
        return found if ordered else sorted(found, key=repr)

    async def all_received(self, names: list[str]) -> Any:
        """Everything that has been published by now, of several subscriptions together."""
        await self._bus.flush()
        found = [outcomes.of_message(one) for name in names for one in self.mailboxes[name].messages]
        for name in names:
            self.mailboxes[name].messages = []
        return sorted(found, key=repr) if len(names) > 1 else found

    async def left(self, name: str) -> int:
        """How many more messages there are than were taken."""
        await self._bus.flush()
        return len(self.mailboxes[name].messages)

    async def flush(self) -> None:
        await self._bus.flush()

    async def refused(self, publish: str = "", subscribe: str = "") -> str:
        """What the server says to somebody who has no right to it."""
        if publish:
            await self._client.publish(publish, b"x")
        else:
            await self._client.subscribe(subscribe)
        async with asyncio.timeout(PATIENCE):
            while "permissions" not in self._bus._last_error:  # noqa: ASYNC110  # nats-py has no event
                await asyncio.sleep(0.01)
        said, self._bus._last_error = self._bus._last_error, ""
        return said.replace(MAPPED.lower(), API.lower())  # what users ask of JetStream has another name behind accounts

    async def server(self) -> Any:
        """What it says of itself that our code reads."""
        info = self._client._server_info
        return {name: info.get(name) for name in ("max_payload", "headers", "jetstream", "auth_required")}

    # --- streams -----------------------------------------------------------------------------------

    async def api(self, subject: str, body: str = "") -> Any:
        """JetStream's API itself: an answer or an error."""
        message = await self._client.request(f"$JS.API.{subject}", body.encode(), timeout=PATIENCE)
        return outcomes.answer(json.loads(message.data))

    async def add_stream(self, name: str, subjects: list[str], **more: Any) -> Any:
        return _stream(await self._js.add_stream(StreamConfig(name=name, subjects=subjects, **more)))

    async def update_stream(self, name: str, subjects: list[str], **more: Any) -> Any:
        return _stream(await self._js.update_stream(StreamConfig(name=name, subjects=subjects, **more)))

    async def delete_stream(self, name: str) -> Any:
        return await self._js.delete_stream(name)

    async def stream_info(self, name: str, subjects: str | None = None) -> Any:
        return _stream(await self._js.stream_info(name, subjects))

    async def stored(self, subject: str, data: str = "", headers: Mapping[str, str] | None = None) -> Any:
        """Published into a stream and acknowledged by it."""
        given = dict(headers) if headers else None
        ack = await self._js.publish(subject, data.encode(), timeout=PATIENCE, headers=given)
        return {"stream": ack.stream, "seq": ack.seq, "duplicate": bool(ack.duplicate)}

    async def stored_bytes(self, subject: str, count: int) -> Any:
        ack = await self._js.publish(subject, bytes(count), timeout=PATIENCE)
        return {"stream": ack.stream, "seq": ack.seq}

    async def stored_many(self, subject: str, count: int) -> Any:
        """`count` messages, one after the other: the number of the last."""
        acks = await asyncio.gather(
            *(self._js.publish(subject, str(number).encode(), timeout=PATIENCE) for number in range(count))
        )
        return [ack.seq for ack in acks]

    async def get(self, stream: str, **which: Any) -> Any:
        """`seq`, `subject`, `next`, `direct` as of nats-py's `get_msg`."""
        message: RawStreamMsg = await self._js.get_msg(stream, **which)
        return {
            "subject": message.subject,
            "seq": message.seq,
            "data": outcomes.text(message.data),
            "headers": outcomes.headers(message.headers),
        }

    async def delete_message(self, stream: str, seq: int) -> Any:
        return await self._js.delete_msg(stream, seq)

    async def purge_stream(self, stream: str, **which: Any) -> Any:
        return await self._js.purge_stream(stream, **which)

    # --- consumers ---------------------------------------------------------------------------------

    async def add_consumer(self, stream: str, **config: Any) -> Any:
        return _consumer(await self._js.add_consumer(stream, _config(config)))

    async def consumer_info(self, stream: str, consumer: str) -> Any:
        return _consumer(await self._js.consumer_info(stream, consumer))

    async def delete_consumer(self, stream: str, consumer: str) -> Any:
        return await self._js.delete_consumer(stream, consumer)

    async def pull_subscribe(
        self, name: str, subject: str, stream: str, durable: str | None = None, **config: Any
    ) -> Any:
        self._pulls[name] = await self._js.pull_subscribe(
            subject, durable, stream=stream, config=_config(config) if config else None
        )
        return _consumer(await self._pulls[name].consumer_info())

    async def fetch(self, name: str, batch: int = 1, timeout: float = PATIENCE) -> Any:
        """Messages that stay here to be acknowledged by their places: 0, 1 and so on since the beginning."""
        messages = await self._pulls[name].fetch(batch, timeout)
        self._fetched += messages
        return [outcomes.of_message(message) for message in messages]

    async def pull_info(self, name: str) -> Any:
        return _consumer(await self._pulls[name].consumer_info())

    async def drop_pull(self, name: str) -> None:
        """As `read_stream` does: the consumer is left to the broker."""
        await self._pulls[name].unsubscribe()

    async def delete_pull(self, name: str, stream: str) -> Any:
        return await self._js.delete_consumer(stream, self._pulls[name]._consumer)

    async def pull_request(self, stream: str, consumer: str, reply_to: str, **asked: Any) -> None:
        """As the scheduler asks: what comes is received in the mailbox `reply_to`, which has subscribed `pulls.>`."""
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        await self._client.publish(subject, _json(asked), f"pulls.{reply_to}")
        await self._bus.flush()

    async def keep(self, name: str, count: int) -> Any:
        """As `received`, and they can be acknowledged as those that were fetched."""
        messages = await self.mailboxes[name].take(count)
        self._fetched += messages
        return [outcomes.of_message(message) for message in messages]

    async def pull_now(self, stream: str, consumer: str, batch: int) -> Any:
        """What there is for a consumer at this moment, up to `batch`; kept to be acknowledged."""
        inbox = self._client.new_inbox()
        box = Mailbox()
        subscription = await self._client.subscribe(inbox, cb=box.arrived)
        request = _json({"batch": batch, "no_wait": True})
        await self._client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", request, inbox)
        messages: list[Msg] = []
        while len(messages) < batch:
            (message,) = await box.take(1)
            messages.append(message)
            if not message.reply:  # that is all, or there is no such consumer
                break
        await subscription.unsubscribe()
        self._fetched += [message for message in messages if message.reply]
        return [outcomes.of_message(message) for message in messages]

    async def ack(self, place: int) -> Any:
        """Waits until the broker has done it. Raises `ValueError` where fewer were fetched."""
        if place >= len(self._fetched):
            raise ValueError(f"{len(self._fetched)} messages were fetched")
        return outcomes.of_message(await self._fetched[place].ack_sync(timeout=PATIENCE))

    async def acknowledge(self, place: int, kind: str) -> Any:
        """`kind`: +ACK, -NAK, -NAK {"delay": nanoseconds}, +WPI, +TERM; waits as `ack`. Any number is a place,
        where there is one."""
        if not self._fetched:
            return None
        reply = self._fetched[place % len(self._fetched)].reply
        return outcomes.of_message(await self._client.request(reply, kind.encode(), timeout=PATIENCE))

    async def push_subscribe(self, name: str, subject: str, stream: str, **more: Any) -> None:
        """An ordered consumer, as watchers have it."""
        box = self.mailboxes[name] = Mailbox()
        config = _config(more)
        subscription = await self._js.subscribe(
            subject,
            stream=stream,
            cb=box.arrived,
            ordered_consumer=True,
            deliver_policy=config.deliver_policy,
            headers_only=config.headers_only,
        )
        box.subscription = subscription

    async def push_info(self, name: str) -> Any:
        subscription = self.mailboxes[name].subscription
        assert isinstance(subscription, JetStreamContext.PushSubscription)
        return _consumer(await subscription.consumer_info())


def _json(asked: Mapping[str, Any]) -> bytes:
    return json.dumps(asked).encode() if asked else b""


def _stream(info: Any) -> Any:
    return outcomes.stream({"config": info.config.as_dict(), "state": _state(info.state)})


def _state(state: Any) -> dict[str, Any]:
    names = ("messages", "bytes", "first_seq", "last_seq", "num_subjects", "subjects", "num_deleted")
    return {name: getattr(state, name, None) for name in names} | {"consumer_count": state.consumer_count}


def _consumer(info: Any) -> Any:
    given = {
        "name": info.name,
        "stream_name": info.stream_name,
        "config": info.config.as_dict(),
        "delivered": vars(info.delivered) if info.delivered else None,
        "ack_floor": vars(info.ack_floor) if info.ack_floor else None,
    }
    names = ("num_ack_pending", "num_redelivered", "num_waiting", "num_pending", "push_bound")
    return outcomes.consumer(given | {name: getattr(info, name) for name in names})


def _config(given: Mapping[str, Any]) -> ConsumerConfig:
    """Policies by their names."""
    named = dict(given)
    if "deliver_policy" in named:
        named["deliver_policy"] = DeliverPolicy(named["deliver_policy"])
    if "ack_policy" in named:
        named["ack_policy"] = AckPolicy(named["ack_policy"])
    return ConsumerConfig(**named)
