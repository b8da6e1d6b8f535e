"""Attention over random blocks, held against attention in float64: small cases for the interpreter, large for a GPU.

for case in cases(large=True):
    error = check(case, torch.device("cuda"))     raises where the kernels are wrong
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.on_gpu.device import choose

choose()

from services.executor.gpu.kernels import attention_launch  # noqa: E402
from services.executor.gpu.kernels.tiles import LEAST_KEYS, rows_for, scratch_numbers, splits_of, tiles_of  # noqa: E402
from services.executor.kv_cache.codecs import CODECS  # noqa: E402
from services.executor.kv_cache.store import KvStore  # noqa: E402
from services.executor.kv_cache.store_shape import StoreShape  # noqa: E402
from shared.data_types import BlockDType  # noqa: E402

# What an error may be, in parts of the number itself or of its row's root mean square, whichever is larger: weights
# and results are rounded to the model's numbers, as everywhere. An absolute error would let long contexts pass, whose
# means are small: a block too few of 3,000 tokens changes them by 0.0013, a fourteenth of their size.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LAYER = 1  # of two: a kernel that reads the wrong one is seen


@dataclass(frozen=True)
class Case:
    """Sequences over blocks that lie in disorder."""

    query: tuple[int, ...] = (1, 1, 5, 37)  # tokens of this step, decodes first
    # Tokens of each sequence with those; 0: it only fills up a graph's batch.
    context: tuple[int, ...] = (70, 3, 5, 50)
    kv_heads: int = 2
    group: int = 3
    width: int = 20
    block: int = 16
    dtype: torch.dtype = torch.float32
    quantized: BlockDType = "int8"  # of quantized blocks; bf16: as they are
    # `aged`: blocks are quantized but the last; `writable`: there are no quantized ones; `mixed`: by chance, in any
    # order.
    order: str = "aged"
    window: int | None = None
    first: int = 0  # keys at positions before it are seen by their own rows alone, as by a draft head's
    softcap: float | None = None
    sinks: bool = False
    slopes: bool = False
    # Parts of each tile's keys, as a graph has captured them; None: as many as the step's lengths ask for.
    splits: int | None = None
    seed: int = 7

    def __str__(self) -> str:
        changed = (f"{name}={value}" for name, value in vars(self).items() if value != _default(name))
        return " ".join(changed).replace("torch.", "") or "as it is"


def _default(name: str) -> object:
    return Case.__dataclass_fields__[name].default


class Wrong(AssertionError):
    """A kernel's result is not what float64 says."""


def cases(large: bool | None = None) -> Iterator[Case]:
    """What models ask for, one thing at a time and by chance together; `large`: as models have it, in bf16."""
    yield from _large() if large else _small()


def check(case: Case, device: torch.device) -> float:
    """The largest error of `case`, in parts of what `TOLERANCE` allows. Raises `Wrong` where it is beyond it, or not a
    number."""
    problem = Problem(case, device)
    found, expected = problem.attended().double(), problem.expected()
    scale = expected.square().mean(dim=-1, keepdim=True).sqrt().maximum(expected.abs()).clamp(min=1e-6)
    error = float(((found - expected).abs() / scale).max())
    if not error <= TOLERANCE[case.dtype]:
        raise Wrong(f"attention is off by {error:.2g} of its size, more than {TOLERANCE[case.dtype]:.2g}: {case}")
    return error / TOLERANCE[case.dtype]


