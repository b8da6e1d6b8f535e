"""The GPU's decoder, interpreted on the CPU, against transformers and against PyTorch's way through the same store."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

pytest.importorskip("triton", reason="the GPU's decoder is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.progress import ProgressCounter
from services.executor.core.step_plan import to_bytes
from services.executor.gpu.decoder import GpuDecoder
from services.executor.sampling.candidates import WANT, RowLogits
from services.executor.worker.backends import gpu_decoder
from services.executor.worker.backends.catalog import backend_of
from services.executor.worker.backends.gpu_decoder import _why_no_triton, has_triton
from services.executor.worker.runner import ModelRunner
from tests.unit.executor.gpu.gpu_runners import (
    RING_STEPS,
    SMALL,
    STEPS,
    on_gpu_ring,
    runner_of,
    small_model,
    small_script,
)
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.lanes import LOWERED
from tests.unit.executor.model.tiny import build, reference_logits

# Families that CPUs alone have a decoder for.
NATIVE = {
    *("axk1", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "flex_olmo", "glm4_moe_lite", "gpt_oss"),
    *("hunyuan_v1_moe", "minicpm3", "minimax_m2", "mistral4", "olmoe", "youtu"),
    *("gemma4_text", "gemma4_unified_text"),
    *("granitemoehybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
OTHERS = sorted(set(LOWERED) - NATIVE)
# Families that every run of the tests computes on two ranks: with caps, with a KV head that both have, with one tensor
# for queries, keys and values, with experts. The others' ranks share all of their code with these.
SHARDED = ("gemma2", "llama", "phi3", "qwen2_moe")
# And on one: with windows and norms of heads, with experts chosen by groups, with scales.
ALONE = ("gemma3_text", "glm4_moe", "granite")


def worst_error(runner: ModelRunner, expected: list[Tensor], steps: Sequence[dict[int, int]]) -> float:
    """Of the logits of `steps`; 0 but on the leader."""
    script = small_script()
    worst = 0.0
    for step in steps:
        plan, sampled = script.step(dict(step), every_token=True)
        logits = runner.forward(plan)
        if logits is None:
            continue
        assert isinstance(logits, Tensor)
        assert len(logits) == len(sampled)
        for row, (sequence, position) in zip(logits, sampled, strict=True):
            worst = max(worst, float((row - expected[sequence][position]).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("model_type", "world_size"),
    [
        *((family, 1) for family in ALONE),
        *((family, 2) for family in SHARDED),
        *(
            pytest.param(family, ranks, marks=pytest.mark.nightly)
            for family in OTHERS
            for ranks in (1, 2)
            if family not in (SHARDED if ranks == 2 else ALONE)
        ),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, model_type: str, world_size: int) -> None:
    directory = small_model(tmp_path, model_type)
    expected = reference_logits(directory, small_script().sequences)
    assert expected[0].std() > 0.1, "logits too flat for the comparison to mean anything"

    def error(collectives: Collectives) -> float:
        runner = runner_of(directory, collectives)
        assert isinstance(runner._decoder, GpuDecoder)
        return worst_error(runner, expected, STEPS if world_size == 1 or model_type == "llama" else RING_STEPS)

    assert max(on_gpu_ring(world_size, error)) < 1e-4


@pytest.mark.parametrize(
    ("name", "world_size"), [("olmoe", 1), pytest.param("ernie4_5_moe", 2, marks=pytest.mark.slow)]
)
def test_experts_of_models_that_pytorch_computes(tmp_path: Path, name: str, world_size: int) -> None:
    """By the kernels, which keep no weights twice."""
    build(name, settings_of(name)).save_pretrained(str(tmp_path))
    expected = reference_logits(tmp_path, small_script().sequences)

    def error(collectives: Collectives) -> float:
        runner = runner_of(tmp_path, collectives)
        assert runner._decoder is None
        experts = [module for module in runner._model.modules() if hasattr(module, "is_transposed")]
        assert experts
        assert not any(parameter.numel() for module in experts for parameter in module.parameters())
        return worst_error(runner, expected, RING_STEPS)

    assert max(on_gpu_ring(world_size, error)) < 1e-4


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gemma2", marks=pytest.mark.nightly)])
def test_in_bf16_it_is_about_as_near_to_the_truth_as_pytorch(tmp_path: Path, model_type: str) -> None:
    """Of the same rounded weights, which float32 holds as they are."""
    directory = small_model(tmp_path, model_type)
    plan, _ = small_script().step({0: 8, 1: 3}, every_token=True)
    ours, theirs, truth = (
        _rounded(runner_of(directory, SingleRank(), dtype, gpu=gpu)).forward(plan)
        for dtype, gpu in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False))
    )
    assert isinstance(ours, Tensor)
    assert isinstance(theirs, Tensor)
    assert isinstance(truth, Tensor)
    assert (ours - truth).abs().mean() < 1.2 * (theirs - truth).abs().mean()


def _rounded(runner: ModelRunner) -> ModelRunner:
    for parameter in runner._model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
    return runner


def test_hidden_states_are_summed_as_pytorch_sums_them(tmp_path: Path) -> None:
    directory = small_model(tmp_path, "gemma3_text")
    plan, _ = small_script().step({0: 4, 1: 3}, sample=False)
    plan = structs.replace(plan, pools=to_bytes([(0, 2), (3, 7)]))
    sums = []
    for gpu in (True, False):
        runner = runner_of(directory, SingleRank(), gpu=gpu)
        logits = runner.forward(plan)
        assert isinstance(logits, Tensor)
        assert logits.shape == (0, runner.vocab_size)
        sums.append(runner.pooled)
    np.testing.assert_allclose(sums[0], sums[1], atol=1e-4)


def test_greedy_rows_are_searched_on_the_device(tmp_path: Path) -> None:
    directory = small_model(tmp_path, "llama")
    plan, _ = small_script().step({0: 5, 1: 3}, every_token=True)
    runner = runner_of(directory, SingleRank())
    logits = runner.forward(plan)
    assert isinstance(logits, Tensor)
    wants = np.zeros(len(logits), WANT)
    wants["count"] = 1
    found = runner.forward(structs.replace(plan, candidates=wants.tobytes()))
    assert isinstance(found, RowLogits)
    assert found.tokens.tolist() == logits.argmax(dim=-1).tolist()
    assert found.largest.tolist() == logits.amax(dim=-1).tolist()


def test_a_row_that_fills_up_a_batch_changes_nothing(tmp_path: Path) -> None:
    """Its key and value go nowhere, and the other rows come to the same, up to the order in which PyTorch's products of
    another number of rows may add: with AVX2 it is another one."""
    runner = runner_of(small_model(tmp_path, "llama"), SingleRank())
    decoder = runner._decoder
    assert isinstance(decoder, GpuDecoder)
    with torch.inference_mode():
        expected = decoder.compute(decoder.inputs_of(small_script().step({0: 1, 1: 1})[0]))
        written = runner._store.writable_layers().clone()
        filled = decoder.inputs_of(small_script().step({0: 1, 1: 1, 2: 1})[0])
        slots = torch.tensor([*filled.slots[:2].tolist(), -1], dtype=torch.int32)
        torch.testing.assert_close(decoder.compute(filled._replace(slots=slots))[:2], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(runner._store.writable_layers(), written, rtol=1e-4, atol=1e-5)


def test_every_layer_is_a_sign_of_progress(tmp_path: Path) -> None:
    runner = runner_of(small_model(tmp_path, "llama"), SingleRank())
    progress = ProgressCounter.unread()
    runner.forward(small_script().step({0: 3})[0], progress)
    assert progress.count == 2
    assert not runner.is_native


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe"])
def test_weights_are_not_kept_twice(tmp_path: Path, model_type: str) -> None:
    runner = runner_of(small_model(tmp_path, model_type), SingleRank())
    kept = {name: parameter.numel() for name, parameter in runner._model.named_parameters()}
    small = ("norm", "mlp.gate.weight", "shared_expert_gate")
    assert {name for name, size in kept.items() if size} == {
        name for name in kept if any(part in name for part in small)
    }


def test_frequencies_beyond_the_first_length(tmp_path: Path) -> None:
    """Short texts, too, turn by the factors of the context that is served."""
    half = SMALL["head_dim"] // 2
    factors = {
        "short_factor": [1.0] * half,
        "long_factor": [2.0 + number for number in range(half)],
        "original_max_position_embeddings": 16,
    }
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **factors}
    directory = small_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=16)
    ours, plain = (runner_of(directory, SingleRank(), gpu=gpu) for gpu in (True, False))
    assert ours._decoder is not None
    found = []
    for runner in (ours, plain):
        plan, _ = small_script().step({0: 9})
        logits = runner.forward(plan)
        assert isinstance(logits, Tensor)
        found.append(logits)
    assert (found[0] - found[1]).abs().max() < 1e-4


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Whether there is Triton: a process finds it out once."""
    has_triton.cache_clear()
    yield
    has_triton.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_compressed_blocks_are_read_as_fast_where_triton_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert backend_of(gpu).reads_compressed(None, torch.bfloat16, SingleRank(), threads=1)
    assert not backend_of(gpu).reads_compressed(None, torch.float32, SingleRank(), threads=1)
    monkeypatch.setitem(sys.modules, "triton", None)
    has_triton.cache_clear()
    assert not backend_of(gpu).reads_compressed(None, torch.bfloat16, SingleRank(), threads=1)


class NoCompiler:
    """What Triton says where it cannot build its part for the driver."""

    @property
    def active(self) -> object:
        raise RuntimeError("Failed to find C compiler.\nmore")


@pytest.mark.usefixtures("asked_anew")
def test_triton_without_a_compiler_is_told_of_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    gpu = torch.device("cuda")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton.runtime, "driver", NoCompiler())
    assert not backend_of(gpu).reads_compressed(None, torch.bfloat16, SingleRank(), threads=1)
    assert "cannot build what launches its kernels (Failed to find C compiler)" in _why_no_triton()


@pytest.mark.usefixtures("asked_anew")
def test_that_there_is_no_triton_is_found_out_and_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_decoder, "_why_no_triton", lambda: "none")
    assert not has_triton()
    assert not has_triton()
    assert capsys.readouterr().out.count("attending_with_pytorch") == 1
