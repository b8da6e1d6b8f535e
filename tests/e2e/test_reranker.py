"""Rerankers through the whole house, a cross-encoder and a language model: their scores are those of transformers."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, processors

from services.cli.target import LocalSettings
from services.gateway.dialects.pooling.prompts import INSTRUCT, JUDGE
from shared.model_store.catalog import DEFAULT_MODEL, ensure_model
from tests.e2e.reference import load_reference
from tests.e2e.stack import Stack
from tests.unit.executor.model.encoders.tiny import make_encoder
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
QUERY, DOCUMENTS = "what", ["is it", "so", "it is what it is"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with one class, whose tokenizer joins pairs as BERT's does."""
    made = tmp_path_factory.mktemp("model") / "tiny-reranker"
    make_encoder(made, "bert", "classes", vocab_size=258, num_labels=1)
    files = tiny_files(template=None)
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>",
        pair="<|start|> $A <|end|> $B:1 <|end|>:1",
        special_tokens=[("<|start|>", 0), ("<|end|>", 1)],
    )
    files["tokenizer.json"] = tokenizer.to_str().encode()
    for name, data in files.items():
        (made / name).write_bytes(data)
    return made


@pytest.fixture(scope="module")
def stack(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("data"), "--model", str(directory), "--dtype", "fp32") as running:
        yield running


def test_scores_over_http(http: httpx.Client, directory: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(str(directory)).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    expected = []
    for document in DOCUMENTS:
        pair = tokenizer.encode(QUERY, document)
        with torch.inference_mode():
            logits = model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits
        expected.append(logits[0, 0].item())
    body = {"model": "tiny-reranker", "query": QUERY, "documents": DOCUMENTS}
    ranked = http.post("/v1/rerank", json=body | {"use_activation": False})
    assert ranked.status_code == 200, ranked.text
    shown = {one["index"]: one["relevance_score"] for one in ranked.json()["results"]}
    assert [shown[index] for index in range(3)] == pytest.approx(expected, abs=1e-4)
    scores = http.post("/v1/score", json={"model": "tiny-reranker", "text_1": QUERY, "text_2": DOCUMENTS}).json()
    likely = torch.sigmoid(torch.tensor(expected)).tolist()
    assert [one["score"] for one in scores["data"]] == pytest.approx(likely, abs=1e-4)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_language_model_answers_yes_or_no(tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    directory = ensure_model(DEFAULT_MODEL, LocalSettings().store, lambda stage, done, total: None)[1]
    query, documents = ("What is the capital of France?", ["Bread is baked.", "Paris is the capital of France."])
    with (
        Stack(tmp_path, "--dtype", "fp32", "--no-smoke-test") as stack,
        httpx.Client(base_url=stack.url, trust_env=False, timeout=60) as http,
    ):
        answer = http.post("/v1/score", json={"model": DEFAULT_MODEL, "queries": query, "documents": documents})
        assert answer.status_code == 200, answer.text
    tokenizer, model = AutoTokenizer.from_pretrained(str(directory)), load_reference(directory)
    answers = [tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no")]
    for document, scored in zip(documents, answer.json()["data"], strict=True):
        pair = f"<Instruct>: {INSTRUCT}\n<Query>: {query}\n<Document>: {document}"
        chat = [{"role": "system", "content": JUDGE}, {"role": "user", "content": pair}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            logits = model(inputs["input_ids"]).logits[0, -1, answers]
        assert scored["score"] == pytest.approx(logits.softmax(0)[0].item(), abs=1e-4)
