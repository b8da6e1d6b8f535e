"""Replays give what launching kernel by kernel gives, whatever was replayed before."""

import weakref
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import SingleRank
from services.executor.core.progress import ProgressCounter
from services.executor.core.step_plan import StepLimits, StepPlan, as_int32, plan_alone, to_bytes
from services.executor.gpu.graphs import GraphedDecoder, Rerun, StepGraphs, Work, ladder, padded
from services.executor.gpu.inputs import (
    MOST_ALIKE,
    MOST_READ_AGAIN,
    Shape,
    Staging,
    arrays_of,
    capacity_of,
    inputs_of,
    is_like_decodes,
    rung_for,
)
from services.executor.kv_cache.codecs import INT8
from services.executor.kv_cache.store import KvStore
from tests.unit.executor.gpu.fake_layers import VOCABULARY, FakeLayers
from tests.unit.executor.gpu.gpu_runners import runner_of, small_model
from tests.unit.executor.model.ring import BLOCK_SIZE, Script

CPU = torch.device("cpu")
BLOCK = 4
NUM_BLOCKS = 40
GROUP = 2
SHAPE = Shape(block_size=BLOCK, kv_heads=2, group=GROUP, processors=4, context_length=48)
LIMITS = StepLimits(max_sequences=9, max_batch_tokens=24, context_length=12 * BLOCK, graph_memory=0)
NO_POOLS = np.zeros((0, 2), np.int32)


class FailingFrom(Rerun):
    """Cannot record what is recorded as the `failing`th; takes 1 MiB for each that it can."""

    def __init__(self, failing: int) -> None:
        self._left = failing
        self._used = 0

    def record(self, work: Work) -> Work:
        self._left -= 1
        if self._left <= 0:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self._used += 1 << 20
        return work

    def memory(self) -> int:
        return self._used


def launched(eager: FakeLayers, plan: StepPlan) -> torch.Tensor:
    """The logits by kernels one by one."""
    inputs = inputs_of(plan, SHAPE, CPU)
    return eager.logits(eager.compute(inputs), inputs.sample_rows)


def make_graphs(layers: FakeLayers, capture: Rerun | None = None) -> tuple[StepGraphs, GraphedDecoder]:
    staging = Staging(capacity_of(LIMITS, BLOCK), CPU)
    before = torch.zeros(LIMITS.max_batch_tokens, dtype=torch.int64)
    graphs = StepGraphs(layers, SHAPE, LIMITS.max_sequences, staging, before, capture or Rerun())
    return graphs, GraphedDecoder(layers, SHAPE, staging, before, graphs)


