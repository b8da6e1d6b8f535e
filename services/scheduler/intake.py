"""The durable work queue INTAKE: one pull consumer per lane, shared by all schedulers.

Each scheduler keeps a pull outstanding per lane, so that the broker hands over a request the moment it
is published. nats-py's own `fetch` asks twice and may hold back the first messages of a batch; here a
pull's messages arrive through a callback, one by one.

    credit = limit - held - outstanding      what may still be pulled without holding more than `limit`

A message stays in the stream until it is acknowledged; what a dead scheduler held goes to another
after `ack_wait`, which is why those that are held are touched:

    arrival ──── ack_wait/2 ──── touch ──── ack_wait/2 ──── touch ...      spread out, oldest first
       └──────── ack_wait without a touch (we were stopped, or cut off): not ours any more

A pull stays open at the broker for no longer than that either, and is made anew when its time is up: what is
given away for the second time does not go to the same dead scheduler again.
"""

import asyncio
import contextlib
import itertools
import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.request import WaitingRequest, trace_of
from services.scheduler.settings import SchedulerSettings
from shared.messages import LANES, GenerationRequest, Lane
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.errors import BROKER_ERRORS, reason_of, translated

PULL_MARGIN = 1.0  # seconds that the news of a pull's end may take
LOOK = 0.1  # seconds between two looks at held messages that are to be touched, and at broken pulls
TOUCH_SHARE = 0.5  # a held message is touched when this fraction of `ack_wait` has passed since the last time
TOUCH_SPREAD = 0.25  # many that are due together are touched within this fraction of `ack_wait`
# Seconds for which a request that cannot wait here is put off, doubled each time.
FIRST_DEFERRAL, LONGEST_DEFERRAL = 1.0, 4.0
STOP_TIMEOUT = 2.0  # seconds that a leaving scheduler waits for the last messages of its pulls
LATECOMERS = 256  # interactive requests held beyond `max_waiting`, while they are handed over or refused
# A new pull is made when the credit has grown to this fraction of the limit, or nothing is outstanding.
_REFILL_SHARE = 4
_PULL_API = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.INTAKE_STREAM}"
_STATUS, _PENDING = "Status", "Nats-Pending-Messages"
_TIME_IS_UP = "408"
_PARTS, _COUNTS = 9, 4  # of the subject of an acknowledgement without a domain, and where its numbers begin

# Pulls to one inbox: nats-server keeps a name for the answers to each pull of another account until nobody listens at
# the inbox any more.
RENEWAL = 256

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _LanePull:
    lane: Lane
    limit: int
    inbox: str
    subscription: Subscription | None = None
    older: Subscription | None = None  # to the inbox before, whose last pull may still be open
    older_ends: float = 0.0  # monotonic seconds after which it is not
    asked: int = 0  # pulls to this inbox
    held: int = 0
    outstanding: int = 0
    expires: float = 0.0  # monotonic seconds after which no pull is open any more, whatever the broker said
    # Whether the consumer, the broker or the connection must be looked after before the next pull.
    broken: bool = False
    behind: bool = False  # whether the broker had more messages when it sent the last one

    @property
    def consumer(self) -> str:
        return f"scheduler-{self.lane}"


class IntakeDelivery:
    """A request's message in the stream, while this scheduler holds it."""

    __slots__ = ("_intake", "message", "order", "pull", "size", "touched")

    def __init__(self, intake: "RequestIntake", message: Msg, pull: _LanePull, order: int, now: float) -> None:
        self._intake = intake
        self.message = message
        self.size = len(message.data)
        self.pull = pull
        self.order = order
        self.touched = now  # when the broker last heard that the message is being worked on

    async def ack(self) -> None:
        await self._intake.settle(self)

    def ours(self, now: float) -> bool:
        return self._intake.holds(self, now)

    def drop(self) -> None:
        self._intake.drop(self)


