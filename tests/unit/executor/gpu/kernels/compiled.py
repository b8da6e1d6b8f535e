"""What Triton's compiler makes of the kernels for a GPU that need not be there:
`python -m tests.unit.executor.gpu.kernels.compiled`.

For each kernel, and of attention each variant that serving uses: registers, bytes of stack (spilled registers lie
there), shared memory, and how often instructions that matter occur. Kernels that the interpreter has decorated cannot
be compiled: run it in a process of its own, with TRITON_INTERPRET=0 where there is no GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from services.executor.gpu.kernels import attention_launch, elementwise, experts, low_rank, pages, sampling
from services.executor.gpu.kernels.grouped import multiply_grouped
from services.executor.gpu.kernels.grouped_row import multiply_row_grouped
from services.executor.gpu.kernels.matmul import BLOCK_N, arrivals_for, encode_rows, multiply_few, tiles_of
from services.executor.gpu.kernels.tiles import rows_for
from services.executor.gpu.quantized_matmul import packed_rows
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.model.quantizing import CODECS as QUANTIZERS
from tests.unit.executor.gpu.kernels.launched import Compiled, Launched, compile_launched, compile_work, launches, meta

TYPES = {torch.float16: "fp16", torch.float32: "fp32"}
FP32 = torch.float32
CODECS: dict[str, Codec | None] = {"writable": None, "int8": INT8, "fp8": FP8}


class Variant(NamedTuple):
    """Of `attend`, with its `merge` where keys are split."""

    tokens: int  # of a tile's sequence in a step: 1 is a decode
    quantized: str  # of `CODECS`; writable: there are no quantized blocks
    width: int
    group: int
    splits: int = 1
    asks: tuple[str, ...] = ()  # of softcap, window, sinks, slopes and first
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        what = "decode" if self.tokens == 1 else f"prefill{self.tokens}"
        parts = f"{what} {self.quantized} d{self.width} group{self.group} splits{self.splits}"
        dtype = () if self.dtype == torch.bfloat16 else (TYPES[self.dtype],)
        return " ".join((parts, *self.asks, *dtype))


# The most demanding of what serving uses.
VARIANTS = (
    Variant(1, "fp8", 128, 4, 8),
    Variant(512, "writable", 128, 4),
    Variant(512, "int8", 256, 8),
    Variant(512, "int8", 128, 4, asks=("first",)),
    Variant(512, "int8", 256, 1, dtype=torch.float32),
)


def calls(variant: Variant) -> list[attention_launch.AttentionCall]:
    """The launches of a variant, of tensors that have shapes and no numbers."""
    kv_heads, width = 8, variant.width
    heads = kv_heads * variant.group
    codec = CODECS[variant.quantized]

    empty = partial(meta, dtype=variant.dtype)
    index = meta(64, dtype=torch.int32)
    quantized = 1000 if codec else 0
    code = meta(quantized, 2, kv_heads, 16, width, dtype=codec.dtype if codec else variant.dtype)
    scales = meta(quantized, 2, kv_heads, dtype=FP32) if codec else None
    layer = attention_launch.AttentionLayer(empty(1000, 2, kv_heads, 16, width), code, scales, codec)
    rows = rows_for(variant.group, variant.tokens)
    batch = attention_launch.Batch(*[index] * 7, rows, variant.splits, 0, 64)
    per_head = meta(heads, dtype=FP32)
    scores = attention_launch.ScoreOptions(
        width**-0.5,
        5.0 if "softcap" in variant.asks else None,
        1024 if "window" in variant.asks else None,
        per_head if "sinks" in variant.asks else None,
        per_head if "slopes" in variant.asks else None,
        int("first" in variant.asks),
    )
    query = empty(64, kv_heads, variant.group, width)
    return attention_launch.attend_calls(query, layer, batch, scores, query)


def block_calls() -> Iterator[tuple[str, attention_launch.AttentionCall]]:
    """The launches that write blocks, and compress them."""
    writable, fused = meta(2, 1000, 2, 8, 16, 128), meta(64, 48, 128)
    slots = meta(64, dtype=torch.int32)
    yield "write", attention_launch.write_call(fused[:, 32:40], fused[:, 40:], slots, writable[0])
    index = meta(64, 2, dtype=torch.int64)
    for name, codec in CODECS.items():
        code = torch.empty_like(writable, dtype=codec.dtype if codec else writable.dtype)
        scales = meta(*writable.shape[:4], dtype=FP32) if codec else None
        yield (f"compress {name}", attention_launch.compress_call(writable, index[:, 0], code, scales, codec, index))


def compile_call(name: str, call: attention_launch.AttentionCall) -> Compiled:
    """As Triton would at the first launch."""
    (launched,) = launches(call.run)
    return compile_launched(name, launched)


def compile_variant(variant: Variant) -> list[Compiled]:
    """`attend`, and `merge` where it is needed."""
    return [compile_call(f"{variant.name}{' merge' if at else ''}", call) for at, call in enumerate(calls(variant))]


def attention_kernels() -> Iterator[Compiled]:
    """All kernels; one process per core."""
    with ProcessPoolExecutor() as pool:
        for found in pool.map(compile_variant, VARIANTS):
            yield from found
    for name, call in block_calls():
        yield compile_call(name, call)


def page_work(width: int, group: int, quantized: str) -> None:
    """Launches what summarises blocks of 16 tokens, and chooses among some thousands for 64 rows."""
    codec = CODECS[quantized]
    blocks, count = meta(1000, 2, 8, 16, width), 1000 if codec else 0
    code = meta(count, 2, 8, 16, width, dtype=codec.dtype if codec else torch.bfloat16)
    scales = meta(count, 2, 8, dtype=FP32) if codec else None
    lines = attention_launch.AttentionLayer(meta(1000, 2, 8, 1, width), meta(count, 2, 8, 1, width), None, None)
    index = meta(64, dtype=torch.int32)
    pairs = meta(64, 2, dtype=torch.int64) if codec else None
    pages.summarise(attention_launch.AttentionLayer(blocks, code, scales, codec), lines, pairs, index, index)
    rows = pages.ChosenRows(index, meta(64, pages.FIELDS, dtype=torch.int32), 8000, 1200)
    pages.choose(meta(64, 8, group, width), lines, rows, 1.0)


def page_kernels() -> Iterator[Compiled]:
    return compile_work("pages int8 d128 group4", partial(page_work, 128, 4, "int8"))


TOKENS = 64
PLAIN, GEMMA = elementwise.Norms(1e-6, offset=False), elementwise.Norms(1e-6, offset=True)


def add_norm(width: int, how: elementwise.Norms, dtype: torch.dtype = torch.bfloat16) -> None:
    """Launches one; Gemma's with the norm behind attention, and a scale."""
    x, residual = meta(TOKENS, width, dtype=dtype), meta(TOKENS, width, dtype=dtype)
    weight = meta(width, dtype=FP32)
    after = (weight, 0.5) if how is GEMMA else (None, 1.0)
    elementwise.add_norm(x, residual, weight, how, *after)


