"""The connection to NATS: typed publish, subscribe and request, and the streams they need.

nats-py reconnects by itself and drops messages when a subscription falls behind; `on_gap` tells the
owner of a subscription that something may be missing (slow consumer or a reconnection), so that it
can read the journal.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError

from shared import subjects
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, PayloadTooLarge

T = TypeVar("T")
Reply = bytes | msgspec.Struct | None

log = structlog.get_logger(__name__)
_encoder = msgspec.msgpack.Encoder()

DEFAULT_PENDING_MESSAGES = 65_536
DEFAULT_PENDING_BYTES = 64 << 20


def encode(message: object) -> bytes:
    """`message` (a msgspec struct) as MessagePack."""
    return _encoder.encode(message)


class Bus:
    """One connection to NATS. Built by `connect`, closed by `close`."""

    def __init__(self, client: Client, settings: CommonSettings) -> None:
        self._client = client
        self._settings = settings
        self._gap_callbacks: list[tuple[Subscription | None, Callable[[], None]]] = []
        self._last_error = ""
        self._refused = asyncio.Event()

    @classmethod
    async def connect(cls, settings: CommonSettings, name: str) -> "Bus":
        """Connects, trying again for `nats_connect_timeout` seconds. Raises `BrokerUnavailable`."""
        bus = cls(Client(), settings)
        where = _without_password(settings.nats_url)
        try:
            async with asyncio.timeout(settings.nats_connect_timeout):
                await bus._connect(name)
        except TimeoutError:
            reason = f" ({bus._last_error})" if bus._last_error else ""
            raise BrokerUnavailable(
                f"NATS at {where} did not answer within {settings.nats_connect_timeout:g} s{reason}; "
                "start it, or set RYZANSTEIN_NATS_URL or --nats-url."
            ) from None
        except ValueError as error:
            raise BrokerUnavailable(
                f"The NATS address {where} is not one ({error}); write it as nats://host:port."
            ) from None
        return bus

    async def _connect(self, name: str) -> None:
        """nats-py tries again for ever, a wrong password included: watch for that one beside it."""
        connecting = asyncio.create_task(
            self._client.connect(
                servers=[url.strip() for url in self._settings.nats_url.split(",") if url.strip()],
                name=name,
                user=self._settings.nats_user or None,
                password=self._settings.nats_password.get_secret_value() or None,
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
                raise BrokerUnavailable(
                    f"NATS at {_without_password(self._settings.nats_url)} refused the user name or "
                    "password; set RYZANSTEIN_NATS_USER and RYZANSTEIN_NATS_PASSWORD."
                )
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
    def client(self) -> Client:
        """The nats-py client, for what this class has no word for."""
        return self._client

    @property
    def max_payload(self) -> int:
        """Largest message the broker takes, in bytes."""
        return self._client.max_payload

    def jetstream(self) -> JetStreamContext:
        return self._client.jetstream()

    # --- streams ---------------------------------------------------------------------------------

    async def ensure_streams(self) -> None:
        """Creates intake and journal where they do not exist yet. Any service may do so, at any time."""
        await self._ensure_stream(
            StreamConfig(
                name=subjects.INTAKE_STREAM,
                subjects=[subjects.ALL_INTAKE],
                retention=RetentionPolicy.WORK_QUEUE,
                storage=StorageType.FILE,
            )
        )
        await self._ensure_stream(
            StreamConfig(
                name=subjects.JOURNAL_STREAM,
                subjects=[subjects.ALL_TOKENS],
                retention=RetentionPolicy.LIMITS,
                storage=StorageType.FILE,
                max_age=self._settings.journal_max_age,
                max_bytes=self._settings.journal_max_bytes,
            )
        )

    async def _ensure_stream(self, config: StreamConfig) -> None:
        jetstream = self.jetstream()
        try:
            await jetstream.add_stream(config)
        except BadRequestError:  # it exists with other limits: ours are the newer ones
            await jetstream.update_stream(config)

    # --- publish, request, subscribe -------------------------------------------------------------

    async def publish(self, subject: str, message: object) -> None:
        """Publishes without waiting for anybody. Raises `PayloadTooLarge`, `BrokerUnavailable`."""
        try:
            await self._client.publish(subject, self._checked(message))
        except nats.errors.Error as error:
            raise BrokerUnavailable(f"NATS took no message on {subject} ({error}); try again.") from error

    async def publish_durable(self, subject: str, message: object, *, timeout: float = 5.0) -> int:
        """Publishes into a stream and waits until it is stored; returns its sequence number."""
        payload = self._checked(message)
        try:
            ack = await self.jetstream().publish(subject, payload, timeout=timeout)
        except (nats.errors.Error, TimeoutError) as error:
            raise BrokerUnavailable(
                f"NATS did not store a message on {subject} within {timeout:g} s; try again."
            ) from error
        return ack.seq

    async def request(self, subject: str, message: object, reply_type: type[T], *, timeout: float) -> T:
        """Asks and waits for the answer. Raises `BrokerUnavailable` when none comes in `timeout` seconds."""
        try:
            answer = await self._client.request(subject, self._checked(message), timeout=timeout)
        except (nats.errors.Error, TimeoutError) as error:
            raise BrokerUnavailable(f"Nobody answered on {subject} within {timeout:g} s.") from error
        return msgspec.msgpack.decode(answer.data, type=reply_type)

    async def subscribe(
        self,
        subject: str,
        message_type: type[T],
        handler: Callable[[T], Awaitable[Reply]],
        *,
        queue: str = "",
        on_gap: Callable[[], None] | None = None,
        pending_messages: int = DEFAULT_PENDING_MESSAGES,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
    ) -> Subscription:
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
            subject,
            queue=queue,
            cb=receive,
            pending_msgs_limit=pending_messages,
            pending_bytes_limit=pending_bytes,
        )
        if on_gap is not None:
            self._gap_callbacks.append((subscription, on_gap))
        return subscription

    async def flush(self) -> None:
        """Waits until the server has seen everything published so far."""
        await self._client.flush()

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Calls `callback` whenever the connection was lost and is back."""
        self._gap_callbacks.append((None, callback))

    def _checked(self, message: object) -> bytes:
        payload = encode(message)
        if len(payload) > self._client.max_payload:
            raise PayloadTooLarge(
                f"The message has {len(payload):,} bytes and NATS takes at most "
                f"{self._client.max_payload:,}; shorten the request, or raise max_payload of the NATS server."
            )
        return payload

    async def close(self) -> None:
        """Sends what is buffered and closes. Safe to call twice."""
        if self._client.is_closed:
            return
        try:
            await asyncio.wait_for(self._client.flush(), 2)
        except (nats.errors.Error, TimeoutError):
            log.debug("flush_at_close_failed")
        await self._client.close()

    # --- connection events -----------------------------------------------------------------------

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        if "authorization" in self._last_error.lower():
            self._refused.set()
        if isinstance(error, nats.errors.SlowConsumerError):
            log.warning("slow_consumer", subject=error.subject)
            for subscription, callback in self._gap_callbacks:
                if subscription is not None and subscription is error.sub:
                    callback()
        elif self._client.is_connected:
            log.warning("nats_error", error=self._last_error)

    async def _on_disconnected(self) -> None:
        if not self._client.is_closed:
            log.warning("nats_disconnected")

    async def _on_reconnected(self) -> None:
        log.info("nats_reconnected")
        for _, callback in self._gap_callbacks:
            callback()


def _without_password(urls: str) -> str:
    """`urls` fit for a message: credentials in them are left out."""
    return ",".join(
        f"{scheme}://{rest.rpartition('@')[2]}" if rest else scheme
        for scheme, _, rest in (url.strip().partition("://") for url in urls.split(","))
    )
