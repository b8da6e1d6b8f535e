"""What the broker answers to a message for a stream, on a connection that is none."""

import asyncio
from collections.abc import Awaitable, Callable

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js.errors import APIError, NoStreamResponseError

from shared.nats.bus import TURNS, Requester


class Client:
    """Answers each message with `answer`."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._on_ack: Callable[[Msg], Awaitable[None]]

    def new_inbox(self) -> str:
        return "inbox"

    async def subscribe(self, subject: str, cb: Callable[[Msg], Awaitable[None]]) -> None:
        self._on_ack = cb

    async def publish(self, subject: str, payload: bytes, reply: str) -> None:
        message = Msg(self, reply, data=self._answer)  # type: ignore[arg-type]
        await self._on_ack(message)
        await self._on_ack(message)  # one that comes twice changes nothing


async def stored(answer: bytes) -> int:
    requester = await Requester.open(Client(answer))  # type: ignore[arg-type]
    try:
        return await requester.store("subject", b"", timeout=30)
    finally:
        assert requester.waiting() == []
        await asyncio.sleep(0)


async def test_a_message_gets_its_number() -> None:
    assert await stored(b'{"stream": "S", "seq": 7}') == 7


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"", NoStreamResponseError, "no response"),
        (b"{", nats.errors.Error, "cannot be read"),
        (b'{"error": {"code": 400, "err_code": 10071, "description": "wrong"}}', APIError, "wrong"),
        (b'{"error": {"code": 503, "err_code": 10077, "description": "full"}}', APIError, "full"),
    ],
)
async def test_what_the_broker_refuses_is_raised(answer: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        await stored(answer)


class LateLoop(Client):
    """Its answer has come in time, and takes `turns` of the event loop to be read."""

    def __init__(self, turns: int) -> None:
        super().__init__(b'{"stream": "S", "seq": 7}')
        self._turns = turns
        self.reading: asyncio.Task[None]

    async def publish(self, subject: str, payload: bytes, reply: str) -> None:
        self.reading = asyncio.create_task(self._read(subject, payload, reply))

    async def _read(self, subject: str, payload: bytes, reply: str) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        await super().publish(subject, payload, reply)


async def test_what_has_come_is_read_before_it_is_given_up() -> None:
    """However late the loop is: with no time at all there are still the turns that reading takes."""
    requester = await Requester.open(LateLoop(TURNS - 2))  # type: ignore[arg-type]
    assert await requester.store("subject", b"", timeout=0) == 7


async def test_what_does_not_come_is_given_up() -> None:
    client = LateLoop(2 * TURNS)
    requester = await Requester.open(client)  # type: ignore[arg-type]
    with pytest.raises(nats.errors.TimeoutError):
        await requester.store("subject", b"", timeout=0)
    assert requester.waiting() == []
    await client.reading  # too late, and nobody's any more
