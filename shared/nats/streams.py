"""Streams as they must be: created, or brought up to date, also while a cluster has no leader yet; read and watched."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    Header,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import APIError, BadRequestError, NotFoundError

from shared import releases
from shared.errors import BrokerUnavailable, ConfigurationError, RyzansteinError
from shared.nats import subjects
from shared.nats.bus import LEADER_PAUSE, PENDING_BYTES, Bus
from shared.nats.errors import (
    BROKER_ERRORS,
    broker_error,
    exists_otherwise,
    lacks_jetstream,
    lacks_leader,
    lacks_room,
    lacks_servers,
)
from shared.nats.permissions import may_create

T = TypeVar("T")
log = structlog.get_logger(__name__)


async def ensure_streams(bus: Bus, *, change: bool = True) -> None:
    """Creates intake and journal where they do not exist yet. Any service may do so, at any time; where they
    are there with other limits, they get those of the settings if `change` says so.

    The journal says which versions have used all that is kept there, and read it (`shared.releases`).

    Raises `BrokerUnavailable`, and `ConfigurationError` for a server that has no JetStream, has other streams under
    these names, or keeps what this version cannot use.
    """
    stored = await _checked_releases(bus)
    if change and (older := releases.downgrade_ends(stored or {}, releases.READABLE_BY)):
        log.warning("downgrade_ends", version=older, readable_by=releases.READABLE_BY)
    intake = StreamConfig(
        name=subjects.INTAKE_STREAM,
        subjects=[subjects.ALL_INTAKE],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
    )
    journal = StreamConfig(
        name=subjects.JOURNAL_STREAM,
        subjects=[subjects.ALL_TOKENS, subjects.ALL_RECORDS],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        max_age=bus.settings.journal_max_age,
        max_bytes=bus.settings.journal_max_bytes,
        metadata=releases.metadata(stored or {}, readable_by=releases.READABLE_BY) if change else stored,
    )
    for config in (intake, journal):
        await ensure_stream(bus, config, change=change)
    if stored is None:  # others may have made it meanwhile
        await _checked_releases(bus)


async def _checked_releases(bus: Bus) -> dict[str, str] | None:
    """The journal's metadata, but for the broker's own; None: there is no journal yet."""
    try:
        info = await when_led(bus, lambda: bus.jetstream().stream_info(subjects.JOURNAL_STREAM))
    except NotFoundError:
        return None
    except BROKER_ERRORS as error:
        raise _refusal(bus, "look for the stream JOURNAL", error) from None
    stored = {key: value for key, value in (info.config.metadata or {}).items() if not key.startswith("_nats.")}
    releases.check(stored, bus.where)
    return stored


async def info_of(bus: Bus, stream: str) -> StreamInfo | None:
    """What the broker says of it; None: there is no such stream. Raises `BrokerUnavailable`."""
    try:
        return await when_led(bus, lambda: bus.jetstream().stream_info(stream))
    except NotFoundError:
        return None
    except BROKER_ERRORS as error:
        raise broker_error(f"look for the stream {stream}", error) from error


async def messages_in(bus: Bus, stream: str) -> int | None:
    """How many it has; None: there is no such stream. Raises `BrokerUnavailable`."""
    info = await info_of(bus, stream)
    return None if info is None else info.state.messages


async def made_by_others(bus: Bus, stream: str) -> bool:
    """False: this user may create it. Else waits for as long as one waits for a broker that starts, until it is there.
    Raises `BrokerUnavailable`."""
    if may_create(bus.settings.nats_user, stream):
        return False
    give_up = asyncio.get_running_loop().time() + bus.patience
    while await messages_in(bus, stream) is None:
        if asyncio.get_running_loop().time() >= give_up:
            raise BrokerUnavailable(
                f"NATS has no stream {stream} yet, which gateways, schedulers and health monitors create; start them."
            )
        await asyncio.sleep(LEADER_PAUSE)
    return True


async def ensure_stream(bus: Bus, config: StreamConfig, *, change: bool = True) -> None:
    """Creates the stream, or gives it these limits if `change` says so; who may not create it waits for it. Raises
    `BrokerUnavailable`, `ConfigurationError`."""
    if await made_by_others(bus, config.name or ""):
        return
    try:
        await when_led(bus, lambda: _add_or_update(bus, config, change))
    except BROKER_ERRORS as error:
        raise _refusal(bus, f"create the stream {config.name}", error) from None


def _refusal(bus: Bus, what: str, error: Exception) -> RyzansteinError:
    """Of a service that starts: it cannot do without JetStream."""
    if lacks_jetstream(error):
        return ConfigurationError(
            f"NATS at {bus.where} runs without JetStream; start nats-server with -js -sd DIRECTORY. "
            "(Its log says why, if JetStream was switched off: a full disk does that.)"
        )
    return broker_error(what, error)


async def when_led(bus: Bus, work: Callable[[], Awaitable[T]], *, created: bool = False) -> T:
    """Does `work` again while the cluster has no leader, for as long as one waits for a broker that starts.

    `created`: it asks for a stream that somebody has created: in a cluster one may be told so before one is shown it.
    """
    give_up = asyncio.get_running_loop().time() + bus.patience
    while True:
        try:
            return await work()
        except BROKER_ERRORS as error:
            hidden = created and isinstance(error, NotFoundError)
            waits = hidden or lacks_leader(error) or isinstance(error, TimeoutError)
            if not (waits and bus.clustered) or asyncio.get_running_loop().time() >= give_up:
                raise
        await asyncio.sleep(LEADER_PAUSE)


async def create_replicated(bus: Bus, create: Callable[[int], Awaitable[T]]) -> T | None:
    """What `create` makes, with as many replicas as there are servers for; None: somebody was first."""
    for replicas in bus.replica_choices():
        try:
            return await create(replicas)
        except APIError as error:
            if not lacks_servers(error):
                if not isinstance(error, BadRequestError):
                    raise
                break
    return None


async def _add_or_update(bus: Bus, config: StreamConfig, change: bool) -> None:
    jetstream = bus.jetstream()
    refusal: APIError | None = None
    for replicas in bus.replica_choices():
        config.num_replicas = replicas
        try:
            await jetstream.add_stream(config)
            return
        except APIError as error:
            refusal = error
            if lacks_servers(error):
                continue
            if lacks_room(error):
                break  # NATS says so, with all its room set aside, of a stream too that exists as it shall be
            if not isinstance(error, BadRequestError):
                raise
            if replicas < bus.replicas or (not change and exists_otherwise(error)):
                return  # it exists, and is kept by more servers than are up; or is for others to change
            break  # it exists with other limits: ours are the newer ones
    assert refusal is not None, "the loop ends with an answer"
    if lacks_servers(refusal):
        raise ConfigurationError(
            f"NATS at {bus.where} cannot keep {config.num_replicas} replicas ({refusal.description}); set "
            "RYZANSTEIN_NATS_REPLICAS to the number of its servers, or less."
        )
    await _update(bus, config, refusal, change)


async def _update(bus: Bus, config: StreamConfig, refusal: APIError, change: bool) -> None:
    """Of a stream that could not be added. `refusal`: why; what is raised if it does not exist either."""
    jetstream = bus.jetstream()
    full = lacks_room(refusal)
    try:
        if full and not change:
            await jetstream.stream_info(config.name or "")
        else:
            await jetstream.update_stream(config)
    except NotFoundError:
        raise refusal if full else _other_stream(bus, config, refusal) from None
    except APIError as error:
        if error.code == 503 or lacks_room(error):
            raise
        raise _other_stream(bus, config, error) from None


def _other_stream(bus: Bus, config: StreamConfig, error: APIError) -> ConfigurationError:
    return ConfigurationError(
        f"NATS at {bus.where} cannot create the stream {config.name} as required ({error.description}); delete the "
        "existing stream, or use another server."
    )


PAGE = 256  # messages of a stream that are asked for at a time


async def read_stream(
    bus: Bus, stream: str, subject: str, config: ConsumerConfig, *, timeout: float
) -> AsyncGenerator[Msg, None]:
    """The messages of `subject` from where `config` begins to the newest, without a gap, page by page: each page has
    `timeout` seconds of its own, so that many messages take long and do not fail. While an entry of a bucket is
    overwritten, the broker counts neither message as pending for a moment: it is asked again before the end.

    Raises one of `BROKER_ERRORS` when the broker does not answer, or the connection is cut meanwhile.
    """
    subscription = await bus.jetstream().pull_subscribe(subject, stream=stream, config=config)
    info = subscription.consumer_info
    try:
        pending, delivered, again = (await info()).num_pending or 0, 0, stream.startswith("KV_")
        while pending > 0 or (again and (pending := (await info()).num_pending or 0) > 0):
            try:
                messages = await subscription.fetch(min(pending, PAGE), timeout=timeout)
            except TimeoutError:
                if (await info()).num_pending:
                    raise
                return  # the last ones have been removed meanwhile
            for message in messages:
                delivered += 1
                if message.metadata.sequence.consumer != delivered:
                    raise nats.errors.Error(f"the connection was cut within a reading of the stream {stream}")
                yield message
            pending = (messages[-1].metadata.num_pending if messages else 0) or 0
    finally:
        with contextlib.suppress(*BROKER_ERRORS):
            await subscription.unsubscribe()
            name = subscription._consumer  # noqa: SLF001  # asking the broker for it would be one more question
            await bus.client.publish(f"$JS.API.CONSUMER.DELETE.{stream}.{name}")  # else it goes by itself


HEARTBEAT = 9.0  # seconds of silence after which the broker says that a watch's consumer is there
MISSED = 20 / 9  # heartbeats without a sign after which it is not: two, and some time for the third
# Seconds after which the broker forgets the consumer of a watch that nobody listens to any more.
UNUSED = 30.0


class _End:
    """In the place of a message: none follows."""


class StreamWatch:
    """The newest message of each subject that matches, then None once, then each message as it is stored.

    An ordered consumer, as nats-py has one too; but that asks itself four times a second, for each one, whether it owes
    the broker an answer. Here the broker's question, its flow control, is answered once the reader has taken what was
    sent before it. So what waits for the reader is what the broker sends without an answer: 32 MiB at most.

    It ends, without an error, when a message was lost on the way, when the broker shows no sign of the consumer for
    `MISSED` heartbeats, when the connection was lost, and when a cluster has lost a server: the broker may have
    forgotten the consumer, and its silence would tell only after many seconds. A new watch shows everything anew.
    """

    def __init__(self, bus: Bus) -> None:
        """Made by `open`."""
        self._bus = bus
        self._waiting: asyncio.Queue[Msg | _End | None] = asyncio.Queue()  # bounded by flow control
        self._delivered = 0  # messages so far, as the consumer counts them
        self._taken = 0  # by the reader
        # Where the answer that is owed goes, and the message that is to be taken before; empty: none is.
        self._question, self._asked_behind = "", 0
        self._shown = self._ended = False
        self._alive = bus.watchdog.watch(self.end, HEARTBEAT * MISSED)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, bus: Bus, stream: str, subject: str) -> AsyncIterator["StreamWatch"]:
        """Nothing listens behind the block, and the broker forgets the consumer `UNUSED` seconds later. Raises one of
        `BROKER_ERRORS`."""
        watch = cls(bus)
        forgets = (bus.on_reconnect(watch.end), bus.on_election(lambda _: watch.end()))
        subscription: Subscription | None = None
        try:
            inbox = bus.client.new_inbox()
            subscription = await bus.client.subscribe(inbox, cb=watch._take, pending_bytes_limit=PENDING_BYTES)
            await watch._begin(stream, subject, inbox)
            yield watch
        finally:
            bus.watchdog.forget(watch._alive)
            for forget in forgets:
                forget()
            if subscription is not None:
                with contextlib.suppress(*BROKER_ERRORS):  # the connection is closed
                    await subscription.unsubscribe()

    async def _begin(self, stream: str, subject: str, inbox: str) -> None:
        config = ConsumerConfig(
            filter_subject=subject,
            deliver_subject=inbox,
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
            ack_policy=AckPolicy.NONE,
            flow_control=True,
            idle_heartbeat=HEARTBEAT,
            inactive_threshold=UNUSED,
            mem_storage=True,
            num_replicas=1,
        )
        info = await self._bus.jetstream().add_consumer(stream, config)
        if not info.num_pending and not (info.delivered and info.delivered.consumer_seq):
            self._all_shown()

    def __aiter__(self) -> "StreamWatch":
        return self

    async def __anext__(self) -> Msg | None:
        message = await self._waiting.get()
        if isinstance(message, _End):
            raise StopAsyncIteration
        if message is not None:
            self._taken += 1
            await self._answer()
        return message

    def end(self) -> None:
        """What waits is shown before. Safe to call twice."""
        if not self._ended:
            self._ended = True
            self._waiting.put_nowait(_End())

    async def _take(self, message: Msg) -> None:
        """In the order in which the broker has sent them."""
        if self._ended:
            return
        self._alive.seen = asyncio.get_running_loop().time()
        if (message.headers or {}).get(Header.STATUS) == "100":
            await self._on_status(message)
            return
        about = message.metadata
        self._delivered += 1
        if about.sequence.consumer != self._delivered:
            self.end()
            return
        self._waiting.put_nowait(message)
        if not about.num_pending:
            self._all_shown()

    async def _on_status(self, message: Msg) -> None:
        headers = message.headers or {}
        question = message.reply or headers.get(Header.CONSUMER_STALLED)
        if question:
            self._question, self._asked_behind = question, self._delivered
            await self._answer()
        elif headers.get(Header.LAST_CONSUMER) != str(self._delivered):
            self.end()  # what came last was lost
        else:  # an idle heartbeat: the broker has nothing more to show
            self._all_shown()

    async def _answer(self) -> None:
        if self._question and self._taken >= self._asked_behind:
            question, self._question = self._question, ""
            with contextlib.suppress(*BROKER_ERRORS):  # the connection is closed
                await self._bus.client.publish(question)

    def _all_shown(self) -> None:
        if not self._shown:
            self._shown = True
            self._waiting.put_nowait(None)
