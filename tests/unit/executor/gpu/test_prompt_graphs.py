"""Steps with chunks, replayed from graphs that have room for any, give what launching kernel by kernel gives."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import SingleRank
from services.executor.core.progress import ProgressCounter
from services.executor.core.step_plan import StepLimits, StepPlan, as_int32, plan_alone, to_bytes
from services.executor.gpu.decoder import AuxHiddenStates
from services.executor.gpu.graphs import GraphedDecoder, StepGraphs
from services.executor.gpu.inputs import Shape, Staging, StepInputs, capacity_of, inputs_of
from services.executor.gpu.kernels.tiles import PREFILL_ROWS
from services.executor.gpu.prompt_graphs import (
    MORE_TILES,
    MOST_TOKENS,
    PromptArrays,
    PromptGraphs,
    PromptShape,
    prompt_arrays,
    token_ladder,
)
from services.executor.gpu.sampling import resolve
from services.executor.kv_cache.codecs import INT8, Codec
from tests.unit.executor.gpu.fake_layers import FakeLayers
from tests.unit.executor.gpu.gpu_runners import runner_of, small_model
from tests.unit.executor.gpu.test_graphs import (
    BLOCK,
    CPU,
    GROUP,
    LIMITS,
    NUM_BLOCKS,
    SHAPE,
    FailingFrom,
    Rerun,
    Sequences,
    launched,
)
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.ring import BLOCK_SIZE, Script

PROMPTS = PromptShape(SHAPE, LIMITS.max_sequences, compresses=False)
# Whether a row's bits are its own alone, and what full blocks are kept as.
GRAPHED: list[tuple[bool, Codec | None]] = [(False, INT8), (True, None), (True, INT8), (False, None)]
WIDE = PromptShape(Shape(16, 8, 4, 132, 8192), 64, compresses=True)


def with_prompts(layers: FakeLayers, capture: Rerun | None = None) -> tuple[PromptGraphs, GraphedDecoder]:
    """Captured."""
    staging, before = Staging(capacity_of(LIMITS, BLOCK), CPU), torch.zeros(LIMITS.max_batch_tokens, dtype=torch.int64)
    graphs = StepGraphs(layers, SHAPE, LIMITS.max_sequences, staging, before, capture or Rerun())
    prompts = PromptGraphs(layers, PROMPTS, LIMITS.max_batch_tokens, staging, lambda ids: resolve(ids, before))
    graphs.prompts = prompts
    graphs.capture()
    return prompts, GraphedDecoder(layers, SHAPE, staging, before, graphs)


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.lists(st.integers(1, 12), min_size=1, max_size=3)), min_size=1, max_size=8
    ),
    st.integers(0, 99),
)
@settings(max_examples=12)
def test_replays_give_what_kernels_one_by_one_give(steps: list[tuple[int, list[int]]], seed: int) -> None:
    sequences = Sequences(np.random.default_rng(seed))
    eager, replayed = FakeLayers(NUM_BLOCKS, BLOCK, GROUP), FakeLayers(NUM_BLOCKS, BLOCK, GROUP)
    prompts, decoder = with_prompts(replayed)
    for decodes, chunks in steps:
        plan = sequences.step(decodes, chunks)
        assert plan is not None
        inputs = inputs_of(plan, SHAPE, CPU)
        expected = eager.logits(eager.compute(inputs), inputs.sample_rows)
        found = decoder.launch(plan, ProgressCounter.unread())
        assert torch.equal(found.logits, expected)
        assert torch.equal(replayed.store[BLOCK:], eager.store[BLOCK:])  # block 0 is what capturing used
        fits = len(inputs.token_ids) <= LIMITS.max_batch_tokens and len(plan.query_lens) // 4 <= LIMITS.max_sequences
        tiles = sum(-(-length // (PREFILL_ROWS // GROUP)) for length in as_int32(plan.query_lens)[plan.num_decodes :])
        assert (prompts.replay(plan) is not None) == (fits and tiles < MORE_TILES)


def test_all_rows_of_a_step_are_some_tile_s_and_no_row_is_two_s() -> None:
    chunks = [100, 37, 1, 260]
    plan = _plan([1] * 9 + chunks, context=700)
    arrays = prompt_arrays(plan, 448, WIDE)
    assert arrays is not None
    rows = np.concatenate([_rows_of_decodes(arrays), _rows_of_chunks(arrays, WIDE.tile_tokens(448))])
    assert sorted(rows) == list(range(448))
    assert (arrays.slots[sum(chunks) + 9 :] == -1).all()
    filling = len(chunks) + 9
    assert arrays.context_lens[filling:].max() == 0  # what fills up reads nothing
    assert len(arrays.decodes.sequence) == 64
    assert list(arrays.rows) == [0, 9, 448]


def _rows_of_decodes(arrays: PromptArrays) -> list[int]:
    starts = arrays.query_starts
    return [
        int(row) for one in arrays.decodes.sequence for row in range(starts[one], min(starts[one] + 1, starts[one + 1]))
    ]


def _rows_of_chunks(arrays: PromptArrays, tokens: int) -> list[int]:
    starts, rows = arrays.query_starts, []
    for one, first in zip(*arrays.tiles, strict=True):
        begin = int(starts[one] + first)
        rows += range(begin, max(begin, min(begin + tokens, int(starts[one + 1]))))
    return rows


def _plan(lengths: list[int], context: int) -> StepPlan:
    total = sum(lengths)
    return StepPlan(
        step=1,
        num_decodes=lengths.index(next(length for length in lengths if length > 1)),
        token_ids=to_bytes([1] * total),
        positions=to_bytes(range(total)),
        slots=to_bytes(range(total)),
        query_lens=to_bytes(lengths),
        context_lens=to_bytes([context] * len(lengths)),
        block_tables=to_bytes([0] * (len(lengths) * -(-context // 16))),
        sample_rows=to_bytes([]),
    )


def test_more_than_a_graph_has_room_for_is_not_replayed() -> None:
    assert prompt_arrays(_plan([1] * 63 + [8], 100), 128, WIDE) is not None
    assert prompt_arrays(_plan([1] * 64 + [8], 100), 128, WIDE) is None  # sequences
    whole = 128 // WIDE.tile_tokens(128)
    short = [2] * (MORE_TILES + 1)  # what fills up takes a tile for each that it begins
    filling = -(-(128 - sum(short)) // WIDE.tile_tokens(128))
    assert prompt_arrays(_plan(short[: MORE_TILES + whole - filling], 100), 128, WIDE) is not None
    assert prompt_arrays(_plan([2] * (MORE_TILES + whole), 100), 128, WIDE) is None


@pytest.mark.parametrize("most", [8, 16, 100, 512, 4096])
def test_the_ladder_ends_with_the_most_and_pads_little(most: int) -> None:
    found = token_ladder(most)
    assert found[-1] == min(most, MOST_TOKENS)
    assert found == sorted(set(found))
    assert all(above <= below * 3 / 2 for below, above in pairwise(found) if below >= 64)


def test_what_cannot_be_captured_is_left_out_and_all_is_computed() -> None:
    layers, eager = FakeLayers(NUM_BLOCKS, BLOCK, GROUP), FakeLayers(NUM_BLOCKS, BLOCK, GROUP)
    prompts, decoder = with_prompts(layers, FailingFrom(7))  # five sizes of decodes, and the largest of chunks
    assert prompts.rungs == [LIMITS.max_batch_tokens]
    plan = Sequences(np.random.default_rng(2)).step(0, [5, 12])
    assert plan is not None
    expected = launched(eager, plan)
    assert torch.equal(decoder.launch(plan, ProgressCounter.unread()).logits, expected)
    decoder._graphs.close()  # type: ignore[union-attr]
    assert prompts.rungs == []


@pytest.mark.parametrize(("invariant", "codec"), in_lanes(GRAPHED, GRAPHED[:1], GRAPHED[1:2]))
def test_kernels_compute_the_same_from_a_graph(tmp_path: Path, invariant: bool, codec: Codec | None) -> None:
    """Chunks, decodes beside them, blocks that both fill, and keys that are split."""
    directory = small_model(tmp_path, "llama")
    limits = StepLimits(3, 32, 4 * BLOCK_SIZE, 1 << 30, invariant, prompt_graphs=True)
    eager = runner_of(directory, SingleRank(), codec=codec, limits=limits._replace(graph_memory=0))
    graphed = runner_of(directory, SingleRank(), codec=codec, limits=limits)
    eager.warm_up()
    graphed.warm_up()
    decoder = graphed._decoder
    assert isinstance(decoder, GraphedDecoder)
    assert decoder._graphs.prompts is not None
    prompts = Counted(decoder._graphs.prompts)
    decoder._graphs.prompts = prompts  # type: ignore[assignment]
    script = Script([30, 40, 9], compresses=codec is not None)
    for step in ({0: 20, 1: 9}, {1: 1, 0: 7}, {1: 1, 0: 1, 2: 3}):
        plan = script.step(step)[0]
        expected, found = eager.forward(plan), graphed.forward(plan)
        if invariant:
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    assert prompts.replayed == 3


class Counted:
    """Counts the steps that it replays."""

    def __init__(self, prompts: PromptGraphs) -> None:
        self._prompts = prompts
        self.replayed = 0

    def replay(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor] | None:
        found = self._prompts.replay(plan)
        self.replayed += found is not None
        return found


def test_a_plan_of_one_chunk_is_replayed() -> None:
    prompts, _ = with_prompts(FakeLayers(NUM_BLOCKS, BLOCK, GROUP))
    assert prompts.replay(plan_alone(20, list(range(20)), BLOCK)) is not None


def test_what_a_graph_reads_lies_where_steps_are_staged() -> None:
    """A graph keeps addresses, and nothing alive."""
    layers, staging = Watched(), Staging(capacity_of(LIMITS, BLOCK), CPU)
    shape = PROMPTS._replace(compresses=True)
    prompts = PromptGraphs(layers, shape, LIMITS.max_batch_tokens, staging, lambda ids: ids)
    work, _ = prompts.work(16)
    work()
    (inputs,) = layers.seen
    lasting = {staging._device.untyped_storage().data_ptr(), prompts._pairs.untyped_storage().data_ptr()}  # type: ignore[union-attr]
    tensors = [one for batch in inputs.batches for one in batch if isinstance(one, torch.Tensor)]
    tensors += [inputs.token_ids, inputs.positions, inputs.slots, inputs.sample_rows, inputs.compressions]
    assert len(tensors) > 16
    assert {one.untyped_storage().data_ptr() for one in tensors} == lasting


class Watched(FakeLayers):
    """Keeps what it was to compute."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK, GROUP)
        self.seen: list[StepInputs] = []

    def compute(self, inputs: StepInputs, on_layer: object = None, taps: AuxHiddenStates | None = None) -> torch.Tensor:
        self.seen.append(inputs)
        return super().compute(inputs, on_layer, taps)
