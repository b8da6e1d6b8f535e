"""Sparse attention on a GPU: what PyTorch chooses and reads, row by row, however steps are cut."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import SingleRank
from services.executor.core.sparse_attention import Choice
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.gpu.decoder import GpuDecoder
from services.executor.gpu.steps import StepLimits
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.worker.runner import ModelRunner
from shared.messages import SparseAttention
from tests.unit.executor.gpu.gpu_runners import runner_of, small_model
from tests.unit.executor.model.ring import Script

LENGTH = 45
PAGES = SparseAttention(threshold=18, sinks=3, recent=6, budget=8, share=0.3, dense_layers=1)
WINDOW = SparseAttention("window", threshold=18, sinks=3, recent=6, dense_layers=0)
CUTS = [14, 21, 1, 1, 8]
INVARIANT = StepLimits(3, 64, 64, 1 << 30, batch_invariant=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(
        tmp_path_factory.mktemp("llama"), "llama", num_attention_heads=4, num_key_value_heads=2
    )


def sparsely(plan: StepPlan, *wanted: SparseAttention | None) -> StepPlan:
    """`plan`, of whose sequences each has its choice, or all of them the same."""
    sequences = len(plan.query_lens) // 4
    choices = wanted if len(wanted) > 1 else wanted * sequences
    return structs.replace(plan, sparse=to_bytes([number for one in choices for number in Choice.of(one)]))


def logits_of(runner: ModelRunner, cuts: Sequence[int], wanted: SparseAttention | None) -> Tensor:
    """Of every token of a text that is computed in parts of `cuts`."""
    script, found = Script([LENGTH], compresses=runner._store.num_cold > 0), []
    for count in cuts:
        logits = runner.forward(sparsely(script.step({0: count}, every_token=True)[0], wanted))
        assert isinstance(logits, Tensor)
        found.append(logits.clone())
    return torch.cat(found)


@pytest.mark.parametrize("wanted", [PAGES, WINDOW], ids=["pages", "window"])
@pytest.mark.parametrize("codec", [None, INT8, FP8], ids=str)
def test_rows_read_what_pytorch_chooses(
    directory: Path, codec: Codec | None, wanted: SparseAttention
) -> None:
    ours, plain = (
        runner_of(directory, SingleRank(), codec=codec, gpu=gpu, summaries=wanted is PAGES)
        for gpu in (True, False)
    )
    assert isinstance(ours._decoder, GpuDecoder)
    found, expected = (logits_of(runner, CUTS, wanted) for runner in (ours, plain))
    assert (found - expected).abs().max() < 1e-4
    dense = logits_of(plain, CUTS, None)
    assert (expected[30:] - dense[30:]).abs().max() > 1e-2, "the choice tells"