def place(q_heads: int, kv_heads: int, width: int, half: int, normed: bool, slots: torch.dtype = torch.int32) -> None:
    angles, norms = meta(TOKENS, half, dtype=FP32), (meta(width, dtype=FP32),) * 2
    elementwise.place(
        meta(TOKENS, (q_heads + 2 * kv_heads) * width),
        q_heads,
        elementwise.Rotation(angles, angles) if half else None,
        meta(TOKENS, dtype=slots),
        meta(1000, 2, kv_heads, 16, width),
        norms if normed else None,
        PLAIN,
    )


def gated(gelu: bool) -> None:
    elementwise.gated(meta(TOKENS, 2 * 14336), gelu=gelu)


def fused_kernels() -> Iterator[Compiled]:
    found = {
        "norm, 4096": partial(elementwise.norm, meta(TOKENS, 4096), meta(4096, dtype=FP32), PLAIN),
        "add and norm, 5120": partial(add_norm, 5120, PLAIN),
        "add and norm, 4096, fp32": partial(add_norm, 4096, PLAIN, FP32),
        "norm, add and norm, 16384": partial(add_norm, 16384, GEMMA),
        "place, int64 slots": partial(place, 32, 8, 128, 64, normed=False, slots=torch.int64),
        "place, norms": partial(place, 32, 8, 128, 64, normed=True),
        "place, heads of 256, norms": partial(place, 8, 4, 256, 128, normed=True),
        "place, heads of 96": partial(place, 32, 32, 96, 48, normed=False),
        "place, not turned": partial(place, 16, 4, 128, 0, normed=False),
        "silu": partial(gated, gelu=False),
        "gelu": partial(gated, gelu=True),
    }
    for name, work in found.items():
        yield from compile_work(name, work)


