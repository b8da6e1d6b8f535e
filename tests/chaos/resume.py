"""How a client goes on reading at another gateway after its own has died. The one place that knows.

    SSE         GET /v1/generations/{id}/stream with `Last-Event-ID`
    WebSocket   {"type": "attach", "generation": id, "position": ...}
    whole       the same request again under its `Idempotency-Key`

Where a gateway offers none of it, clients send their request again, from its beginning.
"""

import json

from tests.chaos.streams import Answer, Lost

BACKGROUND = 60.0
# What a request says to be kept alive while nobody reads it: clients here look for another gateway at leisure.
HEADERS = {"X-Ryzanstein-Background": f"{BACKGROUND:g}"}


def headers(key: str) -> dict[str, str]:
    """Of a request that is not streamed, and so has no id to go on with."""
    return {**HEADERS, "Idempotency-Key": key}


def answer(address: str, generation: str, position: str) -> Answer:
    """The rest of `generation` (as its chunks name it) behind the event `position`."""
    path = f"/v1/generations/{generation}/stream"
    return Answer(address, "GET", path, headers={"Last-Event-ID": position} if position else {})


def attach(generation: str, position: object) -> dict[str, object]:
    """The WebSocket message that goes on with `generation`."""
    return {"type": "attach", "id": "a", "generation": generation, "position": position}


async def is_offered(address: str) -> bool:
    """Whether the endpoint exists: an unknown generation is another error than an unknown URL."""
    try:
        async with answer(address, "chatcmpl-none", "") as asked:
            body = b""
            while data := await asked.read():
                body += data
    except Lost:
        return False
    return json.loads(body).get("error", {}).get("code") != "unknown_url"
