"""Models whose weights were quantized while they were loaded: the kernels against PyTorch with unpacked weights."""

from itertools import product
from pathlib import Path

import pytest
import torch

from services.executor.collectives.base import Collectives
from services.executor.model.quantizing import CODECS
from tests.unit.executor.cpu.test_decoder import errors, runner_of, truth
from tests.unit.executor.model.lanes import LOWERED, STYLES, in_lanes, natively
from tests.unit.executor.model.ring import in_shared_memory, mixed_script
from tests.unit.executor.model.tiny import make_model

pytestmark = natively

# Of inner widths that two and three ranks do not share equally.
WIDE = {"hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 5, "num_key_value_heads": 5}


def model_of(directory: Path, model_type: str) -> Path:
    return make_model(directory, model_type, head_dim=32, **WIDE)


@pytest.mark.parametrize(
    ("model_type", "weights"),
    in_lanes(
        product(["llama", "qwen2", "gemma3_text", "gemma4_text", "qwen3_moe"], CODECS),
        [("llama", "q4_k"), ("llama", "fp8"), ("qwen3_moe", "q4_k")],
        [("llama", codec) for codec in CODECS],
    ),
)
def test_as_near_to_the_truth_as_with_unpacked_weights(tmp_path: Path, model_type: str, weights: str) -> None:
    directory = model_of(tmp_path, model_type)
    native = runner_of(directory, native=True, weights=weights)
    assert native.is_native
    expected = truth(directory, mixed_script()[0].sequences)
    ours = errors(native, expected)
    theirs = errors(runner_of(directory, native=False, weights=weights), expected)
    spread = torch.stack([row.std() for row in expected]).mean()
    # What int8 activations add is as much as int8 weights do.
    assert ours.mean() < theirs.mean() + 0.02 * spread


@pytest.mark.parametrize("model_type", in_lanes(LOWERED, ["gpt_oss", "llama", "qwen3_5_text"], STYLES))
def test_every_family_is_served(tmp_path: Path, model_type: str) -> None:
    directory = model_of(tmp_path, model_type)
    native = runner_of(directory, native=True, weights="q8_0")
    expected = truth(directory, mixed_script()[0].sequences)
    # PyTorch with the same weights: up to 0.17.
    assert errors(native, expected).mean() < 0.2 * torch.stack([row.std() for row in expected]).mean()


@pytest.mark.parametrize(
    ("model_type", "weights"),
    in_lanes(
        [
            *(("llama", codec) for codec in ("int8", "q4_k", "int4", "fp8")),
            ("qwen2_moe", "q8_0"),
            ("gemma4_text", "q4_k"),
            ("deepseek_v3", "q8_0"),
        ],
        [("llama", "int4"), ("llama", "fp8")],
    ),
)
@pytest.mark.parametrize("ranks", in_lanes([2, 3], [3], []))
def test_ranks_share_quantized_weights(tmp_path: Path, ranks: int, model_type: str, weights: str) -> None:
    directory = model_of(tmp_path, model_type)
    expected = truth(directory, mixed_script()[0].sequences)

    def work(ring: Collectives) -> torch.Tensor:
        runner = runner_of(directory, native=True, collectives=ring, weights=weights)
        assert runner.is_native
        return errors(runner, expected)

    ours = in_shared_memory(ranks, work)[0]
    alone = errors(runner_of(directory, native=True, weights=weights), expected)
    assert ours.mean() < 1.3 * alone.mean()


def test_a_tied_head_is_held_once(tmp_path: Path) -> None:
    packed = runner_of(model_of(tmp_path, "llama"), native=True, weights="int4").packed
    assert packed.head is packed.embedding
    assert packed.head.form.bits == 6
    assert packed.layers[0].down.form.bits == 4
