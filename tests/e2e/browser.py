"""A headless Chromium over its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
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
        self.requests: list[str] = []
        """URLs that it has asked for."""
        self.errors: list[str] = []
        """What it wrote to the console as an error, and what it did not catch."""

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

    async def type(self, text: str) -> None:
        """Into the field that has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "") -> None:
        extra = {"text": text} if text else {}
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **extra
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)


class Browser:
    """A running Chromium."""

    def __init__(self, address: str) -> None:
        self._address = address

    @contextlib.asynccontextmanager
    async def tab(self, url: str) -> AsyncIterator[Tab]:
        """A new page at `url`."""
        async with httpx.AsyncClient(trust_env=False) as client:
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


@contextlib.asynccontextmanager
async def run_browser(program: str) -> AsyncIterator[Browser]:
    """A browser with a profile of its own, ended with all of its processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *OPTIONS,
            f"--user-data-dir={profile}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Browser(await _address(Path(profile) / "DevToolsActivePort", process))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _address(note: Path, process: asyncio.subprocess.Process) -> str:
    end = time.monotonic() + 30
    while not (lines := _lines(note)):
        assert process.returncode is None, f"chromium ended with {process.returncode}"
        assert time.monotonic() < end, "chromium does not answer"
        await asyncio.sleep(0.05)
    return f"127.0.0.1:{lines[0]}"


def _lines(note: Path) -> list[str]:
    """Port and path, once both are there."""
    lines = note.read_text().splitlines() if note.exists() else []
    return lines if len(lines) > 1 else []
