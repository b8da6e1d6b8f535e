"""Two answers at a time on one WebSocket: pip install websockets"""

import asyncio
import json
import os
import urllib.request

from websockets.asyncio.client import connect

URL = os.environ.get("RYZANSTEIN_URL", "http://127.0.0.1:8000")
HEADERS = {"Authorization": f"Bearer {os.environ.get('RYZANSTEIN_API_KEY', 'none')}"}
QUESTIONS = {"a": "Tell me a story.", "b": "Write a poem."}


async def main(model):
    texts = dict.fromkeys(QUESTIONS, "")
    running = set(QUESTIONS)
    async with connect(URL.replace("http", "ws", 1) + "/v1/stream", additional_headers=HEADERS) as socket:
        for name, question in QUESTIONS.items():
            request = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 200}
            await socket.send(json.dumps({"type": "generate", "id": name, "request": request}))
        while running:
            message = json.loads(await socket.recv())
            if message["type"] == "chunk":
                for choice in message["chunk"]["choices"]:
                    texts[message["id"]] += choice["delta"].get("content") or ""
            elif message["type"] == "error":
                raise SystemExit(message["error"]["message"])
            elif message["type"] == "done":
                running.remove(message["id"])
    for name, text in texts.items():
        print(f"{name}: {text}")


with urllib.request.urlopen(urllib.request.Request(f"{URL}/v1/models", headers=HEADERS)) as answer:
    served = json.load(answer)["data"][0]["id"]
asyncio.run(main(served))
