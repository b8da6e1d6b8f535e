"""Attention, and the kernels that write and compress blocks."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.on_gpu.compiled_kernels.launched import Compiled, compile_launched, launches
from services.executor.gpu.kernels import attention_launch
from services.executor.gpu.kernels.tiles import rows_for
from services.executor.kv_cache.codecs import FP8, INT8, Codec

MOST_STACK = 160
"""Bytes of each thread: some are kept around the loops where heads have 256 numbers; a loop that spills has more."""
TYPES = {torch.float16: "fp16", torch.float32: "fp32"}
CODECS: dict[str, Codec | None] = {"hot": None, "int8": INT8, "fp8": FP8}


class Variant(NamedTuple):
    """Of `attend`, with its `merge` where keys are split."""

    tokens: int
    """Of a tile's sequence in a step: 1 is a decode."""
    cold: str
    """Of `CODECS`; hot: there are no cold blocks."""
    width: int
    group: int
    splits: int = 1
    asks: tuple[str, ...] = ()
    """Of softcap, window, sinks and slopes."""
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        what = "decode" if self.tokens == 1 else f"prefill{self.tokens}"
        parts = f"{what} {self.cold} d{self.width} group{self.group} splits{self.splits}"
        dtype = () if self.dtype == torch.bfloat16 else (TYPES[self.dtype],)
        return " ".join((parts, *self.asks, *dtype))


def variants(every: bool) -> Iterator[Variant]:
    """What serving uses; or the most demanding of it."""
    if not every:
        yield Variant(1, "fp8", 128, 4, 8)
        yield Variant(512, "hot", 128, 4)
        yield Variant(512, "int8", 256, 8)
        yield Variant(512, "int8", 256, 1, dtype=torch.float32)
        return
    for tokens, cold, width, group in product((1, 512), CODECS, (64, 128, 256), (1, 4, 8)):
        yield Variant(tokens, cold, width, group)
    for cold, width in product(CODECS, (64, 80, 96, 128, 256)):
        yield Variant(1, cold, width, 4, 16)
    for tokens, cold in product((4, 16, 512), CODECS):
        yield Variant(tokens, cold, 128, 4, 4)
        yield Variant(tokens, cold, 256, 3)
    for cold in CODECS:
        for asks in (("softcap",), ("window",), ("sinks", "window"), ("slopes",)):
            yield Variant(1, cold, 128, 4, 8, asks)
            yield Variant(512, cold, 128, 4, 1, asks)
    for tokens in (1, 512):
        yield Variant(tokens, "fp8", 128, 4, dtype=torch.float16)
        yield Variant(tokens, "fp8", 128, 4, dtype=torch.float32)
        yield Variant(tokens, "int8", 256, 1, dtype=torch.float32)


def calls(variant: Variant) -> list[attention_launch.Call]:
    """The launches of a variant, of tensors that have shapes and no numbers."""
    kv_heads, width = 8, variant.width
    heads = kv_heads * variant.group
    codec = CODECS[variant.cold]

    def empty(*sizes: int, dtype: torch.dtype = variant.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    index = empty(64, dtype=torch.int32)
    cold = 1000 if codec else 0
    code = empty(cold, 2, kv_heads, 16, width, dtype=codec.dtype if codec else variant.dtype)
    scales = empty(cold, 2, kv_heads, dtype=torch.float32) if codec else None
    layer = attention_launch.Layer(empty(1000, 2, kv_heads, 16, width), code, scales, codec)
    batch = attention_launch.Batch(
        index,
        index,
        index,
        index,
        index,
        index,
        index,
        rows_for(variant.group, variant.tokens),
        variant.splits,
        0,
        64,
    )
    per_head = empty(heads, dtype=torch.float32)
    scores = attention_launch.Scores(
        width**-0.5,
        5.0 if "softcap" in variant.asks else None,
        1024 if "window" in variant.asks else None,
        per_head if "sinks" in variant.asks else None,
        per_head if "slopes" in variant.asks else None,
    )
    query = empty(64, kv_heads, variant.group, width)
    return attention_launch.attend_calls(query, layer, batch, scores, query)


def block_calls() -> Iterator[tuple[str, attention_launch.Call]]:
    """The launches that write blocks, and compress them."""
    hot = torch.empty((2, 1000, 2, 8, 16, 128), dtype=torch.bfloat16, device="meta")
    fused = torch.empty((64, 48, 128), dtype=torch.bfloat16, device="meta")
    slots = torch.empty(64, dtype=torch.int32, device="meta")
    yield "write", attention_launch.write_call(fused[:, 32:40], fused[:, 40:], slots, hot[0])
    index = torch.empty((64, 2), dtype=torch.int64, device="meta")
    for name, codec in CODECS.items():
        code = torch.empty_like(hot, dtype=codec.dtype if codec else hot.dtype)
        scales = torch.empty(hot.shape[:4], dtype=torch.float32, device="meta") if codec else None
        yield f"compress {name}", attention_launch.compress_call(hot, index[:, 0], code, scales, codec, index)


def compile_call(name: str, call: attention_launch.Call) -> Compiled:
    """As Triton would at the first launch."""
    (launched,) = launches(call.run)
    return compile_launched(name, launched)


def compile_variant(variant: Variant) -> list[Compiled]:
    """`attend`, and `merge` where it is needed."""
    return [
        compile_call(f"{variant.name}{' merge' if at else ''}", call)
        for at, call in enumerate(calls(variant))
    ]


def attention_kernels(every: bool) -> Iterator[Compiled]:
    """All kernels; one process per core."""
    with ProcessPoolExecutor() as pool:
        for found in pool.map(compile_variant, list(variants(every))):
            yield from found
    for name, call in block_calls():
        yield compile_call(name, call)
