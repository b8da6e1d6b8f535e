"""The connection to NATS: typed publish, subscribe and request, and messages stored in streams.

nats-py reconnects by itself and drops messages when a subscription falls behind; `on_gap` tells the
owner of a subscription that something may be missing (slow consumer or a reconnection), so that it
can read the journal.

nats-py's own `Client.request` makes an inbox name of random bytes and a second future, its `JetStreamContext.publish` a
time-out task and three dictionaries too: a noticeable part of a gateway's and a scheduler's CPU time. `Requester` has
one subscription for all answers, and takes acknowledgements of streams out of them (`store`):

    request ── subject, reply: <inbox>.<number> ──▶ service, or stream
    <inbox>.* ◀── answer, or {"stream": ..., "seq": ...} ────
"""

import asyncio
import contextlib
import logging
import ssl
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import nats
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError

from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, LinkLost, NobodyThere, PayloadTooLarge
from shared.nats.client import NatsClient, PlainServer, TlsClient
from shared.nats.errors import (
    BROKER_ERRORS,
    ConnectionBroke,
    broker_error,
    lacks_leader,
    reason_of,
    server_urls,
    translated,
    without_password,
)
from shared.nats.permissions import inbox_of
from shared.tasks import Watchdog
from shared.tls import client_context

TURNS = 5  # of the event loop, in which an answer is read: socket, parser, queue, callback; and one more


class _Ack(msgspec.Struct, frozen=True):
    """What the server answers to a message for a stream."""

    seq: int = 0
    error: dict[str, str | int] | None = None


_ack_decoder = msgspec.json.Decoder(_Ack)


class AnswerTimeout:
    """Gives an answer up that does not come, in parts: each of them takes a turn of the event loop or more. Where the
    loop itself is late, as with a thousand requests at once, the answer lies in the socket unread, and a time-out in
    one piece would give it up before it is looked at."""

    def __init__(self, answer: "asyncio.Future[Msg]", timeout: float) -> None:
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._part = timeout / TURNS
        self._left = TURNS
        self._timer = self._loop.call_later(self._part, self._count)

    def _count(self) -> None:
        self._left -= 1
        if self._left:
            self._timer = self._loop.call_later(self._part, self._count)
        elif not self._answer.done():
            self._answer.set_exception(nats.errors.TimeoutError())

    def cancel(self) -> None:
        self._timer.cancel()


class Requester:
    """Requests on one connection. Each answer is waited for by itself; any number may be under way."""

    def __init__(self, client: NatsClient) -> None:
        """Made by `open`."""
        self._client = client
        self._inbox = client.new_inbox()
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._number = 0

    @classmethod
    async def open(cls, client: NatsClient) -> "Requester":
        """On a connection that stands: nats-py renews the subscription with it. Raises `nats.errors.Error`."""
        requester = cls(client)
        await client.subscribe(f"{requester._inbox}.*", cb=requester._on_answer)
        return requester

    async def request(self, subject: str, payload: bytes, *, timeout: float) -> Msg:
        """Returns the answer, or the server's status that there is nobody to give one (`no_responders`). Raises
        `nats.errors.Error`, `TimeoutError` among them."""
        self._number += 1
        reply = f"{self._inbox}.{self._number}"
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = answer
        give_up = AnswerTimeout(answer, timeout)
        try:
            await self._client.publish(subject, payload, reply=reply)
            return await answer
        finally:
            give_up.cancel()
            del self._waiting[reply]

    async def store(self, subject: str, payload: bytes, *, timeout: float) -> int:
        """Returns the message's number in its stream once it is stored there.

        Raises what `JetStreamContext.publish` raises: `nats.errors.Error`, `TimeoutError` among them.
        """
        answer = await self.request(subject, payload, timeout=timeout)
        if not answer.data:  # the server's status "no responders": there is no such stream
            raise NoStreamResponseError
        try:
            ack = _ack_decoder.decode(answer.data)
        except msgspec.DecodeError as error:
            raise nats.errors.Error(f"the broker's answer cannot be read: {error}") from None
        if ack.error is not None:
            raise _api_error(ack.error)
        return ack.seq

    def waiting(self) -> list["asyncio.Future[Msg]"]:
        """For each answer that is due: what is done once it is here."""
        return list(self._waiting.values())

    async def _on_answer(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject)
        if answer is not None and not answer.done():  # else it came too late
            answer.set_result(message)


