"""`--draft-model` on a real stack: a draft model that is always right, as the model's further layers add nothing."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from services.executor.native.library import why_not
from tests.e2e.stack import Stack
from tests.unit.executor.model.tiny import make_model
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}"),
]

FILE = """\
models:
  - {name: alone, source: HERE/target, least: 1, settings: {dtype: bf16, kv_dtype: bf16}}
  - name: tight
    source: HERE/target
    least: 1
    settings: {draft_model: HERE/twin, dtype: bf16, kv_dtype: bf16, kv_memory: 700000, context_length: 128}
  - name: small
    source: HERE/target
    least: 1
    settings: {draft_model: HERE/draft, dtype: bf16, kv_dtype: bf16, kv_memory: 6000000, context_length: 1024}
"""
LAYERS, LENGTH = 16, 700
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}


def write_models(directory: Path) -> None:
    """`target`, a `twin` of it, and `draft`, its first layer: the others put out zeros."""
    made = make_model(
        directory / "target",
        "llama",
        num_hidden_layers=LAYERS,
        head_dim=32,
        vocab_size=258,
        max_position_embeddings=1024,
        eos_token_id=1,
        **SIZES,
    )
    for name, content in tiny_files().items():
        (made / name).write_bytes(content)
    tensors = load_file(made / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layers." in name and ".layers.0." not in name and ("o_proj" in name or "down_proj" in name):
            tensor.zero_()
    first = {name: one for name, one in tensors.items() if ".layers." not in name or ".layers.0." in name}
    for kind, own, layers in (("target", tensors, LAYERS), ("twin", tensors, LAYERS), ("draft", first, 1)):
        (directory / kind).mkdir(exist_ok=True)
        for file in made.glob("*.json*"):
            (directory / kind / file.name).write_bytes(file.read_bytes())
        config = json.loads((made / "config.json").read_text())
        (directory / kind / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        save_file(own, directory / kind / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("drafts")
    write_models(directory)
    (directory / "models.yaml").write_text(FILE.replace("HERE", str(directory)))
    options = ("--model", str(directory / "target"), "--draft-model", str(directory / "draft"))
    more = ("--dtype", "bf16", "--kv-dtype", "bf16", "--models-file", str(directory / "models.yaml"))
    settings = {"KV_MEMORY": 32 << 20, "KV_HOST_MEMORY": 32 << 20, "THREADS": 1, "HUNG_AFTER": 60}
    environment = {f"RYZANSTEIN_{name}": str(value) for name, value in settings.items()}
    with Stack(directory / "data", *options, *more, **environment) as running:
        yield running


def text_of(
    stack: Stack, model: str, length: int, after: int = 0, then: Callable[[], None] = lambda: None
) -> tuple[str, str]:
    """The request's id, and its text; once `after` characters of it have come, `then` is called."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": length, "seed": 5, "stream": True}
    found, told, ended = "", False, False
    with (
        httpx.Client(base_url=stack.url, trust_env=False, timeout=120) as http,
        http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, f"{line}\n{stack.logs()}"
                found += "".join(choice["text"] for choice in chunk["choices"])
            if not told and len(found) > after:
                told = True
                then()
            ended = line == "data: [DONE]" or (ended and not line)
        assert ended
    return answer.headers["x-request-id"], found


def lines_of(stack: Stack, event: str) -> list[dict[str, Any]]:
    lines = (stack.data_dir / "logs" / "executor-0.log").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in found if line["event"] == event]


def metric(stack: Stack, name: str, model: str) -> float:
    address = lines_of(stack, "ready")[0]["address"]
    text = httpx.get(f"http://{address}/metrics", trust_env=False, timeout=60).text
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(f"ryzanstein_executor_{name}_total{{") and f'model="{model}"' in line
    )


def ranks_of(stack: Stack, model: str) -> list[int]:
    """Their processes."""
    (group,) = [one for one in stack.status()["groups"] if one["model"] == model]
    return [rank["pid"] for rank in group["ranks"]]


def test_a_text_is_the_same_with_a_draft_model_and_after_its_rings_death(stack: Stack) -> None:
    _, alone = text_of(stack, "alone", LENGTH)
    assert text_of(stack, "target", LENGTH)[1] == alone
    assert metric(stack, "draft_model_accepted_tokens", "target") > 0
    assert metric(stack, "draft_model_drafted_tokens", "alone") == 0
    ranks = ranks_of(stack, "target")

    def kill_ring() -> None:
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)

    request, text = text_of(stack, "target", LENGTH, after=20, then=kill_ring)
    assert text == alone
    accepted = [line for line in lines_of(stack, "accepted") if line["request_id"] == request]
    assert len(accepted) >= 2, "the ring died in the middle, and its next life went on"


def test_a_draft_model_that_does_not_fit_is_left_out_and_said(stack: Stack) -> None:
    answer = httpx.get(f"{stack.url}/v1/models", trust_env=False, timeout=60)
    models = {model["id"]: model for model in answer.json()["data"]}
    assert models["target"]["draft_model"] == "draft"
    assert models["target"]["draft_model_left_out"] is None
    assert models["alone"]["draft_model"] is None
    assert models["tight"]["draft_model"] == "twin"
    assert "fewer than one sequence of 128 takes" in models["tight"]["draft_model_left_out"]
    assert text_of(stack, "tight", 64)[1] == text_of(stack, "alone", 64)[1]


def test_a_spilled_session_is_brought_back_when_its_next_request_is_announced(stack: Stack) -> None:
    """A token is a byte here. Three others take more than there is room for."""
    talk = [{"role": "user", "content": "ten words, " * 40}, {"role": "assistant", "content": "Here. " * 30}]
    (ready,) = [line for line in lines_of(stack, "leader_ready") if line["model"] == "small"]
    assert ready["blocks"] * 16 < 3 * 700
    with httpx.Client(base_url=stack.url, trust_env=False, timeout=120) as http:

        def post(path: str, session: str, messages: list[dict[str, str]]) -> dict[str, Any]:
            body = {"model": "small", "messages": messages, "max_tokens": 2}
            answer = http.post(path, json=body, headers={"x-session-id": session})
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        first = post("/v1/sessions/talk/prefill?wait=60", "talk", talk)
        for other in "abc":
            post("/v1/chat/completions", other, [{"role": "user", "content": other * 700}])
        again = post("/v1/sessions/talk/prefill?wait=60", "talk", talk)
        question = [*talk, {"role": "user", "content": "And then?"}]
        usage = post("/v1/chat/completions", "talk", question)["usage"]
    assert first["computed_tokens"] == first["prompt_tokens"] > 600
    assert again["computed_tokens"] <= 16, "a block at most: the others are restored"
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] // 16 * 16
