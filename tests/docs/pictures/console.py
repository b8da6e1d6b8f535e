"""Pictures of the console: an example conversation on a desk, what the model itself says on a phone, a cluster at work,
and a fine-tuning job."""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.e2e.browser import Browser, Tab, run_browser

EXAMPLE = Path(__file__).with_name("example.json")
QUESTION = "Give me three tips for a good night's sleep."  # what a small model answers well enough
LINES = 12
WAVES = 8  # of requests, for the charts
WAVE = 8.0  # seconds from one to the next
COLOURS = {"apple": "red", "banana": "yellow", "plum": "purple", "lime": "green", "carrot": "orange", "swan": "white"}
QUESTIONS = ("What colour is a {}?", "Name the colour of a {}.", "A {} is which colour?", "Tell me a {}'s colour.")
TRAINED = 1800.0  # seconds in which the job must be done


async def photograph(chromium: str, url: str, into: Path) -> None:
    """Writes console.png, console-phone.png, console-cluster.png and console-fine-tuning.png."""
    await asyncio.to_thread(submit_batch, url)
    job = await asyncio.to_thread(fine_tune, url)
    with run_browser(chromium) as browser:
        await _chat(browser, url, into)
        async with browser.tab(f"{url}/#cluster") as tab:
            await _size(tab, 1200, 760)
            async with _work(url):
                await _write(tab, into / "console-cluster.png")
        async with browser.tab(f"{url}/#fine-tuning/{job}") as tab:
            await _size(tab, 1200, 760)
            await tab.until("document.querySelectorAll('#curves polyline').length >= 5")
            await tab.until("document.querySelectorAll('#checkpoints button').length > 0")
            await _write(tab, into / "console-fine-tuning.png")


async def _chat(browser: Browser, url: str, into: Path) -> None:
    async with browser.tab(f"{url}/") as tab:
        await _size(tab, 1200, 860)
        await tab.until("document.getElementById('model').value !== ''")
        await _ask(tab)
        await tab.run(
            "(() => { const given = new DataTransfer();"
            f"given.items.add(new File([{json.dumps(_example())}], 'example.json'));"
            "const field = document.getElementById('import-file'); field.files = given.files;"
            "field.dispatchEvent(new Event('change')); })()"
        )
        example = "[...document.querySelectorAll('#conversations a')].find(link => link.textContent.includes('jitter'))"
        await tab.until(f"{example} !== undefined")
        await tab.run(f"{example}.click()")
        await tab.until("document.querySelectorAll('#transcript math').length === 2")
        await tab.run("document.activeElement.blur()")
        await _write(tab, into / "console.png")
        asked = "[...document.querySelectorAll('#conversations a')].find(link => link.textContent.includes('sleep'))"
        await tab.run(f"{asked}.click()")
        await tab.until("document.getElementById('title').textContent.includes('sleep')")
        await tab.run("document.activeElement.blur()")
        await _size(tab, 360, 740, mobile=True)
        await tab.until("getComputedStyle(document.getElementById('side')).visibility === 'hidden'")
        await _write(tab, into / "console-phone.png")


async def _ask(tab: Tab) -> None:
    """Has the model answer, as a user does."""
    for field, value in (("temperature", "0"), ("limit", "120")):
        place = f"document.getElementById('{field}')"
        await tab.run(f"{place}.value = '{value}', {place}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    await tab.run("document.getElementById('prompt').focus()")
    await tab.type(QUESTION)
    await tab.press("Enter", 13, "\r")
    done = "document.querySelector('#transcript > li:last-child .figures')?.textContent.includes('first token')"
    await tab.until(f"{done} && document.getElementById('stop').hidden", 120)


def _example() -> str:
    """The conversation, as of today."""
    content = json.loads(EXAMPLE.read_text())
    (conversation,) = content["conversations"]
    now = int(time.time() * 1000)
    conversation |= {"created": now, "updated": now}
    for node in conversation["nodes"].values():
        node["at"] += now
    return json.dumps(content)


async def _size(tab: Tab, width: int, height: int, *, mobile: bool = False) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    await tab.call("Emulation.setDeviceMetricsOverride", **size)
    await tab.until(f"innerWidth === {width}")


async def _write(tab: Tab, path: Path) -> None:
    picture = await tab.call("Page.captureScreenshot", format="png")
    await asyncio.to_thread(path.write_bytes, base64.b64decode(picture["data"]))


@contextlib.asynccontextmanager
async def _work(url: str) -> AsyncIterator[None]:
    """Waves of generations, the last of which is under way."""
    async with httpx.AsyncClient(base_url=f"{url}/v1", timeout=120, trust_env=False) as client:
        model = (await client.get("/models")).json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 400}
        body["ignore_eos"] = True
        tasks: list[asyncio.Task[httpx.Response]] = []
        for wave in range(WAVES):
            tasks += [asyncio.create_task(client.post("/chat/completions", json=body)) for _ in range(wave % 4 + 1)]
            await asyncio.sleep(WAVE)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def submit_batch(url: str) -> None:
    """Of a few lines; waits for its end."""
    with httpx.Client(base_url=f"{url}/v1", timeout=60, trust_env=False) as client:
        model = client.get("/models").json()["data"][0]["id"]
        lines = [
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": model,
                    "max_tokens": 8,
                    "messages": [{"role": "user", "content": f"Name the number {number}."}],
                },
            }
            for number in range(LINES)
        ]
        text = "\n".join(json.dumps(line) for line in lines)
        file = client.post("/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", text)}).json()
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = client.post("/batches", json=wanted).json()
        end = time.monotonic() + 120
        while client.get(f"/batches/{batch['id']}").json()["status"] != "completed":
            assert time.monotonic() < end, "the batch does not end"
            time.sleep(0.2)


def fine_tune(url: str) -> str:
    """Teaches the model colours; returns the job once it is done."""

    def lines(questions: tuple[str, ...]) -> str:
        asked = [(question.format(thing), colour) for question in questions for thing, colour in COLOURS.items()]
        return "\n".join(
            json.dumps({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": colour}]})
            for text, colour in asked
        )

    with httpx.Client(base_url=f"{url}/v1", timeout=60, trust_env=False) as client:
        files = {"training_file": lines(QUESTIONS[:3]), "validation_file": lines(QUESTIONS[3:])}
        for name, text in files.items():
            given = {"file": (f"{name}.jsonl", text)}
            files[name] = client.post("/files", data={"purpose": "fine-tune"}, files=given).json()["id"]
        model = client.get("/models").json()["data"][0]["id"]
        chosen = {"n_epochs": 6, "batch_size": 2, "learning_rate_multiplier": 2}
        method = {"type": "supervised", "supervised": {"hyperparameters": chosen}}
        body = {"model": model, **files, "method": method, "suffix": "colours", "seed": 1}
        job = client.post("/fine_tuning/jobs", json=body).json()
        end = time.monotonic() + TRAINED
        while job["status"] != "succeeded":
            assert time.monotonic() < end, "the job does not end"
            assert job["status"] != "failed", job
            time.sleep(1)
            job = client.get(f"/fine_tuning/jobs/{job['id']}").json()
        return str(job["id"])
