"""Sparse attention in PyTorch: summaries, what rows choose by them, and that neither depends on how steps are cut."""

from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.core.layer_state import attention
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.core.sparse_attention import SparsePattern
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.kv_cache.capacity import store_shape
from services.executor.kv_cache.store import KvStore
from services.executor.model import sparse_attention
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.step_context import StepContext
from services.executor.worker.runner import ModelRunner, widths_of
from shared.messages import SparseAttention
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS, Script
from tests.unit.executor.model.tiny import make_model

LENGTH = 61
PAGES = SparseAttention(threshold=18, sinks=3, recent=6, budget=8, share=0.3, dense_layers=1)
WINDOW = SparseAttention("window", threshold=18, sinks=3, recent=6, dense_layers=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


def runner_of(directory: Path, kind: str) -> ModelRunner:
    config = load_config(directory)
    layout = ShardLayout.from_config(config, 1, 0)
    model = load_model(directory, torch.float32, layout, SingleRank(), CPU, lambda done, total: None)
    settings = ExecutorSettings(block_size=BLOCK_SIZE, sparse_attention=True)
    shape = store_shape(settings, kind, layer_states(config, layout), torch.float32)  # type: ignore[arg-type]
    store = KvStore(shape, NUM_BLOCKS, CPU, NUM_BLOCKS if kind != "bf16" else 0)
    return ModelRunner(model, widths_of(model), store, SingleRank(), CPU)


def sparsely(plan: StepPlan, wanted: SparseAttention | None) -> StepPlan:
    sequences = len(plan.query_lens) // 4
    return structs.replace(plan, sparse=to_bytes(list(SparsePattern.of(wanted)) * sequences))


def logits_of(directory: Path, kind: str, chunks: list[int], wanted: SparseAttention | None) -> Tensor:
    """Of every token of a text that is computed in `chunks`."""
    runner, found = runner_of(directory, kind), []
    script = Script([LENGTH], compresses=kind != "bf16")
    for chunk in chunks:
        logits = runner.forward(sparsely(script.step({0: chunk}, every_token=True)[0], wanted))
        assert isinstance(logits, Tensor)
        found.append(logits)
    return torch.cat(found)


@pytest.mark.parametrize("kind", in_lanes(["bf16", "int8"], ["int8"]))
@pytest.mark.parametrize("wanted", [PAGES, WINDOW], ids=["pages", "window"])
def test_a_token_says_the_same_however_steps_are_cut(directory: Path, kind: str, wanted: SparseAttention) -> None:
    alone = logits_of(directory, kind, [1] * LENGTH, wanted)
    for chunks in ([LENGTH], [14, 15, 1, 1, 30]):
        assert (logits_of(directory, kind, chunks, wanted) - alone).abs().max() < 1e-4
    dense = logits_of(directory, kind, [LENGTH], None)
    assert (alone[:18] - dense[:18]).abs().max() < 1e-4, "below the threshold all is read"
    assert (alone[40:] - dense[40:]).abs().max() > 1e-2, "and above it not"


@pytest.mark.parametrize("kind", in_lanes(["bf16", "int8"], ["int8"]))
def test_a_budget_that_covers_all_pages_is_dense_attention(directory: Path, kind: str) -> None:
    everything = structs.replace(PAGES, share=1.0)
    for chunks in ([LENGTH], [20, *[1] * 41]):
        found = logits_of(directory, kind, chunks, everything)
        assert (found - logits_of(directory, kind, chunks, None)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", in_lanes(["bf16", "int8"], ["int8"]))
def test_the_best_blocks_by_the_summaries_of_their_keys_are_chosen(
    directory: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summaries are of the keys as they are kept; each row and KV head has its own choice."""
    seen: list[int] = []
    best = sparse_attention._best

    def watched(step: StepContext, page: int, table: Tensor, query: Tensor, top: int) -> Tensor:
        found = best(step, page, table, query, top)
        keys = step.store.gather(page, table, 1)[0, 0].unflatten(1, (len(table), BLOCK_SIZE)).clone()
        seen.append(page)
        score = torch.stack(
            [
                (query[head] @ keys[head].mean(1).mT + query[head].abs() @ keys[head].std(1, unbiased=False).mT).amax(0)
                for head in range(len(keys))
            ]
        )
        for head, chosen in enumerate(found):
            assert chosen.sum() == top
            assert score[head][chosen].min() >= score[head][~chosen].max() - 1e-4
        return found

    monkeypatch.setattr(sparse_attention, "_best", watched)
    logits_of(directory, kind, [40, 1, 1, 19], PAGES)
    assert set(seen) == {1, 2}, "the first layer is dense"
    assert len(seen) == 2 * sum(
        (reading := SparsePattern.of(PAGES).reading(position, BLOCK_SIZE)) is not None and reading.top > 0
        for position in range(LENGTH)
    )


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8"])
def test_a_blocks_summary_goes_where_the_block_goes(directory: Path, kind: str) -> None:
    """Spilled, handed over and found again it is what it was: it is part of the block's bytes."""
    runner = runner_of(directory, kind)
    script = Script([LENGTH], compresses=kind != "bf16")
    runner.forward(script.step({0: LENGTH})[0])
    store, block = runner._store, script._tables[0][3]
    kept = block + (NUM_BLOCKS if kind != "bf16" else 0)
    other = kept - 1 if kept - 1 not in script.blocks else kept + 1
    summary = store.shape.summary_of(1)
    assert summary is not None
    before = store.gather(summary, torch.tensor([kept]), 1).clone()
    assert before.abs().sum() > 0
    content = store.save(kept)
    assert len(content) == store.shape.bytes_per_spilled_block
    store.load(other, content)
    assert torch.equal(store.gather(summary, torch.tensor([other]), 1), before)
    keys = store.gather(1, torch.tensor([kept]), 1)[0, 0]
    assert torch.allclose(before[0, 0, :, 0], keys.mean(1), atol=1e-5)
    assert torch.allclose(before[1, 0, :, 0], keys.std(1, unbiased=False), atol=1e-5)


def test_summaries_are_part_of_the_format() -> None:
    shapes = [
        store_shape(
            ExecutorSettings(block_size=BLOCK_SIZE, sparse_attention=sparse),
            "int8",
            (attention(2, 16), attention(2, 16, "sliding")),
            torch.bfloat16,
        )
        for sparse in (True, False)
    ]
    assert shapes[0].format != shapes[1].format
    assert [shape.num_layers for shape in shapes] == [3, 2], "a window is what it is"
    assert shapes[0].summary_of(0) == 2
    assert shapes[0].summary_of(1) is None
    assert shapes[0].codec(2) is None
