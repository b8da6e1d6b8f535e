"""Publishing into streams: one subscription for all acknowledgements, and little work for each.

nats-py's own `JetStreamContext.publish` makes an inbox name of random bytes, a time-out task and three
dictionaries per message; at a thousand requests a second that is a noticeable part of a gateway's CPU time.

    publish ── subject, reply: <inbox>.<number> ──▶ stream
    <inbox>.* ◀── {"stream": ..., "seq": ...} ──── stored
"""

import asyncio

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import APIError, NoStreamResponseError


class _Ack(msgspec.Struct, frozen=True):
    """What the server answers."""

    seq: int = 0
    error: dict[str, str | int] | None = None


class StoredPublisher:
    """Publishes on one connection. Each message is waited for by itself; any number may be under way."""

    def __init__(self, client: Client) -> None:
        """Made by `open`."""
        self._client = client
        self._decoder = msgspec.json.Decoder(_Ack)
        self._inbox = client.new_inbox()
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self._number = 0

    @classmethod
    async def open(cls, client: Client) -> "StoredPublisher":
        """On a connection that stands: nats-py renews the subscription with it. Raises `nats.errors.Error`."""
        publisher = cls(client)
        await client.subscribe(f"{publisher._inbox}.*", cb=publisher._on_ack)
        return publisher

    async def publish(self, subject: str, payload: bytes, *, timeout: float) -> int:
        """Returns the message's number in its stream once it is stored there.

        Raises what `JetStreamContext.publish` raises: `nats.errors.Error`, `TimeoutError` among them.
        """
        loop = asyncio.get_running_loop()
        self._number += 1
        reply = f"{self._inbox}.{self._number}"
        stored: asyncio.Future[int] = loop.create_future()
        self._waiting[reply] = stored
        give_up = loop.call_later(timeout, _give_up, stored)
        try:
            await self._client.publish(subject, payload, reply=reply)
            return await stored
        finally:
            give_up.cancel()
            del self._waiting[reply]

    def waiting(self) -> list["asyncio.Future[int]"]:
        """For each message that is on its way: what is done once it is stored."""
        return list(self._waiting.values())

    async def _on_ack(self, message: Msg) -> None:
        stored = self._waiting.get(message.subject)
        if stored is None or stored.done():
            return  # it came too late
        if not message.data:  # the server's status "no responders": there is no such stream
            stored.set_exception(NoStreamResponseError())
            return
        try:
            ack = self._decoder.decode(message.data)
        except msgspec.DecodeError as error:
            stored.set_exception(nats.errors.Error(f"the broker's answer cannot be read: {error}"))
            return
        if ack.error is not None:
            stored.set_exception(_api_error(ack.error))
        else:
            stored.set_result(ack.seq)


def _api_error(error: dict[str, str | int]) -> Exception:
    try:
        APIError.from_error(error)
    except APIError as raised:
        return raised
    return nats.errors.Error(f"the broker refused the message: {error}")


def _give_up(stored: asyncio.Future[int]) -> None:
    if not stored.done():
        stored.set_exception(nats.errors.TimeoutError())
