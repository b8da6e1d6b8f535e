"""Sparse attention on a GPU: what PyTorch chooses and reads, row by row, however steps are cut."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import SingleRank
from services.executor.core.sparse_attention import SparsePattern
from services.executor.core.step_plan import StepLimits, StepPlan, as_int32, to_bytes
from services.executor.gpu import sparse_attention
from services.executor.gpu.decoder import GpuDecoder
from services.executor.gpu.sparse_attention import plan_of_runs
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.worker.runner import ModelRunner
from shared.messages import SparseAttention
from tests.unit.executor.gpu.gpu_runners import runner_of, small_model
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.ring import Script
from tests.unit.executor.model.tiny import build

LENGTH = 26
PAGES = SparseAttention(threshold=18, sinks=3, recent=6, budget=8, share=0.3, dense_layers=1)
WINDOW = SparseAttention("window", threshold=18, sinks=3, recent=6, dense_layers=0)
CUTS = [14, 7, 1, 1, 3]
LIMITS = StepLimits(3, 64, 64, 1 << 30, batch_invariant=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(
        tmp_path_factory.mktemp("llama"), "llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2
    )


def with_choices(plan: StepPlan, choices: Sequence[SparseAttention | None]) -> StepPlan:
    """`plan`, of whose sequences each has its choice."""
    return structs.replace(plan, sparse=to_bytes([number for one in choices for number in SparsePattern.of(one)]))


def logits_of(
    runner: ModelRunner,
    steps: Sequence[dict[int, int]],
    choices: Sequence[SparseAttention | None],
    lengths: Sequence[int] = (LENGTH,),
) -> Tensor:
    """Of every token of the first sequence; the others are computed beside it."""
    script, found = Script(list(lengths), compresses=runner._store.num_quantized > 0), []
    for step in steps:
        plan, sampled = script.step(step, every_token=True)
        order = list(dict.fromkeys(sequence for sequence, _ in sampled))
        logits = runner.forward(with_choices(plan, [choices[sequence] for sequence in order]))
        assert isinstance(logits, Tensor)
        found += [row.clone() for row, (sequence, _) in zip(logits, sampled, strict=True) if not sequence]
    return torch.stack(found)


def alone(counts: Sequence[int]) -> list[dict[int, int]]:
    return [{0: count} for count in counts]


@pytest.mark.parametrize(
    ("codec", "wanted"), [pytest.param(None, PAGES, marks=pytest.mark.nightly), (FP8, PAGES), (INT8, WINDOW)]
)
def test_rows_read_what_pytorch_chooses(directory: Path, codec: Codec | None, wanted: SparseAttention) -> None:
    ours, plain = (
        runner_of(directory, SingleRank(), codec=codec, gpu=gpu, summaries=wanted is PAGES) for gpu in (True, False)
    )
    assert isinstance(ours._decoder, GpuDecoder)
    found, expected = (logits_of(runner, alone(CUTS), [wanted]) for runner in (ours, plain))
    assert (found - expected).abs().max() < 1e-4
    dense = logits_of(plain, alone(CUTS), [None])
    assert (expected[20:] - dense[20:]).abs().max() > 1e-2, "the choice tells"


@pytest.mark.nightly
@pytest.mark.parametrize("codec", [None, INT8], ids=str)
def test_a_token_has_the_same_bits_however_steps_are_cut(directory: Path, codec: Codec | None) -> None:
    """One layer chooses and one reads everything; the decodes below the threshold are replayed from graphs, which
    leave summaries behind."""
    choices = [PAGES, None, WINDOW]

    def of(steps: Sequence[dict[int, int]]) -> Tensor:
        runner = runner_of(directory, SingleRank(), torch.bfloat16, codec=codec, limits=LIMITS, summaries=True)
        runner.warm_up()  # which captures graphs
        return logits_of(runner, steps, choices, (20, 5, 19))

    whole = of([{0: 20}])
    assert torch.equal(of(alone([*[1] * 4, 14, 1, 1])), whole)
    assert torch.equal(of([{0: 9, 1: 3, 2: 18}, {0: 9, 1: 1}, {0: 1, 1: 1, 2: 1}, {0: 1}]), whole)


def test_rounds_of_few_rows_change_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Tensor:
        return logits_of(runner_of(directory, SingleRank(), summaries=True), alone([16, 6]), [PAGES])

    whole = found()
    monkeypatch.setattr(sparse_attention, "ROUND_NUMBERS", 100)
    assert torch.equal(found(), whole)


@pytest.mark.nightly
def test_what_is_not_lowered_chooses_by_the_same_kernels(tmp_path: Path) -> None:
    directory = small_model(tmp_path, "llama", hidden_act="relu")
    ours, plain = (runner_of(directory, SingleRank(), codec=INT8, gpu=gpu, summaries=True) for gpu in (True, False))
    assert ours._decoder is None
    assert ours._attention is not None
    found, expected = (logits_of(runner, alone([14, 7, 1]), [PAGES]) for runner in (ours, plain))
    assert (found - expected).abs().max() < 1e-4


def test_linear_biases_go_by_positions(tmp_path: Path) -> None:
    """Among the keys that a row reads they would be counted wrongly: PyTorch attends where some rows choose."""
    build("bloom", settings_of("bloom")).save_pretrained(str(tmp_path))
    ours, plain = (runner_of(tmp_path, SingleRank(), gpu=gpu, summaries=True) for gpu in (True, False))
    assert ours._attention is not None
    everywhere = [structs.replace(PAGES, dense_layers=0)]
    found = logits_of(ours, alone([14, 7, 1]), everywhere)
    assert (found - logits_of(plain, alone([1] * 22), everywhere)).abs().max() < 1e-4


@given(lens=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=5), data=st.data())
def test_rows_that_read_everything_are_runs_of_their_sequences(
    lens: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Each row keeps its position, its slot and what its table says of the blocks before it."""
    size = 4
    lens.sort(key=lambda pair: pair[0] > 1)
    tables = [[100 * at + block for block in range(-(-sum(pair) // size))] for at, pair in enumerate(lens)]
    total = sum(count for count, _ in lens)
    plan = StepPlan(
        step=0,
        num_decodes=sum(count == 1 for count, _ in lens),
        token_ids=b"",
        positions=b"",
        slots=to_bytes([7 * row for row in range(total)]),
        query_lens=to_bytes([count for count, _ in lens]),
        context_lens=to_bytes([sum(pair) for pair in lens]),
        block_tables=to_bytes([block for table in tables for block in table]),
        sample_rows=b"",
    )
    rows = sorted(data.draw(st.sets(st.integers(0, total - 1), min_size=1)))
    made = plan_of_runs(plan, rows, size)
    places = [(at, before + row) for at, (count, before) in enumerate(lens) for row in range(count)]
    assert as_int32(made.slots).tolist() == [7 * row for row in rows]
    counts, contexts = as_int32(made.query_lens).tolist(), as_int32(made.context_lens).tolist()
    assert sum(counts) == len(rows)
    assert all(count == 1 for count in counts[: made.num_decodes])
    table, left = as_int32(made.block_tables).tolist(), list(rows)
    for count, context in zip(counts, contexts, strict=True):
        own, left = left[:count], left[count:]
        sequence = places[own[0]][0]
        assert [places[row] for row in own] == [(sequence, at) for at in range(context - count, context)]
        used, table = table[: -(-context // size)], table[-(-context // size) :]
        assert used == tables[sequence][: len(used)]
    assert not table
