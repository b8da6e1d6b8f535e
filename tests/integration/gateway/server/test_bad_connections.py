"""Clients that are slow, huge, endless or no clients at all: each is ended, the others are served meanwhile."""

import asyncio
import contextlib
import itertools
import json
import re
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from services.gateway.server.connections import RESERVED
from services.gateway.server.held import HeldWatch
from services.gateway.server.http2 import frames
from shared.config import CommonSettings
from shared.limits import HEADERS, PIPELINED
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, silence, until
from tests.integration.gateway.raw import Raw, connect, frame
from tests.integration.gateway.server.test_tls import Files
from tests.unit.gateway.api.grpc.test_server import GREETING, calls, head
from tests.unit.gateway.server.http2.test_connection import framed, http2_frame

pytestmark = pytest.mark.usefixtures("no_trace")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture
async def hasty(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    """A gateway that waits for nobody."""
    async with run_gateway(nats_settings, head_timeout=0.3, head_limit=4096) as running:
        yield running


@pytest.fixture
async def small(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    """A gateway with room for few."""
    async with run_gateway(nats_settings, max_connections=8) as running:
        yield running


async def works(gateway: RunningGateway) -> None:
    async with gateway.http() as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


# --- slow ----------------------------------------------------------------------------------------


async def test_a_head_that_is_never_finished(hasty: RunningGateway) -> None:
    async with connect(hasty) as silent, connect(hasty) as slow:
        await slow.send(b"GET /v1/models HT")
        assert await slow.error() == (408, "request_timeout")
        assert await silent.rest() == b""
    await works(hasty)


async def drip(client: Raw, parts: Iterable[bytes]) -> None:
    """Sends a part now and then, until the client is told that it takes too long."""

    async def send() -> None:
        for part in parts:
            await client.send(part)
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(send())
    assert await client.error() == (408, "request_timeout")
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)


async def test_one_byte_now_and_then_buys_no_time(hasty: RunningGateway) -> None:
    async with connect(hasty) as slow:
        await drip(slow, (bytes([byte]) for byte in GET + b"x: " + b"y" * 10_000))


async def test_the_next_request_of_a_connection_has_as_long_as_the_first(hasty: RunningGateway) -> None:
    async with connect(hasty) as slow:
        for _ in range(2):
            await slow.send(GET + b"\r\n")
            assert (await slow.answer())[0] == 200
        await slow.send(b"\r\nGET /v1")
        assert await slow.error() == (408, "request_timeout")


async def test_a_slow_next_head_ends_no_answer_that_is_being_written(hasty: RunningGateway, ring: FakeRing) -> None:
    asked, stage = asyncio.Event(), asyncio.Event()

    async def behave(fake: FakeRing, request: object) -> None:
        asked.set()
        await stage.wait()
        await fake.emit(request, 0, list(b"Late"), finish="stop")  # type: ignore[arg-type]

    ring.behave = behave
    body = json.dumps(CHAT).encode()
    async with connect(hasty) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        await client.send(head + body + b"GET /v1/mod")
        await asked.wait()
        async with connect(hasty) as other:  # for as long as a slow head gets
            assert await other.rest() == b""
        stage.set()
        status, _, answer = await client.answer()
        assert (status, json.loads(answer)["choices"][0]["message"]["content"]) == (200, "Late")


async def test_a_body_that_goes_on_after_its_answer(hasty: RunningGateway) -> None:
    async with connect(hasty) as client:
        await client.send(b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        assert (await client.answer())[0] == 404
        await drip(client, itertools.repeat(b"1\r\nx\r\n"))


def posted(version: bytes = b"1.1", **more: object) -> bytes:
    body = json.dumps(CHAT | more).encode()
    head = b"POST /v1/chat/completions HTTP/%b\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (version, len(body))
    return head + body


async def test_a_client_that_ends_its_half_gets_its_answers(gateway: RunningGateway) -> None:
    for sent in (posted(), posted(stream=True), posted() + GET + b"\r\n", GET + b"\r\n"):
        async with connect(gateway) as client:
            client.writer.write(sent)
            client.writer.write_eof()
            shown = await client.rest()
        assert shown.count(b"HTTP/1.1 200 OK") == sent.count(b"HTTP/1.1"), shown
        said = "".join(re.findall(r'"content":"([^"]*)"', shown.decode()))  # one event, or several
        assert said == ("Hello, world!" if b"/chat/" in sent else ""), shown
        if b"stream" in sent:
            assert shown.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await works(gateway)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_client_that_has_gone_altogether_is_noticed(
    gateway: RunningGateway, ring: FakeRing, version: bytes
) -> None:
    ring.behave = silence
    async with connect(gateway) as client:
        await client.send(posted(version))
        await until(lambda: ring.requests)
        client.writer.close()
        await until(lambda: ring.cancelled)


async def test_half_a_request_and_its_end_are_no_request(gateway: RunningGateway) -> None:
    for sent in (GET, posted()[:-5]):
        async with connect(gateway) as client:
            client.writer.write(sent)
            client.writer.write_eof()
            assert await client.rest() == b""
    await works(gateway)


# --- huge ----------------------------------------------------------------------------------------


HUGE = [
    b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    GET + b"x: " + b"y" * 5000 + b"\r\n\r\n",
    GET + b"x" * 5000 + b": y\r\n\r\n",
    GET + b"a: b\r\n" * (HEADERS.value + 1) + b"\r\n",
    GET + b"x: " + b"y" * 200_000,
    b"x" * 200_000,
    b"GET /" + b"x" * 200_000,
    b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 1000,
    b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: " + b"y" * 200_000,
    b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"y" * 200_000,
]


async def test_heads_over_the_limit(hasty: RunningGateway) -> None:
    for sent in HUGE:
        async with connect(hasty) as client:
            sending = asyncio.create_task(client.send(sent))
            shown = await client.rest()
            await sending
            statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", shown)]
            assert statuses, (sent[:80], shown)
            assert set(statuses) <= {400, 404, 431}, (sent[:80], shown)
    await works(hasty)


async def test_the_limit_of_headers_is_said(hasty: RunningGateway) -> None:
    async with connect(hasty) as client:
        await client.send(GET + b"x: " + b"y" * 5000 + b"\r\n\r\n")
        assert await client.error() == (431, "headers_too_large")
    async with connect(hasty) as client:
        await client.send(GET + b"x: " + b"y" * 3000 + b"\r\n\r\n")
        assert (await client.answer())[0] == 200


async def test_pipelined_requests(hasty: RunningGateway) -> None:
    async with connect(hasty) as client:
        await client.send((GET + b"\r\n") * PIPELINED.value)
        for _ in range(PIPELINED.value):
            assert (await client.answer())[0] == 200
        await client.send((GET + b"\r\n") * 20_000)
        shown = await client.rest()
        assert shown.count(b"HTTP/1.1 ") <= PIPELINED.value + 2
    await works(hasty)


# --- unread --------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["REST", "WebSocket"])
async def test_answers_that_nobody_reads_are_not_kept(gateway: RunningGateway, port: str) -> None:
    watch = HeldWatch(gateway.service._door, owed=1 << 30, arriving=1 << 30)
    async with connect(gateway) as client:
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        if port == "WebSocket":
            await client.upgrade()
            await client.answer()
            (connection,) = (each for each in gateway.service._door.http if hasattr(each, "conn"))
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            asked = itertools.repeat(frame(9, b"x" * 125) * 2_000)
        else:
            asked = itertools.repeat(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * PIPELINED.value, 1)
        client.reader._limit = 1  # type: ignore[attr-defined]  # stops reading once there is anything

        async def flood() -> None:
            for part in asked:
                await client.send(part)
                await asyncio.sleep(0)

        flooding = asyncio.create_task(flood())
        await until(lambda: any(each.owed for each in gateway.service._door.http))
        looks = itertools.count(0.0, 61.0)

        def let_go() -> bool:
            watch.look(next(looks))
            return not watch.total("http", "owed")

        await until(let_go)
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
    async with gateway.http() as http:
        metrics = (await http.get("/metrics")).text
    assert 'ryzanstein_gateway_connections_refused_total{port="http",reason="unread"} 1.0' in metrics
    assert 'ryzanstein_gateway_owed_bytes{port="grpc"} 0.0' in metrics


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n"


def incomplete(kind: str, size: int) -> bytes:
    """So many bytes of a request that is larger."""
    part = b"x" * size
    if kind == "gRPC":
        data = b"\0" + (3_000_000).to_bytes(4, "big") + part
        cut = [data[at : at + 16_000] for at in range(0, size, 16_000)]
        said = http2_frame(frames.HEADERS, 4, 1, head("/ryzanstein.v1.InferenceService/Chat"))
        return GREETING + said + b"".join(http2_frame(frames.DATA, 0, 1, each) for each in cut)
    return {
        "body": POST + b"\r\n" + part,
        "pipelined body": posted() + POST + b"\r\n" + part,
        "refused body": POST + b"content-type: text/plain\r\n\r\n" + part,
        "message": frame(1, part + part)[:size],
        "fragments": frame(1, part, fin=False),
    }[kind]


@pytest.mark.parametrize("kind", ["body", "pipelined body", "refused body", "message", "fragments", "gRPC"])
async def test_requests_that_never_come_whole_are_bounded_together(
    nats_settings: CommonSettings, ring: FakeRing, kind: str
) -> None:
    async with run_gateway(nats_settings, grpc_port=0) as gateway:
        door = gateway.service._door
        watch = HeldWatch(door, owed=1 << 30, arriving=50_000)
        address = gateway.service.grpc_address if kind == "gRPC" else gateway
        connections = door.grpc if kind == "gRPC" else door.http
        async with connect(address) as large, connect(address) as small:
            for client, size in ((large, 60_000), (small, 1_000)):
                if kind in ("message", "fragments"):
                    await client.upgrade()
                    await client.answer()
                await client.send(incomplete(kind, size))
            await until(lambda: sum(each.arriving > 900 for each in connections) == 2)
            await until(lambda: sum(each.arriving for each in connections) > 55_000)
            watch.look(0.0)
            await until(lambda: [each.arriving < 2_000 for each in connections] == [True])
        async with gateway.http() as http:
            metrics = (await http.get("/metrics")).text
    port = "grpc" if kind == "gRPC" else "http"
    assert f'connections_refused_total{{port="{port}",reason="incomplete"}} 1.0' in metrics


# --- no HTTP -------------------------------------------------------------------------------------


NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v1/models HTTP/9.9\r\n\r\n",
    b"GET \xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET ?a HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\na b: c\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\na: \x00\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n{}\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n{}",
]
BAD_HEADS = [
    (b"GET /v1/models HTTP/1.1\r\n\r\n", 400, "exactly one"),
    (GET + b"host: y\r\n\r\n", 400, "exactly one"),
    (b"GET /v1/models HTTP/1.0\r\nhost: localhost\r\nhost: localhost\r\n\r\n", 400, "exactly one"),
    (b"GET /v1/models HTTP/2.0\r\nhost: localhost\r\n\r\n", 505, "HTTP/1.1"),
    (b"GET /v1/models HTTP/0.9\r\nhost: localhost\r\n\r\n", 505, "HTTP/1.1"),
    (GET + b"expect: 200-ok\r\n\r\n", 417, "100-continue"),
]


async def test_heads_that_rfc_9112_forbids(gateway: RunningGateway) -> None:
    for sent, status, told in BAD_HEADS:
        async with connect(gateway) as client:
            await client.send(sent)
            answered, headers, body = await client.answer()
            assert (answered, headers["connection"]) == (status, "close"), body
            error = json.loads(body)["error"]
            assert (error["code"], told in error["message"]) == ("invalid_http", True)
            assert await client.rest() == b""


async def test_an_old_client_needs_no_host_and_a_new_one_may_expect_to_go_on(gateway: RunningGateway) -> None:
    async with connect(gateway) as client:
        await client.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await client.answer())[0] == 200
    async with connect(gateway) as client:
        await client.send(posted().replace(b"host: localhost\r\n", b"host: localhost\r\nexpect: 100-continue\r\n"))
        assert (await client.answer())[0] == 100
        assert (await client.answer())[0] == 200


