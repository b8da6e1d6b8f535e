"""A browser, and the console in it, at a gateway behind which the test says what happens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest

from tests.e2e.browser import Browser, Tab, find_chromium, run_browser
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL

HERE = Path(__file__).parent
CHROMIUM = find_chromium()
PREFIX = "/some/path"


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Tests with a browser need one."""
    reason = (
        "THE CONSOLE IS NOT TESTED: no chromium here; install it (Debian: chromium) or name one in "
        "RYZANSTEIN_TEST_CHROMIUM"
    )
    for item in items:
        if item.path.parent == HERE and "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skipif(CHROMIUM is None, reason=reason))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One for all tests: what a page keeps is kept by its address, and each test's gateway has a port of its own."""
    assert CHROMIUM is not None
    with run_browser(CHROMIUM) as running:
        yield running


@contextlib.asynccontextmanager
async def console(browser: Browser, url: str, base: str = "") -> AsyncIterator[Tab]:
    """The page at `url`, all of it below `base` (left out: below `url`), which has found its gateway.

    Nothing that it does may go wrong or outside.
    """
    async with browser.tab(url) as opened:
        await opened.until(f"document.getElementById('model').value === '{MODEL}'")
        yield opened
        assert opened.errors == []
        outside = [asked for asked in opened.requests if not asked.startswith((base or url, "blob:", "about:"))]
        assert outside == []


@pytest.fixture
async def tab(browser: Browser, gateway: RunningGateway) -> AsyncIterator[Tab]:
    async with console(browser, f"{gateway.url}/") as opened:
        yield opened


class Proxy:
    """Serves a gateway below `PREFIX`, a request a connection, and cuts connections when it is told to."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._port = int(gateway.url.rpartition(":")[2])
        self._open: dict[asyncio.StreamWriter, str] = {}
        self.url = ""
        self.asked: list[str] = []  # first lines of the requests

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator["Proxy"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{PREFIX}/"
        try:
            yield self
        finally:
            server.close()
            self.cut("")

    def cut(self, part: str) -> None:
        """Breaks every connection whose request has `part` in its first line."""
        for writer, line in list(self._open.items()):
            if part in line:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, rest = head.split("\r\n", 1)
            self.asked.append(line)
            self._open[writer] = line
            target, sink = await asyncio.open_connection("127.0.0.1", self._port)
            changed = rest.replace("Connection: keep-alive", "Connection: close")
            sink.write(f"{line.replace(PREFIX, '', 1)}\r\n{changed}".encode("latin-1"))
            upwards = asyncio.create_task(_copy(reader, sink))
            try:
                await _copy(target, writer)
            finally:
                upwards.cancel()
                sink.close()
                self._open.pop(writer, None)
        writer.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()


@pytest.fixture
async def proxy(gateway: RunningGateway) -> AsyncIterator[Proxy]:
    async with Proxy(gateway).run() as running:
        yield running
