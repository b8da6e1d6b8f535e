"""The Python client against real gateways: cut, killed, continued by others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ryzanstein_client import ApiError, AsyncClient, Client, Cursor, Piece, Prefilled
from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.integration.clients.cutting import Cutting, cutting
from tests.integration.clients.programs import ROOT, Command, blocks, python_script, run
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying, silence, until
from tests.integration.gateway.lifecycle.test_gateway_lost import gateway_process
from tests.integration.gateway.resuming import Paced

TEXT = "Whoever has the cursor has the stream, and nobody else need know."
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


async def read_async(urls: list[str], pieces: list[Piece]) -> None:
    async with AsyncClient(urls) as client, client.stream_chat(**CHAT) as stream:
        async for piece in stream:
            pieces.append(piece)
            assert stream.cursor.position == piece.position


@pytest.fixture
async def way(gateway: RunningGateway) -> AsyncIterator[Cutting]:
    async with cutting(gateway.url) as found:
        yield found


def read_in_thread(urls: list[str], pieces: list[Piece]) -> None:
    with Client(urls) as client, client.stream_chat(**CHAT) as stream:
        for piece in stream:
            pieces.append(piece)
            assert stream.cursor.position == piece.position


Reader = Callable[[list[str], list[Piece]], Any]


@pytest.mark.parametrize(
    "read", [read_async, lambda *given: asyncio.to_thread(read_in_thread, *given)], ids=["async", "blocking"]
)
async def test_a_stream_survives(
    read: Reader, bus: Bus, nats_settings: CommonSettings, gateway: RunningGateway, ring: FakeRing, tmp_path: Path
) -> None:
    """Cut before anything has come, cut twice in the middle, and its gateway killed."""
    ring.behave = paced = Paced(TEXT.encode(), 0)
    pieces: list[Piece] = []
    async with (
        gateway_process(bus, nats_settings, tmp_path) as doomed,
        cutting(str(doomed.http.base_url)) as first,
        cutting(gateway.url) as second,
    ):
        reading = asyncio.ensure_future(read([first.url, second.url], pieces))
        await until(lambda: ring.requests, 30)
        first.cut()
        for way, count in ((second, 10), (first, 25)):
            paced.allow(count)
            await until(lambda count=count: reading.done() or len(text_of(pieces)) == count, 30)
            way.cut()
        paced.allow(40)
        await until(lambda: reading.done() or len(text_of(pieces)) == 40, 30)
        await doomed.kill()
        paced.allow()
        await asyncio.wait_for(reading, 30)
    assert text_of(pieces) == TEXT
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    assert len(ring.requests) == 1


async def test_choices_survive_side_by_side(gateway: RunningGateway, ring: FakeRing, way: Cutting) -> None:
    """Each has a position of its own in the cursor."""
    ring.behave = paced = Paced(TEXT.encode(), 7)
    texts = ["", "", ""]
    async with AsyncClient(way.url) as client, client.stream_chat(**CHAT, n=3, seed=1) as stream:
        async for piece in stream:
            texts[piece.choice] += piece.text
            if paced.allowed == 7 and [len(text) for text in texts] == [7, 7, 7]:
                assert stream.cursor.position == "7,7,7"
                paced.allow(20)
            elif paced.allowed == 20 and max(map(len, texts)) >= 20:
                paced.allow()
                way.cut()
    assert texts == [TEXT] * 3


async def test_another_process_goes_on(
    gateway: RunningGateway, other: RunningGateway, ring: FakeRing, tmp_path: Path
) -> None:
    ring.behave = paced = Paced(TEXT.encode(), 12)
    begun = ""
    async with AsyncClient(gateway.url) as client, client.stream_chat(**CHAT, background=60) as stream:
        async for piece in stream:
            begun += piece.text
            if len(begun) == 12:
                break
        stream.cursor.save(tmp_path / "cursor")
    paced.allow()

    def go_on() -> str:
        with Client(other.url) as client:
            return client.attach(Cursor.load(tmp_path / "cursor")).text()

    assert begun + await asyncio.to_thread(go_on) == TEXT


async def test_begun_in_the_background(gateway: RunningGateway, other: RunningGateway, ring: FakeRing) -> None:
    ring.behave = paced = Paced(TEXT.encode(), 5)

    def begin() -> Cursor:
        with Client(gateway.url) as client:
            return client.start_chat(**CHAT)

    async with AsyncClient(other.url) as client:
        for start in (lambda: asyncio.to_thread(begin), lambda: client.start_chat(**CHAT)):
            paced.allow(5)
            cursor = await start()
            state = await client.state(cursor)
            assert (state.status, state.over, TEXT.startswith(state.text)) == ("in_progress", False, True)
            paced.allow()
            assert await client.attach(cursor.generation, after=state.position).text() == TEXT[len(state.text) :]
            assert await client.attach(cursor).text() == TEXT
            state = await client.state(cursor)
            assert (state.status, state.text, state.model) == ("completed", TEXT, MODEL)
            assert await client.attach(cursor, after=state.position).text() == ""
            assert not await client.cancel(cursor)


@contextlib.contextmanager
def refused(code: str, status: int) -> Any:
    with pytest.raises(ApiError) as caught:
        yield
    assert (caught.value.code, caught.value.status) == (code, status)


async def test_what_is_cancelled_ends(gateway: RunningGateway, ring: FakeRing) -> None:
    """Its readers hear of it once, and do not come back for ever."""
    ring.behave = Paced(TEXT.encode(), 5)
    async with AsyncClient(gateway.url) as client:
        cursor = await client.start_chat(**CHAT)
        stream, text = client.attach(cursor), ""
        while len(text) < 5:
            text += (await anext(stream)).text
        assert await client.cancel(cursor)
        with refused("unavailable", 503):
            await asyncio.wait_for(stream.text(), 20)
        assert (await client.state(cursor)).status == "cancelled"

    def blocking() -> None:
        with Client(gateway.url) as client:
            assert not client.cancel(cursor)
            assert client.state(cursor).over
            with refused("unavailable", 503):
                client.attach(cursor).text()

    await asyncio.to_thread(blocking)


async def test_who_leaves_early_lets_go(nats_settings: CommonSettings, ring: FakeRing) -> None:
    ring.behave = Paced(TEXT.encode(), 3)
    async with run_gateway(nats_settings, resume_grace=0.05) as gateway:

        def blocking() -> None:
            with Client(gateway.url) as client, client.stream_completion(model=MODEL, prompt="x") as stream:
                next(stream)

        await asyncio.to_thread(blocking)
        async with AsyncClient(gateway.url) as client, client.stream_completion(model=MODEL, prompt="x") as stream:
            await anext(stream)
        await until(lambda: len(ring.commanded | ring.cancelled) == 2)


async def test_refusals_are_told_at_once(gateway: RunningGateway, ring: FakeRing) -> None:
    def blocking() -> None:
        with Client([gateway.url]) as client:
            with refused("model_not_found", 404):
                client.stream_chat(**CHAT | {"model": "none"}).text()
            with refused("unknown_parameter", 400):
                next(client.stream_chat(**CHAT, colour="red"))
            with refused("generation_not_found", 404):
                client.state("chatcmpl-none")
            with refused("generation_not_found", 404):
                client.attach("chatcmpl-none").text()

    await asyncio.to_thread(blocking)
    async with AsyncClient(gateway.url) as client:
        with refused("model_not_found", 404):
            await client.stream_chat(**CHAT | {"model": "none"}).text()
        with refused("generation_not_found", 404):
            await client.cancel("chatcmpl-none")
    assert not ring.requests


@pytest.mark.slow
async def test_nobody_is_there(gateway: RunningGateway, ring: FakeRing, way: Cutting) -> None:
    """One that is away costs nothing where another one is there; with none there it gives up."""
    nowhere = "http://127.0.0.1:9"
    ring.behave = saying(TEXT)
    async with AsyncClient([nowhere, way.url]) as client:
        assert await client.stream_chat(**CHAT).text() == TEXT
        cursor = await client.start_chat(**CHAT)
        assert (await client.state(cursor)).id == cursor.generation
    async with AsyncClient(nowhere, patience=0.2) as client:
        with pytest.raises(httpx.ConnectError):
            await client.stream_chat(**CHAT).text()

    def blocking() -> None:
        with Client([nowhere, gateway.url]) as client:
            assert client.state(cursor).id == cursor.generation
        with Client(nowhere, patience=0.2) as client:
            with pytest.raises(httpx.ConnectError):
                client.stream_chat(**CHAT).text()
            with pytest.raises(httpx.ConnectError):
                client.state("chatcmpl-1")

    await asyncio.to_thread(blocking)
    ring.behave = silence
    async with AsyncClient(gateway.url, timeout=0.2, patience=0.5) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.stream_chat(**CHAT).text()
    assert len(ring.requests) == 3  # the last one was sent more than once, and is one generation


# --- the README -------------------------------------------------------------------------------------

BLOCKS = blocks(ROOT / "clients" / "python", "python")
STORY = "Once upon a time."


def example(contains: str, *gateways: str) -> Command:
    """A block of the page, for these gateways."""
    (found,) = [block for block in BLOCKS if contains in block]
    for port, url in zip(("8000", "8001"), gateways, strict=False):
        found = found.replace(f"http://127.0.0.1:{port}", url)
    return python_script(found.replace("SmolLM2-135M-Instruct", MODEL))


@pytest.mark.parametrize("contains", ["for piece in", "Cursor.load"])
async def test_streams_of_the_readme(
    contains: str, gateway: RunningGateway, other: RunningGateway, ring: FakeRing
) -> None:
    ring.behave = saying(STORY)
    shown = await run(example(contains, gateway.url, other.url), gateway.url)
    assert shown.removesuffix("\n") == STORY
    assert len(ring.requests) == 1


async def test_a_session_is_prepared_before_its_next_turn(gateway: RunningGateway, ring: FakeRing) -> None:
    await ring.put_record("ready")
    await until(lambda: gateway.service.work.catalog.has_ready_group(MODEL))
    talk: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}

    def by_thread() -> tuple[Prefilled, bool]:
        with Client(gateway.url) as client:
            return client.prefill("a b", **talk, max_tokens=9), client.cancel_prefill("a b")

    prefilled, cancelled = await asyncio.to_thread(by_thread)
    assert (prefilled.status, cancelled) == ("completed", False)
    tokens = len(ring.requests[0].prompt)
    assert prefilled.prompt_tokens == tokens == prefilled.cached_tokens + prefilled.computed_tokens
    assert prefilled.raw["session"] == "a b"

    ring.behave = silence
    async with AsyncClient(gateway.url) as client:
        under_way = await client.prefill("a b", **talk, wait=0)
        assert (under_way.status, under_way.cached_tokens) == ("in_progress", None)
        assert await client.cancel_prefill("a b")
