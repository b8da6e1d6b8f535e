"""The kernels against attention in float64, and against PyTorch's way through the same store."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

from services.executor.engine.plan import StepPlan, to_bytes
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.kv_cache.dtypes import BlockDType
from services.executor.kv_cache.sizes import StoreShape
from services.executor.kv_cache.store import KvStore
from services.executor.model.scores import ScoreRule
from services.executor.triton_kernels.backend import GpuKernels
from services.executor.triton_kernels.tiles import LEAST_KEYS, splits_of, tiles_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CODECS: dict[BlockDType, Codec | None] = {"bf16": None, "int8": INT8, "fp8": FP8}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of values of about 1. Where bf16 is multiplied, weights are rounded to it, as everywhere."""


@dataclass
class Case:
    """Sequences over a store whose blocks lie in disorder, hot and cold."""

    query: tuple[int, ...] = (1, 1, 5, 37)
    """Tokens of this step, decodes first."""
    context: tuple[int, ...] = (70, 3, 5, 50)
    kv_heads: int = 2
    group: int = 3
    width: int = 20
    block: int = 16
    dtype: torch.dtype = torch.float32
    cold: BlockDType = "int8"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    slopes: bool = False
    store: KvStore = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(7)
        blocks = sum(-(-length // self.block) for length in self.context)
        shape = StoreShape(2, self.block, self.kv_heads, self.width, self.dtype, (CODECS[self.cold],) * 2)
        self.store = KvStore(shape, blocks + 2, DEVICE, blocks)
        self.kernels = GpuKernels(self.store)
        hot = torch.randn(self.store.hot_layers().shape, generator=random)
        self.store.hot_layers().copy_(hot)
        ids = torch.randperm(blocks + 2, generator=random)[:blocks]
        # Every other block of a sequence is cold, as its older ones are.
        pairs = [(int(ids[at]), self.store.num_hot + at) for at in range(0, blocks, 2)]
        self.store.compress(pairs)
        self.tables = ids.clone()
        for hot_id, cold_id in pairs:
            self.tables[ids == hot_id] = cold_id
        rows = sum(self.query)
        self.queries = torch.randn((rows, self.kv_heads, self.group, self.width), generator=random).to(
            self.dtype
        )
        heads = (self.kv_heads, self.group)
        self.sink = torch.randn(heads, generator=random) if self.sinks else None
        self.slope = -0.3 * torch.rand(heads, generator=random) if self.slopes else None

    @property
    def plan(self) -> StepPlan:
        return StepPlan(
            step=0,
            num_decodes=sum(length == 1 for length in self.query),
            token_ids=b"",
            positions=b"",
            slots=b"",
            query_lens=to_bytes(list(self.query)),
            context_lens=to_bytes(list(self.context)),
            block_tables=to_bytes(self.tables.tolist()),
            sample_rows=b"",
        )

    @property
    def rule(self) -> ScoreRule:
        slope = self.slope
        sink = None if self.sink is None else self.sink.to(DEVICE)
        bias = None if slope is None else (lambda keys: slope.to(keys.device)[..., None] * keys)
        return ScoreRule(self.width**-0.5, self.softcap, sink, bias)

    def attended(self) -> Tensor:
        query = self.queries.to(DEVICE)
        out = torch.full_like(query, float("nan"))
        self.kernels.attend(self.kernels.begin(self.plan), 1, query, self.rule, self.window, out)
        return out.cpu()

    def expected(self) -> Tensor:
        """In float64, row by row."""
        out = torch.zeros(self.queries.shape, dtype=torch.float64)
        row, block = 0, 0
        for query, context in zip(self.query, self.context, strict=True):
            count = -(-context // self.block)
            table = self.tables[block : block + count].to(DEVICE)
            block += count
            found = self.store.gather(1, table, 1)
            keys, values = (part[0, :, :context].double().cpu() for part in found)
            for position in range(context - query, context):
                out[row] = self._one(self.queries[row].double(), keys, values, position)
                row += 1
        return out

    def _one(self, query: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
        scores = torch.einsum("hgd,hkd->hgk", query, keys) * self.width**-0.5
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        places = torch.arange(keys.shape[1])
        if self.slope is not None:
            scores = scores + self.slope.double()[..., None] * places
        seen = places <= position
        if self.window is not None:
            seen &= places > position - self.window
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sink is not None:
            scores = torch.cat((scores, self.sink.double()[..., None]), -1)
        return torch.einsum("hgk,hkd->hgd", scores.softmax(-1)[..., : len(places)], values)

    def check(self) -> None:
        torch.testing.assert_close(
            self.attended().double(), self.expected(), atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype]
        )


@pytest.mark.parametrize("cold", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hot_and_cold_blocks_are_read_alike(dtype: torch.dtype, cold: BlockDType) -> None:
    Case(dtype=dtype, cold=cold).check()


@pytest.mark.parametrize(
    "what",
    [
        {"window": 9},
        {"window": 1},
        {"softcap": 2.0},
        {"sinks": True},
        {"slopes": True},
        {"sinks": True, "window": 20, "softcap": 5.0},
        {"group": 1, "width": 64},
        {"group": 9, "kv_heads": 1},
        {"group": 20, "kv_heads": 1},
        {"block": 128},
        {"query": (1,), "context": (1,)},
        {"query": (4,), "context": (4,)},
    ],
    ids=str,
)
def test_whatever_a_model_asks_for(what: dict[str, object]) -> None:
    Case(**what).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("what", [{}, {"sinks": True}, {"window": 100}, {"dtype": torch.bfloat16}], ids=str)
def test_long_contexts_are_split_and_put_together(what: dict[str, object]) -> None:
    case = Case(query=(1, 1, 2), context=(3 * LEAST_KEYS, 5, LEAST_KEYS + 70), kv_heads=1, **what)  # type: ignore[arg-type]
    batches = case.kernels.begin(case.plan).batches(1, case.group)
    assert [batch.splits > 1 for batch in batches] == [True, True]
    case.check()


@pytest.mark.parametrize("codec", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_compressed_as_pytorch_does_it(dtype: torch.dtype, codec: Codec) -> None:
    shape = StoreShape(3, 16, 2, 20, dtype, (codec, None, codec))
    ours, theirs = KvStore(shape, 6, DEVICE, 5), KvStore(shape, 6, DEVICE, 5)
    content = torch.randn(ours.hot_layers().shape, generator=torch.Generator().manual_seed(1))
    content[:, 1] *= 1e-3
    content[:, 2] = 0
    content[:, 3, 0, 0, 0, 0] = float("nan")
    for store in (ours, theirs):
        store.hot_layers().copy_(content)
    GpuKernels(ours)
    pairs = [(0, 8), (1, 6), (2, 9), (3, 7)]
    ours.compress(pairs)
    theirs.compress(pairs)
    for mine, other in zip(ours.cold_layers(), theirs.cold_layers(), strict=True):
        if mine.scales is not None and other.scales is not None:
            torch.testing.assert_close(mine.scales, other.scales, rtol=0, atol=0, equal_nan=True)
        numbers = [part.codes.clone() for part in (mine, other)]
        for codes in numbers:
            codes.view(torch.uint8)[:, 1, 0, 0] = (
                0  # no code says what a row with a NaN holds: its scale does
            )
        assert torch.equal(numbers[0].view(torch.uint8), numbers[1].view(torch.uint8))


def test_keys_and_values_are_written_to_their_slots() -> None:
    shape = StoreShape(2, 16, 3, 20, torch.bfloat16, (INT8,) * 2)
    ours, theirs = KvStore(shape, 6, DEVICE, 2), KvStore(shape, 6, DEVICE, 2)
    fused = torch.randn((7, 9, 20), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(DEVICE)
    slots = torch.tensor([5, 90, 17, 0, 33, 95, 64], device=DEVICE)
    key, value = fused[:, 3:6], fused[:, 6:]
    GpuKernels(ours).write(1, slots, key, value)
    theirs.write(1, slots, key, value)
    assert torch.equal(ours.hot_layers(), theirs.hot_layers())


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
    ("programs", "longest", "splits"),
    [(1000, 10**6, 1), (8, 200, 1), (8, 10**6, 32), (8, 1000, 4), (200, 10**6, 2)],
)
def test_keys_are_split_where_processors_would_be_idle(programs: int, longest: int, splits: int) -> None:
    assert splits_of(programs, longest, 132) == splits
