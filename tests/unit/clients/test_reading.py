"""What the Python client asks next, wherever its connection is cut."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import EventSource
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein_client import ApiError, Cursor
from ryzanstein_client.errors import LostConnection, refusal, when_again
from ryzanstein_client.reading import Ask, Reading
from ryzanstein_client.requests import Gateways, Patience, new_reading, resumed, state_from

SOURCE = Path(__file__).parents[3] / "clients" / "python" / "src"
GENERATION = "chatcmpl-1"


def event(position: int, text: str) -> str:
    chunk = {"id": GENERATION, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    return f"data: {json.dumps(chunk)}\nid: {position}\n\n"


def served(pieces: list[str], after: int) -> bytes:
    """The stream behind a position, with what else a stream may hold."""
    events = [event(number + 1, text) for number, text in enumerate(pieces) if number >= after]
    return (": waiting\n\n" + "".join(events) + "data: [DONE]\n\n").encode()


@given(pieces=st.lists(st.text(min_size=1, max_size=3), max_size=8), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_any_cuts_give_the_whole_text_once(pieces: list[str], cuts: list[int]) -> None:
    reading = new_reading("/v1/chat/completions", {"model": "m"}, "key", None)
    read: list[str] = []
    for cut in [*cuts, None]:
        ask = reading.ask()
        if reading.cursor is None:
            assert (ask.method, ask.path, ask.headers) == ("POST", "/v1/chat/completions", {"Idempotency-Key": "key"})
            assert ask.body == {"model": "m", "stream": True}
        else:
            assert (ask.method, ask.path) == ("GET", f"/v1/generations/{GENERATION}/stream")
        data = served(pieces, int(ask.headers.get("Last-Event-ID", 0)))[:cut]
        answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=data)
        for found in EventSource(answer).iter_sse():
            piece = reading.take(found.data, found.id)
            if piece is not None:
                read.append(piece.text)
                assert reading.cursor == Cursor(GENERATION, piece.position)
        if reading.done:
            break
    assert reading.done
    assert read == pieces


def test_pieces_show_what_chunks_say() -> None:
    reading = Reading(Ask("POST", "/v1/completions"))
    choice = {"index": 1, "text": "x", "finish_reason": "stop"}
    piece = reading.take(json.dumps({"id": "cmpl-1", "choices": [choice]}), "3,4")
    assert piece is not None
    assert (piece.text, piece.choice, piece.finish_reason, piece.position) == ("x", 1, "stop", "3,4")
    usage = reading.take(json.dumps({"id": "cmpl-1", "choices": [], "usage": {"total_tokens": 3}}), "5,5")
    assert usage is not None
    assert (usage.text, usage.chunk["usage"]) == ("", {"total_tokens": 3})
    with pytest.raises(ApiError, match="lost") as caught:
        reading.take('{"error": {"message": "all is lost", "code": "ring_lost", "param": null}}', "5,5")
    assert (caught.value.code, caught.value.again, caught.value.status) == ("ring_lost", False, 0)
    with pytest.raises(ApiError) as caught:
        reading.take('{"error": {"message": "another gateway", "code": "unavailable"}}', "5,5")
    assert caught.value.again


def test_a_cursor_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cursor"
    for cursor in (Cursor("chatcmpl-1", "12,7"), Cursor("cmpl-2")):
        cursor.save(path)
        assert Cursor.load(path) == cursor
    assert list(tmp_path.iterdir()) == [path]
    for wrong in ("[]", '{"generation": "a"}', "no json"):
        path.write_text(wrong)
        with pytest.raises(ValueError):  # noqa: PT011 - json's own message, or ours
            Cursor.load(path)


def test_where_a_reading_goes_on() -> None:
    assert resumed("chatcmpl-1", None).ask().headers == {}
    assert resumed("chatcmpl-1", "3").ask().headers == {"Last-Event-ID": "3"}
    assert resumed(Cursor("chatcmpl-1", "4"), None).ask().headers == {"Last-Event-ID": "4"}
    assert resumed(Cursor("chatcmpl-1", "4"), "2").ask().headers == {"Last-Event-ID": "2"}
    assert resumed("a/../b", None).ask().path == "/v1/generations/a%2F..%2Fb/stream"
    with pytest.raises(ValueError, match="starting_after"):
        resumed("resp_1", None)
    background = new_reading("/v1/chat/completions", {}, None, 30).ask()
    assert background.headers["X-Ryzanstein-Background"] == "30"
    assert background.headers["Idempotency-Key"] != new_reading("/", {}, None, None).ask().headers["Idempotency-Key"]


def test_patience_counts_from_the_first_failure() -> None:
    """However long the request before it has waited."""
    times = iter([700.0, 700.9, 701.0, 800.0])
    patience = Patience(1.0, lambda: next(times))
    lost = LostConnection("")
    assert [patience(error) for error in (lost, ApiError("", again=True, retry_after=9.0), lost)] == [True, 9.0, False]
    assert not Patience(1.0, lambda: next(times))(ApiError("No."))


def test_gateways_go_round() -> None:
    gateways = Gateways(["http://a:1/v1/", "http://b:2"])
    assert gateways.current == "http://a:1"
    gateways.leave("http://b:2")
    assert gateways.current == "http://a:1"
    for expected in ("http://b:2", "http://a:1"):
        gateways.leave(gateways.current)
        assert gateways.current == expected
    for wrong in ("", [], ["http://a", " "]):
        with pytest.raises(ValueError, match="gateway"):
            Gateways(wrong)


@pytest.mark.parametrize(
    ("status", "headers", "content", "again"),
    [
        (503, {"retry-after": "2"}, b'{"error": {"message": "full", "code": "unavailable"}}', 2.0),
        (429, {}, b'{"error": {"message": "full", "code": "queue_full"}}', True),
        (502, {}, b"<html>", True),
        (503, {"retry-after": "Fri, 31 Dec 1999"}, b'{"error": 3}', True),
        (400, {"retry-after": "2"}, b'{"error": {"message": "no", "code": "invalid_value"}}', False),
        (500, {}, b"[]", False),
        (504, {}, b'{"error": {"message": "late", "code": "deadline_exceeded"}}', False),
    ],
)
def test_what_is_tried_again(status: int, headers: dict[str, str], content: bytes, again: Any) -> None:
    found = refusal(status, headers, content)
    assert found.status == status
    assert when_again(found) == again


def test_which_failures_of_a_connection_are_tried_again() -> None:
    assert when_again(httpx.ConnectError(""))
    assert when_again(httpx.ReadTimeout(""))
    assert when_again(LostConnection(""))
    assert not when_again(httpx.UnsupportedProtocol(""))
    assert not when_again(ValueError())
    assert not when_again(GeneratorExit())  # type: ignore[arg-type]


def test_a_state_has_the_text_of_either_endpoint() -> None:
    answer: dict[str, Any] = {"id": "i", "model": "m", "status": "in_progress", "position": "4", "response": None}
    assert state_from(answer).text == ""
    assert not state_from(answer).over
    for choice in ({"message": {"content": "x"}}, {"text": "x"}):
        assert state_from(answer | {"response": {"choices": [choice]}}).text == "x"
    assert state_from(answer | {"status": "failed"}).over


def test_it_needs_nothing_of_the_server() -> None:
    """It is installed without it."""
    script = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import ryzanstein_client\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not names & {'services', 'shared', 'nats', 'msgspec'}, names"
    )
    subprocess.run([sys.executable, "-I", "-c", script], check=True, timeout=60)
