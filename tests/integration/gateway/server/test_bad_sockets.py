"""WebSockets that no client of the protocol would open: each is ended, the others are served meanwhile."""

import asyncio
import socket

import httpx
import pytest

from shared.limits import WEBSOCKET_FRAMES
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import until
from tests.integration.gateway.raw import connect, frame
from tests.integration.gateway.server.test_bad_connections import works

pytestmark = pytest.mark.usefixtures("no_trace")


async def test_a_handshake_that_is_none(gateway: RunningGateway) -> None:
    for extra in (b"x: " + b"y" * 9000 + b"\r\n", b"sec-websocket-key: twice\r\n", b"x: \x80\x81\r\n"):
        async with connect(gateway) as client:
            await client.upgrade(extra=extra)
            status, _, _ = await client.answer()
            assert status in (101, 400, 431)
            if status != 101:
                await client.rest()
    async with connect(gateway) as client:
        await client.send(
            b"POST /v1/stream HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        )
        assert (await client.answer())[0] >= 400
    async with connect(gateway) as client:
        await client.upgrade("/health")
        assert (await client.answer())[0] == 404
    await works(gateway)


async def test_text_that_is_no_utf8_ends_the_connection_alone(gateway: RunningGateway) -> None:
    async with connect(gateway) as client:
        await client.upgrade()
        await client.answer()
        await client.frame(1, b"\xff\xfe")
        assert (1007).to_bytes(2, "big") in await client.rest()
    await works(gateway)


async def test_fragments_make_one_message(gateway: RunningGateway) -> None:
    async with connect(gateway) as client:
        await client.upgrade()
        await client.answer()
        await client.frame(1, b'{"ty', fin=False)
        for _ in range(1000):
            await client.frame(0, fin=False)
        await client.frame(9, b"between")
        await client.frame(0, b'pe":"ping"}')
        async with asyncio.timeout(10):
            assert await client.reader.readuntil(b"between")
            assert await client.reader.readuntil(b'{"type":"pong"}')


async def test_a_flood_of_messages_waits_outside(gateway: RunningGateway) -> None:
    async with connect(gateway) as client:
        await client.upgrade()
        await client.answer()
        (connection,) = (each for each in gateway.service._door.http if hasattr(each, "conn"))
        sending = asyncio.create_task(client.send(frame(1, b'{"type":"ping"}') * 10_000))
        most = 0
        for _ in range(10_000):
            await client.reader.readuntil(b'{"type":"pong"}')
            most = max(most, connection.queue.qsize())
        assert most < 500
        await sending
    await works(gateway)


async def test_frames_that_carry_no_message_are_counted_whatever_they_are(gateway: RunningGateway) -> None:
    for kind in (frame(9), frame(10), frame(0, fin=False), frame(0, b"x", fin=False)):
        async with connect(gateway) as client:
            await client.upgrade()
            await client.answer()
            await client.frame(1, fin=False)
            sending = asyncio.create_task(client.send(kind * 2 * WEBSOCKET_FRAMES.value))
            assert b"limit websocket_frames: 10,000 frames, fixed" in await client.rest()
            await sending
    await works(gateway)


async def test_messages_one_after_the_other_are_no_flood_of_frames(gateway: RunningGateway) -> None:
    async with connect(gateway) as client:
        await client.upgrade()
        await client.answer()
        for _ in range(11):
            await client.send(frame(1, b'{"type":"ping"}') * (WEBSOCKET_FRAMES.value // 10))
            for _ in range(WEBSOCKET_FRAMES.value // 10):
                await client.reader.readuntil(b'{"type":"pong"}')


async def test_others_have_their_turns_between_the_frames_of_one_read(gateway: RunningGateway) -> None:
    async with connect(gateway) as client:
        await client.upgrade()
        await client.answer()
        (connection,) = (each for each in gateway.service._door.http if hasattr(each, "conn"))
        before = connection._frames
        connection.data_received(frame(9) * 5_000)
        assert connection._frames - before < 500
        connection.data_received(frame(9, b"the last"))
        assert not connection.transport.is_reading()
        await client.reader.readuntil(b"the last")
        assert connection.transport.is_reading()
        assert connection._frames - before == 5_001


async def test_pings_are_not_answered_to_who_does_not_read(gateway: RunningGateway) -> None:
    """Else every one of them would wait in the gateway's memory."""
    async with connect(gateway) as client:
        await client.upgrade()
        await client.answer()
        client.reader._limit = 1  # type: ignore[attr-defined]  # stops reading once there is anything
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        (connection,) = [
            item for item in gateway.service._http._server.server_state.connections if hasattr(item, "conn")
        ]
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        pings = frame(9, b"x" * 125) * 2000

        async def flood() -> None:
            while True:
                await client.send(pings)
                await asyncio.sleep(0)

        flooding = asyncio.create_task(flood())
        try:
            await until(lambda: not connection.writable.is_set(), 30)
            waiting = connection.transport.get_write_buffer_size()
            for _ in range(20):
                await asyncio.sleep(0)
            assert connection.transport.get_write_buffer_size() <= waiting + len(pings)
            async with httpx.AsyncClient(base_url=gateway.url) as http:
                assert (await http.get("/health")).status_code == 200
        finally:
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
