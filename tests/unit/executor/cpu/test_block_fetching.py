"""Full blocks in a file: the same bits as in memory, and the system is asked for what attention reads."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.core.layer_state import choosing_pages, page_layers
from services.executor.core.sharding import ShardLayout
from services.executor.core.sparse_attention import SparsePattern
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.cpu import decoder
from services.executor.cpu.block_fetching import QUIET_STEPS, FetchSteps, disk_reads, measure_disk
from services.executor.kv_cache.block_memory import MappedBlockFile, MappedFiles
from services.executor.kv_cache.codecs import INT8
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import load_config, load_model
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.catalog import backend_of
from services.executor.worker.runner import ModelRunner
from shared.errors import ConfigurationError
from shared.messages import SamplingParams, SparseAttention
from tests.unit.executor.cpu.exact_ring import needs_disk
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, Script
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.worker.drafting_ring import Generated, ring_of

LENGTH, BLOCKS = 900, 300
PAGES = SparseAttention(threshold=100, sinks=8, recent=32, budget=64, share=0.0, dense_layers=1)
# Blocks that the last token reads: it is the last one of its own.
READ = (PAGES.sinks + PAGES.budget + PAGES.recent) // BLOCK_SIZE


def test_steps_ask_while_something_is_read() -> None:
    steps = FetchSteps()
    assert [steps.next(0) for _ in range(3)] == [0, 0, 0]
    assert [steps.next(7) for _ in range(QUIET_STEPS + 2)] == [*range(1, QUIET_STEPS + 1), 0, 0]
    assert steps.next(8) == QUIET_STEPS + 1
    numbers = [steps.next(read) for read in range(9, 400)]
    assert set(numbers) == set(range(1, 256)), "as many as fit into a byte, without 0"
    assert numbers[: 255 - QUIET_STEPS] == [*range(QUIET_STEPS + 2, 256), 1]


def test_the_disk_is_measured_with_what_the_file_holds(tmp_path: Path) -> None:
    needs_disk(tmp_path)
    file = MappedBlockFile(tmp_path, 1 << 20)
    before = disk_reads()
    assert measure_disk(file) > 0
    assert disk_reads() >= before
    assert not file.content.any()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = Path(tmp_path_factory.mktemp("model"))
    needs_disk(directory)
    return make_model(
        directory,
        "llama",
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        max_position_embeddings=1024,
    )


class Mapped:
    """A runner of one rank, and its files; none: its blocks are in memory."""

    def __init__(self, directory: Path, files: MappedFiles | None) -> None:
        config = load_config(directory)
        layout = ShardLayout.from_config(config, 1, 0)
        states = layer_states(config, layout)
        shape = StoreShape(
            BLOCK_SIZE, torch.bfloat16, page_layers(states), (INT8,) * 3, (), choosing_pages(states), files is not None
        ).with_summaries()
        self.files = files
        self.store = KvStore(shape, BLOCKS, CPU, BLOCKS, files=files)
        model = load_model(directory, torch.bfloat16, layout, SingleRank(), CPU, lambda done, total: None)
        self.runner: ModelRunner = backend_of(CPU).runner(
            RunnerRequest(model, self.store, layout, SingleRank(), CPU, 2)
        )

    def logits(self, wanted: Sequence[SparseAttention | None]) -> list[Tensor]:
        """Of the last tokens of a text, `wanted` each, which leaves memory before each of its steps."""
        script, found = Script([LENGTH], num_blocks=BLOCKS, compresses=True), []
        for begin in range(0, LENGTH - len(wanted), 300):
            step, _ = script.step({0: min(300, LENGTH - len(wanted) - begin)}, sample=False)
            self.forward(step, wanted[0])
        for one in wanted:
            step, _ = script.step({0: 1})
            found.append(self.forward(step, one))
        return found

    def forward(self, plan: StepPlan, wanted: SparseAttention | None) -> Tensor:
        if self.files is not None:
            self.files.drop()
        logits = self.runner.forward(structs.replace(plan, sparse=to_bytes(list(SparsePattern.of(wanted)))))
        assert isinstance(logits, Tensor)
        return logits

    def asked(self, layer: int, number: int) -> Tensor:
        """Which blocks of each head the step of that number has asked for: bool [num_quantized, heads]."""
        return self.runner.native._asked[layer] == number


@natively
@pytest.mark.parametrize("wanted", [None, PAGES], ids=["dense", "pages"])
def test_blocks_that_left_memory_give_the_same_bits(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: SparseAttention | None
) -> None:
    in_memory = Mapped(directory, None).logits([wanted] * 4)
    waiting = Mapped(directory, MappedFiles(tmp_path))
    monkeypatch.setattr(decoder, "disk_reads", lambda: 0)  # nothing is asked for ahead
    for plain, mapped in zip(in_memory, waiting.logits([wanted] * 4), strict=True):
        assert torch.equal(plain, mapped)
    reads = itertools.count(1)
    monkeypatch.setattr(decoder, "disk_reads", lambda: next(reads))  # each step asks
    asking = Mapped(directory, MappedFiles(tmp_path))
    for plain, mapped in zip(in_memory, asking.logits([wanted] * 4), strict=True):
        assert torch.equal(plain, mapped)
    steps = next(reads) - 1
    assert not asking.asked(0, steps).any(), "the first layer reads everything"
    for layer in (1, 2):
        chosen = asking.asked(layer, steps).sum(0)
        assert chosen.tolist() == [0, 0] if wanted is None else [READ, READ]


@natively
def test_a_rank_maps_its_blocks_and_tells_what_they_take(directory: Path, tmp_path: Path) -> None:
    own = {"kv_dtype": "int8", "kv_disk_directory": str(tmp_path / "disk"), "dtype": "bf16", "max_batch_tokens": 64}
    with ring_of(tmp_path, directory, kv_mapped_memory=1 << 20, **own) as ring:
        block = 3 * 2 * 2 * 32 * ring.spec.block_size
        assert ring.spec.num_quantized == (1 << 20) // block
        assert ring.spec.kv_bytes < 1 << 20, "what is in memory"
        assert [*(tmp_path / "disk").iterdir()] == []
        asked = Generated(ring, [*range(3, 60)], SamplingParams(temperature=0.0)).run(4).text
    (tmp_path / "other").mkdir()
    with ring_of(tmp_path / "other", directory, **own) as ring:
        assert Generated(ring, [*range(3, 60)], SamplingParams(temperature=0.0)).run(4).text == asked


def test_what_pytorch_computes_maps_no_blocks(directory: Path, tmp_path: Path) -> None:
    refused = pytest.raises(ConfigurationError, match="--kv-mapped-memory is for models that the native CPU kernels")
    with refused, ring_of(tmp_path, directory, kv_mapped_memory=1 << 20, dtype="fp32"):
        pass
