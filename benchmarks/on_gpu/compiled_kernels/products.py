"""Matrix products by weights of eight bits."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.on_gpu.compiled_kernels.launched import Compiled, compile_work, meta
from services.executor.gpu.kernels.matmul import (
    arrivals_for,
    decode_rows,
    encode_rows,
    multiply_few,
    multiply_one,
)
from services.executor.kv_cache.codecs import FP8, INT8, Codec

PROCESSORS = 132
SHAPES = (
    (2, 6144, 4096, False), (17, 6144, 4096, False), (33, 1024, 4096, True), (128, 6144, 4096, False),
    (16, 152_064, 5120, False), (8, 100, 131, True), (1, 100, 131, True),
)  # fmt: skip
"""Rows, outputs, inputs, and whether there is a bias."""


def few(rows: int, outputs: int, inputs: int, codec: Codec, bias: bool) -> None:
    """Launches a product of `rows`."""
    codes, scales = meta(outputs, inputs, dtype=codec.dtype), meta(outputs, dtype=torch.float32)
    arrivals = arrivals_for(outputs, codes.device)
    multiply_few(meta(rows, inputs), codes, scales, meta(outputs) if bias else None, arrivals, PROCESSORS)


def widen(codec: Codec) -> None:
    """Launches the widening of rows."""
    decode_rows(meta(64, 4096, dtype=codec.dtype), meta(64, dtype=torch.float32), meta(64, 4096))


def product_kernels(every: bool) -> Iterator[Compiled]:
    """What serving uses; or the most demanding of it."""
    yield from compile_work("few rows", partial(few, 64, 4096, 4096, FP8, bias=True))
    yield from compile_work("one row", partial(few, 1, 4096, 4096, FP8, bias=True))
    yield from compile_work("encode", partial(encode_rows, meta(64, 28_672), FP8))
    if not every:
        return
    for codec in (FP8, INT8):
        for rows, outputs, inputs, bias in SHAPES:
            name = f"{codec.name} {rows} x {outputs} x {inputs}"
            yield from compile_work(name, partial(few, rows, outputs, inputs, codec, bias))
        yield from compile_work(f"widen {codec.name}", partial(widen, codec))
    yield from compile_work("encode 5120", partial(encode_rows, meta(64, 5120), FP8))
    yield from compile_work(
        "one row bf16", partial(multiply_one, meta(1, 4096), meta(4096, 4096), None, None)
    )
