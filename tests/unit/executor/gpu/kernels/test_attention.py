"""The kernels against attention in float64, and against PyTorch's way through the same store."""

import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.device import interprets
from benchmarks.on_gpu.kernel_cases import LAYER, Case, Problem, Wrong, cases, check
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.gpu.attention import GpuKernels
from services.executor.gpu.kernels import attention_launch
from services.executor.gpu.kernels.tiles import LEAST_KEYS, rows_for, scratch_numbers, splits_of, tile_shape, tiles_of
from services.executor.kv_cache.codecs import COMPRESSING, INT8, Codec
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.step_context import ScoreRule
from shared.data_types import BlockDType

DEVICE = torch.device("cpu" if interprets() else "cuda")


CASES = list(cases(large=False))


@pytest.mark.parametrize(
    "case",
    [*CASES[::3], *(pytest.param(case, marks=pytest.mark.nightly) for at, case in enumerate(CASES) if at % 3)],
    ids=str,
)
def test_attention_is_what_float64_says(case: Case) -> None:
    check(case, DEVICE)


@pytest.mark.parametrize("quantized", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("width", [20, 64])
def test_as_it_is_compiled(cuda: torch.device, quantized: BlockDType, width: int) -> None:
    """Products of bf16 and float16; decodes whose codes are read four by four, behind enough of them for a turn."""
    check(Case((1, 1, 5), (300, 3, 45), width=width, dtype=torch.bfloat16, quantized=quantized), cuda)


# Blocks of a layer, 164 and 49 GB: what counts them in 32 bits finds nothing.
WRITABLE, QUANTIZED = 20_000_000, 12_000_000


NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # which the module has from Python 3.12 on


def virtual(count: int, part: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Memory, most of which is nowhere, for `count` blocks along `axis`; those of `part` are the last, backwards."""
    size = [count if at == axis else length for at, length in enumerate(part.shape)]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, torch.Size(size).numel() * part.itemsize, flags=flags)
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(part.dtype).view(size)
    whole.narrow(axis, count - part.shape[axis], part.shape[axis]).copy_(part.flip(axis))
    return whole


@pytest.mark.skipif(not interprets(), reason="a GPU has not so much memory to be empty")
@pytest.mark.parametrize("codec", [codec.name for codec in COMPRESSING])
def test_a_store_as_large_as_a_card_is_read_and_compressed(codec: BlockDType) -> None:
    case = Case((1, 20), (70, 50), width=64, dtype=torch.bfloat16, quantized=codec, order="mixed")
    problem = Problem(case, DEVICE)
    near, num_writable = problem.layer, problem.store.num_writable
    assert near.scales is not None
    far = near._replace(
        writable=virtual(WRITABLE, near.writable),
        codes=virtual(QUANTIZED, near.codes),
        scales=virtual(QUANTIZED, near.scales),
    )
    out = torch.zeros_like(problem.query)
    for batch in problem.batches():
        tables, slots = batch.tables, batch.slots
        tables = torch.where(
            tables < num_writable, WRITABLE - 1 - tables, WRITABLE + QUANTIZED - 1 - (tables - num_writable)
        )
        slots = (WRITABLE - 1 - slots // 16) * 16 + slots % 16
        batch = batch._replace(tables=tables, slots=slots)
        attention_launch.attend(problem.query, far, batch, problem.scores, out)
    assert torch.equal(out, problem.attended())

    layers = torch.tensor([1], device=DEVICE)
    writable, codes, scales = (part.unsqueeze(0) for part in (near.writable, near.codes, near.scales))
    far_writable = virtual(WRITABLE, torch.cat((writable, writable)), 1)
    far_codes, far_scales = virtual(QUANTIZED, codes, 1), virtual(QUANTIZED, scales, 1)
    pairs = torch.tensor([(0, 1), (3, 2)], device=DEVICE)
    attention_launch.compress(torch.cat((writable, writable)), layers, codes, scales, near.codec, pairs)
    pairs = torch.tensor((WRITABLE - 1, QUANTIZED - 1), device=DEVICE) - pairs
    attention_launch.compress(far_writable, layers, far_codes, far_scales, near.codec, pairs)
    for mine, other in ((far_codes, codes), (far_scales, scales)):
        assert torch.equal(mine[:, -3:-1].flip(1).view(torch.uint8), other[:, 1:3].view(torch.uint8))


def test_a_check_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Problem, "attended", lambda problem: problem.expected() * 1.001)
    with pytest.raises(Wrong, match=r"off by 0\.001"):
        check(Case(), DEVICE)


def test_a_check_sees_a_block_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long context in bf16, whose means are small."""

    def without_a_block(problem: Problem, sequence: int) -> torch.Tensor:
        return real(problem, sequence).index_fill(2, torch.arange(64, 80), 0.0)

    real = Problem._keys_and_values
    expected = Problem.expected
    case = Case(query=(1,), context=(600,), dtype=torch.bfloat16, width=32)
    right = expected(Problem(case, DEVICE))
    monkeypatch.setattr(Problem, "attended", lambda problem: right.to(problem.query.dtype))
    check(case, DEVICE)
    monkeypatch.setattr(Problem, "_keys_and_values", without_a_block)
    with pytest.raises(Wrong):
        check(case, DEVICE)


def test_a_graphs_batch_is_cut_into_parts() -> None:
    problem = Problem(Case(query=(1, 1), context=(3 * LEAST_KEYS, 5), kv_heads=1), DEVICE)
    assert [batch.splits for batch in problem.batches()] == [4]
    padded = Problem(replace(problem.case, context=(3 * LEAST_KEYS, 0), splits=8), DEVICE)
    assert padded.attended()[1].eq(0).all()


@pytest.mark.parametrize("what", [{}, {"sinks": True, "window": 30}, {"slopes": True, "softcap": 4.0}], ids=str)
def test_a_plans_step_is_attended_alike(what: dict[str, object]) -> None:
    case = Case(width=16, **what)  # type: ignore[arg-type]
    problem = Problem(case, DEVICE)
    kernels = GpuKernels(problem.store)
    plan = StepPlan(
        step=0,
        num_decodes=2,
        token_ids=b"",
        positions=b"",
        slots=to_bytes(problem.slots.tolist()),
        query_lens=to_bytes(list(case.query)),
        context_lens=to_bytes(list(case.context)),
        block_tables=to_bytes(problem.tables.tolist()),
        sample_rows=b"",
    )
    slopes = problem.slopes
    bias = None if slopes is None else (lambda keys: slopes[..., None] * keys)
    rule = ScoreRule(case.width**-0.5, case.softcap, problem.sinks, bias)
    out = torch.full_like(problem.query, float("nan"))
    kernels.attend(kernels.begin(plan), LAYER, problem.query, rule, case.window, out)
    torch.testing.assert_close(out, problem.attended(), rtol=0, atol=1e-6)


def test_a_scratch_that_is_too_small_is_refused() -> None:
    problem = Problem(Case(query=(1,), context=(20,), splits=2), DEVICE)
    (batch,) = problem.batches()
    assert batch.scratch.numel() == scratch_numbers(2, 1, 6, 20)
    small = batch._replace(scratch=batch.scratch[:-1])
    with pytest.raises(ValueError, match="need a scratch of 264 numbers, not 263"):
        attention_launch.attend(problem.query, problem.layer, small, problem.scores, problem.query)


def test_a_store_with_more_lines_than_kernels_count_is_refused() -> None:
    writable = torch.empty((2**27, 2, 8, 16, 64), dtype=torch.bfloat16, device="meta")
    none = writable[:0]
    problem = Problem(Case(query=(1,), context=(20,)), DEVICE)
    (batch,) = problem.batches()
    with pytest.raises(ValueError, match=f"{2**27} blocks of 16 tokens"):
        attention_launch.attend_calls(
            problem.query,
            attention_launch.AttentionLayer(writable, none, None, None),
            batch,
            problem.scores,
            problem.query,
        )


@pytest.mark.parametrize("codec", COMPRESSING, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_compressed_as_pytorch_does_it(dtype: torch.dtype, codec: Codec) -> None:
    shape = StoreShape.uniform(3, 16, 2, 20, dtype, (codec, None, codec))
    ours, theirs = KvStore(shape, 6, DEVICE, 5), KvStore(shape, 6, DEVICE, 5)
    content = torch.randn(ours.writable_layers().shape, generator=torch.Generator().manual_seed(1))
    content[:, 1] *= 1e-3
    content[:, 2] = 0
    content[:, 3, 0, 0, 0, 0] = float("nan")
    for store in (ours, theirs):
        store.writable_layers().copy_(content)
    GpuKernels(ours)
    pairs = [(0, 8), (1, 6), (2, 9), (3, 7)]
    ours.compress(pairs)
    theirs.compress(pairs)
    for mine, other in zip(ours.quantized_layers(), theirs.quantized_layers(), strict=True):
        if mine.scales is not None and other.scales is not None:
            torch.testing.assert_close(mine.scales, other.scales, rtol=0, atol=0, equal_nan=True)
        numbers = [part.codes.clone() for part in (mine, other)]
        for codes in numbers:
            codes.view(torch.uint8)[:, 1, 0, 0] = 0  # no code says what a row with a NaN holds: its scale does
        assert torch.equal(numbers[0].view(torch.uint8), numbers[1].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_keys_and_values_are_written_to_their_slots(dtype: torch.dtype) -> None:
    shape = StoreShape.uniform(2, 16, 3, 20, torch.bfloat16, (INT8,) * 2)
    ours, theirs = KvStore(shape, 6, DEVICE, 2), KvStore(shape, 6, DEVICE, 2)
    fused = torch.randn((7, 9, 20), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(DEVICE)
    slots = torch.tensor([5, 90, -1, 0, 33, 95, -1], device=DEVICE)
    key, value = fused[:, 3:6], fused[:, 6:]
    kernels, nothing = GpuKernels(ours), StepPlan(0, 0, *[b""] * 7)
    kernels.write(kernels.begin(nothing), 1, slots.to(dtype), key, value)
    there = slots >= 0  # the others only fill up a graph's batch
    theirs.write(1, slots[there], key[there], value[there])
    assert torch.equal(ours.writable_layers(), theirs.writable_layers())


def test_tiles_hold_every_token_once() -> None:
    lens = np.array([1, 1, 40, 7, 8])
    tiles = tiles_of(lens, 8)
    covered = [
        (sequence, token)
        for sequence, first in zip(tiles.sequence, tiles.first, strict=True)
        for token in range(first, min(first + 8, lens[sequence]))
    ]
    assert covered == [(sequence, token) for sequence, length in enumerate(lens) for token in range(length)]


@pytest.mark.parametrize(
    ("programs", "longest", "splits"), [(1000, 10**6, 1), (8, 200, 1), (8, 10**6, 64), (8, 1000, 4), (200, 10**6, 4)]
)
def test_keys_are_split_where_processors_would_be_idle(programs: int, longest: int, splits: int) -> None:
    assert splits_of(programs, longest, 132) == splits


@pytest.mark.parametrize("group", range(1, 12))
@pytest.mark.parametrize("tokens", [1, 2, 9, 4000])
def test_a_tile_has_whole_tokens(group: int, tokens: int) -> None:
    rows = rows_for(group, tokens)
    assert rows & (rows - 1) == 0
    assert 16 <= rows <= 128
    assert rows // group >= min(tokens, 128 // group) * (group <= rows)


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("compressed", [False, True])
def test_turns_fit_into_shared_memory(rows: int, width: int, compressed: bool) -> None:
    shape = tile_shape(rows, width, 2, compressed)
    padded = 1 << (width - 1).bit_length()
    both = 2 * shape.keys * padded * 2
    assert rows * padded * 2 + shape.writable_stages * both <= 227 << 10
