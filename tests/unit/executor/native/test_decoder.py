"""The native kernels against transformers: nearer to the float32 truth than PyTorch in bf16 is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.executor.kv_cache.store import KvStore, StoreShape
from services.executor.model.backend import make_runner
from services.executor.model.collectives import SingleRank
from services.executor.model.loader import load_config, load_model
from services.executor.model.runner import ModelRunner
from services.executor.model.sharding import ShardLayout
from services.executor.native.library import why_not
from services.executor.native.lowering import FAMILIES
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS, Script, mixed_script
from tests.unit.executor.model.tiny import make_model

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")

CHANGES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 10},
    "ministral": {
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    "gemma2": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
    },
}


def runner_of(directory: Path, native: bool, threads: int = 2, num_blocks: int = NUM_BLOCKS) -> ModelRunner:
    config = load_config(directory)
    layout = ShardLayout.from_config(config, 1, 0)
    dtype = torch.bfloat16
    model = load_model(directory, dtype, layout, SingleRank(), CPU, lambda done, total: None)
    shape = StoreShape(config.num_hidden_layers, BLOCK_SIZE, layout.kv_heads.size, layout.head_dim, dtype)
    store = KvStore(shape, num_blocks, CPU)
    if native:
        return make_runner(model, store, layout.q_heads.size, SingleRank(), CPU, threads)
    return ModelRunner(model, store, SingleRank(), CPU)


def truth(directory: Path, sequences: list[list[int]]) -> list[Tensor]:
    """float32 logits of the bf16 weights."""
    model = AutoModelForCausalLM.from_pretrained(
        str(directory), attn_implementation="eager", dtype=torch.bfloat16
    )
    model = model.float()
    with torch.inference_mode():
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def errors(runner: ModelRunner, expected: list[Tensor]) -> Tensor:
    """Absolute errors over a script of chunked prefill, decodes and both at once."""
    found = []
    for plan, sampled in mixed_script()[1]:
        logits = runner.forward(plan)
        assert logits is not None
        assert logits.shape[0] == len(sampled)
        found += [
            row - expected[sequence][position]
            for row, (sequence, position) in zip(logits, sampled, strict=True)
        ]
    return torch.cat(found).abs()


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_nearer_to_the_truth_than_pytorch(tmp_path: Path, model_type: str) -> None:
    directory = make_model(tmp_path, model_type, **{"head_dim": 32, **CHANGES.get(model_type, {})})
    native, plain = runner_of(directory, native=True), runner_of(directory, native=False)
    assert native.is_native
    assert not plain.is_native
    expected = truth(directory, mixed_script()[0].sequences)
    assert expected[0].std() > 0.1, "logits too flat for the comparison to mean anything"
    ours, theirs = errors(native, expected), errors(plain, expected)
    assert ours.mean() < theirs.mean()
    assert ours.max() < 2 * theirs.max()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_contexts_are_split_over_threads(tmp_path: Path, threads: int) -> None:
    """One decode of a long context: the threads share its keys and merge what they find."""
    directory = make_model(
        tmp_path,
        "llama",
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    length = 1030
    script = Script([length], num_blocks=300)
    native = runner_of(directory, native=True, threads=threads, num_blocks=300)
    expected = truth(directory, script.sequences)[0]
    for begin in range(0, length - 2, 257):
        native.forward(script.step({0: min(257, length - 2 - begin)}, sample=False)[0])
    for position in (length - 2, length - 1):
        logits = native.forward(script.step({0: 1})[0])
        assert logits is not None
        assert (logits[0] - expected[position]).abs().mean() < 0.03 * expected[position].std()


def test_every_layer_is_a_sign_of_progress(tmp_path: Path) -> None:
    runner = runner_of(make_model(tmp_path, "llama", head_dim=32), native=True)
    layers: list[None] = []
    runner.forward(mixed_script()[1][0][0], lambda: layers.append(None))
    assert len(layers) == 3


@pytest.mark.parametrize(
    "changes", [{"head_dim": 16}, {"hidden_act": "relu"}], ids=["narrow heads", "unknown activation"]
)
def test_what_does_not_fit_runs_through_pytorch(tmp_path: Path, changes: dict[str, Any]) -> None:
    runner = runner_of(make_model(tmp_path, "llama", **{"head_dim": 32, **changes}), native=True)
    assert not runner.is_native
    runner.warm_up()