CODES = ("invalid_http", "unknown_url", "method_not_allowed", "invalid_json")


async def test_what_is_no_http_is_refused(gateway: RunningGateway) -> None:
    for sent in NO_HTTP:
        async with connect(gateway) as client:
            await client.send(sent)
            status, _, body = await client.answer()
            assert status in (400, 404, 405), (sent, body)
            assert json.loads(body)["error"]["code"] in CODES, (sent, body)
    await works(gateway)


async def test_another_protocol_that_is_offered_is_not_taken(gateway: RunningGateway) -> None:
    """Java's HttpClient and curl --http2 offer it with every request; the body may come at once or later."""
    async with connect(gateway) as client:
        await client.send(GET + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n\r\n")
        assert (await client.answer())[0] == 200
    body = json.dumps(CHAT).encode()
    async with connect(gateway) as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body[:20]
        )
        await asyncio.sleep(0)
        await client.send(body[20:] + GET + b"\r\n")
        assert (await client.answer())[0] == 200
        assert (await client.answer())[0] == 200


async def test_a_pipelined_request_is_given_up_with_its_client(gateway: RunningGateway, ring: FakeRing) -> None:
    ring.behave = silence
    body = json.dumps(CHAT).encode()
    async with connect(gateway) as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
            + GET
            + b"\r\n"
        )
        await until(lambda: ring.requests)
    await until(lambda: ring.cancelled)


