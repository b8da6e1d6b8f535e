"""An encoder through the whole house: `up` says what it does, its vectors are those of transformers."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.adapters import make_adapter
from tests.e2e.stack import Stack
from tests.unit.executor.model.encoders.tiny import make_encoder
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_encoder(tmp_path_factory.mktemp("model") / "tiny-encoder", "bert", vocab_size=258)
    for name, data in tiny_files(template=None).items():
        (made / name).write_bytes(data)
    return made


@pytest.fixture(scope="module")
def stack(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ("--model", str(directory), "--dtype", "fp32")
    data, models = tmp_path_factory.mktemp("data"), str(directory.parent)
    with Stack(data, *options, RYZANSTEIN_MODEL_DIRECTORIES=models) as running:
        yield running


def test_up_says_what_it_does(stack: Stack) -> None:
    assert "no answer to show" in stack.output
    assert "it gives embeddings (/v1/embeddings)" in stack.output
    assert "/v1/embeddings -H" in stack.output


def test_up_names_the_same_path_without_a_smoke_test(directory: Path, tmp_path: Path) -> None:
    with Stack(tmp_path, "--model", str(directory), "--no-smoke-test") as stack:
        assert "no answer to show" not in stack.output
        assert "/v1/embeddings -H" in stack.output


def test_vectors_over_http(http: httpx.Client, directory: Path) -> None:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(str(directory)).eval()
    prompts = [[5, 6, 7], [9] * 40, [200]]
    answer = http.post("/v1/embeddings", json={"model": "tiny-encoder", "input": prompts})
    assert answer.status_code == 200, answer.text
    for prompt, item in zip(prompts, answer.json()["data"], strict=True):
        with torch.inference_mode():
            mean = model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0)
        assert item["embedding"] == pytest.approx((mean / mean.norm()).tolist(), abs=1e-4)
    chat = {"model": "tiny-encoder", "messages": [{"role": "user", "content": "Hi"}]}
    refused = http.post("/v1/chat/completions", json=chat)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")
    long = {"model": "tiny-encoder", "input": "x" * 100}
    assert http.post("/v1/embeddings", json=long).json()["error"]["code"] == "context_length_exceeded"
    cut = http.post("/v1/embeddings", json=long | {"truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["prompt_tokens"] == 70


def test_an_adapter_is_refused(http: httpx.Client, directory: Path) -> None:
    make_adapter(directory.parent / "adapter", 1)
    body = {"lora_name": "a", "lora_path": str(directory.parent / "adapter"), "model": "tiny-encoder"}
    refused = http.post("/v1/load_lora_adapter", json=body)
    assert refused.status_code == 400, refused.text
    assert "Encoders take no LoRA adapters; merge" in refused.json()["error"]["message"]
