"""Streams cut in the middle of an event or a line: what a client has whole says where it goes on, at a whole border."""

import json
from typing import Any

import httpx
import pytest

from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing
from tests.integration.gateway.resuming import Paced

TEXT = "A stream is a log; \u00e9 has two bytes."
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
# Their bodies, and what ends an event or a line.
APIS = {
    "/v1/messages": (BODY | {"max_tokens": 100}, b"\n\n"),
    "/v1/responses": ({"model": MODEL, "input": "Hi", "stream": True}, b"\n\n"),
    "/api/chat": (BODY, b"\n"),
    "/api/generate": ({"model": MODEL, "prompt": "Hi"}, b"\n"),
}


def whole(path: str, data: bytes) -> list[tuple[str, str]]:
    """(text, position) of each event or line that ends within `data`."""
    *frames, _ = data.split(APIS[path][1])
    return [_line(frame) if path.startswith("/api/") else _event(frame) for frame in frames]


def _line(frame: bytes) -> tuple[str, str]:
    line = json.loads(frame)
    return line["response"] if "response" in line else line["message"]["content"], line["position"]


def _event(frame: bytes) -> tuple[str, str]:
    fields = dict(line.partition(": ")[::2] for line in frame.decode().split("\n"))
    data, delta = json.loads(fields["data"]), ""
    assert data["type"] == fields["event"]
    if data["type"] == "response.output_text.delta":
        delta = data["delta"]
    elif data["type"] == "content_block_delta":
        delta = data["delta"]["text"]
    return delta, fields["id"]


async def rest_of(http: httpx.AsyncClient, path: str, headers: dict[str, str]) -> bytes:
    answer = await http.post(path, json=APIS[path][0], headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.content.endswith(APIS[path][1])
    return answer.content


@pytest.mark.parametrize("path", APIS)
async def test_a_cut_stream_goes_on_at_a_whole_border(gateway: RunningGateway, ring: FakeRing, path: str) -> None:
    ring.behave = paced = Paced(TEXT.encode("latin-1"), 4)
    headers = {"Idempotency-Key": "once", "X-Ryzanstein-Positions": "true"}
    seen = b""
    async with gateway.http() as http:
        async with http.stream("POST", path, json=APIS[path][0], headers=headers) as answer:
            async for data in answer.aiter_raw():
                seen += data
                if (said := sum(len(text) for text, _ in whole(path, seen))) == 12:
                    break
                paced.allow(4 * (said // 4 + 1))
        paced.allow()
        everything = await rest_of(http, path, headers)
        frames = whole(path, everything)
        assert "".join(text for text, _ in frames) == TEXT
        *_, before, last = seen.rstrip(b"\n").split(APIS[path][1])
        for cut in (1, len(last) // 2, len(last) + len(before) // 2):
            known = whole(path, seen.rstrip(b"\n")[:-cut])
            more = await rest_of(http, path, headers | {"Last-Event-ID": known[-1][1]})
            rest = whole(path, more)
            assert "".join(text for text, _ in known + rest) == TEXT
            if not path.startswith("/api/"):  # lines tell times, and how much of the text each has is its reader's
                assert [one for _, one in known + rest] == [one for _, one in frames]
                assert everything.endswith(more.removeprefix(b"retry: 500\n"))
    assert len(ring.requests) == 1