@dataclass
class Sequences:
    """Sequences that come, grow and go; the blocks of those that have gone are taken by others."""

    random: np.random.Generator
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(1, NUM_BLOCKS)))
    coming: int = 0

    def step(self, decodes: int, prompts: list[int]) -> StepPlan | None:
        """Decodes of so many of those there are, and chunks of new ones; ends the oldest where blocks are few."""
        while self.lengths and len(self.free) < len(self.lengths) + sum(1 + p // BLOCK for p in prompts):
            self._end(next(iter(self.lengths)))
        chosen = self.random.permutation(list(self.lengths))[:decodes].tolist()
        for sequence in [one for one in chosen if self.lengths[one] >= SHAPE.context_length]:
            chosen.remove(sequence)
            self._end(sequence)
        widths = dict.fromkeys(chosen, 1)
        for prompt in prompts:
            self.coming += 1
            self.lengths[self.coming], self.tables[self.coming] = 0, []
            widths[self.coming] = prompt
        return self._plan(widths) if widths else None

    def _plan(self, widths: dict[int, int]) -> StepPlan:
        ordered = sorted(widths, key=lambda one: widths[one] > 1)
        positions, slots, tables = [], [], []
        for one in ordered:
            end = self.lengths[one] + widths[one]
            while len(self.tables[one]) * BLOCK < end:
                self.tables[one].append(self.free.pop(int(self.random.integers(len(self.free)))))
            place = range(self.lengths[one], end)
            positions += place
            slots += [self.tables[one][at // BLOCK] * BLOCK + at % BLOCK for at in place]
            tables += self.tables[one]
            self.lengths[one] = end
        ends = np.cumsum([widths[one] for one in ordered])
        kept = self.random.random(len(ordered)) < 0.8
        return StepPlan(
            step=1,
            num_decodes=sum(widths[one] == 1 for one in ordered),
            token_ids=to_bytes(self.random.integers(0, VOCABULARY, len(positions))),
            positions=to_bytes(positions),
            slots=to_bytes(slots),
            query_lens=to_bytes([widths[one] for one in ordered]),
            context_lens=to_bytes([self.lengths[one] for one in ordered]),
            block_tables=to_bytes(tables),
            sample_rows=to_bytes((ends - 1)[kept]),
        )

    def _end(self, sequence: int) -> None:
        self.free += self.tables.pop(sequence)
        del self.lengths[sequence]


@given(
    st.lists(st.tuples(st.integers(0, 11), st.lists(st.integers(1, 9), max_size=2)), min_size=1, max_size=10),
    st.integers(0, 99),
    st.sampled_from([None, (), (1,), (0, 1, 1)]),
)
@settings(max_examples=8)
def test_replays_give_what_kernels_one_by_one_give(
    steps: list[tuple[int, list[int]]], seed: int, reads: tuple[int, ...] | None
) -> None:
    """`reads`: whose inputs a draft head reads."""
    sequences = Sequences(np.random.default_rng(seed))
    eager, replayed = FakeLayers(NUM_BLOCKS, BLOCK, GROUP), FakeLayers(NUM_BLOCKS, BLOCK, GROUP)
    graphs, decoder = make_graphs(replayed)
    if reads is not None:
        decoder.tap(reads)
    graphs.capture()
    for decodes, prompts in steps:
        plan = sequences.step(decodes, prompts)
        if plan is None:
            continue
        inputs = inputs_of(plan, SHAPE, CPU)
        taps = eager.taps(len(inputs.token_ids), reads or ())
        expected = eager.logits(eager.compute(inputs, taps=taps), inputs.sample_rows)
        found = decoder.launch(plan, ProgressCounter.unread())
        assert torch.equal(found.logits, expected)
        if reads is None:
            assert decoder.tapped is None
        else:
            assert decoder.tapped is not None
            assert torch.equal(decoder.tapped, taps.into)
        assert torch.equal(found.tokens, expected.argmax(dim=-1))
        assert torch.equal(found.largest, expected.amax(dim=-1)) or not len(expected)
        assert torch.equal(replayed.store[BLOCK:], eager.store[BLOCK:])  # block 0 is what capturing used


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=4)
def test_tokens_of_the_step_before_are_taken_where_they_lie(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    sequences = Sequences(random)
    eager, replayed = FakeLayers(NUM_BLOCKS, BLOCK, GROUP), FakeLayers(NUM_BLOCKS, BLOCK, GROUP)
    graphs, decoder = make_graphs(replayed)
    graphs.capture()
    sequences.step(0, [1] * 9)
    for size in sizes:
        plan = sequences.step(size, [])
        assert plan is not None
        before = random.integers(0, VOCABULARY, LIMITS.max_batch_tokens)
        decoder._before.copy_(torch.from_numpy(before))
        ids = as_int32(plan.token_ids).copy()
        ahead = random.random(len(ids)) < 0.5
        ids[ahead] = -1 - random.integers(0, len(before), ahead.sum())
        known = np.where(ids < 0, before[np.maximum(-1 - ids, 0)], ids)
        unknown, plan = (structs.replace(plan, token_ids=to_bytes(each)) for each in (ids, known))
        expected = launched(eager, plan)
        assert torch.equal(decoder.launch(unknown, ProgressCounter.unread()).logits, expected)


def test_decodes_and_drafts_are_replayed_alone() -> None:
    sequences = Sequences(np.random.default_rng(0))
    graphs, _ = make_graphs(FakeLayers(NUM_BLOCKS, BLOCK, GROUP))
    graphs.capture()
    drafts = sequences.step(0, [3, 1])
    alone = sequences.step(2, [])
    assert drafts is not None
    assert alone is not None
    assert graphs.replay(drafts) is not None
    assert graphs.replay(alone) is not None
    filling = {"compressions": to_bytes([(1, 2)])}
    assert graphs.replay(structs.replace(alone, **filling)) is not None
    pools = {"pools": to_bytes([(0, 1)])}
    far = {"context_lens": to_bytes(as_int32(drafts.context_lens) + MOST_READ_AGAIN)}
    for changed in (filling, pools, far):
        assert graphs.replay(structs.replace(drafts, **changed)) is None


def test_a_chunk_of_a_prompt_is_no_draft() -> None:
    longer, drafts = (plan_alone(count, list(range(count)), BLOCK) for count in (MOST_ALIKE + 1, MOST_ALIKE))
    assert not is_like_decodes(longer)
    assert is_like_decodes(drafts)


def test_more_sequences_than_the_ladder_has_are_computed_all_the_same() -> None:
    sequences = Sequences(np.random.default_rng(1))
    layers, eager = FakeLayers(NUM_BLOCKS, BLOCK, GROUP), FakeLayers(NUM_BLOCKS, BLOCK, GROUP)
    graphs, decoder = make_graphs(layers)
    graphs.capture()
    plan = sequences.step(0, [1] * 12)
    assert plan is not None
    assert graphs.replay(plan) is None
    expected = launched(eager, plan)
    assert torch.equal(decoder.forward(plan, ProgressCounter.unread(), NO_POOLS)[0], expected)


@pytest.mark.parametrize(("failing", "rungs"), [(1, []), (2, [9]), (3, [8, 9]), (9, [1, 2, 4, 8, 9])])
def test_what_cannot_be_captured_is_left_out_and_all_is_computed(failing: int, rungs: list[int]) -> None:
    sequences = Sequences(np.random.default_rng(2))
    layers, eager = FakeLayers(NUM_BLOCKS, BLOCK, GROUP), FakeLayers(NUM_BLOCKS, BLOCK, GROUP)
    graphs, decoder = make_graphs(layers, FailingFrom(failing))
    graphs.capture()
    assert graphs.rungs == rungs
    for plan in (sequences.step(0, [5, 2]), sequences.step(1, [])):
        assert plan is not None
        expected = launched(eager, plan)
        assert torch.equal(decoder.launch(plan, ProgressCounter.unread()).logits, expected)


def test_graphs_keep_within_their_memory() -> None:
    graphs, _ = make_graphs(FakeLayers(NUM_BLOCKS, BLOCK, GROUP), FailingFrom(99))
    graphs.capture(most_memory=2 << 20)
    assert graphs.rungs == [8, 9]


def test_ranks_that_do_not_agree_have_the_same_graphs() -> None:
    answers = iter([True, True, False])
    graphs, _ = make_graphs(FakeLayers(NUM_BLOCKS, BLOCK, GROUP))
    graphs.capture(agree=lambda fine: next(answers))
    assert graphs.rungs == [8, 9]


@given(st.integers(1, 700))
def test_the_ladder_ends_with_the_most_and_pads_little(most: int) -> None:
    rungs = ladder(most)
    assert rungs == sorted(set(rungs))
    assert rungs[-1] == most
    for count in range(1, most + 1):
        rung = rung_for(count, rungs)
        assert rung - count < max(4, count / 2, 8 if count > 8 else 0)
    assert rung_for(most + 1, rungs) is None
    assert ladder(32)[:7] == [1, 2, 4, 8, 16, 24, 32]


def test_padded_rows_write_and_read_nothing() -> None:
    sequences = Sequences(np.random.default_rng(3))
    sequences.step(0, [6, 3])
    plan = sequences.step(2, [])
    assert plan is not None
    step = padded(arrays_of(plan, SHAPE), 4)
    assert step.token_ids[2:].tolist() == step.positions[2:].tolist() == step.context_lens[2:].tolist() == [0, 0]
    assert step.slots[2:].tolist() == [-1, -1]
    assert step.query_starts.tolist() == [0, 1, 2, 3, 4]
    (part,) = step.parts
    assert part.tiles.sequence.tolist() == [0, 1, 2, 3]
    assert (part.first_row, part.num_rows) == (0, 4)


def test_graphs_are_let_go_before_the_collectives_whose_operations_they_hold() -> None:
    """NCCL leaves when no graph holds any of its operations."""
    recorded: list[weakref.ref[Work]] = []

    class Recording(Rerun):
        def record(self, work: Work) -> Work:
            recorded.append(weakref.ref(work))
            return work

    graphs, decoder = make_graphs(FakeLayers(NUM_BLOCKS, BLOCK, GROUP), Recording())
    graphs.capture()
    plan = Sequences(np.random.default_rng(0)).step(0, [1])
    assert plan is not None
    assert graphs.replay(plan) is not None
    before = decoder.launch(plan, ProgressCounter.unread()).tokens.tolist()
    assert all(work() is not None for work in recorded)
    graphs.close()
    assert all(work() is None for work in recorded)
    assert graphs.replay(plan) is None
    assert decoder.launch(plan, ProgressCounter.unread()).tokens.tolist() == before


@pytest.fixture
def stores(tmp_path: Path) -> tuple[KvStore, KvStore]:
    """What decodes that fill two blocks leave: replayed, and launched kernel by kernel."""
    directory = small_model(tmp_path, "llama", num_hidden_layers=1)

    def filled(limits: StepLimits | None) -> KvStore:
        runner = runner_of(directory, SingleRank(), codec=INT8, limits=limits, summaries=True)
        if limits is not None:
            runner.warm_up()
            assert runner._steps._graphs.rungs == [1]
        script = Script([2 * BLOCK_SIZE], compresses=True)
        for _ in range(2 * BLOCK_SIZE):
            runner.forward(script.step({0: 1})[0])
        return runner._store

    return filled(StepLimits(1, 16, 32, 1 << 30)), filled(None)


@pytest.mark.parametrize("summary", [False, True], ids=["compressed", "summarised"])
def test_blocks_that_replayed_steps_fill_are(stores: tuple[KvStore, KvStore], summary: bool) -> None:
    replayed, launched = (
        [
            quantized.codes
            for quantized in store.quantized_layers()
            if store.shape.pages[quantized.layers[0]].summary is summary
        ]
        for store in stores
    )
    for ours, expected in zip(replayed, launched, strict=True):
        written = expected.flatten(2).any(-1)
        assert written.sum() == 2
        assert torch.equal(ours[written], expected[written])