def delivery_of(reply: str) -> tuple[int, int, float, int]:
    """(how often a message has been delivered, its place in the stream, when it was published in unix seconds, how many
    are behind it), of the subject by which it is acknowledged:

        $JS.ACK.[domain.account.]stream.consumer.delivered.place.place at the consumer.nanoseconds.behind[.random]

    nats-py makes three objects and a date of it.
    """
    parts = reply.split(".")
    first = _COUNTS if len(parts) == _PARTS else _COUNTS + 2
    delivered, order, _, nanoseconds, behind = map(int, parts[first : first + 5])
    return delivered, order, nanoseconds / 1e9, behind


class Admit(Protocol):
    """What becomes of a request: False when it cannot wait here now."""

    def __call__(self, item: WaitingRequest, *, crowded: bool) -> bool: ...


class RequestIntake:
    """Pulls requests and hands them to `admit`."""

    def __init__(self, bus: Bus, settings: SchedulerSettings, metrics: SchedulerMetrics, admit: Admit) -> None:
        self._bus = bus
        self._settings = settings
        self._metrics = metrics
        self._admit = admit
        self._decoder = msgspec.msgpack.Decoder(GenerationRequest)
        # By place in the stream; in the order in which they were touched last.
        self._held: dict[int, IntakeDelivery] = {}
        self._bytes = 0  # of the held messages together
        self._stopping = False
        self._broken = asyncio.Event()  # a pull is, or the pulling is stopped
        # A pull stays open when the queue is full, so that those who come too late are told.
        limits = {"interactive": settings.max_waiting + LATECOMERS}
        self._pulls = [
            _LanePull(lane, limits.get(lane, settings.held_requests), bus.client.new_inbox()) for lane in LANES
        ]

    async def start(self) -> None:
        """Creates the consumers where they do not exist, most urgent lane first, and begins to pull.

        Raises `BrokerUnavailable`.
        """
        for pull in self._pulls:
            with translated(f"open the consumer {pull.consumer}"):
                await self._ensure_consumer(pull)
                pull.subscription = await self._subscribe(pull)
            await self._pull(pull)
        self._bus.on_reconnect(self._on_reconnect)

    def more_coming(self) -> bool:
        """Whether the broker is sending more requests right now."""
        return any(pull.behind and pull.outstanding > 0 for pull in self._pulls)

    async def look_after(self) -> None:
        """Keeps held messages ours and pulls open, until the pulling is stopped."""
        while not self._stopping:
            await self._pause(asyncio.get_running_loop().time())
            try:
                await self._touch(asyncio.get_running_loop().time())
                await self._revive()
            except BROKER_ERRORS as error:
                log.warning("intake_keepalive_failed", error=reason_of(error))

    async def _pause(self, now: float) -> None:
        """Until a held message is to be touched, a pull's time is up, or `LOOK` seconds after one has broken: who asks
        at once may be refused at once."""
        if any(pull.broken for pull in self._pulls):
            await asyncio.sleep(LOOK)
            return
        half = TOUCH_SHARE * self._settings.ack_wait
        due = [pull.expires for pull in self._pulls]
        due += [delivery.touched + half for delivery in itertools.islice(self._held.values(), 1)]
        with contextlib.suppress(TimeoutError):  # what arrives meanwhile is due after `half`, and not before
            async with asyncio.timeout(max(LOOK, min(min(due) - now, half))):
                await self._broken.wait()
                self._broken.clear()
                await asyncio.sleep(LOOK)

    async def stop_pulling(self) -> None:
        """Takes nothing more; what arrives meanwhile goes back at once."""
        self._stopping = True
        self._broken.set()
        both = (one for pull in self._pulls for one in (pull.subscription, pull.older))
        subscriptions = [one for one in both if one is not None]
        for pull in self._pulls:
            pull.subscription = pull.older = None
        drains = [subscription.drain() for subscription in subscriptions]  # type: ignore[no-untyped-call]
        try:
            await asyncio.wait_for(asyncio.gather(*drains), STOP_TIMEOUT)
        except BROKER_ERRORS as error:  # its pulls end with the connection, or with their time
            log.warning("pull_drain_failed", error=reason_of(error))

    async def give_back(self) -> None:
        """Returns everything held to the stream, for another scheduler."""
        for delivery in list(self._held.values()):
            self.drop(delivery)
            try:
                await delivery.message.nak()
            except BROKER_ERRORS as error:  # after `ack_wait` it goes to another one by itself
                log.warning("nak_failed", order=delivery.order, error=reason_of(error))

    # --- held messages ---------------------------------------------------------------------------

    async def settle(self, delivery: IntakeDelivery) -> None:
        """Acknowledges `delivery`; pulls more where there is room again. Raises what nats-py raises: then
        it is still held."""
        if self._held.get(delivery.order) is not delivery:
            return
        await delivery.message.ack()
        self.drop(delivery)
        await self._pull(delivery.pull)

    def holds(self, delivery: IntakeDelivery, now: float) -> bool:
        """Whether the broker still counts on us for `delivery`."""
        held = self._held.get(delivery.order) is delivery
        return held and now - delivery.touched < self._settings.ack_wait

    def drop(self, delivery: IntakeDelivery) -> None:
        """Lets go of `delivery`, without a word to the broker."""
        if self._held.get(delivery.order) is delivery:
            del self._held[delivery.order]
            delivery.pull.held -= 1
            self._bytes -= delivery.size

    async def _touch(self, now: float) -> None:
        """Tells the broker that messages are still held. The oldest first, and no more at a time than it
        takes to touch all in time. What the broker has given up already is left alone."""
        if not self._bus.connected:
            return
        wait = self._settings.ack_wait
        most = math.ceil(len(self._held) * LOOK / (TOUCH_SPREAD * wait))
        for delivery in list(self._held.values()):
            age = now - delivery.touched
            if age < TOUCH_SHARE * wait or (most <= 0 and age < (TOUCH_SHARE + TOUCH_SPREAD) * wait):
                return
            if age < wait and self._held.get(delivery.order) is delivery:
                most -= 1
                await delivery.message.in_progress()
                self._note_touch(delivery, now)

    def _note_touch(self, delivery: IntakeDelivery, now: float) -> None:
        delivery.touched = now
        if self._held.pop(delivery.order, None) is not None:
            self._held[delivery.order] = delivery

    async def _defer(self, delivery: IntakeDelivery) -> None:
        """Leaves the request in the stream for a while."""
        self._metrics.deferred.inc()
        self.drop(delivery)
        times = delivery.message.metadata.num_delivered - 1
        await delivery.message.nak(delay=min(FIRST_DEFERRAL * 2.0 ** min(times, 16), LONGEST_DEFERRAL))

    # --- pulling ---------------------------------------------------------------------------------

    async def _ensure_consumer(self, pull: _LanePull) -> None:
        await self._bus.jetstream().add_consumer(
            subjects.INTAKE_STREAM,
            ConsumerConfig(
                durable_name=pull.consumer,
                deliver_policy=DeliverPolicy.ALL,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=self._settings.ack_wait,
                max_ack_pending=-1,  # each scheduler bounds what it holds
                filter_subject=subjects.intake_lane(pull.lane),
            ),
        )

    async def _pull(self, pull: _LanePull) -> None:
        """Asks for as many messages as there is credit for, unless it is too little to be worth it."""
        credit = pull.limit - pull.held - pull.outstanding
        if self._stopping or pull.broken or credit <= 0 or self._is_full(pull):
            return
        if pull.outstanding and credit * _REFILL_SHARE < pull.limit:
            return
        pull.outstanding += credit
        pull.expires = asyncio.get_running_loop().time() + self._settings.ack_wait + PULL_MARGIN
        request = {"batch": credit, "expires": int(self._settings.ack_wait * 1e9)}
        try:
            await self._renew(pull)
            await self._bus.client.publish(f"{_PULL_API}.{pull.consumer}", json.dumps(request).encode(), pull.inbox)
        except BROKER_ERRORS as error:
            self._break(pull)
            log.warning("pull_failed", lane=pull.lane, error=reason_of(error))

    def _is_full(self, pull: _LanePull) -> bool:
        return pull.held >= pull.limit or self._bytes >= self._settings.held_bytes

    async def _subscribe(self, pull: _LanePull) -> Subscription:
        return await self._bus.client.subscribe(
            pull.inbox, cb=partial(self._receive, pull), pending_msgs_limit=2 * pull.limit + 64
        )

    async def _renew(self, pull: _LanePull) -> None:
        """Takes another inbox now and then; the older one is listened to until its last pull is over."""
        older = pull.older
        if older is not None and asyncio.get_running_loop().time() >= pull.older_ends:
            pull.older = None
            await older.unsubscribe()
        pull.asked += 1
        if pull.asked > RENEWAL and pull.older is None and pull.subscription is not None:
            pull.asked = 0
            pull.older, pull.older_ends = pull.subscription, pull.expires
            pull.inbox = self._bus.client.new_inbox()
            pull.subscription = await self._subscribe(pull)

    async def _receive(self, pull: _LanePull, message: Msg) -> None:
        status = (message.headers or {}).get(_STATUS)
        if status is not None:
            self._on_status(pull, message, status)
        else:
            pull.outstanding = max(0, pull.outstanding - 1)
            await self._on_request(pull, message)
        await self._pull(pull)

    def _on_status(self, pull: _LanePull, message: Msg, status: str) -> None:
        """A pull has ended: its time is up (408), or something is wrong and asking at once would be
        asking in a circle (409: the consumer is gone or moves; 503: nobody there)."""
        left = (message.headers or {}).get(_PENDING, "")
        pull.outstanding = max(0, pull.outstanding - int(left)) if left.isdigit() else 0
        pull.behind = False
        if status != _TIME_IS_UP:
            self._break(pull)

    def _on_reconnect(self) -> None:
        for pull in self._pulls:
            self._break(pull)

    def _break(self, pull: _LanePull) -> None:
        pull.broken = True
        self._broken.set()

    async def _revive(self) -> None:
        """Opens pulls anew that were lost with a connection, a consumer or a broker, or were full: while they are, the
        broker is asked for nothing."""
        now = asyncio.get_running_loop().time()
        for pull in self._pulls:
            if not self._stopping and (pull.broken or now > pull.expires) and not self._is_full(pull):
                await self._ensure_consumer(pull)
                pull.outstanding, pull.broken = 0, False
                await self._pull(pull)

    # --- messages --------------------------------------------------------------------------------

    async def _on_request(self, pull: _LanePull, message: Msg) -> None:
        if self._stopping:
            await message.nak()
            return
        delivered, order, published, left = delivery_of(message.reply)
        pull.behind = left > 0
        now = asyncio.get_running_loop().time()
        self._metrics.received.labels(pull.lane).inc()
        if delivered > 1:
            self._metrics.redelivered.inc()
        if (held := self._held.get(order)) is not None:  # late with a sign of life: it is still ours
            held.message = message
            self._note_touch(held, now)
            return
        delivery = IntakeDelivery(self, message, pull, order, now)
        if self._bytes and self._bytes + delivery.size > self._settings.held_bytes:
            await self._defer(delivery)
            return
        try:
            request = self._decoder.decode(message.data)
        except msgspec.DecodeError as error:
            log.warning("undecodable_request", subject=message.subject, error=str(error))
            self._metrics.undecodable.inc()
            await message.term()
            return
        self._held[order] = delivery
        self._bytes += delivery.size
        pull.held += 1
        item = WaitingRequest.of(
            request, raw=message.data, lane=pull.lane, order=order, delivery=delivery, arrived=now, published=published
        )
        if request.traceparent:
            item.trace = trace_of(request, pull.lane, delivered)
        if not self._admit(item, crowded=2 * pull.held > pull.limit):
            item.trace.ended("deferred")
            await self._defer(delivery)