async def test_a_trailer_changes_nothing_of_its_request(gateway: RunningGateway) -> None:
    body = json.dumps(CHAT).encode()
    async with connect(gateway) as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
            b"%x\r\n%b\r\n0\r\ncontent-encoding: gzip\r\n\r\n" % (len(body), body)
        )
        assert (await client.answer())[0] == 200


# --- many ----------------------------------------------------------------------------------------


async def test_more_connections_than_there_is_room_for(small: RunningGateway) -> None:
    async with contextlib.AsyncExitStack() as stack:

        async def one() -> Raw:
            client = await stack.enter_async_context(connect(small))
            await client.send(GET + b"\r\n")
            return client

        kept = [await one() for _ in range(8)]
        for client in kept:
            assert (await client.answer())[0] == 200
        await kept[0].send(GET + b"\r\n")
        assert (await kept[0].answer())[0] == 200
        late = await one()
        await kept[0].send(GET + b"\r\n")
        assert (await kept[0].answer())[0] == 200, "who was there before keeps its place"
        status, headers, body = await late.answer()
        assert (
            "limit connections: 8 entries, RYZANSTEIN_MAX_CONNECTIONS changes it"
            in json.loads(body)["error"]["message"]
        )
        assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable")
        assert headers["retry-after"] == "1"
        probe = await stack.enter_async_context(connect(small))
        await probe.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await probe.answer())[0] == 200, "a full gateway is no dead one"
        late = await stack.enter_async_context(connect(small))
        await late.upgrade()
        assert await late.error() == (503, "unavailable")
        for client in kept:
            await client.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            await client.rest()
    await works(small)


