"""Sparse attention from a models file and from requests to the kernels, by a model that repeats what it has read."""

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.e2e.stack import Stack
from tests.unit.executor.model.induction import PASSAGE, TOKENS, make_induction_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FILE = """\
models:
  - name: reader
    source: HERE/model
    least: 1
    sparse_attention: {threshold: 128, sinks: 16, recent: 64, budget: 32, share: 0, dense_layers: 0}
"""
LENGTH = 600
FIRST, *REST = PASSAGE


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("long")
    model = make_induction_model(directory / "model")
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(TOKENS)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    (directory / "models.yaml").write_text(FILE.replace("HERE", str(directory)))
    with Stack(directory / "data", "--models-file", str(directory / "models.yaml")) as running:
        yield running


def prompt() -> list[int]:
    rng = random.Random(5)
    noise = [rng.randrange(1, FIRST) for _ in range(LENGTH)]
    return [*noise[:200], *PASSAGE, *noise[200:], FIRST]


def ask(stack: Stack, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """The answer's tokens, and its usage."""
    body = {"model": "reader", "prompt": prompt(), "max_tokens": len(REST), "temperature": 0}
    with httpx.Client(base_url=stack.url, trust_env=False, timeout=60) as http:
        answer = http.post("/v1/completions", json=body | {"return_token_ids": True} | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found["choices"][0]["token_ids"], found["usage"]


def sparse_tokens(usage: dict[str, Any]) -> tuple[int, int]:
    return (
        usage["prompt_tokens_details"].get("sparse_tokens", 0),
        usage["completion_tokens_details"].get("sparse_tokens", 0),
    )


def test_the_models_entry_and_the_request_say_what_is_read(stack: Stack) -> None:
    tokens, usage = ask(stack)
    assert tokens == REST, "the entry chooses pages, and these have the passage"
    assert sparse_tokens(usage) == (len(prompt()) - 128, len(REST))
    tokens, usage = ask(stack, sparse_attention=False)
    assert (tokens, sparse_tokens(usage)) == (REST, (0, 0))
    tokens, usage = ask(stack, sparse_attention={"kind": "window"})
    assert not set(tokens) & set(REST), "a window of 64 tokens has none of it"
    assert sparse_tokens(usage)[1] == len(REST)
    tokens, usage = ask(stack, sparse_attention={"kind": "window", "recent": 450, "threshold": 500})
    assert tokens == REST, "this one is wide enough"
    with httpx.Client(base_url=stack.url, trust_env=False, timeout=60) as http:
        body = {"model": "reader", "prompt": "w1", "sparse_attention": {"budget": 3}}
        refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "below one page of 16 tokens" in refused.json()["error"]["message"]