PROCESSORS = 132


def few(rows: int, outputs: int, inputs: int, codec: Codec, bias: bool) -> None:
    """Launches a product of `rows`."""
    codes, scales = meta(outputs, inputs, dtype=codec.dtype), meta(outputs, dtype=torch.float32)
    arrivals = arrivals_for(outputs, codes.device)
    multiply_few(meta(rows, inputs), codes, scales, meta(outputs) if bias else None, arrivals, PROCESSORS)


def few_grouped(rows: int, kind: str, bias: bool) -> None:
    """Launches a product of `rows` with codes that have scales for groups, of 64 outputs."""
    packed = packed_rows(QUANTIZERS[kind].empty(64, 4096))
    parts = {name: part.to("meta") for name, part in vars(packed).items() if isinstance(part, Tensor)}
    arrivals = arrivals_for(64, torch.device("meta"))
    cut = tiles_of(rows, 64, 4096, PROCESSORS)
    out, addend = meta(rows, 64), meta(64) if bias else None
    multiply_grouped(meta(rows, 4096), replace(packed, **parts), addend, arrivals, cut, out)


def one_grouped(kind: str) -> None:
    """Launches the product of a single row with such codes."""
    packed = packed_rows(QUANTIZERS[kind].empty(64, 4096))
    parts = {name: part.to("meta") for name, part in vars(packed).items() if isinstance(part, Tensor)}
    arrivals = arrivals_for(64, torch.device("meta"))
    multiply_row_grouped(meta(1, 4096), replace(packed, **parts), None, arrivals, PROCESSORS, meta(1, 64))


def product_kernels() -> Iterator[Compiled]:
    yield from compile_work("few rows", partial(few, 64, 4096, 4096, FP8, bias=True))
    yield from compile_work("one row", partial(few, 1, 4096, 4096, FP8, bias=True))
    yield from compile_work("encode", partial(encode_rows, meta(64, 28_672), FP8))
    yield from compile_work("few rows int4", partial(few_grouped, 2, "int4", bias=False))
    for kind in ("int4", "q4_k", "q6_k", "q8_0"):
        yield from compile_work(f"one row {kind}", partial(one_grouped, kind))


EXPERTS, EXPERT_INNER, EXPERT_HIDDEN = 128, 768, 2048  # a layer of Qwen 3 30B-A3B, 8 experts a row


def mixture(tokens: int, kind: str, rule: experts.RoutingRule) -> None:
    """Launches all of a mixture's own kernels for `tokens`; `kind`: of its weights, plain, a `Codec`'s or scales for
    groups."""
    logits, correction = meta(tokens, EXPERTS + 1, dtype=FP32), meta(EXPERTS, dtype=FP32)
    slots = meta(tokens, dtype=torch.int32)
    routed = experts.route(logits, correction, slots, EXPERTS, rule)
    arrivals = experts.arrivals_of(PROCESSORS, torch.device("meta"))
    outputs = 2 * EXPERT_INNER
    splits = experts.splits_for(routed, outputs, EXPERT_HIDDEN, PROCESSORS)
    x = meta(tokens, EXPERT_HIDDEN)
    if kind in QUANTIZERS and kind not in ("int8", "fp8"):
        packed = packed_rows(QUANTIZERS[kind].empty(BLOCK_N, EXPERT_HIDDEN))
        parts = {name: part.to("meta") for name, part in vars(packed).items() if isinstance(part, Tensor)}
        weight = replace(packed, outputs=outputs, **parts)
        experts.multiply_stacked_groups(x, weight, routed, arrivals, splits)
    else:
        codec = CODECS.get(kind)
        codes = meta(EXPERTS * outputs, EXPERT_HIDDEN, dtype=codec.dtype if codec else torch.bfloat16)
        scales = meta(EXPERTS * outputs, dtype=FP32) if codec else None
        experts.multiply_stacked(x, codes, scales, routed, outputs, arrivals, splits)
    made = meta(tokens * rule.chosen, EXPERT_HIDDEN)
    experts.combine(made, routed, EXPERTS, meta(tokens, EXPERT_HIDDEN), logits)


