"""A headless Chromium over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
    "--window-size=1400,900",
)


def find_chromium() -> str | None:
    """The program, as RYZANSTEIN_TEST_CHROMIUM or the search path has it."""
    given = os.environ.get("RYZANSTEIN_TEST_CHROMIUM")
    return given or next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page, and what was heard of it."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []  # URLs that it has asked for
        self.errors: list[str] = []  # what it wrote to the console as an error, and what it did not catch
        self.sent: list[dict[str, Any]] = []  # its requests: url, method, headers, postData
        # File fields (their backend node ids) that asked for a file since `choose_files`.
        self.choosers: list[int] = []

    async def listen(self) -> None:
        """Runs until the connection ends."""
        async for text in self._socket:
            message = json.loads(text)
            if "id" in message:
                self._waiting.pop(message["id"]).set_result(message)
            else:
                self._hear(message["method"], message["params"])

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
            self.sent.append(params["request"])
        elif method == "Page.fileChooserOpened":
            self.choosers.append(params["backendNodeId"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(json.dumps(params["entry"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol. Raises `AssertionError` where it is refused."""
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        message = await asyncio.wait_for(answer, 30)
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = 30.0) -> Any:
        """Waits until the expression is true; returns its value. Also while a page is being loaded."""
        end = time.monotonic() + seconds
        while True:
            value = None
            with contextlib.suppress(AssertionError):
                value = await self.run(script)
            if value:
                return value
            shown = f"{script}\n{self.errors}"
            assert time.monotonic() < end, f"did not come true: {shown}"
            await asyncio.sleep(0.05)

    async def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first element of that selector, once it is in view and nothing lies
        over it or moves. Again where the page has put another element in its place meanwhile."""
        one = f"document.querySelector({json.dumps(selector)})"
        place = f"""(() => {{
          if (document.getAnimations().some(one => one.playState === 'running')) return null;
          {one}.scrollIntoView({{block: 'nearest', inline: 'nearest'}});
          const box = {one}.getBoundingClientRect();
          const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
          if ({one}.disabled || !{one}.contains(document.elementFromPoint(x, y))) return null;
          window.clicked = false;
          {one}.addEventListener('click', () => {{ window.clicked = true; }}, {{once: true, capture: true}});
          return [x, y];
        }})()"""
        for _ in range(20):
            x, y = await self.until(place)
            for kind in ("mousePressed", "mouseReleased"):
                await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
            if await self.run("window.clicked !== false"):  # undefined: it has led to another page
                return
        raise AssertionError(f"{selector} is not there long enough to be clicked")

    async def choose_files(self, selector: str, *paths: Path) -> None:
        """Clicks on what asks for files, and gives these."""
        self.choosers.clear()
        await self.call("Page.setInterceptFileChooserDialog", enabled=True)
        await self.click(selector)
        while not self.choosers:
            await self.run("null")  # events come before the answers to what is asked behind them
        await self.call("DOM.setFileInputFiles", files=[str(path) for path in paths], backendNodeId=self.choosers[0])

    async def type(self, text: str) -> None:
        """Into the field that has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "", **extra: Any) -> None:
        """`extra`: `modifiers` (8: Shift), `commands` of the editor such as `paste`."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, **extra}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)


class Browser:
    """A running Chromium."""

    def __init__(self, address: str) -> None:
        self._address = address

    @contextlib.asynccontextmanager
    async def tab(self, url: str) -> AsyncIterator[Tab]:
        """A new page at `url`."""
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            target = (await client.put(f"http://{self._address}/json/new?about:blank")).json()
            async with connect(target["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                try:
                    await tab.open(url)
                    yield tab
                finally:
                    listening.cancel()
                    await client.get(f"http://{self._address}/json/close/{target['id']}")


@contextlib.contextmanager
def run_browser(program: str) -> Iterator[Browser]:
    """A browser with a profile of its own, ended with all of its processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={profile}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Browser(_address(Path(profile) / "DevToolsActivePort", process))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _address(note: Path, process: "subprocess.Popen[bytes]") -> str:
    end = time.monotonic() + 30
    while not (lines := _lines(note)):
        assert process.poll() is None, f"chromium ended with {process.returncode}"
        assert time.monotonic() < end, "chromium does not answer"
        time.sleep(0.05)
    return f"127.0.0.1:{lines[0]}"


def _lines(note: Path) -> list[str]:
    """Port and path, once both are there."""
    lines = note.read_text().splitlines() if note.exists() else []
    return lines if len(lines) > 1 else []
