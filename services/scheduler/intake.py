"""The durable work queue INTAKE: one pull consumer per lane, shared by all schedulers.

Each scheduler keeps a pull outstanding per lane, so that the broker hands over a request the moment it
is published. nats-py's own `fetch` asks twice and may hold back the first messages of a batch; here a
pull's messages arrive through a callback, one by one.

    credit = limit - held - outstanding      what may still be pulled without holding more than `limit`

A message stays in the stream until it is acknowledged; what a dead scheduler held goes to another
after `ack_wait`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.settings import SchedulerSettings
from services.scheduler.waiting import WaitingRequest
from shared import subjects
from shared.bus import Bus
from shared.messages import LANES, GenerationRequest, Lane

PULL_EXPIRES = 20.0
"""Seconds that a pull stays open at the broker."""
LOOK = 0.1
"""Seconds between two looks at held messages and broken pulls."""
LATECOMERS = 256
"""Interactive requests held beyond `max_waiting`, while they are handed over or refused."""
_REFILL_SHARE = 4
"""A new pull is made when the credit has grown to this fraction of the limit, or nothing is outstanding."""
_PULL_API = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.INTAKE_STREAM}"
_STATUS, _PENDING = "Status", "Nats-Pending-Messages"
_TIME_IS_UP = "408"

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _LanePull:
    """Where one lane's pulling stands."""

    lane: Lane
    limit: int
    inbox: str
    subscription: Subscription | None = None
    held: int = 0
    outstanding: int = 0
    expires: float = 0.0
    """Monotonic seconds after which no pull is open any more, whatever the broker said."""
    broken: bool = False
    """Whether the consumer, the broker or the connection must be looked after before the next pull."""
    behind: bool = False
    """Whether the broker had more messages when it sent the last one."""

    @property
    def consumer(self) -> str:
        return f"scheduler-{self.lane}"


class IntakeDelivery:
    """A request's message in the stream, while this scheduler holds it."""

    __slots__ = ("_intake", "message", "order", "pull", "touched")

    def __init__(self, intake: "Intake", message: Msg, pull: _LanePull, order: int, now: float) -> None:
        self._intake = intake
        self.message = message
        self.pull = pull
        self.order = order
        self.touched = now
        """When the broker last heard that the message is being worked on."""

    async def ack(self) -> None:
        await self._intake.settle(self)


