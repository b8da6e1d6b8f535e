"""Questions about long texts: made as told, asked in each way, and scored by what an endpoint really answers."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from benchmarks.errors import BenchError
from benchmarks.harness import program
from benchmarks.long_context.__main__ import lengths_of, main
from benchmarks.long_context.asking import Endpoint
from benchmarks.long_context.tasks import PLACED, TASKS, make

WINDOW = 600
"""Characters at the end of a prompt that a window reads."""


class Reader(BaseHTTPRequestHandler):
    """Reads numbers out of its prompt: everything, or with kind `window` the end alone; a word is a token."""

    bodies: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "reader"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        tokens = len(prompt.split())
        if tokens > 2000:
            self._say(400, {"error": {"message": "The context has 2000 tokens."}})
            return
        choice = body.get("sparse_attention")
        sparse = tokens - 100 if choice else 0
        seen = prompt[-WINDOW:] if isinstance(choice, dict) and choice.get("kind") == "window" else prompt
        answer = self._answer(seen, prompt)
        shown = {"text": answer} if "prompt" in body else {"message": {"content": answer}}
        usage = {"prompt_tokens": tokens, "prompt_tokens_details": {"sparse_tokens": sparse}}
        self._say(200, {"choices": [shown], "usage": usage})

    @staticmethod
    def _answer(seen: str, prompt: str) -> str:
        name = re.search(r"Question: .* of (\w+)\?", prompt)
        numbers = re.findall(rf"magic number of {name[1]} is (\d+)\.", seen) if name else []
        return f"It is {' and '.join(numbers)}"

    def _say(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Reader.bodies = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Reader)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(program(main), arguments)


@settings(max_examples=30)
@given(st.sampled_from(sorted(TASKS)), st.integers(2000, 30_000), st.floats(0, 1), st.integers(0, 99))
def test_a_question_is_as_long_as_it_is_told_and_has_its_answer(
    task: str, characters: int, depth: float, seed: int
) -> None:
    sample = make(task, 1024, characters, depth, seed)
    assert sample == make(task, 1024, characters, depth, seed), "the seed makes it"
    assert characters * 0.9 < len(sample.text) < characters * 1.2 + 800
    assert sample.score(" and ".join(sample.expected).upper()) == 1.0
    assert sample.score("".join(sample.expected)) == 0.0 or len(sample.expected) == 1, "whole words count"
    assert sample.score("") == 0.0
    assert all(one in sample.text for one in sample.expected), "the text has the answer"
    assert (sample.depth is not None) == (task in PLACED)
    if task == "needle":
        at = sample.text.index(sample.expected[0])
        assert abs(at / len(sample.text) - depth) < 0.1


def test_needles_are_asked_for_in_every_way_and_scored(url: str, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("made.md", "made.json")]
    result = run(
        *("--url", url, "--lengths", "1k,8k", "--task", "needle", "--task", "values", "--depths", "3"),
        *("--samples", "1", "--sparse", "dense", "--sparse", "pages", "--sparse", "window,recent=100"),
        *("--markdown", files[0], "--json", files[1], "--concurrency", "2"),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(Path(files[1]).read_text())
    scores = {(*cell["row"], cell["choice"]): cell for cell in report["tasks"]}
    assert scores["needle", 1024, "dense"]["score"] == scores["needle", 1024, "pages"]["score"] == 1.0
    assert scores["needle", 1024, "window,recent=100"]["score"] == pytest.approx(1 / 3)
    assert scores["values", 1024, "pages"]["score"] == 1.0
    assert scores["values", 1024, "window,recent=100"]["score"] < 1.0
    assert scores["needle", 1024, "dense"]["sparse"] == 0 < scores["needle", 1024, "pages"]["sparse"]
    assert 800 < scores["needle", 1024, "dense"]["prompt_tokens"] < 1024
    assert (scores["needle", 8192, "dense"]["answered"], scores["needle", 8192, "dense"]["failed"]) == (0, 3)
    depths = {(*cell["row"], cell["choice"]): cell["score"] for cell in report["depths"]}
    windowed = [depths[f"depth {depth:g}", 1024, "window,recent=100"] for depth in (0, 0.5, 1)]
    assert windowed == [0.0, 0.0, 1.0], "a window sees the end alone"
    assert "| needle | 1k |" in Path(files[0]).read_text()
    assert f"12 x {url}/v1/chat/completions answered HTTP 400: The context has 2000 tokens." in result.output
    asked = {json.dumps(body.get("sparse_attention")) for body in Reader.bodies[2:]}
    assert asked == {"false", '{"kind": "pages"}', '{"kind": "window", "recent": 100}'}


def test_other_servers_are_asked_without_fields_that_they_do_not_know(url: str) -> None:
    result = run(
        "--url", f"{url}/v1", "--lengths", "512", "--task", "needle", "--sparse", "dense", "--completions"
    )
    assert result.exit_code == 0, result.output
    assert all("sparse_attention" not in body and "prompt" in body for body in Reader.bodies)
    assert "100%" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "2k"], "Name a model, or an endpoint with --url."),
        (["m", "--lengths", "99"], "--lengths '99' is no number of tokens from 256 on"),
        (["m", "--sparse", "pages,bugdet=1"], "--sparse pages,bugdet=1: it has no 'bugdet'"),
        (["m", "--task", "naps"], "'naps' is not one of needle"),
        (["m", "--url", "http://127.0.0.1:9"], "cannot be reached"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_sentence(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output


async def test_an_endpoint_without_usage_that_counts_is_named(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def post(*_: object) -> dict[str, Any]:
        return {"usage": {"prompt_tokens": 5}}

    monkeypatch.setattr(Endpoint, "_post", post)
    async with Endpoint(url, "", "chat") as endpoint:
        with pytest.raises(BenchError, match="cannot be measured"):
            await endpoint.measure()
    assert lengths_of("2k, 300") == [2048, 300]