async def test_grpc_connections_take_the_same_places(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with (
        run_gateway(nats_settings, max_connections=2, grpc_port=0) as gateway,
        contextlib.AsyncExitStack() as stack,
    ):
        address = gateway.service.grpc_address
        for _ in range(2):
            client = await stack.enter_async_context(connect(address))
            await client.send(GREETING)
            await client.reader.readexactly(9)
        late = await stack.enter_async_context(connect(gateway))
        await late.send(GET + b"\r\n")
        assert await late.error() == (503, "unavailable")
        late = await stack.enter_async_context(connect(address))
        await late.send(GREETING + calls(1, "/ryzanstein.v1.InferenceService/ListModels"))
        await late.reader.readuntil(b"RYZANSTEIN_MAX_CONNECTIONS")
        await late.send(http2_frame(frames.HEADERS, 4, 3, head("/grpc.health.v1.Health/Check")))
        await late.send(http2_frame(frames.DATA, 1, 3, framed(b"")))
        await late.reader.readuntil(framed(b"\x08\x01"))
        probe = await stack.enter_async_context(connect(gateway))
        await probe.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        status, _, body = await probe.answer()
        assert status == 200
        for line in (
            b'ryzanstein_gateway_connections{port="grpc"} 3.0',
            b'ryzanstein_gateway_connections_refused_total{port="grpc",reason="full"} 1.0',
            b'ryzanstein_gateway_connections_refused_total{port="http",reason="full"} 1.0',
        ):
            assert line in body


async def test_handshakes_are_given_as_long_as_heads(
    nats_settings: CommonSettings, ring: FakeRing, tmp_path: Path
) -> None:
    certificate, key = Files(tmp_path).issue("gateway")
    options = {"tls_certificate": certificate, "tls_key": key, "head_timeout": 0.2, "grpc_port": 0}
    async with run_gateway(nats_settings, **options) as gateway:
        for address in (gateway.service.address, gateway.service.grpc_address):
            async with connect(address) as silent:
                assert await silent.rest() == b""


async def test_beyond_the_reserve_nothing_is_read(small: RunningGateway) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(small)) for _ in range(8 + RESERVED + 1)]
        assert await clients[-1].error() == (503, "unavailable")
    await works(small)