def expert_kernels() -> Iterator[Compiled]:
    plain = experts.RoutingRule(8)
    grouped = experts.RoutingRule(8, sigmoid=True, groups=8, top_groups=4, scale=2.5)
    cases = [(tokens, kind, plain) for tokens in (1, 2048) for kind in ("bf16", "fp8", "int4")]
    seen: list[Launched] = []
    for tokens, kind, rule in (*cases, (64, "bf16", grouped)):
        for launched in launches(partial(mixture, tokens, kind, rule)):
            if launched not in seen:
                seen.append(launched)
                yield compile_launched(f"{launched.name} {tokens} {kind}", launched)


def adapted(tokens: int, rank: int, dtype: torch.dtype) -> None:
    """Launches what adapters of up to `rank` add to the queries, keys and values of 64 slots."""
    slots = 64
    rows = low_rank.LowRankRows(meta(tokens, dtype=torch.int32), meta(4, tokens, dtype=torch.int32))
    table, ranks = meta(3, slots, 2, dtype=torch.int64), meta(3, slots, dtype=torch.int32)
    x, out = meta(tokens, 4096, dtype=dtype), meta(tokens, 6144, dtype=dtype)
    low_rank.add_low_rank(out, x, table, ranks, meta(4, dtype=torch.int32), 4096, rank, rows)


def adapter_kernels() -> Iterator[Compiled]:
    return compile_work("adapters 16 rank 64 bf16", partial(adapted, 16, 64, torch.bfloat16))


MOST_BY_LOGIT = 1024


def draw(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Launches the draws of `rows`, of which some have top-k and some top-p."""
    space = sampling.space_for(256, vocabulary, torch.device("meta"))
    largest, params = (meta(rows, dtype=torch.float32), meta(sampling.NUM_PARAMS * rows, dtype=torch.float64))
    tokens = meta(rows, dtype=torch.int64)
    logits = meta(rows, vocabulary, dtype=dtype)
    sampling.draw(logits, largest, params, tokens, space, MOST_BY_LOGIT, top_k=True, top_p=True)


def named(launched: Launched) -> str:
    """`launched` by what it does."""
    weights = launched.values().get("WEIGHTS")
    if weights is None:
        return launched.name
    return f"{launched.name} {'weights' if weights else 'counts'}"


def sampling_kernels() -> Iterator[Compiled]:
    seen: list[Launched] = []
    for launched in launches(partial(draw, 16, 128_256, torch.bfloat16)):
        if launched not in seen:
            seen.append(launched)
            yield compile_launched(f"{named(launched)} 16 x 128256 bf16", launched)


FAMILIES: dict[str, Callable[[], Iterator[Compiled]]] = {
    "attention": attention_kernels,
    "pages": page_kernels,
    "fused": fused_kernels,
    "products": product_kernels,
    "experts": expert_kernels,
    "adapters": adapter_kernels,
    "sampling": sampling_kernels,
}


def main() -> None:
    """Prints a line of JSON for each kernel."""
    parser = argparse.ArgumentParser(prog="python -m tests.unit.executor.gpu.kernels.compiled", description=__doc__)
    parser.add_argument("--only", choices=FAMILIES)
    only = parser.parse_args().only
    for family in [only] if only else FAMILIES:
        for one in FAMILIES[family]():
            sys.stdout.write(f"{json.dumps(one._asdict())}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
