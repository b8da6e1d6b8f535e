"""Sparse attention in the native kernels: the blocks that PyTorch chooses, and no others, are read."""

from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.core.sparse_attention import SparsePattern
from services.executor.core.step_plan import to_bytes
from services.executor.kv_cache.capacity import store_shape
from services.executor.kv_cache.store import KvStore
from services.executor.model import sparse_attention
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.step_context import StepContext
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.catalog import backend_of
from services.executor.worker.runner import ModelRunner, widths_of
from shared.data_types import BlockDType
from shared.messages import SparseAttention
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, Script
from tests.unit.executor.model.test_sparse_attention import sparsely
from tests.unit.executor.model.tiny import make_model

pytestmark = natively

LENGTH, BLOCKS = 901, 300
PAGES = SparseAttention(threshold=100, sinks=6, recent=30, budget=64, share=0.2, dense_layers=0)
# Five query heads to a KV head: four that are scored together, and one.
SHAPE = {
    "head_dim": 32,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "hidden_size": 160,
    "max_position_embeddings": 4200,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama", **SHAPE, num_hidden_layers=1)


def runner_of(
    directory: Path, kind: BlockDType, *, native: bool, blocks: int = BLOCKS, summaries: bool = True
) -> ModelRunner:
    config = load_config(directory)
    layout = ShardLayout.from_config(config, 1, 0)
    model = load_model(directory, torch.bfloat16, layout, SingleRank(), CPU, lambda done, total: None)
    settings = ExecutorSettings(block_size=BLOCK_SIZE, sparse_attention=summaries)
    shape = store_shape(settings, kind, layer_states(config, layout), torch.bfloat16)
    store = KvStore(shape, blocks, CPU, blocks if kind != "bf16" else 0)
    if native:
        return backend_of(CPU).runner(RunnerRequest(model, store, layout, SingleRank(), CPU, 2))
    return ModelRunner(model, widths_of(model), store, SingleRank(), CPU)


def prefilled(runner: ModelRunner, compresses: bool, wanted: SparseAttention | None) -> Script:
    """A text all of whose tokens but the last are computed."""
    script = Script([LENGTH], num_blocks=BLOCKS, compresses=compresses)
    for begin in range(0, LENGTH - 1, 300):
        step, _ = script.step({0: min(300, LENGTH - 1 - begin)}, sample=False)
        runner.forward(sparsely(step, wanted))
    return script


def tensor(found: object) -> Tensor:
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8"])
def test_summaries_are_those_of_pytorch(directory: Path, kind: BlockDType) -> None:
    native, plain = (runner_of(directory, kind, native=native) for native in (True, False))
    script = prefilled(native, kind != "bf16", None)
    prefilled(plain, kind != "bf16", None)
    full = script._tables[0][: (LENGTH - 1) // BLOCK_SIZE]
    kept = torch.tensor(full) + (BLOCKS if kind != "bf16" else 0)
    with torch.inference_mode():
        ours, theirs = (runner._store.gather(1, kept, 1).float() for runner in (native, plain))
    assert (ours - theirs).abs().mean() < 0.01 * theirs.abs().mean()
    assert (ours - theirs).abs().max() < 0.1 * theirs.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_what_pytorch_chooses_is_read_and_nothing_else(
    directory: Path, kind: BlockDType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What must not be read is made NaN: the logits are numbers. What must be is, block by block: they are not.

    Blocks whose scores are near that of the last one chosen are left alone.
    """
    plain = runner_of(directory, kind, native=False)
    script = prefilled(plain, kind != "bf16", None)
    step, _ = script.step({0: 1})
    plan = sparsely(step, PAGES)
    found: list[tuple[Tensor, Tensor]] = []
    best = sparse_attention._best

    def watched(context: StepContext, page: int, table: Tensor, query: Tensor, top: int) -> Tensor:
        chosen = best(context, page, table, query, top)
        mean, deviation = context.store.gather(1, table, 1)[:, 0].float()
        rows = query.float()
        found.append((chosen, (rows @ mean.mT + rows.abs() @ deviation.mT).amax(1)))
        return chosen

    monkeypatch.setattr(sparse_attention, "_best", watched)
    dense = tensor(plain.forward(step))
    expected = tensor(plain.forward(plan))
    assert (expected - dense).abs().max() > 0.01, "the choice tells"
    ((chosen, scores),) = found
    reading = SparsePattern.of(PAGES).reading(LENGTH - 1, BLOCK_SIZE)
    assert reading.recent - reading.first > 128, "more than one task scores"

    native = runner_of(directory, kind, native=True)
    for ours, theirs in zip(native._store._wholes(), plain._store._wholes(), strict=True):
        ours.copy_(theirs)
    native._store.writable(0).copy_(plain._store.writable(0))  # what is being filled
    sound = tensor(native.forward(plan))
    assert (sound - expected).abs().mean() < 0.2 * (expected - dense).abs().mean()

    poison = native._store.scales(0) if kind == "int8" else native._store.writable(0)
    assert poison is not None
    table = torch.tensor(script._tables[0])[reading.first : reading.recent]
    poisoned = 0
    for head in range(2):
        border = scores[head][chosen[head]].min()
        margin = 0.02 * scores[head].std()
        for block in table[scores[head] < border - margin].tolist():
            poison[block, :, head] = float("nan")
            poisoned += 1
    assert poisoned > 100
    assert torch.equal(tensor(native.forward(plan)), sound)
    for head in range(2):
        border = scores[head][~chosen[head]].max()
        for block in table[scores[head] > border + 0.02 * scores[head].std()].tolist()[::5]:
            before = poison[block, 1, head].clone()
            poison[block, 1, head] = float("nan")
            assert not tensor(native.forward(plan)).isfinite().any()
            poison[block, 1, head] = before


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_window_reads_no_summaries(directory: Path, kind: BlockDType) -> None:
    """Executors that keep none compute it, to the same bits."""
    window = structs.replace(PAGES, kind="window")
    found = []
    for summaries in (True, False):
        native = runner_of(directory, kind, native=True, summaries=summaries)
        script = prefilled(native, kind != "bf16", window)
        step, _ = script.step({0: 1})
        found.append((tensor(native.forward(sparsely(step, window))), tensor(native.forward(step))))
    assert torch.equal(*(sparse for sparse, _ in found))
    assert not torch.equal(*found[0])


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_budget_that_covers_all_pages_gives_the_bits_of_dense_attention(directory: Path, kind: BlockDType) -> None:
    found = []
    for wanted in (None, structs.replace(PAGES, share=1.0), structs.replace(PAGES, dense_layers=1)):
        native = runner_of(directory, kind, native=True)
        script = prefilled(native, kind != "bf16", wanted)
        found.append(tensor(native.forward(sparsely(script.step({0: 1})[0], wanted))))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_plans_that_name_what_is_not_there_are_refused(directory: Path) -> None:
    native = runner_of(directory, "int8", native=True, summaries=False)
    step, _ = Script([LENGTH], num_blocks=BLOCKS, compresses=True).step({0: 200})
    with pytest.raises(IndexError):
        native.forward(sparsely(step, PAGES))
    twice = to_bytes(list(SparsePattern.of(structs.replace(PAGES, kind="window"))) * 2)
    with pytest.raises(IndexError):
        native.forward(structs.replace(step, sparse=twice))
    negative = to_bytes([2, 0, -1, 0, 0, 0, 0])
    with pytest.raises(IndexError):
        native.forward(structs.replace(step, sparse=negative))


@pytest.mark.slow
def test_a_long_chunk_is_merged_in_rounds(tmp_path: Path) -> None:
    """Its partial results do not fit into one round; its rows are what they are in short chunks."""
    shape = {**SHAPE, "num_attention_heads": 32, "num_hidden_layers": 1}
    directory = make_model(tmp_path, "llama", **shape)
    found = []
    for chunk in (2048, 128):
        native = runner_of(directory, "int8", native=True, blocks=1100, summaries=False)
        script = Script([4097], num_blocks=1100, compresses=True)
        rows = []
        for _ in range(4096 // chunk):
            rows.append(tensor(native.forward(script.step({0: chunk}, every_token=True)[0])))
        found.append(torch.cat(rows))
    assert torch.equal(*found)