def no_responders(answer: Msg) -> bool:
    """Whether it is the server's status "no responders"."""
    return not answer.data and (answer.headers or {}).get("Status") == "503"


def _api_error(error: dict[str, str | int]) -> Exception:
    try:
        APIError.from_error(error)
    except APIError as raised:
        return raised
    return nats.errors.Error(f"the broker refused the message: {error}")


T = TypeVar("T")
Reply = bytes | msgspec.Struct | None

log = structlog.get_logger(__name__)


def as_list(value: object) -> object:
    """What encoders of msgspec ask about objects that they do not know: an array of numbers is a list of them."""
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError


_encoder = msgspec.msgpack.Encoder(enc_hook=as_list)

DEFAULT_PENDING_MESSAGES = 65_536
PENDING_BYTES = 64 << 20
CLOSE_TIMEOUT = 2.0
FLUSH_TIMEOUT = 10.0  # seconds within which the server answers whether it has read what was sent
CLUSTER_REPLICAS = 3
LEADER_PAUSE = 0.1  # seconds between two questions to a cluster that has no leader
# Seconds within which a cluster has chosen a new leader: nats-server takes 4 to 9 to miss the old one.
ELECTION = 15.0
_ELECTIONS = "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED"
LATE_ANSWERS = 0.1  # seconds after a reconnection in which what was asked before it may still be answered
REPEAT_INTERVAL = 1.0  # seconds between two log lines about the same fault


def encode(message: object) -> bytes:
    """`message` (a msgspec struct) as MessagePack."""
    return _encoder.encode(message)


def _tls_of(settings: CommonSettings, urls: list[str]) -> ssl.SSLContext | None:
    """How to speak TLS, where settings or addresses want it. Raises `ConfigurationError`."""
    wanted = settings.nats_ca or settings.nats_certificate or any(url.startswith("tls://") for url in urls)
    if not wanted:
        return None
    return client_context(settings.nats_ca, settings.nats_certificate, settings.nats_key)


def _refusal(error: Exception, text: str) -> str | None:
    """Why there is no use in trying again; None: there may be."""
    if "authorization" in text.lower():
        return "refused the user name or password; set RYZANSTEIN_NATS_USER and RYZANSTEIN_NATS_PASSWORD."
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that is not trusted ({error.verify_message}); set RYZANSTEIN_NATS_CA."
    if isinstance(error, PlainServer):
        return "offers no TLS, so nothing was sent to it; unset RYZANSTEIN_NATS_CA, or configure tls in NATS."
    return None


class Subscribed:
    """What `Bus.subscribe` returns."""

    def __init__(self, subscription: Subscription, forget: Callable[[], None]) -> None:
        self._subscription = subscription
        self._forget = forget

    async def unsubscribe(self) -> None:
        """The handler is called no more, nor is `on_gap`. Safe to call twice."""
        self._forget()
        with contextlib.suppress(nats.errors.Error):  # it has ended before, or the connection has
            await self._subscription.unsubscribe()


