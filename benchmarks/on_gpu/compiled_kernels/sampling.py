"""The kernels that sample."""

from collections.abc import Iterator
from typing import Any

from benchmarks.on_gpu.compiled_kernels.hopper import Compiled, compile_kernel
from services.executor.triton_kernels import sampling
from services.executor.triton_kernels.drawing import BLOCK, WARPS

POINTERS = {
    "logits": "*bf16", "largest": "*fp32", "row_params": "*fp64", "prefixes": "*i32", "tallies": "*fp64",
    "needs": "*fp64", "sums": "*fp64", "tokens": "*i64",
}  # fmt: skip
CHUNKS = 32


def measure(name: str, kernel: Any, **constants: int | bool) -> Compiled:
    signature = {argument: POINTERS.get(argument, "i32") for argument in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    return compile_kernel(name, kernel, signature, constants, set(), WARPS)


def kernels() -> Iterator[Compiled]:
    for weights in (False, True):
        what = "weights" if weights else "counts"
        yield measure(f"tally {what}", sampling.tally, WEIGHTS=weights, FILL=0xFFFF, BLOCK=BLOCK)
        yield measure(f"choose by {what}", sampling.choose, WEIGHTS=weights, CHUNKS=CHUNKS)
    yield measure("weigh", sampling.weigh, FILL=0xFFFF, BLOCK=BLOCK)
    yield measure("draw", sampling.draw, FILL=0xFFFF, BLOCK=BLOCK, CHUNKS=CHUNKS)
