"""Sparse attention from a models file and from requests to the kernels, by a model that repeats what it has read."""

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from services.executor.native.library import why_not
from tests.e2e.stack import Stack
from tests.unit.executor.model.induction import END, PASSAGE, TOKENS, make_induction_model
from tests.unit.executor.model.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FILE = """\
models:
  - name: reader
    source: HERE/model
    least: 1
    sparse_attention: {threshold: 128, sinks: 16, recent: 64, budget: 32, share: 0, dense_layers: 0}
  - {name: endless, source: HERE/endless, least: 1, settings: {dtype: bf16, kv_memory: 67108864}}
"""
POSITIONS = 128 << 10  # of the second model: of one small layer, that it takes a minute
NARROW = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 64}
LENGTH = 600
FIRST, *REST = PASSAGE


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("long")
    model = make_induction_model(directory / "model")
    endless = make_model(
        directory / "endless", "llama", vocab_size=TOKENS, max_position_embeddings=POSITIONS, eos_token_id=END, **NARROW
    )
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(TOKENS)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    for where in (model, endless):
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(where)
    (directory / "models.yaml").write_text(FILE.replace("HERE", str(directory)))
    # One layer of the longest steps takes seconds where the machine is busy.
    patient = {"RYZANSTEIN_HUNG_AFTER": "60"}
    with Stack(directory / "data", "--models-file", str(directory / "models.yaml"), **patient) as running:
        yield running


def prompt() -> list[int]:
    rng = random.Random(5)
    noise = [rng.randrange(1, FIRST) for _ in range(LENGTH)]
    return [*noise[:200], *PASSAGE, *noise[200:], FIRST]


def ask(http: httpx.Client, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """The answer's tokens, and its usage."""
    body = {"model": "reader", "prompt": prompt(), "max_tokens": len(REST), "temperature": 0}
    answer = http.post("/v1/completions", json=body | {"return_token_ids": True} | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found["choices"][0]["token_ids"], found["usage"]


def sparse_tokens(usage: dict[str, Any]) -> tuple[int, int]:
    return (
        usage["prompt_tokens_details"].get("sparse_tokens", 0),
        usage["completion_tokens_details"].get("sparse_tokens", 0),
    )


@pytest.mark.nightly
def test_the_models_entry_and_the_request_say_what_is_read(http: httpx.Client) -> None:
    tokens, usage = ask(http)
    assert tokens == REST, "the entry chooses pages, and these have the passage"
    assert sparse_tokens(usage) == (len(prompt()) - 128, len(REST))
    tokens, usage = ask(http, sparse_attention=False)
    assert (tokens, sparse_tokens(usage)) == (REST, (0, 0))
    tokens, usage = ask(http, sparse_attention={"kind": "window"})
    assert not set(tokens) & set(REST), "a window of 64 tokens has none of it"
    assert sparse_tokens(usage)[1] == len(REST)
    tokens, usage = ask(http, sparse_attention={"kind": "window", "recent": 450, "threshold": 500})
    assert tokens == REST, "this one is wide enough"
    body = {"model": "reader", "prompt": "w1", "sparse_attention": {"budget": 3}}
    refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "below one page of 16 tokens" in refused.json()["error"]["message"]


class Stream(threading.Thread):
    """A long answer that is read until `left` is set."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self.tokens = 0
        self.begun, self.left = threading.Event(), threading.Event()
        self._stack = stack
        self.start()

    def run(self) -> None:
        body = {"model": "endless", "prompt": [1, 2], "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        url = f"{self._stack.url}/v1/completions"
        with httpx.stream("POST", url, json=body, trust_env=False, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    self.tokens += 1
                    self.begun.set()
                if self.left.is_set():
                    return


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")
def test_a_prompt_of_128k_tokens_beside_a_stream(stack: Stack) -> None:
    """While it is computed, which is told, the stream goes on; the prompt has the machine to itself afterwards."""
    rng = random.Random(7)
    prompt = [rng.randrange(1, FIRST) for _ in range(POSITIONS - 8)]
    body = {"model": "endless", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    beside = Stream(stack)
    assert beside.begun.wait(120)
    told: list[int] = []
    seen: list[int] = []
    chunks: list[dict[str, Any]] = []
    with (
        httpx.Client(base_url=stack.url, trust_env=False, timeout=300) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith(": prompt "):
                done, of = line.removeprefix(": prompt ").split("/")
                assert int(of) == len(prompt)
                told.append(int(done))
                seen.append(beside.tokens)
                if len(told) == 3:
                    beside.left.set()
            elif line.startswith("data: {"):
                chunks.append(json.loads(line[6:]))
    assert 0 < told[0] < told[1] < told[2] < len(prompt), "it says how far it is"
    assert seen[0] < seen[1] < seen[2], "the stream goes on meanwhile"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] == "length"
    assert (chunks[-1]["usage"]["prompt_tokens"], chunks[-1]["usage"]["completion_tokens"]) == (len(prompt), 8)


def test_a_prompt_longer_than_positions_allow_is_refused_with_both_numbers(http: httpx.Client) -> None:
    body = {"model": "endless", "prompt": [1] * (POSITIONS + 1), "max_tokens": 1}
    refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "131,072" in error["message"] or "131072" in error["message"]
    assert "131,073" in error["message"] or "131073" in error["message"]
