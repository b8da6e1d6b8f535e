"""The chat client against a server that is real and misbehaves."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from services.cli.chat_client import PLAIN_TOKENS, ChatClient, NoChatTemplate, answer_once
from services.cli.gateway_client import EventReader
from shared.errors import ConfigurationError, RyzansteinError, Unavailable

CHUNK = 'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'


class Handler(BaseHTTPRequestHandler):
    """Answers with what the test has put into `status` and `body`."""

    status: ClassVar[int] = 200
    body: ClassVar[str] = ""
    models: ClassVar[str] = '{"data":[{"id":"m"}]}'
    asked: ClassVar[list[bytes]] = []
    chats: ClassVar[bool] = True  # whether the model has a chat template

    def do_GET(self) -> None:
        self._send(200, self.models)

    def do_POST(self) -> None:
        self.asked.append(self.rfile.read(int(self.headers["content-length"])))
        if self.chats or "chat" not in self.path:
            self._send(self.status, self.body)
        else:
            self._send(400, '{"error":{"message":"No chat template.","code":"no_chat_template"}}')

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatClient]:
    monkeypatch.setattr(Handler, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    client = ChatClient(f"http://127.0.0.1:{server.server_address[1]}")
    yield client
    client.close()
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_conversation_is_kept(client: ChatClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "body", CHUNK % "Hel" + CHUNK % "lo" + "data: [DONE]\n\n")
    assert "".join(client.ask("Hi")) == "Hello"
    assert "".join(client.ask("Again", max_tokens=3, temperature=0)) == "Hello"
    assert b'"assistant","content":"Hello"' in Handler.asked[1].replace(b", ", b",").replace(b": ", b":")
    assert b'"max_tokens"' in Handler.asked[1]


def test_how_far_a_long_prompt_is(client: ChatClient, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "retry: 500\n: prompt 512/6800\n: prompt 1024/6800\n: prompt x/y\n: prompt 1/2 or so\n"
    monkeypatch.setattr(Handler, "body", lines + CHUNK % "Hello" + "data: [DONE]\n\n")
    assert "".join(client.ask("Hi")) == "Hello"
    told: list[tuple[int, int]] = []
    client.on_progress = lambda computed, total: told.append((computed, total))
    assert "".join(client.ask("Hi")) == "Hello"
    assert told == [(512, 6800), (1024, 6800)]


TEXT = 'data: {"choices":[{"index":0,"text":"%s"}]}\n\n'


def test_a_model_without_a_chat_template_goes_on_with_texts(
    client: ChatClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "chats", False)
    monkeypatch.setattr(Handler, "body", TEXT % "on a" + TEXT % " time" + "data: [DONE]\n\n")
    assert "".join(client.ask("Once up")) == "on a time"
    assert client.plain
    assert "".join(client.ask("Once up", max_tokens=3)) == "on a time"
    chat, *plain = map(json.loads, Handler.asked)
    assert "messages" in chat
    assert [(body["prompt"], body["max_tokens"]) for body in plain] == [("Once up", PLAIN_TOKENS), ("Once up", 3)]
    assert client.messages == []


async def test_a_question_to_it_is_refused_and_a_text_is_not(
    client: ChatClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "chats", False)
    monkeypatch.setattr(Handler, "body", TEXT % "on a time" + "data: [DONE]\n\n")
    with pytest.raises(NoChatTemplate):
        [text async for text in answer_once(client.url, "Hi", max_tokens=3)]
    texts = [text async for text in answer_once(client.url, "Once up", max_tokens=3, plain=True)]
    assert texts == ["on a time"]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, '{"error":{"message":"The prompt is too long."}}', "The prompt is too long."),
        (502, "<html>", "The gateway answered 502 Bad Gateway"),
        (200, 'data: {"error":{"message":"It broke."}}\n\n', "It broke."),
        (200, CHUNK % "half", "closed the stream before the answer was whole"),
        (200, "data: <html>\n\n", "is not a gateway"),
        (200, 'data: {"choices":[7]}\n\n', "is not a gateway"),
        (500, '{"error":"a string"}', "The gateway answered 500"),
    ],
)
def test_what_goes_wrong_is_said(
    client: ChatClient, monkeypatch: pytest.MonkeyPatch, status: int, body: str, message: str
) -> None:
    monkeypatch.setattr(Handler, "status", status)
    monkeypatch.setattr(Handler, "body", body)
    with pytest.raises(RyzansteinError, match=message):
        list(client.ask("Hi"))
    assert client.messages == [], "a half answer is not part of the conversation"


def test_no_model_yet(client: ChatClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "models", '{"data":[]}')
    with pytest.raises(Unavailable, match="serves no model yet"):
        client.choose_model()


@pytest.mark.parametrize("body", ["<html>", "[]", '{"data":[{}]}', '{"models":[]}', ""])
def test_something_else_answers(client: ChatClient, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(Handler, "models", body)
    with pytest.raises(ConfigurationError, match=r"is not a gateway.*--url"):
        client.choose_model()


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "http://", "http://[::1", "http://a:b:c", "ftp://host"])
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is not the address of a gateway; write it as http://host:port"):
        ChatClient(url)


async def test_a_single_answer(client: ChatClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "body", CHUNK % "Hel" + CHUNK % "lo" + "data: [DONE]\n\n")
    parts = [text async for text in answer_once(client.url, "Hi", max_tokens=3)]
    assert parts == ["Hel", "lo"]
    for status, body, message in ((429, "", "answered 429"), (200, CHUNK % "half", "closed the stream")):
        monkeypatch.setattr(Handler, "status", status)
        monkeypatch.setattr(Handler, "body", body)
        with pytest.raises(RyzansteinError, match=message):
            [text async for text in answer_once(client.url, "Hi", max_tokens=3)]
    with pytest.raises(Unavailable, match="did not answer"):
        [text async for text in answer_once("http://127.0.0.1:1", "Hi", max_tokens=3)]


def test_nobody_there() -> None:
    client = ChatClient("http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="start the stack with `ryzanstein up`"):
        client.choose_model()
    client.close()


def test_an_event_is_there_with_its_blank_line() -> None:
    reader = EventReader()
    lines = ["", "id: 7", ": sign of life", "data: a", "data:b", "event: step", "", "data: c", "", "id: 8"]
    events = [event for line in lines if (event := reader.take(line)) is not None]
    assert events == [("a\nb", "7"), ("c", "7")]
