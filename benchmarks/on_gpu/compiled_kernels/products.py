"""Matrix products by weights of eight bits."""

from collections.abc import Iterator
from typing import Any

from benchmarks.on_gpu.compiled_kernels.hopper import Compiled, compile_kernel, pointers, with_types
from services.executor.triton_kernels import product_launch, products

TYPES = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    **dict.fromkeys(("scales", "parts"), "*fp32"),
    **dict.fromkeys(("rows", "outputs", "inputs", "x_stride", "splits"), "i32"),
    **dict.fromkeys(("limit", "smallest"), "fp32"),
    "codes": "*i8",
    "arrivals": "*i32",
}
EVEN = {"outputs", "inputs", "x_stride"}


def measure(kernel: Any, warps: int, stages: int, constants: dict[str, Any]) -> Compiled:
    signature = with_types(kernel, {name: kind for name, kind in TYPES.items() if name not in constants})
    return compile_kernel("", kernel, signature, constants, pointers(signature) | EVEN, warps, stages)


def kernels() -> Iterator[Compiled]:
    coded = {"CODE": 2, "BIAS": True, "WIDE": False}
    few = {"BLOCK_T": 64, "BLOCK_N": product_launch.BLOCK_N, "BLOCK_K": product_launch.BLOCK_K, "SPLIT": True}
    one = {
        "BLOCK_N": product_launch.ONE_ROW_N,
        "BLOCK_K": product_launch.ONE_ROW_K,
        "STAGES": product_launch.STAGES,
    }
    found = {
        "few rows": measure(products.few_rows, 4, product_launch.STAGES, {**few, **coded}),
        "one row": measure(products.one_row, 4, 3, {**one, **coded}),
        "encode": measure(products.encode_rows, 16, 3, {"BLOCK": 32768, "CODE": 2}),
    }
    for name, compiled in found.items():
        yield compiled._replace(name=name)
