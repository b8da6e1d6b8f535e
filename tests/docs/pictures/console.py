"""A picture of the console: an answer that streams, two rings, a batch that has ended."""

import base64
import json
import time

import httpx

from tests.e2e.browser import run_browser

QUESTION = "Tell me a long story about a lighthouse keeper and his dog."
LINES = 12


async def photograph(chromium: str, url: str) -> bytes:
    """PNG."""
    submit_batch(url)
    async with run_browser(chromium) as browser, browser.tab(f"{url}/") as tab:
        await tab.until("document.getElementById('model').value !== ''")
        for field, value in (("limit", "400"), ("system", "You are a helpful assistant.")):
            place = f"document.getElementById('{field}')"
            await tab.run(
                f"{place}.value = '{value}', {place}.dispatchEvent(new Event('input', {{bubbles: true}}))"
            )
        await tab.run("document.getElementById('prompt').focus()")
        await tab.type(QUESTION)
        await tab.press("Enter", 13, "\r")
        text = "(document.querySelector('#transcript > li:last-child .body')?.textContent ?? '')"
        await tab.until(f"{text}.length > 250", 120)
        picture = await tab.call("Page.captureScreenshot", format="png")
        return base64.b64decode(picture["data"])


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
