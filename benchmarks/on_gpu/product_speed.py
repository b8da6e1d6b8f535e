"""How fast products are, each way at each number of rows: `python -m benchmarks.on_gpu.product_speed`.

It shows where `services/executor/gpu/quantized_matmul.py` should change from one way to the other, and what a product
of few rows reaches of the rate at which weights can be read.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional

from benchmarks.random_model import random_rows
from services.executor.kv_cache.codecs import FP8, INT8
from services.executor.model.quantizing import CODECS
from services.executor.model.weight_formats import quantize

SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""(outputs, inputs) of the layers of Llama 3 8B."""
ROWS = (1, 2, 8, 16, 32, 64, 128, 512, 2048)
BRIEF_ROWS = (1, 256, 4096)
GROUPED = ("int4", "q4_k", "q6_k", "q8_0")
ROUNDS = 20
COLD = 512 << 20
"""Bytes of weights to go round in, so that none of them are in the processor's cache."""

Row = dict[str, Any]


def product_speed(
    device: torch.device,
    tiny: bool = False,
    brief: bool = False,
    bandwidth: float | None = None,
    matrix_rate: float | None = None,
) -> Iterator[Row]:
    """Rows of `products/...`: GB/s of weights with one row of activations, TFLOP/s with more, and of which limit.
    `brief`: of one shape, with a few numbers of rows. Without a GPU the kernels are interpreted."""
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    shapes = {"tiny": (32, 64)} if tiny else {"gate_up": SHAPES["gate_up"]} if brief else SHAPES
    rows = (1, 3, 17) if tiny else BRIEF_ROWS if brief else ROWS
    for name, shape in shapes.items():
        for count in rows:
            yield from _products(device, name, *shape, count, bandwidth, matrix_rate)


def _products(
    device: torch.device,
    name: str,
    outputs: int,
    inputs: int,
    rows: int,
    bandwidth: float | None,
    matrix_rate: float | None,
) -> Iterator[Row]:
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
    for way, (size, works) in _ways(device, outputs, inputs, rows).items():
        seconds = seconds_of([lambda work=work: work(x) for work in works], device)
        scale, unit = (1e9, "GB/s") if rows == 1 else (1e12, "TFLOP/s")
        figure = (size if rows == 1 else 2 * rows) * outputs * inputs / seconds / scale
        limit = bandwidth if rows == 1 else matrix_rate
        yield {
            "key": f"products/{name}/{rows}/{way}",
            "what": f"{name} of 8B, {rows} rows: {way}",
            "figure": figure,
            "unit": unit,
            "limit": limit / scale if limit else None,
            "share": figure * scale / limit if limit else None,
            "note": f"{seconds * 1e6:.1f} us",
        }


def _ways(
    device: torch.device, outputs: int, inputs: int, rows: int
) -> dict[str, tuple[float, list[Callable[[Tensor], Tensor]]]]:
    """name -> (bytes of a weight, the product with each of several weights)"""
    from services.executor.gpu import quantized_matmul
    from services.executor.gpu.kernels.matmul import MOST_ROWS, multiply_one

    copies = max(1, min(COLD // (2 * outputs * inputs), 8)) if device.type == "cuda" else 1
    plain = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device) for _ in range(copies)]
    ways: dict[str, tuple[float, list[Callable[[Tensor], Tensor]]]] = {
        "bf16": (2, [lambda x, weight=weight: functional.linear(x, weight) for weight in plain])
    }
    if rows == 1:
        ours = [lambda x, weight=weight: multiply_one(x, weight, None, None) for weight in plain]
        ways["bf16, our own"] = (2, ours)
    for codec in (FP8, INT8):
        weights = [quantize(weight, codec) for weight in plain]
        if rows <= MOST_ROWS:
            # None: not by the library, so in registers up to the most rows.
            few = [quantized_matmul.coded_product(weight, None, None) for weight in weights]
            ways[f"{codec.name}, widened in registers"] = (1, [*few])
        else:
            wide = [
                lambda x, weight=weight: quantized_matmul.multiply_widened(x, weight, None)
                for weight in weights
            ]
            ways[f"{codec.name}, widened in memory"] = (1, wide)
    for kind in GROUPED:
        made = [random_rows(CODECS[kind], outputs, inputs, device) for _ in plain]
        packed = [quantized_matmul.packed_rows(one) for one in made]
        each = packed[0].nbytes / (outputs * inputs)
        ways[kind] = (each, [quantized_matmul.GroupedProduct(one, None) for one in packed])
    if device.type == "cuda":
        from services.executor.gpu.kernels.matmul import encode_rows

        scaled = [quantize(weight, FP8) for weight in plain]
        ways["fp8, activations too"] = (
            1,
            [lambda x, w=w: quantized_matmul.scaled_by_rows(*encode_rows(x, FP8), *w, None) for w in scaled],
        )
    return ways


def seconds_of(works: list[Callable[[], Tensor]], device: torch.device) -> float:
    """Of one, in the middle of `ROUNDS`, captured in a graph on a GPU: launching takes longer than the work."""
    for work in works:
        work()
    if device.type != "cuda":
        begin = time.perf_counter()
        works[0]()
        return time.perf_counter() - begin
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    found = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1000 / len(works))
    return statistics.median(found)


def main(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu, ...")] = "cuda",
    tiny: Annotated[bool, typer.Option(help="A tiny product, to see that it runs.")] = False,
) -> None:
    """Products by shape, rows and way, as JSON."""
    print(json.dumps(list(product_speed(torch.device(device), tiny)), indent=2))


if __name__ == "__main__":
    typer.run(main)
