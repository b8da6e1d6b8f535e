"""The TypeScript client's package, as npm packs it, in a real browser: on pages whose origin is not the gateways'."""

import asyncio
import contextlib
import functools
import http.server
import json
import re
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.config import CommonSettings
from shared.nats.bus import Bus
from tests.e2e.browser import Browser, Tab
from tests.integration.clients.cutting import cutting
from tests.integration.clients.programs import TYPESCRIPT, blocks, run_npm, typescript_client
from tests.integration.gateway.api.console.conftest import CHROMIUM, browser
from tests.integration.gateway.batches.helpers import ready
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying, until
from tests.integration.gateway.lifecycle.test_gateway_lost import gateway_process
from tests.integration.gateway.resuming import Paced

__all__ = ["browser"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="THE CLIENT IS NOT TESTED IN A BROWSER: no chromium here"),
]

TEXT = "Once upon a time, a connection was lost, and nobody who listened noticed."
CHAT = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
(README,) = blocks(TYPESCRIPT, "html")
PAGE = f'<!doctype html>\n<meta charset="utf-8"><link rel="icon" href="data:,">\n<body>{README}</body>\n'
SHOWN = "document.body.innerText.trim()"


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing: what a page asks for is not what the test is about."""


@contextlib.contextmanager
def site(directory: Path) -> Iterator[str]:
    """A folder as web pages; its address."""
    handler = functools.partial(Files, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def unpack(directory: Path) -> None:
    """The package and its dependency as the README's page has them, and that page without its program."""
    built = typescript_client()
    (package,) = json.loads(run_npm(built, "pack", "--dry-run", "--json", "--ignore-scripts"))
    for file in package["files"]:
        target = directory / "ryzanstein-client" / file["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built / file["path"], target)
    (directory / "eventsource-parser").symlink_to(built / "node_modules" / "eventsource-parser")
    (directory / "index.html").write_text(re.sub(r'<script type="module">.*?</script>', "", PAGE, flags=re.DOTALL))


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    made = tmp_path / "site"
    made.mkdir()
    await asyncio.to_thread(unpack, made)
    return made


@pytest.fixture
async def origin(directory: Path) -> AsyncIterator[str]:
    with site(directory) as address:
        yield address


@pytest.fixture
async def page(browser: Browser, origin: str) -> AsyncIterator[Tab]:
    async with browser.tab(f"{origin}/") as tab:
        await tab.until("import('ryzanstein-client').then((module) => (globalThis.ryzanstein = module))")
        yield tab


@pytest.fixture
async def allowing(nats_settings: CommonSettings, ring: FakeRing, origin: str) -> AsyncIterator[RunningGateway]:
    async with run_gateway(nats_settings, allowed_origins=origin, resume_grace=60.0) as running:
        yield running


async def test_a_stream_survives_its_connection_and_its_gateway(
    browser: Browser,
    directory: Path,
    origin: str,
    bus: Bus,
    nats_settings: CommonSettings,
    allowing: RunningGateway,
    ring: FakeRing,
    tmp_path: Path,
) -> None:
    options = ("--allowed-origins", origin, "--resume-grace", "60")
    ring.behave = paced = Paced(TEXT.encode(), 9)
    async with (
        gateway_process(bus, nats_settings, tmp_path, *options) as doomed,
        cutting(str(doomed.http.base_url)) as first,
    ):
        shown = PAGE.replace("http://127.0.0.1:8000", first.url).replace("http://127.0.0.1:8001", allowing.url)
        (directory / "stream.html").write_text(shown.replace("SmolLM2-135M-Instruct", MODEL))
        async with browser.tab(f"{origin}/stream.html") as page:
            await page.until(f"{SHOWN} === {json.dumps(TEXT[:9])}")
            first.cut()
            paced.allow(25)
            await page.until(f"{SHOWN} === {json.dumps(TEXT[:25])}")
            await doomed.kill()
            paced.allow()
            await page.until(f"{SHOWN} === {json.dumps(TEXT)}")
    assert len(ring.requests) == 1


CALLS = """(async () => {
  const { ApiError, Client, textOf } = ryzanstein;
  const client = new Client(%s, { apiKey: "none" });
  const body = %s;
  const [model] = await client.models();
  const refused = await client.chat({ ...body, model: "none" }).catch((error) => error);
  const { id } = await client.batches.submit([
    { custom_id: "a", method: "POST", url: "/v1/chat/completions", body },
  ]);
  const batch = await client.batches.wait(id, { interval: 50 });
  const lines = [];
  for await (const line of client.batches.results(batch)) lines.push(textOf(line.response.body));
  const { status, code, requestId } = refused;
  return { model, lines, refused: [refused instanceof ApiError, status, code, requestId !== ""] };
})().catch(String).then((seen) => (globalThis.seen = seen))"""


async def test_what_else_a_page_may_do(page: Tab, allowing: RunningGateway, ring: FakeRing) -> None:
    """Errors are read with their headers, requests are sent as a form, and answers by lines."""
    await ready(ring)
    ring.behave = saying(TEXT)
    await page.run(f"void {CALLS % (json.dumps(allowing.url), CHAT)}")
    assert await page.until("globalThis.seen") == {
        "model": MODEL,
        "lines": [TEXT],
        "refused": [True, 404, "model_not_found", True],
    }


async def test_an_answer_is_asked_for_again_under_its_key(page: Tab, allowing: RunningGateway, ring: FakeRing) -> None:
    ring.behave = paced = Paced(TEXT.encode(), 10)
    async with cutting(allowing.url) as way:
        call = f"new ryzanstein.Client({json.dumps(way.url)}).chat({CHAT}).then(ryzanstein.textOf)"
        await page.run(f"void {call}.catch(String).then((text) => (globalThis.answer = text))")
        await until(lambda: ring.requests, 30)
        way.cut()
        paced.allow()
        assert await page.until("globalThis.answer") == TEXT
    assert len(ring.requests) == 1
