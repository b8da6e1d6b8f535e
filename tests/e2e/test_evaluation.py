"""What evaluation harnesses send, word for word, against transformers' own log-softmax of the real model in fp32.

The shapes are those of lm-eval 0.4 (`local-completions`): token ids, several prompts at a time, one token more than
is wanted of each; the sum over a continuation, and whether it is the greedy one, are read as it reads them. lm-eval
itself is run in `tests/clients`.
"""

from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.model_store.catalog import DEFAULT_MODEL
from tests.e2e.reference import load_reference
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOLERANCE = 1e-3  # of a sum over some tokens
CONTEXTS = {
    "The capital of France is": [" Paris", " Berlin", " London, of course"],
    "Question: what do bees make?\nAnswer:": [" honey", " bread", " steel and glass"],
}
PASSAGE = "Once upon a time there was a river. " * 40  # more tokens than a step computes of a prompt


@pytest.fixture(scope="module", params=[pytest.param("two_groups", marks=pytest.mark.nightly), "one_ring_of_two"])
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    stack: Stack = request.getfixturevalue(request.param)
    with httpx.Client(base_url=stack.url, trust_env=False, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def reference(model_directory: Path) -> "Reference":
    return Reference(model_directory)


class Reference:
    """transformers."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoTokenizer

        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(str(directory))
        self.model = load_reference(directory)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def log_softmax(self, tokens: list[int]) -> Any:
        """[tokens - 1, vocabulary]: of each token but the first."""
        with self.torch.inference_mode():
            logits = self.model(self.torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        return logits.log_softmax(dim=-1)

    def judged(self, tokens: list[int], begin: int) -> tuple[float, bool]:
        """(log likelihood of the tokens from `begin` on, whether they are the greedy ones)."""
        rows = self.log_softmax(tokens)[begin - 1 :]
        wanted = self.torch.tensor(tokens[begin:])
        chosen = rows.gather(1, wanted[:, None])
        return float(chosen.sum()), bool((rows.argmax(dim=-1) == wanted).all())


def ask(http: httpx.Client, prompts: list[list[int]], **changes: Any) -> list[dict[str, Any]]:
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True} | changes
    answer = http.post("/v1/completions", json={"model": DEFAULT_MODEL, "prompt": prompts} | body)
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=itemgetter("index"))


def read(choice: dict[str, Any], begin: int) -> tuple[float, bool]:
    """As lm-eval reads it: the last token is the one that had to be generated."""
    own = choice["logprobs"]["token_logprobs"][begin:-1]
    top = choice["logprobs"]["top_logprobs"][begin:-1]
    return sum(own), all(one == max(most.values()) for one, most in zip(own, top, strict=True))


def test_continuations(http: httpx.Client, reference: Reference) -> None:
    """Multiple choice: every continuation of every context, several prompts a request."""
    pairs = [(reference.ids(context), reference.ids(end)) for context, ends in CONTEXTS.items() for end in ends]
    choices = ask(http, [context + end for context, end in pairs])
    judged = [read(choice, len(context)) for choice, (context, _) in zip(choices, pairs, strict=True)]
    for (ours, greedy), (context, end) in zip(judged, pairs, strict=True):
        theirs, their_greedy = reference.judged(context + end, len(context))
        assert (ours, greedy) == (pytest.approx(theirs, abs=TOLERANCE), their_greedy)
    assert judged[0][1], "the capital of France"
    assert max(judged[:3]) == judged[0]


def test_a_passage_of_its_own(http: httpx.Client, reference: Reference) -> None:
    """Perplexity: the end of the text goes before it, as lm-eval puts it there."""
    tokens = [reference.tokenizer.eos_token_id, *reference.ids(PASSAGE)]
    assert len(tokens) > 300
    (choice,) = ask(http, [tokens])
    ours, _ = read(choice, 1)
    assert ours == pytest.approx(reference.judged(tokens, 1)[0], rel=1e-4)
    (alone,) = ask(http, [tokens], max_tokens=0)
    assert alone["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"][:-1]


@pytest.mark.nightly
def test_a_known_prompt_is_told_in_whole_too(http: httpx.Client, reference: Reference) -> None:
    """Its beginning lies in the prefix cache: of a row that is not computed nothing could be told."""
    tokens = reference.ids(PASSAGE)
    ask(http, [tokens], logprobs=None, echo=None)
    first, second = (ask(http, [tokens])[0]["logprobs"] for _ in range(2))
    assert len(first["tokens"]) == len(tokens) + 1
    assert first["token_logprobs"] == pytest.approx(second["token_logprobs"], abs=1e-5)


def test_vllms_list(http: httpx.Client, reference: Reference) -> None:
    text = "The sun rises in the east"
    tokens = reference.ids(text)
    (choice,) = ask(http, [tokens], echo=None, logprobs=None, prompt_logprobs=3)
    truth = reference.log_softmax(tokens)
    assert choice["prompt_logprobs"][0] is None
    for token, row, told in zip(tokens[1:], truth, choice["prompt_logprobs"][1:], strict=True):
        own = told[str(token)]
        assert own["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        assert own["rank"] == 1 + int((row > row[token]).sum())
        best = row.topk(3)
        assert {str(one) for one in best.indices.tolist()} <= told.keys()
        assert own["decoded_token"] == reference.tokenizer.decode([token])
        ranked = {entry["rank"]: entry["logprob"] for entry in told.values()}
        assert [ranked[rank] for rank in (1, 2, 3)] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_stop_token_as_the_one_that_had_to_come(http: httpx.Client, reference: Reference) -> None:
    """Whatever the model would say next, the continuation keeps its last token."""
    tokens = reference.ids("Yes.")
    end = reference.tokenizer.eos_token_id
    (choice,) = ask(http, [tokens], logit_bias={str(end): 100})
    assert choice["finish_reason"] == "stop"
    assert read(choice, 1)[0] == pytest.approx(reference.judged(tokens, 1)[0], abs=TOLERANCE)
