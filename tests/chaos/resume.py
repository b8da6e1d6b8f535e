"""How a client whose gateway has died goes on reading at another one. The one place that knows.

`GET /v1/generations/{id}/stream` with the header `Last-Event-ID: POSITION` answers with the events that
are missing. Where the gateway has no such endpoint, clients send their request again.
"""

import json

from tests.chaos.streams import Answer, Lost

REQUEST_HEADERS: dict[str, str] = {}
"""What a request says to be kept alive while nobody reads it."""


def answer(address: str, generation: str, position: int) -> Answer:
    """The rest of `generation` behind `position`."""
    path = f"/v1/generations/{generation}/stream"
    return Answer(address, "GET", path, headers={"Last-Event-ID": str(position)})


async def is_offered(address: str) -> bool:
    """Whether the endpoint exists: an unknown generation is another error than an unknown URL."""
    try:
        async with answer(address, "none", 0) as asked:
            body = b""
            while data := await asked.read():
                body += data
    except Lost:
        return False
    return json.loads(body).get("error", {}).get("code") != "unknown_url"