class Bus:
    """One connection to NATS. Built by `connect`, closed by `close`."""

    def __init__(self, client: NatsClient, settings: CommonSettings) -> None:
        self._client = client
        self.settings = settings
        self._gap_callbacks: list[tuple[Subscription | None, Callable[[], object]]] = []
        self._election_callbacks: list[Callable[[str], None]] = []
        self.where = without_password(settings.nats_url)  # its address, as it may be shown
        self._last_error = ""
        self._refused = asyncio.Event()
        self._refusal = ""
        self._repeats: dict[tuple[str, str], int] = {}
        self._requester: Requester | None = None
        self._unanswered: list[asyncio.Future[Any]] = []  # what was waited for when the connection broke
        self.watchdog = Watchdog()  # of the consumers that the broker keeps for this connection

    @classmethod
    async def connect(cls, settings: CommonSettings, name: str) -> "Bus":
        """Connects, trying again for `nats_connect_timeout` seconds.

        Raises `BrokerUnavailable`, and `ConfigurationError` for what is not an address.
        """
        urls = server_urls(settings.nats_url)
        tls = _tls_of(settings, urls)
        bus = cls(TlsClient() if tls else NatsClient(), settings)
        try:
            async with asyncio.timeout(settings.nats_connect_timeout):
                await bus._connect(urls, name, tls)
                bus._requester = await Requester.open(bus._client)
        except TimeoutError:
            reason = f" ({bus._last_error})" if bus._last_error else ""
            raise BrokerUnavailable(
                f"NATS at {bus.where} did not answer within {settings.nats_connect_timeout:g} s{reason}; "
                "start it, or set RYZANSTEIN_NATS_URL or --nats-url."
            ) from None
        except (nats.errors.Error, OSError, ValueError) as error:
            raise BrokerUnavailable(
                f"NATS at {bus.where} cannot be reached ({reason_of(error)}); "
                "start it, or set RYZANSTEIN_NATS_URL or --nats-url."
            ) from None
        if bus.clustered:
            await bus._client.subscribe(f"{_ELECTIONS}.*", cb=bus._on_election)
        return bus

    @classmethod
    @contextlib.asynccontextmanager
    async def session(cls, settings: CommonSettings, name: str) -> AsyncIterator["Bus"]:
        """A connection that is closed with the block. Raises as `connect`."""
        bus = await cls.connect(settings, name)
        try:
            yield bus
        finally:
            await bus.close()

    async def _connect(self, urls: list[str], name: str, tls: ssl.SSLContext | None) -> None:
        """nats-py tries again for ever, a wrong password or certificate included: watch for these beside it."""
        connecting = asyncio.create_task(
            self._client.connect(
                servers=urls,
                name=name,
                tls=tls,
                inbox_prefix=inbox_of(self.settings.nats_user),
                user=self.settings.nats_user or None,
                password=self.settings.nats_password.get_secret_value() or None,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.1,  # type: ignore[arg-type]  # seconds; fractions work
                connect_timeout=2,
                ping_interval=5,
                max_outstanding_pings=2,
            )
        )
        refused = asyncio.create_task(self._refused.wait())
        try:
            await asyncio.wait({connecting, refused}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise BrokerUnavailable(f"NATS at {self.where} {self._refusal}")
            await connecting
        finally:
            refused.cancel()
            if not connecting.done():
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and is back."""
        return int(self._client.stats["reconnects"])

    @property
    def clustered(self) -> bool:
        return bool(self._client._server_info.get("cluster"))  # noqa: SLF001  # nats-py shows it nowhere else

    @property
    def replicas(self) -> int:
        """Servers that should keep each stream and bucket."""
        return self.settings.nats_replicas or (CLUSTER_REPLICAS if self.clustered else 1)

    def replica_choices(self) -> list[int]:
        """How many to ask for, the best first: where nothing is set, a cluster of too few servers will do."""
        wanted = self.replicas
        return [wanted] if self.settings.nats_replicas or wanted == 1 else [wanted, 1]

    @property
    def client(self) -> NatsClient:
        """The nats-py client, for what this class has no word for."""
        return self._client

    @property
    def max_payload(self) -> int:
        """Largest message the broker takes, in bytes."""
        return self._client.max_payload

    @property
    def patience(self) -> float:
        """Seconds to wait for a broker that starts."""
        return self.settings.nats_connect_timeout

    def jetstream(self) -> JetStreamContext:
        return self._client.jetstream()

    # --- publish, request, subscribe -------------------------------------------------------------

    async def publish(self, subject: str, message: object) -> None:
        """Publishes without waiting for anybody. Raises `PayloadTooLarge`, `BrokerUnavailable`."""
        await self.publish_encoded(subject, encode(message))

    async def publish_encoded(self, subject: str, payload: bytes) -> None:
        """`publish` of what `encode` has given: for who keeps it, to publish it again."""
        self._check_size(payload)
        try:
            await self._client.publish(subject, payload)
        except nats.errors.Error as error:
            raise BrokerUnavailable(f"NATS did not accept a message on {subject} ({error}); try again.") from error

    async def publish_durable(self, subject: str, message: object, *, timeout: float = 5.0) -> int:
        """Publishes into a stream and waits until it is stored; returns its sequence number.

        While a cluster chooses the stream's leader it is tried again, for ELECTION seconds: it is certain then
        that it was not stored. Raises `LinkLost` once the connection is back that broke meanwhile,
        `BrokerUnavailable`, `PayloadTooLarge`.
        """
        payload = self._checked(message)
        assert self._requester is not None, "connect opens it"
        give_up = asyncio.get_running_loop().time() + ELECTION
        while True:
            try:
                return await self._requester.store(subject, payload, timeout=timeout)
            except (nats.errors.Error, TimeoutError) as error:
                waits = self.clustered and lacks_leader(error)
                if not waits or asyncio.get_running_loop().time() >= give_up:
                    raise broker_error(f"store a message on {subject} within {timeout:g} s", error) from error
            await asyncio.sleep(LEADER_PAUSE)

    async def request(self, subject: str, message: object, reply_type: type[T], *, timeout: float) -> T:
        """Asks and waits for the answer. Raises `NobodyThere` at once when nobody has subscribed, `LinkLost` once
        the connection is back that broke meanwhile, and `BrokerUnavailable` when no answer comes in `timeout`
        seconds."""
        assert self._requester is not None, "connect opens it"
        try:
            answer = await self._requester.request(subject, self._checked(message), timeout=timeout)
        except ConnectionBroke as error:
            raise LinkLost(f"The connection to NATS broke before an answer on {subject} came.") from error
        except (nats.errors.Error, TimeoutError) as error:
            raise BrokerUnavailable(f"Nobody answered on {subject} within {timeout:g} s.") from error
        if no_responders(answer):
            raise NobodyThere(f"Nobody listens on {subject}.")
        return msgspec.msgpack.decode(answer.data, type=reply_type)

    async def subscribe(
        self,
        subject: str,
        message_type: type[T],
        handler: Callable[[T], Awaitable[Reply]],
        *,
        queue: str = "",
        on_gap: Callable[[], object] | None = None,
        pending_messages: int = DEFAULT_PENDING_MESSAGES,
    ) -> Subscribed:
        """Calls `handler` for each message, in order; what it returns is sent to whoever asked.

        A message that cannot be decoded is logged and dropped. `on_gap` is called when messages may
        have been missed.
        """
        decoder = msgspec.msgpack.Decoder(message_type)

        async def receive(msg: Msg) -> None:
            try:
                message = decoder.decode(msg.data)
            except msgspec.DecodeError as error:
                log.warning("undecodable_message", subject=msg.subject, error=str(error))
                return
            try:
                reply = await handler(message)
            except Exception:
                log.exception("handler_failed", subject=msg.subject)
                return
            if msg.reply and reply is not None:
                await self._client.publish(msg.reply, reply if isinstance(reply, bytes) else encode(reply))

        subscription = await self._client.subscribe(
            subject, queue=queue, cb=receive, pending_msgs_limit=pending_messages, pending_bytes_limit=PENDING_BYTES
        )
        if on_gap is None:
            return Subscribed(subscription, lambda: None)
        entry = (subscription, on_gap)
        self._gap_callbacks.append(entry)
        return Subscribed(subscription, lambda: self._forget_gaps(entry))

    def _forget_gaps(self, entry: tuple[Subscription | None, Callable[[], object]]) -> None:
        if entry in self._gap_callbacks:
            self._gap_callbacks.remove(entry)

    async def flush(self) -> None:
        """Waits until the server has seen everything published and subscribed so far. Raises `BrokerUnavailable`."""
        # A caller that is cancelled leaves: nats-py swallows that while it sends.
        with translated("say that it has read what was sent"):
            await asyncio.shield(self._flush())

    async def _flush(self) -> None:
        # nats-py's own flush sends its question ahead of what it still holds: the answer says nothing about that.
        client = self._client
        await client._flush_pending(force_flush=True)  # noqa: SLF001  # there is no other way to have it sent
        if client.is_closed or client._reading_task is None or client._reading_task.done():  # noqa: SLF001
            await client.flush()  # which asks nobody
            return
        answered = asyncio.get_running_loop().create_future()
        await client._send_ping(answered)  # noqa: SLF001
        if not (await asyncio.wait([answered], timeout=FLUSH_TIMEOUT))[0]:
            raise nats.errors.FlushTimeoutError

    def on_reconnect(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Calls `callback` whenever the connection was lost and is back, until what is returned is called."""
        entry = (None, callback)
        self._gap_callbacks.append(entry)
        return lambda: self._forget_gaps(entry)

    def on_election(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Calls `callback` with the name of a stream whenever the cluster has chosen its leader, until what is
        returned is called. What was published to it meanwhile without an acknowledgement may not be in it, and
        consumers of it may be gone."""
        self._election_callbacks.append(callback)
        return lambda: self._election_callbacks.remove(callback)

    def _checked(self, message: object) -> bytes:
        payload = encode(message)
        self._check_size(payload)
        return payload

    def _check_size(self, payload: bytes) -> None:
        if len(payload) > self._client.max_payload:
            raise PayloadTooLarge(
                f"The message has {len(payload):,} bytes and NATS takes at most "
                f"{self._client.max_payload:,}; shorten the request, or raise max_payload of the NATS server."
            )

    async def close(self) -> None:
        """Sends what is buffered and closes. Safe to call twice."""
        if self._client.is_closed:
            return
        for step in (self._client.flush, self._client.close):
            try:
                await asyncio.wait_for(step(), CLOSE_TIMEOUT)
            except BROKER_ERRORS as error:
                log.debug("close_failed", error=reason_of(error))

    # --- connection events -----------------------------------------------------------------------

    def _tell_unanswered(self, unanswered: list["asyncio.Future[Any]"]) -> None:
        """What was lost with the connection is not waited for until its time is up."""
        for future in unanswered:
            if not future.done():
                future.set_exception(ConnectionBroke())

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        if (refusal := _refusal(error, self._last_error)) is not None:
            self._refusal = refusal
            self._refused.set()
        if isinstance(error, nats.errors.SlowConsumerError):
            self._warn("slow_consumer", error.subject)
            for subscription, callback in list(self._gap_callbacks):
                if subscription is not None and subscription is error.sub:
                    callback()
        elif "permissions violation" in self._last_error.lower():
            self._warn("nats_refused", self._last_error, logging.ERROR)
        elif self._client.is_connected:
            self._warn("nats_error", self._last_error)

    def _warn(self, event: str, about: str, level: int = logging.WARNING) -> None:
        """Logs at once, and what repeats once per interval with its number: a line for each message that
        is dropped would make a slow consumer slower still."""
        key = (event, about)
        if key in self._repeats:
            self._repeats[key] += 1
            return
        self._repeats[key] = 0
        log.log(level, event, about=about)
        asyncio.get_running_loop().call_later(REPEAT_INTERVAL, self._warn_again, key)

    def _warn_again(self, key: tuple[str, str]) -> None:
        count = self._repeats.pop(key)
        if count and not self._client.is_closed:
            event, about = key
            log.warning(event, about=about, times=count)
            self._repeats[key] = 0
            asyncio.get_running_loop().call_later(REPEAT_INTERVAL, self._warn_again, key)

    async def _on_election(self, message: Msg) -> None:
        stream = message.subject.rpartition(".")[2]
        log.debug("leader_elected", stream=stream)
        for callback in list(self._election_callbacks):
            callback(stream)

    async def _on_disconnected(self) -> None:
        if not self._client.is_closed:
            log.warning("nats_disconnected")
        asked = self._client._resp_map.values()  # noqa: SLF001  # nats-py has no word for them
        self._unanswered += [*asked, *(self._requester.waiting() if self._requester is not None else ())]

    async def _on_reconnected(self) -> None:
        log.info("nats_reconnected")
        asyncio.get_running_loop().call_later(LATE_ANSWERS, self._tell_unanswered, self._unanswered)
        self._unanswered = []
        for _, callback in list(self._gap_callbacks):
            callback()
