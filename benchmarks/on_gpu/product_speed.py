"""How fast products are, each way at each number of rows.

It shows where `services/executor/gpu/quantized_matmul.py` should change from one way to the other, and what a product
of few rows reaches of the rate at which weights can be read.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.on_gpu.bench import Bench, Row, rate
from benchmarks.on_gpu.machine import graph_seconds
from benchmarks.random_model import random_rows
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.model.quantizing import CODECS
from services.executor.model.weight_formats import Quantized, quantize

# (outputs, inputs) of the widest layer of Llama 3 8B, and of a dry run's.
GATE_UP, TINY = (28672, 4096), (32, 64)
ROWS, TINY_ROWS = (1, 256, 4096), (1, 3, 17)
GROUPED = ("int4", "q4_k", "q6_k", "q8_0")
COLD = 512 << 20  # bytes of weights to go round in, so that none of them are in the processor's cache


def run(bench: Bench) -> Iterator[Row]:
    """Rows of `products/...`: GB/s of weights with one row of activations, TFLOP/s with more, and of which limit."""
    name, (outputs, inputs), counts = ("tiny", TINY, TINY_ROWS) if bench.tiny else ("gate_up", GATE_UP, ROWS)
    for rows in counts:
        x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=bench.device)
        for way, (size, works) in _ways(bench.device, outputs, inputs, rows).items():
            seconds = graph_seconds([partial(work, x) for work in works], bench.device)
            done = (size if rows == 1 else 2 * rows) * outputs * inputs
            limit, unit = (bench.bandwidth, "GB/s") if rows == 1 else (bench.matrix_rate("bf16"), "TFLOP/s")
            key, what = f"products/{name}/{rows}/{way}", f"{name} of 8B, {rows} rows: {way}"
            yield rate(key, what, done, seconds, limit, unit)


def _coded(weight: Tensor, codec: Codec) -> Quantized:
    """With one scale for each output."""
    coded = quantize(weight, codec)
    assert isinstance(coded, Quantized)
    return coded


def _ways(
    device: torch.device, outputs: int, inputs: int, rows: int
) -> dict[str, tuple[float, list[Callable[[Tensor], Tensor]]]]:
    """name -> (bytes of a weight, the product with each of several weights)"""
    from services.executor.gpu import quantized_matmul
    from services.executor.gpu.kernels.matmul import MOST_ROWS, multiply_one

    copies = max(1, min(COLD // (2 * outputs * inputs), 8)) if device.type == "cuda" else 1
    plain = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device) for _ in range(copies)]
    ways: dict[str, tuple[float, list[Callable[[Tensor], Tensor]]]] = {
        "bf16": (2, [partial(functional.linear, weight=weight) for weight in plain])
    }
    if rows == 1:
        ways["bf16, our own"] = (2, [partial(multiply_one, weight=one, scales=None, bias=None) for one in plain])
    for codec in (FP8, INT8):
        weights = [_coded(weight, codec) for weight in plain]
        if rows <= MOST_ROWS:
            # None: not by the library, so in registers up to the most rows.
            few = [quantized_matmul.coded_product(weight, None, None) for weight in weights]
            ways[f"{codec.name}, widened in registers"] = (1, [*few])
        else:
            wide = [partial(quantized_matmul.multiply_widened, weight=weight, bias=None) for weight in weights]
            ways[f"{codec.name}, widened in memory"] = (1, [*wide])
    for kind in GROUPED:
        made = [random_rows(CODECS[kind], outputs, inputs, device) for _ in plain]
        packed = [quantized_matmul.packed_rows(one) for one in made]
        each = packed[0].nbytes / (outputs * inputs)
        ways[kind] = (each, [quantized_matmul.GroupedProduct(one, None) for one in packed])
    if device.type == "cuda":
        from services.executor.gpu.kernels.matmul import encode_rows

        def scaled(x: Tensor, weight: Quantized) -> Tensor:
            return quantized_matmul.scaled_by_rows(*encode_rows(x, FP8), weight.codes, weight.scales, None)

        ways["fp8, activations too"] = (1, [partial(scaled, weight=_coded(weight, FP8)) for weight in plain])
    return ways