class Problem:
    """A case's tensors."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(case.seed)
        counts = [-(-length // case.block) for length in case.context]
        blocks = sum(counts)
        shape = StoreShape.uniform(2, case.block, case.kv_heads, case.width, case.dtype, (CODECS[case.quantized],) * 2)
        quantized = [at for at, is_quantized in enumerate(self._quantized(counts)) if is_quantized]
        self.store = KvStore(shape, blocks + 2, device, 0 if case.order == "writable" else len(quantized) + 1)
        for layer in self.store.writable_layers():
            layer.normal_(generator=generator)
        ids = torch.randperm(blocks + 2, generator=torch.Generator().manual_seed(case.seed))[:blocks]
        # The writable block that each block of the tables was written to: as it is read from within.
        self.written = ids
        self.tables = ids.clone()
        pairs = [(int(ids[at]), self.store.num_writable + place) for place, at in enumerate(quantized)]
        if pairs:
            self.store.compress(pairs)
            self.tables[quantized] = torch.tensor([quantized_id for _, quantized_id in pairs])
        self.starts = np.cumsum(counts) - counts
        heads = (case.kv_heads, case.group)
        size = (sum(case.query), *heads, case.width)
        self.query = torch.randn(size, generator=generator, device=device).to(case.dtype)
        self.sinks = torch.randn(heads, generator=generator, device=device) if case.sinks else None
        self.slopes = -0.3 * torch.rand(heads, generator=generator, device=device) if case.slopes else None

    def _quantized(self, counts: list[int]) -> list[bool]:
        chance = random.Random(self.case.seed)
        order = self.case.order
        return [
            (order == "aged" and at < count - 1) or (order == "mixed" and chance.random() < 0.5)
            for count in counts
            for at in range(count)
        ]

    @property
    def layer(self) -> attention_launch.AttentionLayer:
        store = self.store
        return attention_launch.AttentionLayer(
            store.writable(LAYER), store.codes(LAYER), store.scales(LAYER), store.codec(LAYER)
        )

    @property
    def scores(self) -> attention_launch.ScoreOptions:
        case = self.case
        sinks, slopes = (None if part is None else part.reshape(-1) for part in (self.sinks, self.slopes))
        return attention_launch.ScoreOptions(case.width**-0.5, case.softcap, case.window, sinks, slopes, case.first)

    def attended(self) -> Tensor:
        """What the kernels say: [T, kv heads, group, d]."""
        out = torch.full_like(self.query, float("nan"))
        for batch in self.batches():
            attention_launch.attend(self.query, self.layer, batch, self.scores, out)
        return out

    def batches(self) -> list[attention_launch.Batch]:
        """The decodes and the chunks."""
        decodes = sum(length == 1 for length in self.case.query)
        bounds = ((0, decodes), (decodes, len(self.case.query)))
        return [self._batch(first, end) for first, end in bounds if end > first]

    def _batch(self, first: int, end: int) -> attention_launch.Batch:
        case = self.case
        lens = np.array(case.query[first:end])
        rows = rows_for(case.group, int(lens.max()))
        tiles = tiles_of(lens, rows // case.group)
        longest = max(case.context[first:end])
        splits = case.splits or splits_of(len(tiles.sequence) * case.kv_heads, longest, 4)
        numbers = scratch_numbers(splits, int(lens.sum()), case.kv_heads * case.group, case.width)
        return attention_launch.Batch(
            slots=self.slots,
            tables=self._int32(self.tables.tolist()),
            table_starts=self._int32(self.starts),
            query_starts=self._int32(np.concatenate(([0], np.cumsum(case.query)))),
            context_lens=self._int32(case.context),
            tile_sequence=self._int32(tiles.sequence + first),
            tile_first=self._int32(tiles.first),
            rows_per_tile=rows,
            splits=splits,
            first_row=sum(case.query[:first]),
            num_rows=int(lens.sum()),
            # What is left from other steps must not be read.
            scratch=torch.full((numbers,), float("nan"), device=self.device),
        )

    @property
    def slots(self) -> Tensor:
        """int32 [T]; -1 for a row that only fills up a graph's batch."""
        size = self.case.block
        slots = [
            int(self.written[start + at // size]) * size + at % size if context else -1
            for start, query, context in zip(self.starts, self.case.query, self.case.context, strict=True)
            for at in range(context - query, context)
        ]
        return self._int32(slots)

    def _int32(self, values: object) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int32)).to(self.device)

    def expected(self) -> Tensor:
        """The same in float64."""
        out = torch.zeros(self.query.shape, dtype=torch.float64, device=self.device)
        row = 0
        for sequence, (query, context) in enumerate(zip(self.case.query, self.case.context, strict=True)):
            if context:
                both = (self._keys_and_values(sequence), self._as_written(sequence))
                rows = self.query[row : row + query].double()
                out[row : row + query] = self._one(rows, both, context - query)
            row += query
        return out

    def _as_written(self, sequence: int) -> Tensor:
        """float64 [2, kv heads, context, d], of the writable blocks alone."""
        context, start = self.case.context[sequence], self.starts[sequence]
        ids = self.written[start : start - (-context // self.case.block)].tolist()
        blocks = [self.store.writable(LAYER)[block].double() for block in ids]
        return torch.cat(blocks, dim=2)[:, :, :context]

    def _keys_and_values(self, sequence: int) -> Tensor:
        """The same as the tables have the blocks, from codes and scales themselves."""
        store, context = self.store, self.case.context[sequence]
        start = self.starts[sequence]
        blocks = []
        for block in self.tables[start : start - (-context // self.case.block)].tolist():
            quantized = block - store.num_writable
            scales = store.scales(LAYER)
            if quantized < 0:
                blocks.append(store.writable(LAYER)[block].double())
            elif scales is None:
                blocks.append(store.codes(LAYER)[quantized].double())
            else:
                blocks.append(store.codes(LAYER)[quantized].double() * scales[quantized].double()[..., None, None])
        return torch.cat(blocks, dim=2)[:, :, :context]

    def _one(self, query: Tensor, both: tuple[Tensor, Tensor], before: int) -> Tensor:
        """`query` [rows, kv heads, group, d], after `before` tokens; `both`: keys and values [2, kv heads, context, d]
        as they are kept, and as they were written. Head by head: its scores in float64 are hundreds of megabytes."""
        heads = [
            self._head(head, query[:, head], tuple(one[:, head] for one in both), before)
            for head in range(self.case.kv_heads)
        ]
        return torch.stack(heads, dim=1)

    def _head(self, head: int, query: Tensor, both: tuple[Tensor, ...], before: int) -> Tensor:
        """The same of one KV head: `query` [rows, group, d], `both` [2, context, d]."""
        case = self.case
        places = torch.arange(both[0].shape[1], device=self.device)
        own = before + torch.arange(query.shape[0], device=self.device)[:, None]
        at_home = places // case.block == own // case.block
        kept, written = (torch.einsum("rgd,kd->grk", query, keys) for keys, _ in both)
        scores = torch.where(at_home, written, kept) * case.width**-0.5
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if self.slopes is not None:
            scores = scores + self.slopes[head].double()[:, None, None] * places
        seen = places <= own
        if case.window is not None:
            seen &= places > own - case.window
        if case.first:
            seen &= (places >= case.first) | (places == own)
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            column = self.sinks[head].double()[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., : len(places)]
        shares = (weights.masked_fill(at_home, 0.0), weights.masked_fill(~at_home, 0.0))
        return sum(
            (torch.einsum("grk,kd->rgd", share, values) for share, (_, values) in zip(shares, both, strict=True)),
            start=torch.zeros(query.shape, dtype=torch.float64, device=self.device),
        )


def _small() -> Iterator[Case]:
    base = Case()
    for dtype in (torch.float32, torch.bfloat16):
        for quantized in CODECS:
            yield replace(base, dtype=dtype, quantized=quantized, order="mixed")
    yield from (
        replace(base, **what)
        for what in (
            {"order": "writable"},
            {"window": 9},
            {"window": 1},
            {"first": 1},
            {"first": 1, "order": "writable"},
            {"first": 2, "window": 9, "query": (1, 1, 4), "context": (70, 1, 4)},
            {"softcap": 2.0},
            {"sinks": True},
            {"slopes": True},
            {"sinks": True, "window": 20, "softcap": 5.0, "order": "mixed"},
            {"group": 1, "width": 64},
            {"group": 5, "kv_heads": 1, "width": 80},
            {"group": 7, "kv_heads": 1},
            {"group": 20, "kv_heads": 1},
            {"block": 128, "order": "mixed"},
            {"query": (1,), "context": (1,)},
            {"query": (4,), "context": (4,)},
            {"width": 256, "query": (1, 3), "context": (40, 90)},
        )
    )
    long = Case(query=(1, 1, 2), context=(3 * LEAST_KEYS, 5, LEAST_KEYS + 70), kv_heads=1)
    yield long
    yield replace(long, sinks=True)
    yield replace(long, window=100, quantized="fp8")
    yield replace(long, first=1)
    yield replace(long, dtype=torch.bfloat16)
    # A graph's batch: more parts than these lengths ask for, and rows that only fill it up.
    padded = Case(query=(1, 1, 1, 1), context=(3 * LEAST_KEYS, 0, 17, 0), kv_heads=1, splits=8)
    yield padded
    yield replace(padded, sinks=True)
    yield replace(padded, first=1)
    yield replace(padded, splits=1)
    chance = random.Random(1)
    for _ in range(10):
        yield _by_chance(chance, widths=(16, 24, 64), longest=80, dtypes=(torch.float32, torch.bfloat16))


def _large() -> Iterator[Case]:
    base = Case(
        query=(1,) * 6 + (300, 1000), context=(4000, 1, 700, 65, 64, 63, 300, 3000), kv_heads=4, group=4, width=128,
        dtype=torch.bfloat16,
    )  # fmt: skip
    for quantized in CODECS:
        for order in ("aged", "mixed", "writable"):
            yield replace(base, quantized=quantized, order=order)
    for width in (64, 80, 96, 128, 256):
        for group in (1, 2, 3, 5, 7, 8):
            yield replace(base, width=width, group=group, quantized="fp8")
    yield replace(base, query=(1,) * 4, context=(20000, 0, 900, 0), splits=32, quantized="fp8")
    yield replace(base, query=(1,) * 4, context=(20000, 0, 900, 0), splits=32, sinks=True)
    yield replace(base, first=1)
    yield replace(base, first=1, order="writable")
    yield replace(base, dtype=torch.float16)
    yield replace(base, dtype=torch.float32, kv_heads=2)
    chance = random.Random(2)
    for _ in range(60):
        yield _by_chance(chance, widths=(64, 80, 96, 128, 256), longest=3000, dtypes=(torch.bfloat16,))


def _by_chance(chance: random.Random, widths: tuple[int, ...], longest: int, dtypes: tuple[torch.dtype, ...]) -> Case:
    decodes, chunks = chance.randint(0, 4), chance.randint(0, 2)
    query = [1] * max(decodes, not chunks) + [chance.randint(2, longest // 2) for _ in range(chunks)]
    return Case(
        query=tuple(query),
        context=tuple(length + chance.randint(0, longest) * chance.randint(0, 1) for length in query),
        kv_heads=chance.randint(1, 3),
        group=chance.randint(1, 8),
        width=chance.choice(widths),
        block=chance.choice((16, 32)),
        dtype=chance.choice(dtypes),
        quantized=chance.choice(tuple(CODECS)),
        order=chance.choice(("aged", "writable", "mixed")),
        window=chance.choice((None, None, chance.randint(1, longest))),
        softcap=chance.choice((None, None, 3.0)),
        sinks=chance.random() < 0.3,
        slopes=chance.random() < 0.3,
        splits=chance.choice((None, None, 1, 4)),
        seed=chance.randint(0, 10**6),
    )