class Intake:
    """Pulls requests and hands them to `admit`."""

    def __init__(
        self,
        bus: Bus,
        settings: SchedulerSettings,
        metrics: SchedulerMetrics,
        admit: Callable[[WaitingRequest], None],
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._metrics = metrics
        self._admit = admit
        self._decoder = msgspec.msgpack.Decoder(GenerationRequest)
        self._held: dict[int, IntakeDelivery] = {}
        self._stopping = False
        # A pull stays open when the queue is full, so that those who come too late are told.
        limits = {"interactive": settings.max_waiting + LATECOMERS}
        self._pulls = [
            _LanePull(lane, limits.get(lane, settings.held_requests), bus.client.new_inbox())
            for lane in LANES
        ]

    async def start(self) -> None:
        """Creates the consumers where they do not exist, most urgent lane first, and begins to pull."""
        for pull in self._pulls:
            await self._ensure_consumer(pull)
            pull.subscription = await self._bus.client.subscribe(
                pull.inbox, cb=self._receiver(pull), pending_msgs_limit=2 * pull.limit + 64
            )
            await self._pull(pull)
        self._bus.on_reconnect(self._on_reconnect)

    def more_coming(self) -> bool:
        """Whether the broker is sending more requests right now."""
        return any(pull.behind and pull.outstanding > 0 for pull in self._pulls)

    async def look_after(self) -> None:
        """Keeps held messages ours and pulls open, until the pulling is stopped."""
        while not self._stopping:
            await asyncio.sleep(LOOK)
            try:
                await self._touch(asyncio.get_running_loop().time() - self._settings.ack_wait / 5)
                await self._revive()
            except (nats.errors.Error, TimeoutError) as error:
                log.warning("intake_not_looked_after", error=str(error) or type(error).__name__)

    async def stop_pulling(self) -> None:
        """Takes nothing more; what arrives meanwhile goes back at once."""
        self._stopping = True
        for pull in self._pulls:
            if pull.subscription is not None:
                await pull.subscription.drain()  # type: ignore[no-untyped-call]
                pull.subscription = None

    async def give_back(self) -> None:
        """Returns everything held to the stream, for another scheduler."""
        for delivery in list(self._held.values()):
            self._forget(delivery)
            await delivery.message.nak()

    async def settle(self, delivery: IntakeDelivery) -> None:
        """Acknowledges `delivery`; pulls more where there is room again."""
        if self._held.get(delivery.order) is not delivery:
            return
        self._forget(delivery)
        await delivery.message.ack()
        await self._pull(delivery.pull)

    def _forget(self, delivery: IntakeDelivery) -> None:
        del self._held[delivery.order]
        delivery.pull.held -= 1

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
        if self._stopping or pull.broken or credit <= 0:
            return
        if pull.outstanding and credit * _REFILL_SHARE < pull.limit:
            return
        pull.outstanding += credit
        pull.expires = asyncio.get_running_loop().time() + PULL_EXPIRES + 1.0
        request = {"batch": credit, "expires": int(PULL_EXPIRES * 1e9)}
        await self._bus.client.publish(
            f"{_PULL_API}.{pull.consumer}", json.dumps(request).encode(), pull.inbox
        )

    def _receiver(self, pull: _LanePull) -> Callable[[Msg], Awaitable[None]]:
        async def receive(message: Msg) -> None:
            status = (message.headers or {}).get(_STATUS)
            if status is not None:
                self._on_status(pull, message, status)
            else:
                pull.outstanding = max(0, pull.outstanding - 1)
                await self._on_request(pull, message)
            await self._pull(pull)

        return receive

    def _on_status(self, pull: _LanePull, message: Msg, status: str) -> None:
        """A pull has ended: its time is up (408), or something is wrong and asking at once would be
        asking in a circle (409: the consumer is gone or moves; 503: nobody there)."""
        left = (message.headers or {}).get(_PENDING, "")
        pull.outstanding = max(0, pull.outstanding - int(left)) if left.isdigit() else 0
        pull.behind = False
        if status != _TIME_IS_UP:
            pull.broken = True

    def _on_reconnect(self) -> None:
        for pull in self._pulls:
            pull.broken = True

    async def _revive(self) -> None:
        """Opens pulls anew that were lost with a connection, a consumer or a broker."""
        now = asyncio.get_running_loop().time()
        for pull in self._pulls:
            if not self._stopping and (pull.broken or now > pull.expires):
                await self._ensure_consumer(pull)
                pull.outstanding, pull.broken = 0, False
                await self._pull(pull)

    # --- messages --------------------------------------------------------------------------------

    async def _on_request(self, pull: _LanePull, message: Msg) -> None:
        if self._stopping:
            await message.nak()
            return
        metadata = message.metadata
        order = metadata.sequence.stream
        pull.behind = metadata.num_pending > 0
        now = asyncio.get_running_loop().time()
        self._metrics.received.labels(pull.lane).inc()
        if metadata.num_delivered > 1:
            self._metrics.redelivered.inc()
        if (held := self._held.get(order)) is not None:  # late with a sign of life: it is still ours
            held.message, held.touched = message, now
            return
        try:
            request = self._decoder.decode(message.data)
        except msgspec.DecodeError as error:
            log.warning("undecodable_request", subject=message.subject, error=str(error))
            self._metrics.undecodable.inc()
            await message.term()
            return
        delivery = IntakeDelivery(self, message, pull, order, now)
        self._held[order] = delivery
        pull.held += 1
        self._admit(
            WaitingRequest.of(
                request, raw=message.data, lane=pull.lane, order=order, delivery=delivery, arrived=now
            )
        )

    async def _touch(self, before: float) -> None:
        """Tells the broker that messages are still held which it has not heard of since `before`."""
        now = asyncio.get_running_loop().time()
        for delivery in [held for held in self._held.values() if held.touched <= before]:
            delivery.touched = now
            await delivery.message.in_progress()
