"""A gateway that knows fine-tuning jobs, on a real socket: what it answers is written by the test."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, Any]  # status, and an object or bytes
DIES = 0  # as a status: the connection ends in the middle of the answer, or before it where that is empty


class FakeGateway:
    """`answers`: for "METHOD /path" what is answered, one after the other, the last one again and again."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, list[Answer | Callable[[dict[str, str]], Answer]]] = {}

    def answer(self, path: str, *answers: Answer | Callable[[dict[str, str]], Answer]) -> None:
        self.answers[path] = list(answers)

    def take(self, path: str, query: dict[str, str], body: Any) -> Answer:
        self.asked.append((path, body))
        known = self.answers.get(path)
        if not known:
            return 404, {"error": {"message": f"No route {path}."}}
        found = known.pop(0) if len(known) > 1 else known[0]
        return found(query) if callable(found) else found


@contextmanager
def fake_gateway() -> Iterator[FakeGateway]:
    fake = FakeGateway()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            url = urlsplit(self.path)
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            is_json = self.headers.get("content-type") == "application/json"
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            query["after_event"] = self.headers.get("last-event-id", "")
            status, answer = fake.take(f"{self.command} {url.path}", query, json.loads(raw) if is_json and raw else raw)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.close_connection = status == DIES
            if status == DIES and not data:
                return
            self.send_response(200 if status == DIES else status)
            self.send_header("content-length", str(len(data) + (status == DIES)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = handle_any  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def job(status: str = "queued", **changes: Any) -> dict[str, Any]:
    """As OpenAI's API shows one, with our extensions."""
    return {
        "object": "fine_tuning.job",
        "id": "ftjob-1",
        "created_at": 1_700_000_000,
        "estimated_finish": None,
        "error": None,
        "fine_tuned_model": None,
        "finished_at": None,
        "model": "base",
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
        "hyperparameters": {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": "auto"},
        "organization_id": "",
        "result_files": [],
        "seed": 7,
        "status": status,
        "trained_tokens": None,
        "training_file": "file-1",
        "validation_file": None,
        "lora": {"rank": 16},
        "progress": None,
        "waiting_for": None,
        **changes,
    }  # fmt: skip


def message(number: int, text: str, level: str = "info") -> dict[str, Any]:
    return {
        "object": "fine_tuning.job.event",
        "id": f"ftevent-{number}",
        "created_at": 1_700_000_000 + number,
        "level": level,
        "message": text,
        "type": "message",
        "data": {},
    }


def step(number: int, loss: float, **data: Any) -> dict[str, Any]:
    known = {"step": number, "train_loss": loss, "tokens": 100 * number, "seconds": 0.5, **data}
    text = f"Step {number}/4: training loss={loss:.2f}"
    return {**message(100 + number, text), "type": "metrics", "data": known}


def page(*newest_first: dict[str, Any], has_more: bool = False) -> Answer:
    return 200, {"object": "list", "data": list(newest_first), "has_more": has_more}


def stream(*events: dict[str, Any]) -> bytes:
    """Server-sent events, as a gateway writes them; their ids are their positions."""
    parts = [f"data: {json.dumps(event)}\nid: {event['created_at']}\n\n" for event in events]
    return ("retry: 1000\n" + ":\n\n".join(parts)).encode()


def fields_of(form: bytes) -> dict[str, str]:
    """Of a multipart form, file included."""
    found = re.findall(rb'name="(\w+)"[^\r]*\r\n(?:[\w-]+: [^\r]*\r\n)*\r\n(.*?)\r\n--', form, re.DOTALL)
    return {name.decode(): value.decode() for name, value in found}
