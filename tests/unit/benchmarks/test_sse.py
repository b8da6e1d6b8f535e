from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.errors import BenchError
from benchmarks.serve.sse import Answer, Client, SseSplitter, error_message
from tests.unit.benchmarks.fake_server import DONE, FakeServer, delta, serving, usage

BODY = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5, "stream": True}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


async def ask(fake: FakeServer, timeout: float = 10.0) -> Answer:
    client = Client(fake.url, timeout=timeout)
    try:
        return await client.stream(BODY, {})
    finally:
        client.close()


async def fault_of(**behaviour: Any) -> str | None:
    async with serving(**behaviour) as fake:
        return (await ask(fake)).fault()


@given(
    st.lists(st.text("abc{}[]: ", max_size=10), max_size=10),
    st.lists(st.integers(0, 200), max_size=5),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["data: ", "data:"]),
)
def test_events_are_found_wherever_the_stream_is_cut(
    payloads: list[str], cuts: list[int], newline: str, prefix: str
) -> None:
    whole = "".join(f"id: 7{newline}{prefix}{p}{newline}{newline}: ping{newline}" for p in payloads).encode()
    splitter = SseSplitter()
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    found = [event for i in range(len(edges) - 1) for event in splitter.feed(whole[edges[i] : edges[i + 1]])]
    assert found == [payload.strip().encode() for payload in payloads]


def test_events_of_one_read_are_one_arrival() -> None:
    answer = Answer()
    for content, now in (("", 1.0), ("a", 2.0), ("b", 2.0), ("c", 3.0)):
        answer.take_event(delta(content).removeprefix(b"data: ").strip(), now)
    assert answer.arrivals == [2.0, 3.0]
    assert answer.deltas == [2, 1]
    assert answer.text == ["a", "b", "c"]


def test_reasoning_counts_as_text() -> None:
    answer = Answer()
    answer.take_event(b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}', 1.0)
    assert answer.arrivals == [1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "model is busy", "code": "x"}}', "model is busy"),
        (b'{"detail": "Not\\n Found"}', "Not Found"),
        (b"<html>no</html>", "<html>no</html>"),
        (b"", ""),
        (b"x" * 500, "x" * 300 + "..."),
    ],
)
def test_error_bodies_are_shown(body: bytes, message: str) -> None:
    assert error_message(body) == message


async def test_a_good_stream() -> None:
    async with serving() as fake:
        answer = await ask(fake)
    assert answer.fault() is None
    assert "".join(answer.text) == " tok" * 5
    assert sum(answer.deltas) == 5
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (13, 5)
    assert answer.started <= answer.arrivals[0] <= answer.arrivals[-1] <= answer.finished
    assert answer.finish_reason == "length"


async def test_connections_are_kept_and_headers_sent() -> None:
    async with serving() as fake:
        client = Client(fake.url + "/v1", api_key="secret")
        await client.connect(1)
        for _ in range(3):
            assert (await client.stream(BODY, {"X-Session-ID": "s"})).fault() is None
        client.close()
    assert fake.connections == 1
    assert {request.path for request in fake.requests} == {"/v1/chat/completions"}
    assert {request.headers["x-session-id"] for request in fake.requests} == {"s"}
    assert {request.headers["authorization"] for request in fake.requests} == {"Bearer secret"}


async def test_a_stream_without_length_or_chunks_ends_with_the_connection() -> None:
    raw = HEAD + b"Connection: close\r\n\r\n" + delta("a", "stop") + usage(3, 1) + DONE
    async with serving(raw=raw) as fake:
        client = Client(fake.url)
        assert (await client.stream(BODY, {})).fault() is None
        assert (await client.stream(BODY, {})).fault() is None
        client.close()
    assert fake.connections == 2


@pytest.mark.parametrize(
    ("stream", "fault"),
    [
        ([delta("a", "stop"), usage(3, 1)], "the stream ended without [DONE]"),
        ([delta("a"), usage(3, 1), DONE], "the stream ended without a finish_reason"),
        ([delta("a", "stop"), DONE], "the stream ended without a usage count"),
        ([delta("", "stop"), usage(3, 1), DONE], "the stream ended without any text"),
        ([delta("a")], "the stream ended without [DONE] and a finish_reason and a usage count"),
        ([delta("a"), b'data: {"error": {"message": "ring lost"}}\n\n', DONE], "error event: ring lost"),
    ],
)
async def test_an_incomplete_stream_is_an_error(stream: list[bytes], fault: str) -> None:
    assert await fault_of(stream=stream) == fault


async def test_an_error_field_of_null_is_no_error() -> None:
    event = b'data: {"error": null, "choices": []}\n\n'
    assert await fault_of(stream=[event, delta("a", "stop"), usage(3, 1), DONE]) is None


async def test_a_server_that_never_sends_done_can_be_told_of() -> None:
    async with serving(stream=[delta("a", "stop"), usage(3, 1)]) as fake:
        client = Client(fake.url, needs_done=False)
        answer = await client.stream(BODY, {})
        client.close()
    assert answer.fault() is None
    assert not answer.done


async def test_an_event_that_is_no_chunk_is_an_error() -> None:
    fault = await fault_of(stream=[b"data: {nonsense\n\n", DONE])
    assert fault is not None
    assert fault.startswith("an event is not a chat completion chunk")


async def test_a_stream_cut_off_is_an_error() -> None:
    fault = await fault_of(stream=[delta("a")], cut=True)
    assert fault is not None
    assert "without [DONE]" in fault


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", "the connection closed before any answer"),
        (b"SSH-2.0-OpenSSH_9\r\n", "the answer is not HTTP/1.1"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi",
            "the answer is text/html instead of text/event-stream",
        ),
    ],
)
async def test_no_event_stream_at_all_is_an_error(raw: bytes, fault: str) -> None:
    found = await fault_of(raw=raw)
    assert found is not None
    assert found.startswith(fault)


async def test_an_http_error_shows_its_body() -> None:
    found = await fault_of(status=429, error_body=b'{"error": {"message": "too many requests"}}')
    assert found == "HTTP 429: too many requests"


async def test_a_silent_server_is_an_error_after_the_time_out() -> None:
    async with serving(silent=True) as fake:
        assert (await ask(fake, timeout=0.2)).fault() == "no complete answer within 0.2 s"


async def test_a_server_that_is_not_there_is_told() -> None:
    async with serving() as fake:
        client = Client(fake.url)
    with pytest.raises(BenchError, match="cannot be reached"):
        await client.get("/v1/models")
    fault = (await client.stream(BODY, {})).fault()
    assert fault is not None
    assert "cannot be reached" in fault


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:99999"])
def test_an_unusable_address_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="is not a server's address"):
        Client(url)
