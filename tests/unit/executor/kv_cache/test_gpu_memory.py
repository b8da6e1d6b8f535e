"""How much of a GPU the KV cache takes, with the GPU's memory doubled."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.layer_state import LayerStates, attention
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.kv_cache import capacity
from services.executor.kv_cache.capacity import (
    BlockCounts,
    StepWidths,
    StoreShape,
    default_budget,
    step_bytes,
    widths_of,
)
from services.executor.platforms.cuda import Cuda
from shared.config import load_settings
from shared.errors import ConfigurationError
from tests.unit.executor.model.ring import on_ring

GIB = 1 << 30
LLAMA_8B = SimpleNamespace(
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
)


def gpu_with(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> list[str]:
    """As torch.cuda tells of it; returns what was called."""
    calls: list[str] = []

    def info(device: torch.device) -> tuple[int, int]:
        calls.append("mem_get_info")
        return free, total

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    return calls


def test_what_torch_holds_without_need_is_given_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = gpu_with(monkeypatch, 124 * GIB, 140 * GIB)
    assert default_budget(torch.device("cuda", 0), GIB, 0.9) == 110 * GIB
    assert calls == ["synchronize", "empty_cache", "mem_get_info"]


@pytest.mark.parametrize(
    ("free", "total", "needs", "utilization", "expected"),
    [
        (100, 100, 5, 0.9, 90),
        (100, 100, 25, 0.9, 75),
        (60, 100, 5, 0.75, 35),
        (20, 100, 30, 0.9, 0),
        (100, 100, 5, 1.0, 95),
    ],
)
def test_needs_stay_free_however_high_the_utilization(
    free: int, total: int, needs: int, utilization: float, expected: int
) -> None:
    assert capacity.gpu_budget(free, total, needs, utilization) == expected


def test_what_steps_of_an_8b_model_need() -> None:
    one, four = widths_of(LLAMA_8B, 1), widths_of(LLAMA_8B, 4)
    assert one == StepWidths(4096, 2 * 40 * 128, 14336, 128256, 1)
    assert four == StepWidths(4096, 2 * 10 * 128, 3584, 128256, 4)
    small = step_bytes(one, 512, 64, torch.bfloat16)
    assert GIB < small < 1.5 * GIB
    assert step_bytes(one, 8192, 64, torch.bfloat16) - small == int(1.5 * 7680 * 69632 * 2)
    assert step_bytes(four, 512, 64, torch.bfloat16) < small
    with_drafts = step_bytes(one, 512, 512, torch.bfloat16)
    assert with_drafts - small == int(1.5 * 448 * 128256 * 12), "all rows of a step are sampled"
    assert step_bytes(one, 512, 64, torch.bfloat16, 2 * GIB) - small == 2 * GIB - capacity.GRAPHS


@pytest.mark.parametrize(("graphs", "expected"), [({}, GIB), ({"cuda_graphs": "off"}, 0)])
def test_graphs_find_the_room_that_they_may_take(graphs: dict[str, Any], expected: int) -> None:
    settings = load_settings(ExecutorSettings, **graphs)
    needs = capacity._step_needs(settings, widths_of(LLAMA_8B, 1), torch.bfloat16)
    without = capacity._step_needs(
        load_settings(ExecutorSettings, cuda_graphs="off"), widths_of(LLAMA_8B, 1), torch.bfloat16
    )
    assert needs - without == expected


def plain(layout: ShardLayout, layers: int) -> LayerStates:
    return (attention(layout.kv_heads.size, layout.head_dim),) * layers


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("heads", [2, 256])
def test_a_tiny_model_on_a_large_gpu_gets_as_many_blocks_as_can_be_counted(
    monkeypatch: pytest.MonkeyPatch, compressed: bool, heads: int
) -> None:
    """126 GB hold more tokens of it than kernels, or lists of Python, are made for."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(Cuda, "free_memory", lambda self, device: (139 * GIB, 141 * GIB))
    monkeypatch.setattr(capacity, "smallest", lambda mine, device, ranks: list(mine))
    config = SimpleNamespace(hidden_size=64, num_attention_heads=heads, num_key_value_heads=heads, head_dim=2)
    layout, settings = ShardLayout.from_config(config, 1, 0), load_settings(ExecutorSettings)
    shape, blocks = capacity.plan_store(settings, plain(layout, 1), torch.bfloat16, compressed, 2048, gpu, SingleRank())
    assert shape.compresses == compressed
    most = min(1 << 21, ((1 << 31) - 1) // (2 * heads * 16))
    assert (blocks.quantized if compressed else blocks.writable) == most
    asked = load_settings(ExecutorSettings, kv_memory=64 * GIB)
    _, more = capacity.plan_store(asked, plain(layout, 1), torch.bfloat16, compressed, 2048, gpu, SingleRank())
    assert sum(more) > sum(blocks), "what is asked for is given"


def test_a_mixture_counts_the_experts_that_a_token_meets() -> None:
    mixture = SimpleNamespace(hidden_size=2048, moe_intermediate_size=1024, num_experts_per_tok=8)
    assert widths_of(mixture, 2).intermediate == 4096
    mixtral = SimpleNamespace(hidden_size=4096, intermediate_size=14336, num_experts_per_tok=2)
    assert widths_of(mixtral, 2).intermediate == 14336
    of_one = widths_of(mixtral, 2)._replace(experts=0)
    both = [step_bytes(widths, 512, 1, torch.bfloat16) for widths in (widths_of(mixtral, 2), of_one)]
    assert both[0] - both[1] == int(1.5 * 512 * 2 * 2 * 4096)


def test_the_ring_takes_the_smallest_rank_and_each_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's GPU has less free memory; what replicas share is the host's memory, not the GPUs'."""
    config = SimpleNamespace(**vars(LLAMA_8B), num_hidden_layers=2)
    settings = load_settings(ExecutorSettings, tp=2, replicas_on_host=4, gpu_memory_utilization=0.5)
    free = {0: 100 * GIB, 1: 90 * GIB}
    monkeypatch.setattr(Cuda, "free_memory", lambda self, device: (free[device.index], 140 * GIB))
    agree = capacity.smallest
    monkeypatch.setattr(capacity, "smallest", lambda mine, device, ranks: agree(mine, torch.device("cpu"), ranks))

    def plan(collectives: Collectives) -> tuple[StoreShape, BlockCounts]:
        rank = collectives.rank
        layout, device = ShardLayout.from_config(config, 2, rank), torch.device("cuda", rank)
        widths = widths_of(config, 2)
        return capacity.plan_store(settings, plain(layout, 2), torch.bfloat16, False, 8192, device, collectives, widths)

    (shape, blocks), (_, same) = on_ring(2, plan)
    assert blocks == same
    assert blocks.writable == 20 * GIB // shape.bytes_per_block


def test_a_gpu_that_holds_no_sequence_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuda, "free_memory", lambda self, device: (GIB, 16 * GIB))
    config = SimpleNamespace(**vars(LLAMA_8B), num_hidden_layers=32)
    layout, settings = ShardLayout.from_config(config, 1, 0), load_settings(ExecutorSettings)
    with pytest.raises(
        ConfigurationError, match=r"Of the 16\.0 GiB of the GPU 1\.0 are free .* RYZANSTEIN_CONTEXT_LENGTH.*nvidia-smi"
    ):
        capacity.plan_store(
            settings, plain(layout, 32), torch.bfloat16, False, 8192, torch.device("cuda", 0), SingleRank()
        )
